//! Adopted tables: the catalogue, locked rows, marks.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use sqlx::mysql::{MySqlArguments, MySqlRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, MySql, MySqlConnection, MySqlPool, Row as _};

use super::error::db;
use super::{MysqlStore, Tx};
use crate::adopt::sql::{Bind, Dialect, Sql, Statement};
use crate::adopt::{
    AdoptedRow, AdoptedTable, AdoptedTables, ColumnInfo, ColumnKind, IndexInfo, LockedRows, Mapping, Outcome, Part,
    TableInfo, TableName, check, not_marked, orderless, table_changed, unknown_word,
};
use crate::doctor::{Finding, Severity};
use crate::error::{Error, Kind, Result};
use crate::source::Failure;
use crate::upkeep::Backlog;

const TABLE: &str = "SELECT CAST(table_schema AS CHAR), CAST(table_name AS CHAR) FROM information_schema.tables \
     WHERE table_type = 'BASE TABLE' AND CAST(table_name AS BINARY) = CAST(? AS BINARY) \
       AND table_schema = coalesce(?, database()) LIMIT 1";

const COLUMNS: &str = "SELECT CAST(column_name AS CHAR), CAST(data_type AS CHAR), CAST(column_type AS CHAR), \
       CAST(is_nullable AS CHAR), CAST(column_default AS CHAR), CAST(character_maximum_length AS SIGNED), \
       CAST(datetime_precision AS SIGNED) \
     FROM information_schema.columns WHERE table_schema = ? AND table_name = ? ORDER BY ordinal_position";

const INDEXES: &str = "SELECT CAST(index_name AS CHAR), CAST(non_unique AS SIGNED), CAST(coalesce(column_name, '') AS CHAR) \
     FROM information_schema.statistics WHERE table_schema = ? AND table_name = ? ORDER BY index_name, seq_in_index";

/// The index of a primary key.
const PRIMARY: &str = "PRIMARY";

#[async_trait]
impl AdoptedTables for MysqlStore {
    fn is_mysql(&self) -> bool {
        true
    }

    async fn table(&self, name: &TableName) -> Result<Option<TableInfo>> {
        table(&self.own, name).await
    }

    async fn words(&self, name: &TableName, column: &str) -> Result<Vec<String>> {
        let Some(info) = table(&self.own, name).await? else { return Ok(Vec::new()) };
        let (schema, table) = (Dialect::Mysql.name(&info.schema), Dialect::Mysql.name(&info.name));
        let column = Dialect::Mysql.name(column);
        let sql = format!(
            "SELECT DISTINCT CAST(c AS CHAR) FROM (SELECT {column} AS c FROM {schema}.{table} LIMIT 5000) w \
             WHERE c IS NOT NULL LIMIT 20"
        );
        let rows = sqlx::query(AssertSqlSafe(sql)).fetch_all(&self.own).await.map_err(db)?;
        rows.iter().map(|row| row.try_get(0).map_err(db)).collect()
    }

    async fn adopt(&self, mapping: &Mapping) -> Result<Box<dyn AdoptedTable>> {
        let Some(info) = table(&self.own, &mapping.table).await? else {
            return Err(Error::new(
                Kind::Config,
                format!("outbox {:?}: there is no table {}", mapping.name, mapping.table),
            )
            .with_remedy("correct `table`; names count letter by letter, and the schema comes before a dot"));
        };
        if let Some(wrong) = check(mapping, &info, true).into_iter().find(|found| found.severity == Severity::Error) {
            return Err(Error::new(Kind::Config, format!("outbox {:?}: {}", mapping.name, wrong.message))
                .with_remedy(wrong.remedy));
        }
        let sql = Arc::new(Sql::new(Dialect::Mysql, mapping, &info)?);
        if let Some(check) = sql.zone_check() {
            let row = sqlx::query(AssertSqlSafe(check)).fetch_one(&self.own).await.map_err(db)?;
            if row.try_get::<Option<String>, _>(0).map_err(db)?.is_none() {
                let message = format!("outbox {:?}: clock: the server does not know this time zone", mapping.name);
                return Err(Error::new(Kind::Config, message).with_remedy(
                    "write an offset such as \"+07:00\", load the server's time zone tables, or say \"utc\"",
                ));
            }
        }
        Ok(Box::new(Table { own: self.own.clone(), sql }))
    }
}

/// How often a look is repeated without the keys that others hold.
const LOOKS_MAX: usize = 5;

struct Table {
    own: MySqlPool,
    sql: Arc<Sql>,
}

#[async_trait]
impl AdoptedTable for Table {
    fn source(&self) -> String {
        self.sql.source()
    }

