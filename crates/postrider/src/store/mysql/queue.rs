//! The embedded broker's log.

use std::sync::Arc;

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, MySqlConnection, Row as _};

use super::error::db;
use super::lease::is_alive;
use super::row::{self, event_columns};
use super::{MysqlStore, Tx};
use crate::broker::embedded::{Message, OpenedSlot, Queue};
use crate::broker::topic;
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::handler::ConsumerSpec;
use crate::lease::Lease;

const READ: &str = concat!(
    "SELECT `offset`, ",
    event_columns!(),
    " FROM postrider_message WHERE `offset` > ? AND `offset` <= ? AND hash % ? = ? ORDER BY `offset` LIMIT ?"
);

#[async_trait]
impl Queue for MysqlStore {
    async fn append(&self, batch: &[Arc<Event>]) -> Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        let mut tx = self.write().await?;
        // One writer at a time: offsets become visible in their order.
        super::lock(&mut tx, "queue").await?;
        insert(&mut tx, batch).await.map_err(db)?;
        tx.commit().await.map_err(db)?;
        self.rings.appended.notify_waiters();
        Ok(())
    }

    async fn open(&self, consumer: &ConsumerSpec, lease: &Lease) -> Result<OpenedSlot> {
        let mut tx = self.write().await?;
        self.set_slots(&mut tx, consumer, lease).await?;
        let row = sqlx::query(
            "SELECT `offset`, is_open FROM postrider_cursor \
             WHERE consumer = ? AND slot = ? AND epoch <= ? FOR UPDATE",
        )
        .bind(&consumer.name)
        .bind(lease.slot)
        .bind(lease.epoch)
        .fetch_optional(&mut *tx)
        .await
        .map_err(db)?;
        let Some(row) = row else { return Err(lost(consumer, lease)) };
        let opened = OpenedSlot { offset: row.try_get(0).map_err(db)?, was_open: row.try_get(1).map_err(db)? };
        sqlx::query("UPDATE postrider_cursor SET epoch = ?, is_open = 1 WHERE consumer = ? AND slot = ?")
            .bind(lease.epoch)
            .bind(&consumer.name)
            .bind(lease.slot)
            .execute(&mut *tx)
            .await
            .map_err(db)?;
        tx.commit().await.map_err(db)?;
        Ok(opened)
    }

    async fn read(&self, consumer: &ConsumerSpec, slot: u32, offset: i64, limit: usize) -> Result<(Vec<Message>, i64)> {
        // First the end, so that nothing below it can be missed.
        let end: i64 = sqlx::query("SELECT COALESCE(MAX(`offset`), 0) FROM postrider_message")
            .fetch_one(&self.own)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(db)?;
        if end <= offset {
            return Ok((Vec::new(), offset));
        }
        let rows = sqlx::query(READ)
            .bind(offset)
            .bind(end)
            .bind(consumer.slots.max(1))
            .bind(slot)
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .fetch_all(&self.own)
            .await
            .map_err(db)?;
        let mut messages = Vec::with_capacity(rows.len());
        for row in &rows {
            messages.push(Message { offset: row.try_get(0).map_err(db)?, event: row::read_event(row) });
        }
        let read_to = match messages.last() {
            Some(last) if messages.len() >= limit => last.offset,
            _ => end,
        };
        Ok((messages, read_to))
    }

    async fn commit(&self, consumer: &ConsumerSpec, lease: &Lease, offset: i64) -> Result<()> {
        self.move_cursor(consumer, lease, offset, true).await
    }

    async fn leave(&self, consumer: &ConsumerSpec, lease: &Lease, offset: i64) -> Result<()> {
        self.move_cursor(consumer, lease, offset, false).await
    }

    async fn appended(&self) {
        self.rings.appended.notified().await;
    }
}

impl MysqlStore {
    async fn move_cursor(&self, consumer: &ConsumerSpec, lease: &Lease, offset: i64, is_open: bool) -> Result<()> {
        let moved = sqlx::query(
            "UPDATE postrider_cursor SET `offset` = GREATEST(`offset`, ?), is_open = ? \
             WHERE consumer = ? AND slot = ? AND slots = ? AND epoch = ?",
        )
        .bind(offset)
        .bind(is_open)
        .bind(&consumer.name)
        .bind(lease.slot)
        .bind(consumer.slots)
        .bind(lease.epoch)
        .execute(&self.own)
        .await
        .map_err(db)?;
        if moved.rows_affected() == 1 { Ok(()) } else { Err(lost(consumer, lease)) }
    }

