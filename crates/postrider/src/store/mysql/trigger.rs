//! Change triggers. MySQL has one for each action, and no comment on them: they are known by their names.

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Row as _};

use super::MysqlStore;
use super::error::db;
use crate::adopt::sql::Dialect;
use crate::adopt::{AdoptedTables as _, TableInfo, TableName};
use crate::error::{Error, Kind, Result};
use crate::trigger::{Trigger, TriggerView, Triggers, sql};

const LIST: &str = "SELECT CAST(event_object_schema AS CHAR), CAST(event_object_table AS CHAR), CAST(trigger_name AS CHAR) \
     FROM information_schema.triggers WHERE trigger_schema = coalesce(?, database()) \
       AND trigger_name LIKE 'postrider\\_%' ORDER BY 1, 2, 3";

/// What the server allows.
const NAME_CHARS_MAX: usize = 64;

#[async_trait]
impl Triggers for MysqlStore {
    async fn statements(&self, trigger: &Trigger) -> Result<Vec<String>> {
        let info = known(self, &trigger.table).await?;
        let id = trigger.check(&info)?;
        let name = sql::mysql_name(&trigger.entity, &info.name, "insert");
        if name.chars().count() > NAME_CHARS_MAX {
            return Err(Error::new(Kind::Config, format!("the trigger would be called {name:?}, which is too long"))
                .with_remedy(format!("choose a shorter entity; a name has at most {NAME_CHARS_MAX} characters")));
        }
        let database: String = sqlx::query("SELECT CAST(database() AS CHAR)")
            .fetch_one(&self.own)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(db)?;
        Ok(sql::mysql(trigger, &info, &id, &database))
    }

    async fn add(&self, trigger: &Trigger) -> Result<()> {
        // DDL commits by itself; run again, the same statements make the same triggers.
        for statement in self.statements(trigger).await? {
            sqlx::raw_sql(AssertSqlSafe(statement)).execute(&self.own).await.map_err(db)?;
        }
        Ok(())
    }

    async fn remove(&self, table: &TableName, entity: Option<&str>) -> Result<u64> {
        let info = known(self, table).await?;
        let mut entities = std::collections::BTreeSet::new();
        for (schema, name, trigger) in self.triggers(Some(&info.schema)).await? {
            let Some(of) = entity_of(&trigger, &name) else { continue };
            if name != info.name || entity.is_some_and(|entity| !entity.eq_ignore_ascii_case(&of)) {
                continue;
            }
            let (schema, trigger) = (Dialect::Mysql.name(&schema), Dialect::Mysql.name(&trigger));
            let statement = format!("DROP TRIGGER {schema}.{trigger}");
            sqlx::raw_sql(AssertSqlSafe(statement)).execute(&self.own).await.map_err(db)?;
            entities.insert(of);
        }
        Ok(entities.len() as u64)
    }

    async fn list(&self) -> Result<Vec<TriggerView>> {
        let mut views: Vec<TriggerView> = Vec::new();
        for (schema, name, trigger) in self.triggers(None).await? {
            let Some(entity) = entity_of(&trigger, &name) else { continue };
            let table = TableName { schema: Some(schema), name }.to_string();
            if !views.iter().any(|view| view.table == table && view.entity == entity) {
                views.push(TriggerView { table, entity, is_enabled: true });
            }
        }
        Ok(views)
    }
}

impl MysqlStore {
    /// Schema, table and name of all that may be ours.
    async fn triggers(&self, schema: Option<&str>) -> Result<Vec<(String, String, String)>> {
        let rows = sqlx::query(LIST).bind(schema).fetch_all(&self.own).await.map_err(db)?;
        let read = |row: &sqlx::mysql::MySqlRow| Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?));
        rows.iter().map(read).collect::<Result<_, sqlx::Error>>().map_err(db)
    }
}

/// The entity in a trigger's name: `postrider_<entity>_<table>_<action>`.
fn entity_of(trigger: &str, table: &str) -> Option<String> {
    let rest = trigger.strip_prefix(sql::PREFIX)?;
    let end = rest.find(&format!("_{table}_"))?;
    Some(rest[..end].to_uppercase())
}

async fn known(store: &MysqlStore, table: &TableName) -> Result<TableInfo> {
    store.table(table).await?.ok_or_else(|| {
        Error::new(Kind::Missing, format!("there is no table {table}"))
            .with_remedy("correct the name; names count letter by letter, and the database comes before a dot")
    })
}
