//! Adopted tables: the catalogue, locked rows, marks.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, PgPool, Postgres, Row as _, Transaction};

use super::PostgresStore;
use super::error::db;
use crate::adopt::sql::{Bind, Dialect, Sql, Statement};
use crate::adopt::{
    AdoptedRow, AdoptedTable, AdoptedTables, ColumnInfo, ColumnKind, IndexInfo, LockedRows, Mapping, Outcome, Part,
    TableInfo, TableName, check, not_marked, orderless, table_changed, unknown_word,
};
use crate::doctor::{Finding, Severity};
use crate::error::{Error, Kind, Result};
use crate::source::Failure;
use crate::upkeep::Backlog;

const TABLE: &str = "SELECT c.oid::int8, n.nspname::text, c.relname::text, current_database()::text, \
       has_table_privilege(c.oid, 'SELECT'), has_table_privilege(c.oid, 'UPDATE') \
     FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
     WHERE c.relkind IN ('r', 'p') AND c.relname = $2 \
       AND (n.nspname = $1 OR ($1 IS NULL AND pg_table_is_visible(c.oid))) LIMIT 1";

const COLUMNS: &str = "SELECT a.attname::text, format_type(a.atttypid, -1), coalesce(b.typname, t.typname)::text, \
       (t.typtype = 'e'), a.attnotnull, pg_get_expr(d.adbin, d.adrelid), \
       CASE WHEN t.typname IN ('varchar', 'bpchar') AND a.atttypmod > 4 THEN a.atttypmod - 4 END, \
       ARRAY(SELECT e.enumlabel::text FROM pg_enum e WHERE e.enumtypid = t.oid ORDER BY e.enumsortorder), \
       CASE WHEN coalesce(b.typname, t.typname) IN ('timestamp', 'timestamptz') \
         THEN CASE WHEN greatest(a.atttypmod, t.typtypmod) < 0 THEN 6 ELSE greatest(a.atttypmod, t.typtypmod) END END \
     FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid LEFT JOIN pg_type b ON b.oid = t.typbasetype \
     LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum \
     WHERE a.attrelid = $1::int8::oid AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum";

const INDEXES: &str = "SELECT c.relname::text, x.indisprimary, x.indisunique, pg_get_expr(x.indpred, x.indrelid), \
       ARRAY(SELECT coalesce(a.attname::text, '') FROM unnest(x.indkey::int2[]) WITH ORDINALITY k(attnum, n) \
         LEFT JOIN pg_attribute a ON a.attrelid = x.indrelid AND a.attnum = k.attnum WHERE k.n <= x.indnkeyatts ORDER BY k.n) \
     FROM pg_index x JOIN pg_class c ON c.oid = x.indexrelid WHERE x.indrelid = $1::int8::oid AND x.indisvalid ORDER BY 1";

#[async_trait]
impl AdoptedTables for PostgresStore {
    async fn table(&self, name: &TableName) -> Result<Option<TableInfo>> {
        table(&self.pool, name).await
    }

    async fn words(&self, name: &TableName, column: &str) -> Result<Vec<String>> {
        let Some(info) = table(&self.pool, name).await? else { return Ok(Vec::new()) };
        let (schema, table) = (Dialect::Postgres.name(&info.schema), Dialect::Postgres.name(&info.name));
        let column = Dialect::Postgres.name(column);
        let sql = format!(
            "SELECT DISTINCT c::text FROM (SELECT {column} AS c FROM {schema}.{table} LIMIT 5000) w \
             WHERE c IS NOT NULL LIMIT 20"
        );
        let rows = sqlx::query(AssertSqlSafe(sql)).fetch_all(&self.pool).await.map_err(db)?;
        rows.iter().map(|row| row.try_get(0).map_err(db)).collect()
    }

    async fn adopt(&self, mapping: &Mapping) -> Result<Box<dyn AdoptedTable>> {
        let Some(info) = table(&self.pool, &mapping.table).await? else {
            return Err(Error::new(
                Kind::Config,
                format!("outbox {:?}: there is no table {}", mapping.name, mapping.table),
            )
            .with_remedy("correct `table`; names count letter by letter, and the schema comes before a dot"));
        };
        if let Some(wrong) = check(mapping, &info, false).into_iter().find(|found| found.severity == Severity::Error) {
            return Err(Error::new(Kind::Config, format!("outbox {:?}: {}", mapping.name, wrong.message))
                .with_remedy(wrong.remedy));
        }
        let sql = Arc::new(Sql::new(Dialect::Postgres, mapping, &info)?);
        if let Some(check) = sql.zone_check() {
            sqlx::query(AssertSqlSafe(check))
                .fetch_one(&self.pool)
                .await
                .map_err(|error| unknown_zone(mapping, db(error)))?;
        }
        // Marks nothing, but says before anything is sent whether it could.
        let none: Vec<String> = Vec::new();
        sqlx::query(AssertSqlSafe(sql.publish(0))).bind(none).execute(&self.pool).await.map_err(changed)?;
        Ok(Box::new(Table { pool: self.pool.clone(), sql, candidates: AtomicUsize::new(0) }))
    }
}

