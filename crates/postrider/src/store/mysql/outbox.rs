//! Writes events into the outbox, and reads it for people.

use std::collections::BTreeSet;

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, MySql, MySqlConnection, Row as _, Transaction};

use super::MysqlStore;
use super::error::db;
use super::row::{self, event_columns};
use crate::error::Result;
use crate::event::Event;
use crate::outbox::{OutboxStore, OutboxWriter};
use crate::source::{Page, Position};

/// So many numbers that were not there when `tail` passed them are looked for again: their transactions may commit yet.
const GAPS_MAX: usize = 1_000;

/// For a connection inside of a transaction. The relay is not rung, since only the caller knows when it commits: it finds the
/// events at its next look.
#[async_trait]
impl OutboxWriter for MySqlConnection {
    async fn insert(&mut self, events: &[Event]) -> Result<()> {
        if events.is_empty() || row::is_one_chunk(events) {
            return insert(self, events).await.map_err(db);
        }
        // Several statements, all or nothing: a caller who goes on after an error must not commit half of the events.
        sqlx::raw_sql("SAVEPOINT postrider_append").execute(&mut *self).await.map_err(db)?;
        if let Err(error) = insert(self, events).await {
            // After a deadlock there is no savepoint any more; the first error is the one to tell.
            let _ = sqlx::raw_sql("ROLLBACK TO SAVEPOINT postrider_append").execute(&mut *self).await;
            return Err(db(error));
        }
        sqlx::raw_sql("RELEASE SAVEPOINT postrider_append").execute(self).await.map_err(db)?;
        Ok(())
    }
}

#[async_trait]
impl OutboxWriter for Transaction<'_, MySql> {
    async fn insert(&mut self, events: &[Event]) -> Result<()> {
        OutboxWriter::insert(&mut **self, events).await
    }
}

async fn insert(connection: &mut MySqlConnection, mut events: &[Event]) -> Result<(), sqlx::Error> {
    while !events.is_empty() {
        let (chunk, rest) = events.split_at(row::chunk(events.iter()));
        let statement = row::insert_statement("postrider_outbox", &[], chunk.len());
        let query = chunk.iter().fold(sqlx::query(AssertSqlSafe(statement)), row::bind);
        query.execute(&mut *connection).await?;
        events = rest;
    }
    Ok(())
}

#[async_trait]
impl OutboxStore for MysqlStore {
    async fn enqueue(&self, events: &[Event]) -> Result<()> {
        let mut tx = self.write().await?;
        insert(&mut tx, events).await.map_err(db)?;
        tx.commit().await.map_err(db)?;
        self.rings.enqueued.notify_waiters();
        Ok(())
    }

    async fn position(&self, from_start: bool) -> Result<Position> {
        if from_start {
            return Ok(Position::default());
        }
        let rows = sqlx::query("SELECT id FROM postrider_outbox ORDER BY id DESC LIMIT ?")
            .bind(GAPS_MAX as i64)
            .fetch_all(&self.own)
            .await
            .map_err(db)?;
        let ids = rows.iter().map(|row| row.try_get(0).map_err(db)).collect::<Result<BTreeSet<i64>>>()?;
        let (first, last) = (ids.first().copied().unwrap_or(0), ids.last().copied().unwrap_or(0));
        Ok(position(last, &gaps(first, last, &ids)))
    }

    /// For people: numbers that are missing are looked for again, as long as there are not too many of them.
    async fn tail(&self, from: &Position, limit: usize) -> Result<Page> {
        let mut gaps: BTreeSet<i64> = from.done.split(',').filter_map(|id| id.parse().ok()).collect();
        let missing = gaps.iter().copied().collect::<Vec<_>>();
        let missing = if missing.is_empty() { String::new() } else { format!("id IN ({}) OR ", super::list(&missing)) };
        let query =
            format!("SELECT id, {} FROM postrider_outbox WHERE {missing}id > ? ORDER BY id LIMIT ?", event_columns!());
        let found = sqlx::query(AssertSqlSafe(query))
            .persistent(false)
            .bind(from.last_id)
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .fetch_all(&self.own)
            .await
            .map_err(db)?;
        let mut rows = Vec::with_capacity(found.len());
        for row in &found {
            rows.push(row::read_row(row).map_err(db)?);
        }
        let ids: BTreeSet<i64> = rows.iter().map(|row| row.id).collect();
        gaps.retain(|id| !ids.contains(id));
        let last = ids.last().copied().unwrap_or(0).max(from.last_id);
        if last > from.last_id {
            gaps.extend(self::gaps(from.last_id, last, &ids));
        }
        while gaps.len() > GAPS_MAX {
            gaps.pop_first();
        }
        Ok(Page { has_more: !rows.is_empty() && rows.len() >= limit, rows, next: position(last, &gaps) })
    }
}

fn position(last_id: i64, gaps: &BTreeSet<i64>) -> Position {
    let gaps: Vec<i64> = gaps.iter().copied().collect();
    Position { done: super::list(&gaps).replace(' ', ""), target: None, last_id }
}

/// What is missing between the two.
fn gaps(after: i64, last: i64, ids: &BTreeSet<i64>) -> BTreeSet<i64> {
    let newest = last.saturating_sub(GAPS_MAX as i64).max(after);
    (newest + 1..last).filter(|id| !ids.contains(id)).collect()
}
