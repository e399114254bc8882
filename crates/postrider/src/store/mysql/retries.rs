//! Held messages and dead letters.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, MySqlConnection, Row as _};

use super::error::{db, is_deadlock, is_duplicate};
use super::{DEADLOCKS_MAX, MysqlStore, bury, list, micros, now, now_text};
use crate::broker::{Origin, topic};
use crate::error::Result;
use crate::event::Event;
use crate::inbox::{Admission, DeadLetter, Failed, Held, Message, Part, Retries, Unsent, Why};
use crate::store::json;

/// Read without locks: a search for rows to change would wait for every row on its way that a handler has, also of others.
const RUNNING: &str = "SELECT id FROM postrider_held WHERE consumer = ? AND shard % ? = ? AND state = 'running'";

/// One that a handler still has is waited for: whether it was applied is known only then.
const OPEN_RUNNING: &str = concat!(
    "UPDATE postrider_held SET state = 'suspect', next_at = ",
    now!(),
    ", history = JSON_MERGE_PRESERVE(history, JSON_OBJECT('at', ",
    now_text!(),
    ", 'error_type', 'crash', 'error', 'the process ended while it had the message')) \
      WHERE state = 'running' AND id = ?"
);

/// Messages that wait for one that is gone: the one before them left while they came.
const STRANDED: &str = "SELECT h.id FROM postrider_held h WHERE h.consumer = ? AND h.shard % ? = ? AND h.next_at IS NULL \
     AND NOT EXISTS (SELECT 1 FROM postrider_held p WHERE p.consumer = h.consumer AND p.`key` = h.`key` AND p.id < h.id)";

const KEYS: &str =
    "SELECT DISTINCT `key` FROM postrider_held WHERE consumer = ? AND shard % ? = ? AND `key` IS NOT NULL";

/// Unless it is held, which the unique key says, or was applied already.
const HOLD: &str = concat!(
    "INSERT INTO postrider_held \
       (consumer, shard, message_id, `key`, state, attempts, next_at, history, origin, envelope, payload) \
     SELECT ?, ?, ?, ?, \
       CASE WHEN b.is_behind THEN 'waiting' WHEN ? = 'waiting' THEN 'retrying' ELSE ? END, ?, \
       CASE WHEN b.is_behind THEN NULL ELSE ",
    now!(),
    " + INTERVAL ? MICROSECOND END, \
       CASE WHEN ? IS NULL THEN '[]' ELSE JSON_ARRAY(JSON_MERGE_PATCH(JSON_OBJECT('at', ",
    now_text!(),
    "), ?)) END, ?, ?, ? \
     FROM (SELECT EXISTS (SELECT 1 FROM postrider_held WHERE consumer = ? AND `key` = ?) AS is_behind) b \
     WHERE NOT EXISTS (SELECT 1 FROM postrider_inbox WHERE consumer = ? AND message_id = ?)"
);

const DUE: &str = concat!(
    "SELECT id, envelope, payload, attempts, state = 'suspect', origin FROM postrider_held \
      WHERE consumer = ? AND next_at <= ",
    now!(),
    " AND shard % ? = ? AND state <> 'running' ORDER BY next_at, id LIMIT ?"
);

const FREE: &str =
    concat!("UPDATE postrider_held SET state = 'retrying', next_at = ", now!(), " WHERE next_at IS NULL AND id IN");

const PAUSED: &str = concat!(
    "UPDATE postrider_held SET state = 'retrying', attempts = attempts - 1, next_at = ",
    now!(),
    " + INTERVAL ? MICROSECOND WHERE id = ?"
);

const FAILED: &str = concat!(
    "UPDATE postrider_held SET state = 'retrying', next_at = ",
    now!(),
    " + INTERVAL ? MICROSECOND, history = JSON_MERGE_PRESERVE(history, JSON_MERGE_PATCH(JSON_OBJECT('at', ",
    now_text!(),
    "), ?)) WHERE id = ?"
);

const UNSENT: &str = "SELECT id, envelope, headers, payload, error_type, error, causes, attempts, origin FROM postrider_dead_letter \
      WHERE consumer = ? AND sent_at IS NULL AND shard % ? = ? ORDER BY id LIMIT ?";