/// How often a look is repeated without the keys that others hold.
const LOOKS_MAX: usize = 5;

/// While much waits as many as the limit are looked at; where other instances hold some of them, this many times as many.
const CANDIDATES: usize = 3;

struct Table {
    pool: PgPool,
    sql: Arc<Sql>,
    /// How many of the oldest the next look is about, 0 for all: those that the last look left when it found all it might.
    candidates: AtomicUsize,
}

#[async_trait]
impl AdoptedTable for Table {
    fn source(&self) -> String {
        self.sql.source()
    }

    async fn lock(&self, part: Part, limit: usize) -> Result<Box<dyn LockedRows>> {
        let mut tx = self.pool.begin().await.map_err(changed)?;
        // When all that was found is behind rows of others, their keys are left out of the next look.
        let mut without: Vec<String> = Vec::new();
        let mut rows = Vec::new();
        let mut candidates = self.candidates.load(Ordering::Relaxed).min(CANDIDATES * limit);
        for _ in 0..LOOKS_MAX {
            let found = sqlx::query(AssertSqlSafe(self.sql.lock(part, candidates)))
                .bind(limit as i64)
                .bind(&without)
                .fetch_all(&mut *tx)
                .await
                .map_err(changed)?;
            let wider = if candidates == limit { CANDIDATES * limit } else { 0 };
            // A part without rows says nothing about the other.
            if part == Part::ALL || !found.is_empty() {
                self.candidates.store(if found.len() == limit { limit } else { wider }, Ordering::Relaxed);
            }
            if found.is_empty() && candidates > 0 {
                // Others hold all of them.
                candidates = wider;
                continue;
            }
            for row in &found {
                rows.push(read_row(&self.sql.mapping, row).map_err(changed)?);
            }
            let behind = self.behind(&mut tx, &rows).await?;
            if found.is_empty() || behind.len() < rows.len() {
                rows.retain(|row: &AdoptedRow| !behind.contains(&row.id));
                break;
            }
            without.extend(rows.drain(..).filter_map(|row| row.key(&self.sql.mapping).map(str::to_owned)));
        }
        Ok(Box::new(Locked { tx, rows, sql: self.sql.clone() }))
    }

    async fn free_abandoned(&self) -> Result<u64> {
        let Some(abandoned) = self.sql.abandoned() else { return Ok(0) };
        let mut tx = self.pool.begin().await.map_err(changed)?;
        let rows = sqlx::query(AssertSqlSafe(abandoned))
            .bind(self.sql.mapping.processing_timeout.as_secs_f64())
            .fetch_all(&mut *tx)
            .await
            .map_err(changed)?;
        let ids: Vec<String> = rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>().map_err(changed)?;
        let Some(free) = self.sql.free(ids.len()).filter(|_| !ids.is_empty()) else {
            return tx.rollback().await.map(|()| 0).map_err(changed);
        };
        let freed = sqlx::query(AssertSqlSafe(free)).bind(ids).execute(&mut *tx).await.map_err(changed)?;
        tx.commit().await.map_err(changed)?;
        Ok(freed.rows_affected())
    }

    async fn backlog(&self) -> Result<Backlog> {
        let one = async |sql: String| -> Result<Option<i64>> {
            let row = sqlx::query(AssertSqlSafe(sql)).fetch_optional(&self.pool).await.map_err(changed)?;
            Ok(row.map(|row| row.try_get::<Option<i64>, _>(0)).transpose().map_err(changed)?.flatten())
        };
        let mut backlog = Backlog { pending: count(one(self.sql.count_pending()).await?), ..Backlog::default() };
        if let Some(sql) = self.sql.oldest() {
            backlog.oldest_secs = one(sql).await?.map(|secs| u64::try_from(secs).unwrap_or_default());
        }
        if let Some(sql) = self.sql.count_failed() {
            backlog.failed = count(one(sql).await?);
        }
        if let Some(sql) = self.sql.count_aside() {
            let row = sqlx::query(AssertSqlSafe(sql)).fetch_one(&self.pool).await.map_err(changed)?;
            backlog.retrying = count(row.try_get(0).map_err(changed)?);
            backlog.failed += count(row.try_get(1).map_err(changed)?);
        }
        Ok(backlog)
    }