    async fn lock(&self, part: Part, limit: usize) -> Result<Box<dyn LockedRows>> {
        let mut tx = self.own.begin().await.map_err(changed)?;
        // When all that was found is behind rows of others, their keys are left out of the next look.
        let mut without: Vec<String> = Vec::new();
        let mut rows = Vec::new();
        for _ in 0..LOOKS_MAX {
            let mut query = sqlx::query(AssertSqlSafe(self.sql.candidates(part, without.len())));
            for key in &without {
                query = query.bind(key);
            }
            let candidates = query.bind(limit as i64).fetch_all(&mut *tx).await.map_err(changed)?;
            let ids: Vec<String> =
                candidates.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>().map_err(changed)?;
            if ids.is_empty() {
                break;
            }
            let query = sqlx::query(AssertSqlSafe(self.sql.lock(Part::ALL, ids.len())));
            let query = bind_ids(&self.sql, query, ids.iter().map(String::as_str));
            for row in &query.fetch_all(&mut *tx).await.map_err(changed)? {
                rows.push(read_row(&self.sql.mapping, row).map_err(changed)?);
            }
            let behind = self.behind(&mut tx, &rows).await?;
            if rows.is_empty() || behind.len() < rows.len() {
                rows.retain(|row: &AdoptedRow| !behind.contains(&row.id));
                break;
            }
            let keys = rows.drain(..).filter_map(|row| row.key(&self.sql.mapping).map(str::to_owned));
            without.extend(keys.collect::<std::collections::BTreeSet<_>>());
        }
        Ok(Box::new(Locked { tx, rows, sql: self.sql.clone() }))
    }

    async fn free_abandoned(&self) -> Result<u64> {
        let Some(abandoned) = self.sql.abandoned() else { return Ok(0) };
        let mut tx = self.own.begin().await.map_err(changed)?;
        let rows = sqlx::query(AssertSqlSafe(abandoned))
            .bind(self.sql.mapping.processing_timeout.as_secs_f64())
            .fetch_all(&mut *tx)
            .await
            .map_err(changed)?;
        let ids: Vec<String> = rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>().map_err(changed)?;
        let Some(free) = self.sql.free(ids.len()).filter(|_| !ids.is_empty()) else {
            return tx.rollback().await.map(|()| 0).map_err(changed);
        };
        let freed = bind_ids(&self.sql, sqlx::query(AssertSqlSafe(free)), ids.iter().map(String::as_str))
            .execute(&mut *tx)
            .await
            .map_err(changed)?;
        tx.commit().await.map_err(changed)?;
        Ok(freed.rows_affected())
    }

    async fn backlog(&self) -> Result<Backlog> {
        let one = async |sql: String| -> Result<Option<i64>> {
            let row = sqlx::query(AssertSqlSafe(sql)).fetch_optional(&self.own).await.map_err(changed)?;
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
            let row = sqlx::query(AssertSqlSafe(sql)).fetch_one(&self.own).await.map_err(changed)?;
            backlog.retrying = count(row.try_get(0).map_err(changed)?);
            backlog.failed += count(row.try_get(1).map_err(changed)?);
        }
        Ok(backlog)
    }

    async fn inspect(&self) -> Result<Vec<Finding>> {
        let mapping = &self.sql.mapping;
        let name = format!("outbox.{}", mapping.name);
        let Some(info) = table(&self.own, &mapping.table).await? else {
            return Ok(vec![Finding::error(
                name,
                format!("{} is gone", mapping.table),
                "create it, or correct `table`",
            )]);
        };
        let mut findings = check(mapping, &info, true);
        if let Some(sql) = self.sql.unknown_state()
            && let Ok(rows) = sqlx::query(AssertSqlSafe(sql)).fetch_all(&self.own).await
        {
            for row in &rows {
                let word: String = row.try_get(0).map_err(changed)?;
                let rows: i64 = row.try_get(1).map_err(changed)?;
                findings.push(unknown_word(&name, &word, rows));
            }
        }
        if let Some(sql) = self.sql.count_orderless()
            && let Ok(row) = sqlx::query(AssertSqlSafe(sql)).fetch_one(&self.own).await
        {
            findings.extend(orderless(&name, row.try_get(0).map_err(changed)?));
        }
        Ok(findings)
    }
}

fn count(value: Option<i64>) -> u64 {
    value.and_then(|value| u64::try_from(value).ok()).unwrap_or_default()
}

impl Table {
    /// Ids of locked rows that must wait for an earlier one of their key.
    async fn behind(&self, tx: &mut MySqlConnection, rows: &[AdoptedRow]) -> Result<HashSet<String>> {
        let (Some(sql), Some(last)) = (self.sql.behind(rows.len()), rows.last()) else { return Ok(HashSet::new()) };
        let ids = || rows.iter().map(|row| row.id.as_str());
        let mut query = sqlx::query(AssertSqlSafe(sql));
        for _ in 0..self.sql.behind_parts() {
            query = bind_ids(&self.sql, query, std::iter::once(last.id.as_str()).chain(ids()));
        }
        let found = bind_ids(&self.sql, query, ids()).fetch_all(tx).await.map_err(changed)?;
        found.iter().map(|row| row.try_get(0).map_err(changed)).collect()
    }
}

