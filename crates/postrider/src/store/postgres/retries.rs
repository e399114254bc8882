//! Held messages and dead letters.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::PostgresStore;
use super::error::db;
use crate::broker::{Origin, topic};
use crate::error::Result;
use crate::event::Event;
use crate::inbox::{Admission, DeadLetter, Failed, Held, Message, Part, Retries, Unsent, Why};
use crate::store::json;

/// `$2` and `$3` are the slots and the slot.
const OPEN_RUNNING: &str = "UPDATE postrider.held SET state = 'suspect', next_at = clock_timestamp(), \
       history = history || jsonb_build_object('at', clock_timestamp(), 'error_type', 'crash', \
         'error', 'the process ended while it had the message') \
     WHERE consumer = $1 AND shard % $2 = $3 AND state = 'running'";

/// A message that waits for one that is gone: the one before it left while it came.
const STRANDED: &str = "UPDATE postrider.held h SET state = 'retrying', next_at = clock_timestamp() \
     WHERE consumer = $1 AND shard % $2 = $3 AND next_at = 'infinity' AND NOT EXISTS \
       (SELECT 1 FROM postrider.held p WHERE p.consumer = h.consumer AND p.key = h.key AND p.id < h.id)";

const KEYS: &str =
    "SELECT DISTINCT key FROM postrider.held WHERE consumer = $1 AND shard % $2 = $3 AND key IS NOT NULL";

const HOLD: &str = "INSERT INTO postrider.held \
       (consumer, shard, message_id, key, state, attempts, next_at, history, origin, envelope, payload) \
     SELECT $1, $2, $3, $4, \
       CASE WHEN b.is_behind THEN 'waiting' WHEN $5 = 'waiting' THEN 'retrying' ELSE $5 END, $6, \
       CASE WHEN b.is_behind THEN 'infinity' ELSE clock_timestamp() + $7 * interval '1 ms' END, \
       CASE WHEN $8::jsonb IS NULL THEN '[]' \
            ELSE jsonb_build_array(jsonb_build_object('at', clock_timestamp()) || $8::jsonb) END, $9::jsonb, $10::jsonb, $11 \
     FROM (SELECT EXISTS (SELECT 1 FROM postrider.held WHERE consumer = $1 AND key = $4) AS is_behind) b \
     WHERE NOT EXISTS (SELECT 1 FROM postrider.inbox WHERE consumer = $1 AND message_id = $3) \
     ON CONFLICT (consumer, message_id) DO NOTHING";

const DUE: &str = "SELECT id, envelope::text, payload, attempts, state = 'suspect', origin::text FROM postrider.held \
     WHERE consumer = $1 AND next_at <= clock_timestamp() AND shard % $2 = $3 AND state <> 'running' \
     ORDER BY next_at, id LIMIT $4";

/// The next of the key, after the one that leaves.
const PROMOTE: &str = "UPDATE postrider.held SET state = 'retrying', next_at = clock_timestamp() WHERE id = \
     (SELECT min(id) FROM postrider.held WHERE consumer = $1 AND key = $2 AND id > $3) AND next_at = 'infinity'";

const BURY: &str = "INSERT INTO postrider.dead_letter AS d \
       (consumer, message_id, shard, topic, type, key, tenant, error_type, error, causes, attempts, history, origin, \
        envelope, headers, payload) \
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10::jsonb, $11, $12::jsonb || jsonb_build_object('at', \
        clock_timestamp(), 'error_type', $8, 'error', $9, 'causes', $10::jsonb), $13::jsonb, $14::jsonb, $15::jsonb, $16) \
     ON CONFLICT (consumer, message_id) DO UPDATE SET state = 'dead', error_type = excluded.error_type, \
       error = excluded.error, causes = excluded.causes, attempts = d.attempts + excluded.attempts, \
       history = d.history || excluded.history, died_at = clock_timestamp(), sent_at = NULL";

const UNSENT: &str = "SELECT id, envelope::text, headers::text, payload, error_type, error, causes::text, attempts, \
       origin::text FROM postrider.dead_letter \
     WHERE consumer = $1 AND sent_at IS NULL AND shard % $2 = $3 ORDER BY id LIMIT $4";

impl PostgresStore {
    /// See [`crate::inbox::Inbox::admit_held`].
    pub(super) async fn release(&self, connection: &mut PgConnection, held: &Held) -> Result<Admission> {
        // Waits for another instance that has it; gone means that it was applied there.
        let gone = sqlx::query("DELETE FROM postrider.held WHERE id = $1").bind(held.id).execute(&mut *connection);
        if gone.await.map_err(db)?.rows_affected() == 0 {
            return Ok(Admission::Done);
        }
        promote(connection, &held.consumer, held.event.key(), held.id).await?;
        // A dead letter that is replayed has a row that says so.
        let result = sqlx::query(
            "INSERT INTO postrider.inbox AS i (consumer, message_id, topic, key, fingerprint) \
             VALUES ($1, $2, $3, $4, $5) ON CONFLICT (consumer, message_id) DO UPDATE \
             SET state = 'done', error = NULL, processed_at = clock_timestamp() WHERE i.state = 'dead'",
        )
        .bind(&held.consumer)
        .bind(held.event.id)
        .bind(held.event.topic.as_str())
        .bind(held.event.key.as_deref())
        .bind(held.event.fingerprint())
        .execute(&mut *connection)
        .await
        .map_err(db)?;
        sqlx::query(
            "DELETE FROM postrider.dead_letter WHERE consumer = $1 AND message_id = $2 AND state = 'replaying'",
        )
        .bind(&held.consumer)
        .bind(held.event.id)
        .execute(connection)
        .await
        .map_err(db)?;
        Ok(if result.rows_affected() == 1 { Admission::New } else { Admission::Done })
    }
}

