//! The embedded broker's log.

use std::sync::Arc;

use async_trait::async_trait;
use sqlx::{PgConnection, Row as _};

use super::PostgresStore;
use super::copy::CopyRows;
use super::error::db;
use super::row;
use crate::broker::embedded::{Message, OpenedSlot, Queue};
use crate::broker::topic;
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::handler::ConsumerSpec;
use crate::lease::Lease;

/// One writer at a time: offsets become visible in their order.
const APPEND_LOCK: i64 = 7_062_611_490_211_870_002;

const APPEND: &str = "COPY postrider.message (hash, event_id, topic, key, type, payload, content_type, source, subject, \
     tenant, correlation, causation, traceparent, tracestate, headers, created_at) FROM STDIN (FORMAT binary)";
const APPEND_COLUMNS: i16 = 16;
/// What an event may take there beside its payload, to begin with.
const ROW_BYTES: usize = 256;

/// The end of the log comes with the rows, so that the caller knows how far it has looked when none was for it.
const READ: &str = "SELECT m.\"offset\", m.event_id, m.topic, m.key, m.type, NULL::text, m.payload, m.content_type, \
     m.source, m.subject, m.tenant, m.correlation, m.causation, m.traceparent, m.tracestate, m.headers, m.created_at \
     FROM postrider.message m WHERE m.\"offset\" > $1 AND m.\"offset\" <= $5 AND ($3 = 1 OR m.hash % $3 = $4) \
     ORDER BY m.\"offset\" LIMIT $2";

#[async_trait]
impl Queue for PostgresStore {
    async fn append(&self, batch: &[Arc<Event>]) -> Result<()> {
        let rows = rows(batch);
        let mut tx = self.own.begin().await.map_err(db)?;
        sqlx::query("SELECT pg_advisory_xact_lock($1), pg_notify($2, '')")
            .bind(APPEND_LOCK)
            .bind(super::wake::QUEUE)
            .execute(&mut *tx)
            .await
            .map_err(db)?;
        let mut copy = tx.copy_in_raw(APPEND).await.map_err(db)?;
        copy.send(rows).await.map_err(db)?;
        copy.finish().await.map_err(db)?;
        tx.commit().await.map_err(db)
    }

    async fn open(&self, consumer: &ConsumerSpec, lease: &Lease) -> Result<OpenedSlot> {
        let mut tx = self.own.begin().await.map_err(db)?;
        sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended($1, 7062611490211871))")
            .bind(&consumer.name)
            .execute(&mut *tx)
            .await
            .map_err(db)?;
        let row = sqlx::query("SELECT min(slots), min(\"offset\") FROM postrider.cursor WHERE consumer = $1")
            .bind(&consumer.name)
            .fetch_one(&mut *tx)
            .await
            .map_err(db)?;
        let slots: Option<i32> = row.try_get(0).map_err(db)?;
        let lowest: Option<i64> = row.try_get(1).map_err(db)?;
        if slots != Some(consumer.slots as i32) {
            if let Some(found) = slots {
                require_alone(&mut tx, consumer, lease, found).await?;
            }
            sqlx::query("DELETE FROM postrider.cursor WHERE consumer = $1")
                .bind(&consumer.name)
                .execute(&mut *tx)
                .await
                .map_err(db)?;
            sqlx::query(
                "INSERT INTO postrider.cursor (consumer, slot, slots, epoch, \"offset\") \
                 SELECT $1, n, $2, 0, $3 FROM generate_series(0, $2 - 1) n",
            )
            .bind(&consumer.name)
            .bind(consumer.slots as i32)
            .bind(lowest.unwrap_or(0))
            .execute(&mut *tx)
            .await
            .map_err(db)?;
        }
        let row = sqlx::query(
            "UPDATE postrider.cursor c SET epoch = $3, is_open = true \
             FROM (SELECT is_open FROM postrider.cursor WHERE consumer = $1 AND slot = $2 FOR UPDATE) o \
             WHERE c.consumer = $1 AND c.slot = $2 AND c.epoch <= $3 RETURNING c.\"offset\", o.is_open",
        )
        .bind(&consumer.name)
        .bind(lease.slot as i32)
        .bind(lease.epoch)
        .fetch_optional(&mut *tx)
        .await
        .map_err(db)?;
        let Some(row) = row else { return Err(lease_lost(consumer, lease)) };
        let opened = OpenedSlot { offset: row.try_get(0).map_err(db)?, was_open: row.try_get(1).map_err(db)? };
        tx.commit().await.map_err(db)?;
        Ok(opened)
    }

    async fn read(&self, consumer: &ConsumerSpec, slot: u32, offset: i64, limit: usize) -> Result<(Vec<Message>, i64)> {
        let end: Option<i64> = sqlx::query("SELECT max(\"offset\") FROM postrider.message")
            .fetch_one(&self.own)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(db)?;
        let end = end.unwrap_or(0);
        if end <= offset {
            return Ok((Vec::new(), offset));
        }
        let rows = sqlx::query(READ)
            .bind(offset)
            .bind(limit as i64)
            .bind(i64::from(consumer.slots))
            .bind(i64::from(slot))
            .bind(end)
            .fetch_all(&self.own)
            .await
            .map_err(db)?;
        let mut messages = Vec::with_capacity(rows.len());
        for row in &rows {
            messages.push(Message { offset: row.try_get(0).map_err(db)?, event: row::event(row, 1) });
        }
        let read_to = match messages.last() {
            Some(last) if messages.len() == limit => last.offset,
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
        self.wake.appended().await;
    }
}

