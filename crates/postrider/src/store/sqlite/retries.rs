//! Held messages and dead letters.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::query::Query;
use sqlx::sqlite::{Sqlite, SqliteArguments, SqliteRow};
use sqlx::{Row as _, SqliteConnection};

use super::{SqliteStore, now_ms};
use crate::broker::{Origin, topic};
use crate::error::Result;
use crate::event::Event;
use crate::inbox::{Admission, DeadLetter, Failed, Held, Message, Part, Retries, Unsent, Why};
use crate::store::json;

/// Now, as text that sorts, as a literal for `concat!`.
macro_rules! now_text {
    () => {
        "strftime('%Y-%m-%dT%H:%M:%f', 'now') || '000Z'"
    };
}

/// `?2` and `?3` are the slots and the slot.
const OPEN_RUNNING: &str = concat!(
    "UPDATE held SET state = 'suspect', next_at = ",
    now_ms!(),
    ", history = json_insert(history, '$[#]', json_object('at', ",
    now_text!(),
    ", 'error_type', 'crash', 'error', 'the process ended while it had the message'))
      WHERE consumer = ?1 AND shard % ?2 = ?3 AND state = 'running'"
);

/// A message that waits for one that is gone: the one before it left while it came.
const OPEN_STRANDED: &str = concat!(
    "UPDATE held SET state = 'retrying', next_at = ",
    now_ms!(),
    " WHERE consumer = ?1 AND shard % ?2 = ?3 AND next_at IS NULL AND NOT EXISTS
        (SELECT 1 FROM held p WHERE p.consumer = held.consumer AND p.key = held.key AND p.id < held.id)"
);

const KEYS: &str = "SELECT DISTINCT key FROM held WHERE consumer = ?1 AND shard % ?2 = ?3 AND key IS NOT NULL";

