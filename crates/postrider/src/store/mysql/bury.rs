//! Writes the dead letter of a message that its consumer gave up.

use serde_json::{Value, json as value};
use sqlx::{MySqlConnection, Row as _};

use super::error::{db, is_duplicate};
use super::retries::promote;
use super::{MysqlStore, now, now_text};
use crate::broker::topic;
use crate::error::Result;
use crate::event::Event;
use crate::inbox::{DeadLetter, Failed};
use crate::store::json;

const INBOX_DEAD: &str = "INSERT INTO postrider_inbox (consumer, message_id, topic, `key`, state, error, fingerprint) \
     VALUES (?, ?, ?, ?, 'dead', ?, ?)";

const INBOX_DEAD_AGAIN: &str = concat!(
    "UPDATE postrider_inbox SET error = ?, processed_at = ",
    now!(),
    " WHERE consumer = ? AND message_id = ? AND state = 'dead'"
);

const KEPT: &str =
    "SELECT id, attempts, history FROM postrider_dead_letter WHERE consumer = ? AND message_id = ? FOR UPDATE";

const BURY: &str = "INSERT INTO postrider_dead_letter (error_type, error, causes, attempts, history, consumer, message_id, \
       shard, topic, type, `key`, tenant, origin, envelope, headers, payload) \
     VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)";

const BURY_AGAIN: &str = concat!(
    "UPDATE postrider_dead_letter SET state = 'dead', sent_at = NULL, died_at = ",
    now!(),
    ", error_type = ?, error = ?, causes = ?, attempts = ?, history = ? WHERE id = ?"
);

/// What the columns hold. A message that cannot be buried would stop its consumer, and all of it stands in envelope or origin.
const TOPIC_CHARS_MAX: usize = 255;
const TYPE_CHARS_MAX: usize = 1024;

/// The first characters of a text.
fn first(text: &str, chars_max: usize) -> &str {
    text.char_indices().nth(chars_max).map_or(text, |(end, _)| &text[..end])
}

/// See [`crate::inbox::Retries::bury`].
pub(super) async fn once(store: &MysqlStore, dead: &DeadLetter<'_>) -> Result<()> {
    let mut tx = store.write().await?;
    let mut history: Vec<Value> = Vec::new();
    let mut attempts = 1;
    let event = dead.message.event();
    let key = event.and_then(Event::key);
    if let Some(id) = dead.held {
        let row = sqlx::query("SELECT history, attempts FROM postrider_held WHERE id = ? FOR UPDATE")
            .bind(id)
            .fetch_optional(&mut *tx)
            .await
            .map_err(db)?;
        // Gone: another instance has applied or buried it.
        let Some(row) = row else { return tx.rollback().await.map_err(db) };
        history = serde_json::from_str(row.try_get(0).map_err(db)?).unwrap_or_default();
        attempts = i64::from(row.try_get::<i32, _>(1).map_err(db)?).max(1);
        sqlx::query("DELETE FROM postrider_held WHERE id = ?").bind(id).execute(&mut *tx).await.map_err(db)?;
        promote(&mut tx, dead.consumer, key, id).await?;
    }
    // Buried before, and delivered again, there is nothing more to write.
    if write_inbox(&mut tx, dead).await? {
        write_letter(&mut tx, dead, history, attempts).await?;
    }
    tx.commit().await.map_err(db)
}

/// Writes the inbox row of a dead letter. False when there was one and the message is not held: it was decided before.
async fn write_inbox(tx: &mut MySqlConnection, dead: &DeadLetter<'_>) -> Result<bool> {
    let event = dead.message.event();
    let id = dead.id.hyphenated().to_string();
    let inserted = sqlx::query(INBOX_DEAD)
        .bind(dead.consumer)
        .bind(&id)
        .bind(first(event.map_or(dead.origin.topic.as_str(), Event::topic), TOPIC_CHARS_MAX))
        .bind(event.and_then(Event::key))
        .bind(&dead.failed.error)
        .bind(event.and_then(Event::fingerprint))
        .execute(&mut *tx)
        .await;
    match inserted {
        Ok(_) => Ok(true),
        Err(error) if is_duplicate(&error) && dead.held.is_some() => {
            let again = sqlx::query(INBOX_DEAD_AGAIN).bind(&dead.failed.error).bind(dead.consumer).bind(&id);
            Ok(again.execute(tx).await.map_err(db)?.rows_affected() == 1)
        }
        Err(error) if is_duplicate(&error) => Ok(false),
        Err(error) => Err(db(error)),
    }
}

/// Writes the dead letter, or adds to the one that was replayed.
async fn write_letter(
    tx: &mut MySqlConnection,
    dead: &DeadLetter<'_>,
    history: Vec<Value>,
    attempts: i64,
) -> Result<()> {
    let (event, id) = (dead.message.event(), dead.id.hyphenated().to_string());
    let at: String = sqlx::query(concat!("SELECT ", now_text!()))
        .fetch_one(&mut *tx)
        .await
        .and_then(|row| row.try_get(0))
        .map_err(db)?;
    let kept = sqlx::query(KEPT).bind(dead.consumer).bind(&id).fetch_optional(&mut *tx).await.map_err(db)?;
    let (kept, before, mut all) = match &kept {
        Some(kept) => {
            let all: Vec<Value> = serde_json::from_str(kept.try_get(2).map_err(db)?).unwrap_or_default();
            (Some(kept.try_get::<i64, _>(0).map_err(db)?), kept.try_get::<i64, _>(1).map_err(db)?, all)
        }
        None => (None, 0, Vec::new()),
    };
    let Failed { error_type, error, causes } = dead.failed;
    all.extend(history);
    all.push(value!({ "at": at, "error_type": error_type, "error": error, "causes": causes }));
    let query = sqlx::query(if kept.is_some() { BURY_AGAIN } else { BURY })
        .bind(error_type)
        .bind(error)
        .bind(json(causes))
        .bind(before + attempts)
        .bind(json(&all));
    let query = match kept {
        Some(kept) => query.bind(kept),
        None => query
            .bind(dead.consumer)
            .bind(id)
            .bind(event.map_or(0, topic::shard))
            .bind(first(event.map_or(dead.origin.topic.as_str(), Event::topic), TOPIC_CHARS_MAX))
            .bind(event.map(|event| first(event.kind(), TYPE_CHARS_MAX)))
            .bind(event.and_then(Event::key))
            .bind(event.and_then(Event::tenant))
            .bind(json(dead.origin))
            .bind(event.map(Event::envelope).transpose()?)
            .bind(dead.message.headers().map(json))
            .bind(dead.message.payload()),
    };
    query.execute(tx).await.map_err(db)?;
    Ok(())
}