async fn promote(connection: &mut PgConnection, consumer: &str, key: Option<&str>, id: i64) -> Result<()> {
    if let Some(key) = key {
        sqlx::query(PROMOTE).bind(consumer).bind(key).bind(id).execute(connection).await.map_err(db)?;
    }
    Ok(())
}

fn held(consumer: &str, row: &PgRow) -> Result<Held> {
    let envelope: &str = row.try_get(1).map_err(db)?;
    let payload: Vec<u8> = row.try_get(2).map_err(db)?;
    let origin: &str = row.try_get(5).map_err(db)?;
    Ok(Held {
        id: row.try_get(0).map_err(db)?,
        consumer: consumer.to_owned(),
        event: Event::of_envelope(envelope, payload)?,
        attempts: row.try_get::<i32, _>(3).map_err(db)? as u32,
        is_suspect: row.try_get(4).map_err(db)?,
        origin: serde_json::from_str(origin).unwrap_or_default(),
    })
}

fn unsent(row: &PgRow) -> Result<Unsent> {
    let (envelope, headers): (Option<&str>, Option<&str>) = (row.try_get(1).map_err(db)?, row.try_get(2).map_err(db)?);
    let causes: &str = row.try_get(6).map_err(db)?;
    let origin: &str = row.try_get(8).map_err(db)?;
    Ok(Unsent {
        id: row.try_get(0).map_err(db)?,
        message: Message::of_columns(envelope, headers, row.try_get(3).map_err(db)?)?,
        failed: Failed {
            error_type: row.try_get(4).map_err(db)?,
            error: row.try_get(5).map_err(db)?,
            causes: serde_json::from_str(causes).unwrap_or_default(),
        },
        attempts: row.try_get::<i32, _>(7).map_err(db)? as u32,
        origin: serde_json::from_str(origin).unwrap_or_default(),
    })
}

/// See [`Retries::hold`]. Says whether it was not held before.
pub(super) async fn hold(
    connection: &mut PgConnection,
    consumer: &str,
    event: &Event,
    origin: &Origin,
    why: Why<'_>,
) -> Result<bool> {
    let (state, attempts, delay, failed) = match why {
        Why::Failed { delay, attempts, failure } => ("retrying", attempts, delay, failure),
        Why::Behind => ("waiting", 0, Duration::ZERO, None),
        Why::Suspect => ("suspect", 1, Duration::ZERO, None),
    };
    let held = sqlx::query(HOLD)
        .bind(consumer)
        .bind(topic::shard(event) as i32)
        .bind(event.id)
        .bind(event.key.as_deref())
        .bind(state)
        .bind(attempts as i32)
        .bind(delay.as_millis() as f64)
        .bind(failed.map(json))
        .bind(json(origin))
        .bind(event.envelope()?)
        .bind(event.payload.as_ref())
        .execute(connection)
        .await
        .map_err(db)?;
    Ok(held.rows_affected() == 1)
}

#[async_trait]
impl Retries for PostgresStore {
    async fn open(&self, part: Part<'_>) -> Result<Vec<String>> {
        sqlx::query(OPEN_RUNNING)
            .bind(part.consumer)
            .bind(part.slots as i32)
            .bind(part.slot as i32)
            .execute(&self.own)
            .await
            .map_err(db)?;
        self.free_stranded(part).await?;
        let rows = sqlx::query(KEYS)
            .bind(part.consumer)
            .bind(part.slots as i32)
            .bind(part.slot as i32)
            .fetch_all(&self.own)
            .await
            .map_err(db)?;
        rows.iter().map(|row| row.try_get(0).map_err(db)).collect()
    }

    async fn hold(&self, consumer: &str, event: &Event, origin: &Origin, why: Why<'_>) -> Result<()> {
        let mut connection = self.pool.acquire().await.map_err(db)?;
        hold(&mut connection, consumer, event, origin, why).await?;
        Ok(())
    }

    async fn due(&self, part: Part<'_>, limit: usize) -> Result<Vec<Held>> {
        let rows = sqlx::query(DUE)
            .bind(part.consumer)
            .bind(part.slots as i32)
            .bind(part.slot as i32)
            .bind(limit as i64)
            .fetch_all(&self.own)
            .await
            .map_err(db)?;
        rows.iter().map(|row| held(part.consumer, row)).collect()
    }