impl MysqlStore {
    /// See [`crate::inbox::Inbox::admit_held`].
    pub(super) async fn release(&self, tx: &mut MySqlConnection, held: &Held) -> Result<Admission> {
        // Waits for another instance that has it; gone means that it was applied there.
        let gone = sqlx::query("DELETE FROM postrider_held WHERE id = ?").bind(held.id).execute(&mut *tx);
        if gone.await.map_err(db)?.rows_affected() == 0 {
            return Ok(Admission::Done);
        }
        promote(tx, &held.consumer, held.event.key(), held.id).await?;
        let id = held.event.id().hyphenated().to_string();
        let inserted = sqlx::query(
            "INSERT INTO postrider_inbox (consumer, message_id, topic, `key`, fingerprint) VALUES (?, ?, ?, ?, ?)",
        )
        .bind(&held.consumer)
        .bind(&id)
        .bind(held.event.topic())
        .bind(held.event.key())
        .bind(held.event.fingerprint())
        .execute(&mut *tx)
        .await;
        let is_new = match inserted {
            Ok(_) => true,
            // A dead letter that is replayed has a row that says so.
            Err(error) if is_duplicate(&error) => {
                let revived = sqlx::query(concat!(
                    "UPDATE postrider_inbox SET state = 'done', error = NULL, processed_at = ",
                    now!(),
                    " WHERE consumer = ? AND message_id = ? AND state = 'dead'"
                ))
                .bind(&held.consumer)
                .bind(&id)
                .execute(&mut *tx)
                .await
                .map_err(db)?;
                revived.rows_affected() == 1
            }
            Err(error) => return Err(db(error)),
        };
        // By its number: a DELETE that searches may lock other letters until the handler has ended.
        let letter = sqlx::query(
            "SELECT id FROM postrider_dead_letter WHERE consumer = ? AND message_id = ? AND state = 'replaying'",
        )
        .bind(&held.consumer)
        .bind(&id)
        .fetch_optional(&mut *tx)
        .await
        .map_err(db)?;
        if let Some(letter) = letter {
            sqlx::query("DELETE FROM postrider_dead_letter WHERE id = ?")
                .bind(letter.try_get::<i64, _>(0).map_err(db)?)
                .execute(tx)
                .await
                .map_err(db)?;
        }
        Ok(if is_new { Admission::New } else { Admission::Done })
    }

    /// Makes these due that wait.
    pub(super) async fn free(&self, ids: &[i64]) -> Result<()> {
        if ids.is_empty() {
            return Ok(());
        }
        let free = format!("{FREE} ({})", list(ids));
        sqlx::raw_sql(AssertSqlSafe(free)).execute(&self.own).await.map_err(db)?;
        Ok(())
    }
}

/// The next of the key becomes due, after the one that leaves.
pub(super) async fn promote(tx: &mut MySqlConnection, consumer: &str, key: Option<&str>, id: i64) -> Result<()> {
    let Some(key) = key else { return Ok(()) };
    let next: Option<i64> =
        sqlx::query("SELECT MIN(id) FROM postrider_held WHERE consumer = ? AND `key` = ? AND id > ?")
            .bind(consumer)
            .bind(key)
            .bind(id)
            .fetch_one(&mut *tx)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(db)?;
    if let Some(next) = next {
        let free = format!("{FREE} ({next})");
        sqlx::raw_sql(AssertSqlSafe(free)).execute(tx).await.map_err(db)?;
    }
    Ok(())
}

