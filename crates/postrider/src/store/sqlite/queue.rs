//! The embedded broker's log. One writer, so offsets are in commit order.

use std::sync::{Arc, LazyLock};

use async_trait::async_trait;
use sqlx::{Row as _, SqliteConnection};

use super::row::{self, CHUNKS, event_columns};
use super::{SqliteStore, Tx, now_ms};
use crate::broker::embedded::{Message, OpenedSlot, Queue};
use crate::broker::topic;
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::handler::ConsumerSpec;
use crate::lease::Lease;

static INSERT: LazyLock<[String; CHUNKS.len()]> = LazyLock::new(|| row::insert_statements("message", &["hash"]));

#[async_trait]
impl Queue for SqliteStore {
    async fn append(&self, batch: &[Arc<Event>]) -> Result<()> {
        const DOING: &str = "the messages were not appended";
        if batch.is_empty() {
            return Ok(());
        }
        let mut tx = self.write(DOING).await?;
        insert(&mut tx, batch).await.map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))?;
        self.inner.appended.notify_waiters();
        Ok(())
    }

    async fn open(&self, consumer: &ConsumerSpec, lease: &Lease) -> Result<OpenedSlot> {
        const DOING: &str = "the consumer's slot was not opened";
        let mut tx = self.write(DOING).await?;
        self.slots(&mut tx, consumer, lease).await?;
        let row = sqlx::query("SELECT \"offset\", is_open FROM cursor WHERE consumer = ? AND slot = ? AND epoch <= ?")
            .bind(&consumer.name)
            .bind(lease.slot)
            .bind(lease.epoch)
            .fetch_optional(&mut *tx)
            .await
            .map_err(self.failed(DOING))?;
        let Some(row) = row else { return Err(lost(consumer, lease)) };
        let read = || -> Result<OpenedSlot, sqlx::Error> {
            Ok(OpenedSlot { offset: row.try_get(0)?, was_open: row.try_get(1)? })
        };
        let opened = read().map_err(self.failed(DOING))?;
        sqlx::query("UPDATE cursor SET epoch = ?3, is_open = 1 WHERE consumer = ?1 AND slot = ?2")
            .bind(&consumer.name)
            .bind(lease.slot)
            .bind(lease.epoch)
            .execute(&mut *tx)
            .await
            .map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))?;
        Ok(opened)
    }

    async fn read(&self, consumer: &ConsumerSpec, slot: u32, offset: i64, limit: usize) -> Result<(Vec<Message>, i64)> {
        const DOING: &str = "the messages were not read";
        // One snapshot, so that the end of the log belongs to the messages.
        let mut tx = SqliteStore::read(self, DOING).await?;
        let rows = sqlx::query(concat!(
            "SELECT \"offset\", ",
            event_columns!(),
            " FROM message WHERE \"offset\" > ? AND hash % ? = ? ORDER BY \"offset\" LIMIT ?"
        ))
        .bind(offset)
        .bind(consumer.slots.max(1))
        .bind(slot)
        .bind(i64::try_from(limit).unwrap_or(i64::MAX))
        .fetch_all(&mut *tx)
        .await
        .map_err(self.failed(DOING))?;
        let end = sqlx::query("SELECT coalesce(max(\"offset\"), 0) FROM message")
            .fetch_one(&mut *tx)
            .await
            .map_err(self.failed(DOING))?;
        tx.rollback().await.map_err(self.failed(DOING))?;

        let mut messages = Vec::with_capacity(rows.len());
        for row in &rows {
            let offset = row.try_get(0).map_err(self.failed(DOING))?;
            messages.push(Message { offset, event: row::read_event(row) });
        }
        let end: i64 = end.try_get(0).map_err(self.failed(DOING))?;
        let looked_to = match messages.last() {
            Some(last) if messages.len() >= limit => last.offset,
            _ => end.max(offset),
        };
        Ok((messages, looked_to))
    }

    async fn commit(&self, consumer: &ConsumerSpec, lease: &Lease, offset: i64) -> Result<()> {
        self.move_cursor(consumer, lease, offset, true).await
    }

    async fn leave(&self, consumer: &ConsumerSpec, lease: &Lease, offset: i64) -> Result<()> {
        self.move_cursor(consumer, lease, offset, false).await
    }

    async fn appended(&self) {
        self.inner.appended.notified().await;
    }
}

