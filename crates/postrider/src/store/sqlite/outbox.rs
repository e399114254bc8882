//! Writes events into the outbox and reads the log from any position.

use std::sync::LazyLock;

use async_trait::async_trait;
use sqlx::sqlite::Sqlite;
use sqlx::{Row as _, SqliteConnection, Transaction};

use super::row::{self, CHUNKS, event_columns};
use super::{SqliteStore, error};
use crate::error::Result;
use crate::event::Event;
use crate::outbox::{OutboxStore, OutboxWriter};
use crate::source::{Page, Position};

static INSERT: LazyLock<[String; CHUNKS.len()]> = LazyLock::new(|| row::insert_statements("outbox", &[]));

/// For a transaction of the caller's own. The relay is not rung, since only the caller knows when it commits: it finds
/// the events at its next look.
#[async_trait]
impl OutboxWriter for Transaction<'_, Sqlite> {
    async fn insert(&mut self, events: &[Event]) -> Result<()> {
        insert_as_one(self, events).await.map_err(|error| error::classify(None, "the events were not appended", error))
    }
}

/// For a connection inside of a transaction that was begun by other means.
#[async_trait]
impl OutboxWriter for SqliteConnection {
    async fn insert(&mut self, events: &[Event]) -> Result<()> {
        insert_as_one(self, events).await.map_err(|error| error::classify(None, "the events were not appended", error))
    }
}

#[async_trait]
impl OutboxStore for SqliteStore {
    async fn enqueue(&self, events: &[Event]) -> Result<()> {
        const DOING: &str = "the events were not enqueued";
        if events.is_empty() {
            return Ok(());
        }
        let mut tx = self.write(DOING).await?;
        insert(&mut tx, events).await.map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))?;
        self.inner.enqueued.notify_waiters();
        Ok(())
    }

    async fn position(&self, from_start: bool) -> Result<Position> {
        const DOING: &str = "the end of the outbox was not found";
        let row = sqlx::query("SELECT coalesce(max(id), 0) FROM outbox")
            .fetch_one(&self.inner.reader)
            .await
            .map_err(self.failed(DOING))?;
        let last_id = row.try_get(0).map_err(self.failed(DOING))?;
        Ok(at(if from_start { 0 } else { last_id }))
    }

    async fn tail(&self, from: &Position, limit: usize) -> Result<Page> {
        self.page(from.last_id, limit).await
    }
}

/// A position: everything up to this id was handled.
pub(super) fn at(last_id: i64) -> Position {
    Position { last_id, ..Position::default() }
}

impl SqliteStore {
    /// Up to `limit` rows of all lanes after `last_id`.
    pub(super) async fn page(&self, last_id: i64, limit: usize) -> Result<Page> {
        const DOING: &str = "the outbox was not read";
        let found =
            sqlx::query(concat!("SELECT id, ", event_columns!(), " FROM outbox WHERE id > ? ORDER BY id LIMIT ?"))
                .bind(last_id)
                .bind(i64::try_from(limit).unwrap_or(i64::MAX))
                .fetch_all(&self.inner.reader)
                .await
                .map_err(self.failed(DOING))?;
        let has_more = !found.is_empty() && found.len() >= limit;
        let mut rows = Vec::with_capacity(found.len());
        for row in &found {
            rows.push(row::read_row(row).map_err(self.failed(DOING))?);
        }
        let next = at(rows.last().map_or(last_id, |row| row.id));
        Ok(Page { rows, next, has_more })
    }
}

/// Several statements, all or nothing: a caller who goes on after an error must not commit half of the events.
async fn insert_as_one(connection: &mut SqliteConnection, events: &[Event]) -> Result<(), sqlx::Error> {
    if CHUNKS.contains(&events.len()) {
        return insert(connection, events).await;
    }
    sqlx::query("SAVEPOINT postrider_append").execute(&mut *connection).await?;
    if let Err(error) = insert(connection, events).await {
        // On a full disk SQLite has rolled back everything already; the first error is the one to tell.
        let _ = sqlx::query("ROLLBACK TO postrider_append").execute(&mut *connection).await;
        let _ = sqlx::query("RELEASE postrider_append").execute(&mut *connection).await;
        return Err(error);
    }
    sqlx::query("RELEASE postrider_append").execute(connection).await?;
    Ok(())
}

async fn insert(connection: &mut SqliteConnection, mut events: &[Event]) -> Result<(), sqlx::Error> {
    for (rows, statement) in CHUNKS.into_iter().zip(INSERT.iter()) {
        while events.len() >= rows {
            let (chunk, rest) = events.split_at(rows);
            let query = chunk.iter().fold(sqlx::query(statement.as_str()), row::bind);
            query.execute(&mut *connection).await?;
            events = rest;
        }
    }
    Ok(())
}