    /// Makes sure that the consumer has exactly its slots.
    async fn set_slots(&self, tx: &mut Tx, consumer: &ConsumerSpec, lease: &Lease) -> Result<()> {
        super::lock(tx, &format!("consumer/{}", consumer.name)).await?;
        let rows = sqlx::query("SELECT slots, `offset` FROM postrider_cursor WHERE consumer = ? FOR UPDATE")
            .bind(&consumer.name)
            .fetch_all(&mut **tx)
            .await
            .map_err(db)?;
        let mut lowest: Option<i64> = None;
        let mut other = None;
        for row in &rows {
            let (slots, offset): (i32, i64) = (row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?);
            lowest = Some(lowest.map_or(offset, |lowest| lowest.min(offset)));
            other = other.or((slots != consumer.slots as i32).then_some(slots));
        }
        if !rows.is_empty() && other.is_none() {
            return Ok(());
        }
        if let Some(other) = other {
            refuse_beside(tx, consumer, lease, other).await?;
        }
        sqlx::query("DELETE FROM postrider_cursor WHERE consumer = ? AND slot >= ?")
            .bind(&consumer.name)
            .bind(consumer.slots)
            .execute(&mut **tx)
            .await
            .map_err(db)?;
        let values = vec!["(?, ?, ?, ?)"; consumer.slots as usize].join(", ");
        let insert = format!(
            "INSERT INTO postrider_cursor (consumer, slot, slots, `offset`) VALUES {values} \
             ON DUPLICATE KEY UPDATE slots = VALUES(slots), `offset` = VALUES(`offset`)"
        );
        let insert = (0..consumer.slots).fold(sqlx::query(AssertSqlSafe(insert)).persistent(false), |query, slot| {
            query.bind(&consumer.name).bind(slot).bind(consumer.slots).bind(lowest.unwrap_or(0))
        });
        insert.execute(&mut **tx).await.map_err(db)?;
        Ok(())
    }
}

/// Two numbers of slots at once would give one key to two instances.
async fn refuse_beside(tx: &mut MySqlConnection, consumer: &ConsumerSpec, lease: &Lease, other: i32) -> Result<()> {
    let holder = sqlx::query(concat!(
        "SELECT l.owner FROM postrider_cursor c JOIN postrider_lease l \
           ON l.group_name = ? AND l.slot = c.slot AND l.epoch = c.epoch \
         WHERE c.consumer = ? AND c.slots <> ? AND l.owner <> ? AND ",
        is_alive!(),
        " LIMIT 1"
    ))
    .bind(&lease.group)
    .bind(&consumer.name)
    .bind(consumer.slots)
    .bind(&lease.owner)
    .fetch_optional(tx)
    .await
    .map_err(db)?;
    let Some(holder) = holder else { return Ok(()) };
    let owner: String = holder.try_get(0).map_err(db)?;
    let (name, slots) = (&consumer.name, consumer.slots);
    let message = format!("consumer {name:?} is set to {slots} slots here, but {owner} works on it with {other}");
    Err(Error::new(Kind::Config, message).with_remedy(format!(
        "set slots to {other} here, or stop all instances of the consumer and start them with {slots}"
    )))
}

fn lost(consumer: &ConsumerSpec, lease: &Lease) -> Error {
    let message = format!("slot {} of consumer {:?} was opened by another instance", lease.slot, consumer.name);
    Error::new(Kind::LeaseLost, message)
}

async fn insert(connection: &mut MySqlConnection, mut batch: &[Arc<Event>]) -> Result<(), sqlx::Error> {
    while !batch.is_empty() {
        let (chunk, rest) = batch.split_at(row::chunk(batch.iter().map(Arc::as_ref)));
        let statement = row::insert_statement("postrider_message", &["hash"], chunk.len());
        let query = chunk.iter().fold(sqlx::query(AssertSqlSafe(statement)), |query, event| {
            row::bind(query.bind(i64::from(topic::event_hash(event))), event)
        });
        query.execute(&mut *connection).await?;
        batch = rest;
    }
    Ok(())
}