    async fn free_stranded(&self, part: Part<'_>) -> Result<()> {
        sqlx::query(STRANDED)
            .bind(part.consumer)
            .bind(part.slots as i32)
            .bind(part.slot as i32)
            .execute(&self.own)
            .await
            .map_err(db)?;
        Ok(())
    }

    async fn begin_attempt(&self, held: &Held) -> Result<bool> {
        let begun = sqlx::query("UPDATE postrider.held SET state = 'running', attempts = attempts + 1 WHERE id = $1")
            .bind(held.id)
            .execute(&self.pool)
            .await
            .map_err(db)?;
        Ok(begun.rows_affected() == 1)
    }

    async fn failed(&self, held: &Held, failed: Option<&Failed>, delay: Duration) -> Result<()> {
        sqlx::query(
            "UPDATE postrider.held SET state = 'retrying', next_at = clock_timestamp() + $2 * interval '1 ms', \
               attempts = CASE WHEN $3::jsonb IS NULL THEN attempts - 1 ELSE attempts END, \
               history = CASE WHEN $3::jsonb IS NULL THEN history \
                 ELSE history || (jsonb_build_object('at', clock_timestamp()) || $3::jsonb) END \
             WHERE id = $1",
        )
        .bind(held.id)
        .bind(delay.as_millis() as f64)
        .bind(failed.map(json))
        .execute(&self.pool)
        .await
        .map_err(db)?;
        Ok(())
    }

    async fn bury(&self, dead: &DeadLetter<'_>) -> Result<()> {
        let mut tx = self.pool.begin().await.map_err(db)?;
        let mut history = "[]".to_owned();
        let mut attempts = 0;
        if let Some(id) = dead.held {
            let row = sqlx::query("DELETE FROM postrider.held WHERE id = $1 RETURNING history::text, attempts")
                .bind(id)
                .fetch_optional(&mut *tx)
                .await
                .map_err(db)?;
            // Gone: another instance has applied or buried it.
            let Some(row) = row else { return Ok(()) };
            history = row.try_get(0).map_err(db)?;
            attempts = row.try_get(1).map_err(db)?;
        }
        let event = dead.message.event();
        let key = event.and_then(Event::key);
        if let Some(held) = dead.held {
            promote(&mut tx, dead.consumer, key, held).await?;
        }
        let is_new = sqlx::query(
            "INSERT INTO postrider.inbox AS i (consumer, message_id, topic, key, state, error, fingerprint) \
             VALUES ($1, $2, $3, $4, 'dead', $5, $6) ON CONFLICT (consumer, message_id) DO UPDATE \
             SET error = excluded.error, processed_at = clock_timestamp() WHERE i.state = 'dead' AND $7",
        )
        .bind(dead.consumer)
        .bind(dead.id)
        .bind(event.map_or(dead.origin.topic.as_str(), Event::topic))
        .bind(key)
        .bind(&dead.failed.error)
        .bind(event.and_then(Event::fingerprint))
        .bind(dead.held.is_some())
        .execute(&mut *tx)
        .await
        .map_err(db)?
        .rows_affected()
            == 1;
        // Buried before, and delivered again.
        if !is_new {
            return tx.commit().await.map_err(db);
        }
        sqlx::query(BURY)
            .bind(dead.consumer)
            .bind(dead.id)
            .bind(event.map_or(0, topic::shard) as i32)
            .bind(event.map_or(dead.origin.topic.as_str(), Event::topic))
            .bind(event.map(Event::kind))
            .bind(key)
            .bind(event.and_then(Event::tenant))
            .bind(&dead.failed.error_type)
            .bind(&dead.failed.error)
            .bind(json(&dead.failed.causes))
            .bind(attempts.max(1))
            .bind(history)
            .bind(json(dead.origin))
            .bind(event.map(Event::envelope).transpose()?)
            .bind(dead.message.headers().map(json))
            .bind(dead.message.payload())
            .execute(&mut *tx)
            .await
            .map_err(db)?;
        tx.commit().await.map_err(db)
    }

    async fn unsent(&self, part: Part<'_>, limit: usize) -> Result<Vec<Unsent>> {
        let rows = sqlx::query(UNSENT)
            .bind(part.consumer)
            .bind(part.slots as i32)
            .bind(part.slot as i32)
            .bind(limit as i64)
            .fetch_all(&self.own)
            .await
            .map_err(db)?;
        rows.iter().map(unsent).collect()
    }

    async fn sent(&self, id: i64) -> Result<()> {
        sqlx::query("UPDATE postrider.dead_letter SET sent_at = clock_timestamp() WHERE id = $1")
            .bind(id)
            .execute(&self.own)
            .await
            .map_err(db)?;
        Ok(())
    }

    async fn has_key(&self, consumer: &str, key: &str) -> Result<bool> {
        sqlx::query("SELECT EXISTS (SELECT 1 FROM postrider.held WHERE consumer = $1 AND key = $2)")
            .bind(consumer)
            .bind(key)
            .fetch_one(&self.pool)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(db)
    }
}