fn held(consumer: &str, row: &MySqlRow) -> Result<Held> {
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

fn unsent(row: &MySqlRow) -> Result<Unsent> {
    let (envelope, headers): (Option<&str>, Option<&str>) = (row.try_get(1).map_err(db)?, row.try_get(2).map_err(db)?);
    let (causes, origin): (&str, &str) = (row.try_get(6).map_err(db)?, row.try_get(8).map_err(db)?);
    Ok(Unsent {
        id: row.try_get(0).map_err(db)?,
        message: Message::of_columns(envelope, headers, row.try_get(3).map_err(db)?)?,
        failed: Failed {
            error_type: row.try_get(4).map_err(db)?,
            error: row.try_get(5).map_err(db)?,
            causes: serde_json::from_str(causes).unwrap_or_default(),
        },
        attempts: row.try_get::<i64, _>(7).map_err(db)? as u32,
        origin: serde_json::from_str(origin).unwrap_or_default(),
    })
}

/// See [`Retries::hold`]. Says whether it was not held before.
pub(super) async fn hold(
    connection: &mut MySqlConnection,
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
    let (id, failed) = (event.id().hyphenated().to_string(), failed.map(json));
    let held = sqlx::query(HOLD)
        .bind(consumer)
        .bind(topic::shard(event))
        .bind(&id)
        .bind(event.key())
        .bind(state)
        .bind(state)
        .bind(attempts)
        .bind(micros(delay))
        .bind(&failed)
        .bind(&failed)
        .bind(json(origin))
        .bind(event.envelope()?)
        .bind(event.payload().as_ref())
        .bind(consumer)
        .bind(event.key())
        .bind(consumer)
        .bind(&id)
        .execute(connection)
        .await;
    match held {
        Ok(held) => Ok(held.rows_affected() == 1),
        Err(error) if is_duplicate(&error) => Ok(false),
        Err(error) => Err(db(error)),
    }
}

#[async_trait]
impl Retries for MysqlStore {
    async fn open(&self, part: Part<'_>) -> Result<Vec<String>> {
        let running = sqlx::query(RUNNING)
            .bind(part.consumer)
            .bind(part.slots)
            .bind(part.slot)
            .fetch_all(&self.own)
            .await
            .map_err(db)?;
        for row in &running {
            let id: i64 = row.try_get(0).map_err(db)?;
            sqlx::query(OPEN_RUNNING).bind(id).execute(&self.own).await.map_err(db)?;
        }
        self.free_stranded(part).await?;
        let rows = sqlx::query(KEYS)
            .bind(part.consumer)
            .bind(part.slots)
            .bind(part.slot)
            .fetch_all(&self.own)
            .await
            .map_err(db)?;
        rows.iter().map(|row| row.try_get(0).map_err(db)).collect()
    }

    async fn hold(&self, consumer: &str, event: &Event, origin: &Origin, why: Why<'_>) -> Result<()> {
        let mut connection = self.own.acquire().await.map_err(db)?;
        hold(&mut connection, consumer, event, origin, why).await?;
        Ok(())
    }

    async fn due(&self, part: Part<'_>, limit: usize) -> Result<Vec<Held>> {
        let rows = sqlx::query(DUE)
            .bind(part.consumer)
            .bind(part.slots)
            .bind(part.slot)
            .bind(limit as i64)
            .fetch_all(&self.own)
            .await
            .map_err(db)?;
        rows.iter().map(|row| held(part.consumer, row)).collect()
    }

    async fn free_stranded(&self, part: Part<'_>) -> Result<()> {
        let rows = sqlx::query(STRANDED)
            .bind(part.consumer)
            .bind(part.slots)
            .bind(part.slot)
            .fetch_all(&self.own)
            .await
            .map_err(db)?;
        let ids = rows.iter().map(|row| row.try_get(0).map_err(db)).collect::<Result<Vec<i64>>>()?;
        self.free(&ids).await
    }

    async fn begin_attempt(&self, held: &Held) -> Result<bool> {
        let begun = sqlx::query("UPDATE postrider_held SET state = 'running', attempts = attempts + 1 WHERE id = ?")
            .bind(held.id)
            .execute(&self.own)
            .await
            .map_err(db)?;
        Ok(begun.rows_affected() == 1)
    }

    async fn failed(&self, held: &Held, failed: Option<&Failed>, delay: Duration) -> Result<()> {
        let query = match failed {
            Some(failed) => sqlx::query(FAILED).bind(micros(delay)).bind(json(failed)),
            None => sqlx::query(PAUSED).bind(micros(delay)),
        };
        query.bind(held.id).execute(&self.own).await.map_err(db)?;
        Ok(())
    }

    async fn bury(&self, dead: &DeadLetter<'_>) -> Result<()> {
        for _ in 0..DEADLOCKS_MAX {
            match bury::once(self, dead).await {
                Err(error) if is_deadlock(&error) => {}
                result => return result,
            }
        }
        bury::once(self, dead).await
    }

    async fn unsent(&self, part: Part<'_>, limit: usize) -> Result<Vec<Unsent>> {
        let rows = sqlx::query(UNSENT)
            .bind(part.consumer)
            .bind(part.slots)
            .bind(part.slot)
            .bind(limit as i64)
            .fetch_all(&self.own)
            .await
            .map_err(db)?;
        rows.iter().map(unsent).collect()
    }

    async fn sent(&self, id: i64) -> Result<()> {
        sqlx::query(concat!("UPDATE postrider_dead_letter SET sent_at = ", now!(), " WHERE id = ?"))
            .bind(id)
            .execute(&self.own)
            .await
            .map_err(db)?;
        Ok(())
    }

    async fn has_key(&self, consumer: &str, key: &str) -> Result<bool> {
        sqlx::query("SELECT EXISTS (SELECT 1 FROM postrider_held WHERE consumer = ? AND `key` = ?)")
            .bind(consumer)
            .bind(key)
            .fetch_one(&self.own)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(db)
    }
}