const HOLD: &str = concat!(
    "INSERT INTO held (consumer, shard, message_id, key, state, attempts, next_at, history, origin, envelope, payload)
     SELECT ?1, ?2, ?3, ?4,
            CASE WHEN b.is_behind THEN 'waiting' WHEN ?5 = 'waiting' THEN 'retrying' ELSE ?5 END, ?6,
            CASE WHEN b.is_behind THEN NULL ELSE ",
    now_ms!(),
    " + ?7 END,
            CASE WHEN ?8 IS NULL THEN '[]' ELSE json_array(json_patch(json_object('at', ",
    now_text!(),
    "), ?8)) END, ?9, ?10, ?11
       FROM (SELECT EXISTS (SELECT 1 FROM held WHERE consumer = ?1 AND key = ?4) AS is_behind) b
      WHERE NOT EXISTS (SELECT 1 FROM inbox WHERE consumer = ?1 AND message_id = ?3)
     ON CONFLICT DO NOTHING"
);

const DUE: &str = concat!(
    "SELECT id, envelope, payload, attempts, state = 'suspect', origin FROM held
      WHERE consumer = ?1 AND shard % ?2 = ?3 AND state <> 'running' AND next_at <= ",
    now_ms!(),
    " ORDER BY next_at, id LIMIT ?4"
);

/// The next of the key, after the one that leaves.
const PROMOTE: &str = concat!(
    "UPDATE held SET state = 'retrying', next_at = ",
    now_ms!(),
    " WHERE id = (SELECT min(id) FROM held WHERE consumer = ?1 AND key = ?2 AND id > ?3) AND next_at IS NULL"
);

const FAILED: &str = concat!(
    "UPDATE held SET state = 'retrying', next_at = ",
    now_ms!(),
    " + ?2, attempts = CASE WHEN ?3 IS NULL THEN attempts - 1 ELSE attempts END,
        history = CASE WHEN ?3 IS NULL THEN history
                       ELSE json_insert(history, '$[#]', json_patch(json_object('at', ",
    now_text!(),
    "), ?3)) END
      WHERE id = ?1"
);

const ADMIT_HELD: &str = concat!(
    "INSERT INTO inbox (consumer, message_id, topic, key, fingerprint) VALUES (?1, ?2, ?3, ?4, ?5)
     ON CONFLICT DO UPDATE SET state = 'done', error = NULL, processed_at = ",
    now_text!(),
    " WHERE inbox.state = 'dead'"
);

const INBOX_DEAD: &str = concat!(
    "INSERT INTO inbox (consumer, message_id, topic, key, state, error, fingerprint)
     VALUES (?1, ?2, ?3, ?4, 'dead', ?5, ?6)
     ON CONFLICT DO UPDATE SET error = excluded.error, processed_at = ",
    now_text!(),
    " WHERE inbox.state = 'dead' AND ?7"
);

const UNSENT: &str =
    "SELECT id, envelope, headers, payload, error_type, error, causes, attempts, origin FROM dead_letter
      WHERE consumer = ?1 AND sent_at IS NULL AND shard % ?2 = ?3 ORDER BY id LIMIT ?4";

const SENT: &str = concat!("UPDATE dead_letter SET sent_at = ", now_text!(), " WHERE id = ?1");

const BURY: &str = concat!(
    "INSERT INTO dead_letter (consumer, message_id, shard, topic, type, key, tenant, error_type, error, causes, attempts,
                              history, origin, envelope, headers, payload)
     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11,
             json_insert(?12, '$[#]', json_object('at', ",
    now_text!(),
    ", 'error_type', ?8, 'error', ?9, 'causes', json(?10))), ?13, ?14, ?15, ?16)
     ON CONFLICT DO UPDATE SET state = 'dead', error_type = excluded.error_type, error = excluded.error,
            causes = excluded.causes, attempts = attempts + excluded.attempts, died_at = excluded.died_at, sent_at = NULL,
            history = (SELECT json_group_array(json(value)) FROM
                        (SELECT value FROM json_each(dead_letter.history)
                         UNION ALL SELECT value FROM json_each(excluded.history)))"
);

impl SqliteStore {
    /// See [`crate::inbox::Inbox::admit_held`].
    pub(super) async fn release(
        &self,
        connection: &mut SqliteConnection,
        held: &Held,
    ) -> Result<Admission, sqlx::Error> {
        let gone = sqlx::query("DELETE FROM held WHERE id = ?").bind(held.id).execute(&mut *connection).await?;
        if gone.rows_affected() == 0 {
            return Ok(Admission::Done);
        }
        promote(connection, &held.consumer, held.event.key(), held.id).await?;
        // A dead letter that is replayed has a row that says so.
        let id = held.event.id().hyphenated().to_string();
        let admitted = sqlx::query(ADMIT_HELD)
            .bind(&held.consumer)
            .bind(&id)
            .bind(held.event.topic())
            .bind(held.event.key())
            .bind(held.event.fingerprint())
            .execute(&mut *connection)
            .await?;
        sqlx::query("DELETE FROM dead_letter WHERE consumer = ? AND message_id = ? AND state = 'replaying'")
            .bind(&held.consumer)
            .bind(&id)
            .execute(connection)
            .await?;
        Ok(if admitted.rows_affected() == 1 { Admission::New } else { Admission::Done })
    }

    async fn write_one(
        &self,
        doing: &str,
        query: sqlx::query::Query<'_, sqlx::Sqlite, sqlx::sqlite::SqliteArguments>,
    ) -> Result<()> {
        let mut tx = self.write(doing).await?;
        query.execute(&mut *tx).await.map_err(self.failed(doing))?;
        tx.commit().await.map_err(self.failed(doing))
    }
}

async fn promote(
    connection: &mut SqliteConnection,
    consumer: &str,
    key: Option<&str>,
    id: i64,
) -> Result<(), sqlx::Error> {
    if let Some(key) = key {
        sqlx::query(PROMOTE).bind(consumer).bind(key).bind(id).execute(connection).await?;
    }
    Ok(())
}

fn millis(delay: Duration) -> i64 {
    i64::try_from(delay.as_millis()).unwrap_or(i64::MAX)
}

fn held(consumer: &str, row: &SqliteRow) -> Result<Held, sqlx::Error> {
    let envelope: &str = row.try_get(1)?;
    let payload: Vec<u8> = row.try_get(2)?;
    let origin: &str = row.try_get(5)?;
    Ok(Held {
        id: row.try_get(0)?,
        consumer: consumer.to_owned(),
        event: Event::of_envelope(envelope, payload).map_err(|error| sqlx::Error::Decode(Box::new(error)))?,
        attempts: row.try_get(3)?,
        is_suspect: row.try_get(4)?,
        origin: serde_json::from_str(origin).unwrap_or_default(),
    })
}

type Read<T> = std::result::Result<T, sqlx::Error>;

fn unsent(row: &SqliteRow) -> Read<Result<Unsent>> {
    let (envelope, headers): (Option<&str>, Option<&str>) = (row.try_get(1)?, row.try_get(2)?);
    let message = match Message::of_columns(envelope, headers, row.try_get(3)?) {
        Ok(message) => message,
        Err(error) => return Ok(Err(error)),
    };
    Ok(Ok(Unsent {
        id: row.try_get(0)?,
        message,
        failed: Failed {
            error_type: row.try_get(4)?,
            error: row.try_get(5)?,
            causes: serde_json::from_str(row.try_get(6)?).unwrap_or_default(),
        },
        attempts: row.try_get(7)?,
        origin: serde_json::from_str(row.try_get(8)?).unwrap_or_default(),
    }))
}

/// The statement of [`Retries::hold`].
pub(super) fn hold<'q>(
    consumer: &str,
    event: &Event,
    envelope: String,
    origin: &Origin,
    why: Why<'_>,
) -> Query<'q, Sqlite, SqliteArguments> {
    let (state, attempts, delay, failed) = match why {
        Why::Failed { delay, attempts, failure } => ("retrying", attempts, delay, failure),
        Why::Behind => ("waiting", 0, Duration::ZERO, None),
        Why::Suspect => ("suspect", 1, Duration::ZERO, None),
    };
    sqlx::query(HOLD)
        .bind(consumer.to_owned())
        .bind(topic::shard(event))
        .bind(event.id().hyphenated().to_string())
        .bind(event.key().map(str::to_owned))
        .bind(state)
        .bind(attempts)
        .bind(millis(delay))
        .bind(failed.map(json))
        .bind(json(origin))
        .bind(envelope)
        .bind(event.payload().to_vec())
}

#[async_trait]
impl Retries for SqliteStore {
    async fn open(&self, part: Part<'_>) -> Result<Vec<String>> {
        const DOING: &str = "the held messages were not opened";
        let mut tx = self.write(DOING).await?;
        for statement in [OPEN_RUNNING, OPEN_STRANDED] {
            sqlx::query(statement)
                .bind(part.consumer)
                .bind(part.slots)
                .bind(part.slot)
                .execute(&mut *tx)
                .await
                .map_err(self.failed(DOING))?;
        }
        let rows = sqlx::query(KEYS)
            .bind(part.consumer)
            .bind(part.slots)
            .bind(part.slot)
            .fetch_all(&mut *tx)
            .await
            .map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))?;
        rows.iter().map(|row| row.try_get(0).map_err(self.failed(DOING))).collect()
    }

    async fn hold(&self, consumer: &str, event: &Event, origin: &Origin, why: Why<'_>) -> Result<()> {
        let envelope = event.envelope()?;
        self.write_one("the message was not held", hold(consumer, event, envelope, origin, why)).await
    }

    async fn due(&self, part: Part<'_>, limit: usize) -> Result<Vec<Held>> {
        const DOING: &str = "the held messages were not read";
        let rows = sqlx::query(DUE)
            .bind(part.consumer)
            .bind(part.slots)
            .bind(part.slot)
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .fetch_all(&self.inner.reader)
            .await
            .map_err(self.failed(DOING))?;
        rows.iter().map(|row| held(part.consumer, row).map_err(self.failed(DOING))).collect()
    }

    async fn begin_attempt(&self, held: &Held) -> Result<bool> {
        const DOING: &str = "the attempt was not counted";
        let mut tx = self.write(DOING).await?;
        let begun = sqlx::query("UPDATE held SET state = 'running', attempts = attempts + 1 WHERE id = ?")
            .bind(held.id)
            .execute(&mut *tx)
            .await
            .map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))?;
        Ok(begun.rows_affected() == 1)
    }

    async fn failed(&self, held: &Held, failed: Option<&Failed>, delay: Duration) -> Result<()> {
        let query = sqlx::query(FAILED).bind(held.id).bind(millis(delay)).bind(failed.map(json));
        self.write_one("the failure was not written", query).await
    }

    async fn bury(&self, dead: &DeadLetter<'_>) -> Result<()> {
        const DOING: &str = "the dead letter was not written";
        let mut tx = self.write(DOING).await?;
        let mut history = "[]".to_owned();
        let mut attempts = 0i64;
        if let Some(id) = dead.held {
            let row = sqlx::query("DELETE FROM held WHERE id = ? RETURNING history, attempts")
                .bind(id)
                .fetch_optional(&mut *tx)
                .await
                .map_err(self.failed(DOING))?;
            // Gone: another instance has applied or buried it.
            let Some(row) = row else { return Ok(()) };
            history = row.try_get(0).map_err(self.failed(DOING))?;
            attempts = row.try_get(1).map_err(self.failed(DOING))?;
        }
        let event = dead.message.event();
        let key = event.and_then(Event::key);
        if let Some(held) = dead.held {
            promote(&mut tx, dead.consumer, key, held).await.map_err(self.failed(DOING))?;
        }
        let id = dead.id.hyphenated().to_string();
        let written = sqlx::query(INBOX_DEAD)
            .bind(dead.consumer)
            .bind(&id)
            .bind(event.map_or(dead.origin.topic.as_str(), Event::topic))
            .bind(key)
            .bind(&dead.failed.error)
            .bind(event.and_then(Event::fingerprint))
            .bind(dead.held.is_some())
            .execute(&mut *tx)
            .await
            .map_err(self.failed(DOING))?;
        // Otherwise it was buried before, and delivered again.
        if written.rows_affected() == 1 {
            sqlx::query(BURY)
                .bind(dead.consumer)
                .bind(&id)
                .bind(event.map_or(0, topic::shard))
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
                .map_err(self.failed(DOING))?;
        }
        tx.commit().await.map_err(self.failed(DOING))
    }

    async fn unsent(&self, part: Part<'_>, limit: usize) -> Result<Vec<Unsent>> {
        const DOING: &str = "the dead letters were not read";
        let rows = sqlx::query(UNSENT)
            .bind(part.consumer)
            .bind(part.slots)
            .bind(part.slot)
            .bind(limit as i64)
            .fetch_all(&self.inner.reader)
            .await
            .map_err(self.failed(DOING))?;
        rows.iter().map(|row| unsent(row).map_err(self.failed(DOING))?).collect()
    }

    async fn sent(&self, id: i64) -> Result<()> {
        const DOING: &str = "the dead letter was not marked as sent";
        let mut tx = self.write(DOING).await?;
        sqlx::query(SENT).bind(id).execute(&mut *tx).await.map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))
    }

    async fn has_key(&self, consumer: &str, key: &str) -> Result<bool> {
        sqlx::query("SELECT EXISTS (SELECT 1 FROM held WHERE consumer = ? AND key = ?)")
            .bind(consumer)
            .bind(key)
            .fetch_one(&self.inner.reader)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(self.failed("the held messages were not read"))
    }
}