impl PostgresStore {
    async fn move_cursor(&self, consumer: &ConsumerSpec, lease: &Lease, offset: i64, is_open: bool) -> Result<()> {
        let result = sqlx::query(
            "UPDATE postrider.cursor SET \"offset\" = greatest(\"offset\", $4), is_open = $6 \
             WHERE consumer = $1 AND slot = $2 AND epoch = $3 AND slots = $5",
        )
        .bind(&consumer.name)
        .bind(lease.slot as i32)
        .bind(lease.epoch)
        .bind(offset)
        .bind(consumer.slots as i32)
        .bind(is_open)
        .execute(&self.own)
        .await
        .map_err(db)?;
        if result.rows_affected() == 1 { Ok(()) } else { Err(lease_lost(consumer, lease)) }
    }
}

/// The batch as [`APPEND`] takes it.
fn rows(batch: &[Arc<Event>]) -> Vec<u8> {
    let bytes = batch.iter().map(|event| event.payload.len() + ROW_BYTES).sum();
    let mut rows = CopyRows::new(APPEND_COLUMNS, bytes);
    for event in batch {
        rows.row()
            .bigint(topic::event_hash(event).into())
            .uuid(event.id)
            .text(Some(&event.topic))
            .text(event.key.as_deref())
            .text(Some(&event.kind))
            .raw(&event.payload)
            .text(Some(&event.content_type))
            .text(event.source.as_deref())
            .text(event.subject.as_deref())
            .text(event.tenant.as_deref())
            .text(event.correlation.as_deref())
            .text(event.causation.as_deref())
            .text(event.traceparent.as_deref())
            .text(event.tracestate.as_deref())
            .jsonb(row::headers_json(&event.headers).as_ref())
            .timestamptz(event.time);
    }
    rows.finish()
}

/// Two instances with different numbers of slots would undo each other's positions in turn.
async fn require_alone(tx: &mut PgConnection, consumer: &ConsumerSpec, lease: &Lease, found: i32) -> Result<()> {
    let is_alone = super::lease::is_alone(tx, lease).await?;
    if is_alone {
        return Ok(());
    }
    let text =
        format!("consumer {} has {found} slots in the database, its settings say {}", consumer.name, consumer.slots);
    Err(Error::new(Kind::Config, text)
        .with_remedy(format!("stop all other instances before changing the number, or set slots = {found}")))
}

fn lease_lost(consumer: &ConsumerSpec, lease: &Lease) -> Error {
    Error::new(
        Kind::LeaseLost,
        format!("slot {} of consumer {} was taken over after epoch {}", lease.slot, consumer.name, lease.epoch),
    )
}
