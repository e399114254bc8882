//! Change triggers.

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Row as _};

use super::PostgresStore;
use super::error::db;
use crate::adopt::sql::Dialect;
use crate::adopt::{AdoptedTables as _, TableInfo, TableName};
use crate::error::{Error, Kind, Result};
use crate::trigger::{Trigger, TriggerView, Triggers, sql};

const LIST: &str = "SELECT n.nspname::text, c.relname::text, t.tgname::text, t.tgenabled <> 'D', f.proname::text \
     FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace \
       JOIN pg_proc f ON f.oid = t.tgfoid JOIN pg_namespace s ON s.oid = f.pronamespace \
     WHERE NOT t.tgisinternal AND s.nspname = 'postrider' AND f.proname LIKE 'on\\_%' AND t.tgname LIKE 'postrider\\_%' \
       AND t.tgparentid = 0 ORDER BY 1, 2, 3";

#[async_trait]
impl Triggers for PostgresStore {
    async fn statements(&self, trigger: &Trigger) -> Result<Vec<String>> {
        let info = known(self, &trigger.table).await?;
        let id = trigger.check(&info)?;
        Ok(sql::postgres(trigger, &info, &id))
    }

    async fn add(&self, trigger: &Trigger) -> Result<()> {
        let statements = self.statements(trigger).await?;
        let mut tx = self.pool.begin().await.map_err(db)?;
        for statement in statements {
            sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut *tx).await.map_err(db)?;
        }
        tx.commit().await.map_err(db)
    }

    async fn remove(&self, table: &TableName, entity: Option<&str>) -> Result<u64> {
        let info = known(self, table).await?;
        let rows = sqlx::query(LIST).fetch_all(&self.pool).await.map_err(db)?;
        let mut tx = self.pool.begin().await.map_err(db)?;
        let mut removed = 0;
        for row in &rows {
            let (schema, name, trigger): (String, String, String) =
                (row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?, row.try_get(2).map_err(db)?);
            let is_wanted = entity.is_none_or(|entity| sql::name(entity) == trigger);
            if schema != info.schema || name != info.name || !is_wanted {
                continue;
            }
            let (function, quoted): (String, _) =
                (row.try_get(4).map_err(db)?, |name: &str| Dialect::Postgres.name(name));
            let statement = format!(
                "DROP TRIGGER {} ON {}.{}; DROP FUNCTION postrider.{}()",
                quoted(&trigger),
                quoted(&schema),
                quoted(&name),
                quoted(&function)
            );
            sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut *tx).await.map_err(db)?;
            removed += 1;
        }
        tx.commit().await.map_err(db)?;
        Ok(removed)
    }

    async fn list(&self) -> Result<Vec<TriggerView>> {
        let rows = sqlx::query(LIST).fetch_all(&self.pool).await.map_err(db)?;
        let mut views = Vec::with_capacity(rows.len());
        for row in &rows {
            let table = TableName { schema: row.try_get(0).map_err(db)?, name: row.try_get(1).map_err(db)? };
            let trigger: String = row.try_get(2).map_err(db)?;
            let entity = trigger.trim_start_matches(sql::PREFIX).to_uppercase();
            views.push(TriggerView { table: table.to_string(), entity, is_enabled: row.try_get(3).map_err(db)? });
        }
        Ok(views)
    }
}

async fn known(store: &PostgresStore, table: &TableName) -> Result<TableInfo> {
    store.table(table).await?.ok_or_else(|| {
        Error::new(Kind::Missing, format!("there is no table {table}"))
            .with_remedy("correct the name; names count letter by letter, and the schema comes before a dot")
    })
}