struct Locked {
    tx: Tx,
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
            let query = sqlx::query(AssertSqlSafe(self.sql.publish(published.len())));
            let marked =
                bind_ids(&self.sql, query, published.iter().copied()).execute(&mut *self.tx).await.map_err(changed)?;
            if marked.rows_affected() != published.len() as u64 {
                return Err(not_marked(published.len(), marked.rows_affected()));
            }
            if let Some(sql) = self.sql.forget(published.len()) {
                let mut query = sqlx::query(AssertSqlSafe(sql));
                for id in &published {
                    query = query.bind(*id);
                }
                query.execute(&mut *self.tx).await.map_err(changed)?;
            }
        }
        self.tx.commit().await.map_err(changed)
    }
}

async fn fail(
    tx: &mut MySqlConnection,
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

fn read_row(mapping: &Mapping, row: &MySqlRow) -> Result<AdoptedRow, sqlx::Error> {
    let payload: Option<Vec<u8>> = row.try_get(0)?;
    let mut values = BTreeMap::new();
    for (place, column) in mapping.columns_read().into_iter().enumerate() {
        if let Some(value) = row.try_get::<Option<String>, _>(place + 2)? {
            values.insert(column.to_owned(), value);
        }
    }
    let side_attempts = row.try_get::<i64, _>(1)? as u32;
    Ok(AdoptedRow::new(mapping, payload.map(Bytes::from), values, side_attempts))
}

/// What is missing here is the service's, not ours.
fn changed(error: sqlx::Error) -> Error {
    table_changed(db(error))
}

/// Ids as the column has them: a number compared with a text would not be found by its index.
fn bind_ids<'q>(
    sql: &Sql,
    mut query: Query<'q, MySql, MySqlArguments>,
    ids: impl Iterator<Item = &'q str>,
) -> Query<'q, MySql, MySqlArguments> {
    for id in ids {
        query = match (sql.is_integer_id(), id.parse::<i64>()) {
            (true, Ok(number)) => query.bind(number),
            _ => query.bind(id),
        };
    }
    query
}

async fn table(pool: &MySqlPool, name: &TableName) -> Result<Option<TableInfo>> {
    let found = sqlx::query(TABLE).bind(&name.name).bind(&name.schema).fetch_optional(pool).await.map_err(db)?;
    let Some(found) = found else { return Ok(None) };
    let (schema, name): (String, String) = (found.try_get(0).map_err(db)?, found.try_get(1).map_err(db)?);
    let rows = sqlx::query(COLUMNS).bind(&schema).bind(&name).fetch_all(pool).await.map_err(db)?;
    let columns = rows.iter().map(column).collect::<Result<_, _>>().map_err(db)?;
    let mut indexes: Vec<IndexInfo> = Vec::new();
    for row in &sqlx::query(INDEXES).bind(&schema).bind(&name).fetch_all(pool).await.map_err(db)? {
        let (index, column): (String, String) = (row.try_get(0).map_err(db)?, row.try_get(2).map_err(db)?);
        let is_unique = row.try_get::<i64, _>(1).map_err(db)? == 0;
        match indexes.last_mut().filter(|last| last.name == index) {
            Some(last) => last.columns.push(column),
            None => indexes.push(IndexInfo { name: index, columns: vec![column], condition: None, is_unique }),
        }
    }
    let primary_key = indexes.iter().find(|index| index.name == PRIMARY).map(|index| index.columns.clone());
    Ok(Some(TableInfo {
        database: schema.clone(),
        schema,
        name,
        columns,
        primary_key: primary_key.unwrap_or_default(),
        indexes,
        missing_rights: Vec::new(),
    }))
}

fn column(row: &MySqlRow) -> Result<ColumnInfo, sqlx::Error> {
    let type_name: String = row.try_get(2)?;
    let kind = match row.try_get::<String, _>(1)?.to_lowercase().as_str() {
        "tinyint" if type_name.starts_with("tinyint(1)") => ColumnKind::Boolean,
        "tinyint" | "smallint" | "mediumint" | "int" | "bigint" => ColumnKind::Integer,
        "uuid" => ColumnKind::Uuid,
        "char" | "varchar" | "tinytext" | "text" | "mediumtext" | "longtext" | "enum" => ColumnKind::Text,
        "json" => ColumnKind::Json,
        "binary" | "varbinary" | "tinyblob" | "blob" | "mediumblob" | "longblob" => ColumnKind::Bytes,
        "timestamp" => ColumnKind::Instant,
        "datetime" => ColumnKind::DateTime,
        _ => ColumnKind::Other,
    };
    Ok(ColumnInfo {
        name: row.try_get(0)?,
        kind,
        is_nullable: row.try_get::<String, _>(3)? == "YES",
        default: row.try_get(4)?,
        words: enumerated(&type_name),
        chars_max: row.try_get::<Option<i64>, _>(5)?.and_then(|chars| u32::try_from(chars).ok()),
        second_digits: row.try_get::<Option<i64>, _>(6)?.and_then(|digits| u32::try_from(digits).ok()),
        type_name,
    })
}

/// The words of `enum('a','b')`.
fn enumerated(type_name: &str) -> Vec<String> {
    let Some(list) = type_name.strip_prefix("enum('").and_then(|rest| rest.strip_suffix("')")) else {
        return Vec::new();
    };
    list.split("','").map(|word| word.replace("''", "'")).collect()
}