    async fn inspect(&self) -> Result<Vec<Finding>> {
        let mapping = &self.sql.mapping;
        let name = format!("outbox.{}", mapping.name);
        let Some(info) = table(&self.pool, &mapping.table).await? else {
            return Ok(vec![Finding::error(
                name,
                format!("{} is gone", mapping.table),
                "create it, or correct `table`",
            )]);
        };
        let mut findings = check(mapping, &info, false);
        if let Some(sql) = self.sql.unknown_state() {
            // Every row is looked at, so it must not take long.
            let mut tx = self.pool.begin().await.map_err(changed)?;
            sqlx::query("SET LOCAL statement_timeout = '5s'").execute(&mut *tx).await.map_err(changed)?;
            if let Ok(rows) = sqlx::query(AssertSqlSafe(sql)).fetch_all(&mut *tx).await {
                for row in &rows {
                    let word: String = row.try_get(0).map_err(changed)?;
                    let rows: i64 = row.try_get(1).map_err(changed)?;
                    findings.push(unknown_word(&name, &word, rows));
                }
            }
        }
        if let Some(sql) = self.sql.count_orderless()
            && let Ok(row) = sqlx::query(AssertSqlSafe(sql)).fetch_one(&self.pool).await
        {
            findings.extend(orderless(&name, row.try_get(0).map_err(changed)?));
        }
        Ok(findings)
    }
}

fn unknown_zone(mapping: &Mapping, error: Error) -> Error {
    Error::new(Kind::Config, format!("outbox {:?}: clock: {}", mapping.name, error.message()))
        .with_remedy("name a time zone that the database knows, or \"utc\"")
}

fn count(value: Option<i64>) -> u64 {
    value.and_then(|value| u64::try_from(value).ok()).unwrap_or_default()
}

impl Table {
    /// Ids of locked rows that must wait for an earlier one of their key.
    async fn behind(&self, tx: &mut PgConnection, rows: &[AdoptedRow]) -> Result<HashSet<String>> {
        let (Some(sql), Some(last)) = (self.sql.behind(rows.len()), rows.last()) else { return Ok(HashSet::new()) };
        let ids: Vec<&str> = rows.iter().map(|row| row.id.as_str()).collect();
        // A plan that is kept would not know how many ids there are.
        let query = sqlx::query(AssertSqlSafe(sql)).persistent(false).bind(&last.id).bind(ids);
        let found = query.fetch_all(tx).await.map_err(changed)?;
        found.iter().map(|row| row.try_get(0).map_err(changed)).collect()
    }
}

struct Locked {
    tx: Transaction<'static, Postgres>,
    rows: Vec<AdoptedRow>,
    sql: Arc<Sql>,
}

#[async_trait]
impl LockedRows for Locked {
    fn rows(&self) -> &[AdoptedRow] {
        &self.rows
    }

    async fn settle(mut self: Box<Self>, outcomes: &[Outcome]) -> Result<()> {
        let mut published: Vec<&str> = Vec::new();
        for (row, outcome) in self.rows.iter().zip(outcomes) {
            let (attempts, delay, failure, is_failed) = match outcome {
                Outcome::Untouched => continue,
                Outcome::Published => {
                    published.push(&row.id);
                    continue;
                }
                Outcome::Retry { attempts, delay, failure } => (*attempts, delay.as_secs_f64(), failure, false),
                Outcome::Failed { attempts, failure } => (*attempts, 0.0, failure, true),
            };
            for statement in [self.sql.fail(is_failed), self.sql.fail_aside(is_failed)].into_iter().flatten() {
                let chars_max = self.sql.error_chars_max();
                fail(&mut self.tx, &statement, row, attempts, delay, failure, chars_max).await?;
            }
        }
        if !published.is_empty() {
            let marked = sqlx::query(AssertSqlSafe(self.sql.publish(published.len())))
                .bind(&published)
                .execute(&mut *self.tx)
                .await
                .map_err(changed)?;
            if marked.rows_affected() != published.len() as u64 {
                return Err(not_marked(published.len(), marked.rows_affected()));
            }
            if let Some(sql) = self.sql.forget(published.len()) {
                sqlx::query(AssertSqlSafe(sql)).bind(&published).execute(&mut *self.tx).await.map_err(changed)?;
            }
        }
        self.tx.commit().await.map_err(changed)
    }
}