impl SqliteStore {
    async fn move_cursor(&self, consumer: &ConsumerSpec, lease: &Lease, offset: i64, is_open: bool) -> Result<()> {
        const DOING: &str = "the consumer's offset was not written";
        let mut tx = self.write(DOING).await?;
        let moved = sqlx::query(
            "UPDATE cursor SET \"offset\" = max(\"offset\", ?5), is_open = ?6
              WHERE consumer = ?1 AND slot = ?2 AND slots = ?3 AND epoch = ?4",
        )
        .bind(&consumer.name)
        .bind(lease.slot)
        .bind(consumer.slots)
        .bind(lease.epoch)
        .bind(offset)
        .bind(is_open)
        .execute(&mut *tx)
        .await
        .map_err(self.failed(DOING))?;
        if moved.rows_affected() == 0 {
            return Err(lost(consumer, lease));
        }
        tx.commit().await.map_err(self.failed(DOING))
    }

    /// Makes sure that the consumer has exactly its slots.
    async fn slots(&self, tx: &mut Tx, consumer: &ConsumerSpec, lease: &Lease) -> Result<()> {
        const DOING: &str = "the consumer's slot was not opened";
        let row = sqlx::query(
            "SELECT count(*), coalesce(min(\"offset\"), 0), max(slots), max(slots <> ?2) FROM cursor WHERE consumer = ?1",
        )
        .bind(&consumer.name)
        .bind(consumer.slots)
        .fetch_one(&mut **tx)
        .await
        .map_err(self.failed(DOING))?;
        let read = || -> Result<(i64, i64, Option<u32>, Option<bool>), sqlx::Error> {
            Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?, row.try_get(3)?))
        };
        let (count, offset, slots, has_changed) = read().map_err(self.failed(DOING))?;
        if count > 0 && has_changed == Some(false) {
            return Ok(());
        }
        if count > 0 {
            self.refuse_beside(tx, consumer, lease, slots.unwrap_or_default()).await?;
        }
        sqlx::query("DELETE FROM cursor WHERE consumer = ? AND slot >= ?")
            .bind(&consumer.name)
            .bind(consumer.slots)
            .execute(&mut **tx)
            .await
            .map_err(self.failed(DOING))?;
        // Epochs stay; a late commit of the old slots is refused by their number.
        sqlx::query(
            "WITH RECURSIVE number(slot) AS (SELECT 0 UNION ALL SELECT slot + 1 FROM number WHERE slot + 1 < ?2)
             INSERT INTO cursor (consumer, slot, slots, \"offset\") SELECT ?1, slot, ?2, ?3 FROM number WHERE true
             ON CONFLICT DO UPDATE SET slots = excluded.slots, \"offset\" = excluded.\"offset\"",
        )
        .bind(&consumer.name)
        .bind(consumer.slots)
        .bind(offset)
        .execute(&mut **tx)
        .await
        .map_err(self.failed(DOING))?;
        Ok(())
    }

    /// Two numbers of slots at once would give one key to two instances.
    async fn refuse_beside(&self, tx: &mut Tx, consumer: &ConsumerSpec, lease: &Lease, other: u32) -> Result<()> {
        let holder = sqlx::query(concat!(
            "SELECT l.owner FROM cursor c JOIN lease l ON l.group_name = ?2 AND l.slot = c.slot AND l.epoch = c.epoch
              WHERE c.consumer = ?1 AND c.slots <> ?3 AND l.owner <> ?4 AND l.expires_at > ",
            now_ms!(),
            " LIMIT 1"
        ))
        .bind(&consumer.name)
        .bind(&lease.group)
        .bind(consumer.slots)
        .bind(&lease.owner)
        .fetch_optional(&mut **tx)
        .await
        .map_err(self.failed("the consumer's slot was not opened"))?;
        let Some(holder) = holder else { return Ok(()) };
        let owner: String = holder.try_get(0).unwrap_or_default();
        let (name, slots) = (&consumer.name, consumer.slots);
        let message = format!("consumer {name:?} is set to {slots} slots here, but {owner} works on it with {other}");
        Err(Error::new(Kind::Config, message).with_remedy(format!(
            "set slots to {other} here, or stop all instances of the consumer and start them with {slots}"
        )))
    }
}

fn lost(consumer: &ConsumerSpec, lease: &Lease) -> Error {
    let message = format!("slot {} of consumer {:?} was opened by another instance", lease.slot, consumer.name);
    Error::new(Kind::LeaseLost, message)
}

async fn insert(connection: &mut SqliteConnection, mut batch: &[Arc<Event>]) -> Result<(), sqlx::Error> {
    for (rows, statement) in CHUNKS.into_iter().zip(INSERT.iter()) {
        while batch.len() >= rows {
            let (chunk, rest) = batch.split_at(rows);
            let query = chunk.iter().fold(sqlx::query(statement.as_str()), |query, event| {
                row::bind(query.bind(topic::event_hash(event)), event)
            });
            query.execute(&mut *connection).await?;
            batch = rest;
        }
    }
    Ok(())
}