async fn fail(
    tx: &mut PgConnection,
    statement: &Statement,
    row: &AdoptedRow,
    attempts: u32,
    delay: f64,
    failure: &Failure,
    chars_max: usize,
) -> Result<()> {
    let text: String = failure.message.chars().take(chars_max).collect();
    let mut query = sqlx::query(AssertSqlSafe(statement.sql.clone()));
    for bind in &statement.binds {
        query = match bind {
            Bind::Attempts => query.bind(attempts as i32),
            Bind::Delay => query.bind(delay),
            Bind::FailureKind => query.bind(&failure.kind),
            Bind::Failure => query.bind(&text),
            Bind::Id => query.bind(&row.id),
        };
    }
    let written = query.execute(tx).await.map_err(changed)?;
    // The side table may have nothing to forget; the row itself is locked, so it is there.
    match written.rows_affected() > 0 || statement.may_miss {
        true => Ok(()),
        false => Err(not_marked(1, 0)),
    }
}

fn read_row(mapping: &Mapping, row: &PgRow) -> Result<AdoptedRow, sqlx::Error> {
    let payload: Option<Vec<u8>> = row.try_get(0)?;
    let mut values = BTreeMap::new();
    for (place, column) in mapping.columns_read().into_iter().enumerate() {
        if let Some(value) = row.try_get::<Option<String>, _>(place + 2)? {
            values.insert(column.to_owned(), value);
        }
    }
    let side_attempts = row.try_get::<i32, _>(1)? as u32;
    Ok(AdoptedRow::new(mapping, payload.map(Bytes::from), values, side_attempts))
}

/// What is missing here is the service's, not ours.
fn changed(error: sqlx::Error) -> Error {
    table_changed(db(error))
}

async fn table(pool: &PgPool, name: &TableName) -> Result<Option<TableInfo>> {
    let found = sqlx::query(TABLE).bind(&name.schema).bind(&name.name).fetch_optional(pool).await.map_err(db)?;
    let Some(found) = found else { return Ok(None) };
    let oid: i64 = found.try_get(0).map_err(db)?;
    let mut missing_rights = Vec::new();
    for (place, right) in [(4, "SELECT"), (5, "UPDATE")] {
        if !found.try_get::<bool, _>(place).map_err(db)? {
            missing_rights.push(right.to_owned());
        }
    }
    let rows = sqlx::query(COLUMNS).bind(oid).fetch_all(pool).await.map_err(db)?;
    let columns = rows.iter().map(column).collect::<Result<_, _>>().map_err(db)?;
    let (mut primary_key, mut indexes) = (Vec::new(), Vec::new());
    for row in &sqlx::query(INDEXES).bind(oid).fetch_all(pool).await.map_err(db)? {
        let index = IndexInfo {
            name: row.try_get(0).map_err(db)?,
            is_unique: row.try_get(2).map_err(db)?,
            condition: row.try_get(3).map_err(db)?,
            columns: row.try_get(4).map_err(db)?,
        };
        if row.try_get(1).map_err(db)? {
            primary_key = index.columns.clone();
        }
        indexes.push(index);
    }
    Ok(Some(TableInfo {
        schema: found.try_get(1).map_err(db)?,
        name: found.try_get(2).map_err(db)?,
        database: found.try_get(3).map_err(db)?,
        columns,
        primary_key,
        indexes,
        missing_rights,
    }))
}

fn column(row: &PgRow) -> Result<ColumnInfo, sqlx::Error> {
    let kind = match (row.try_get::<&str, _>(2)?, row.try_get(3)?) {
        (_, true) | ("text" | "varchar" | "bpchar" | "citext" | "name", _) => ColumnKind::Text,
        ("int2" | "int4" | "int8", _) => ColumnKind::Integer,
        ("uuid", _) => ColumnKind::Uuid,
        ("json" | "jsonb", _) => ColumnKind::Json,
        ("bytea", _) => ColumnKind::Bytes,
        ("bool", _) => ColumnKind::Boolean,
        ("timestamptz", _) => ColumnKind::Instant,
        ("timestamp", _) => ColumnKind::DateTime,
        _ => ColumnKind::Other,
    };
    Ok(ColumnInfo {
        name: row.try_get(0)?,
        type_name: row.try_get(1)?,
        kind,
        is_nullable: !row.try_get::<bool, _>(4)?,
        default: row.try_get(5)?,
        words: row.try_get(7)?,
        chars_max: row.try_get::<Option<i32>, _>(6)?.and_then(|chars| u32::try_from(chars).ok()),
        second_digits: row.try_get::<Option<i32>, _>(8)?.and_then(|digits| u32::try_from(digits).ok()),
    })
}
