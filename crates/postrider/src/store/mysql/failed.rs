//! A parked event that failed is a dead letter of the relay too. It stays parked, so that its key waits behind it; the two
//! rows know each other by destination and event id. Whoever writes to both takes the parked row first.

use serde_json::{Map, Value, json};
use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, MySqlConnection, Row as _};

use super::error::db;
use super::row::event_columns;
use super::{list, marks, now, now_text};
use crate::error::Result;
use crate::source::DISCARDED_MAX;

/// Those that have failed before: a settlement that comes twice adds no attempts.
const KNOWN: &str = "SELECT id FROM postrider_parked WHERE destination = ? AND state = 'failed' AND id IN";

const KEPT: &str =
    "SELECT id, attempts, history FROM postrider_dead_letter WHERE consumer = ? AND message_id = ? FOR UPDATE";

const INSERT: &str = concat!(
    "INSERT INTO postrider_dead_letter (attempts, history, topic, type, error_type, error, origin, outbox_id, envelope, \
       payload, consumer, message_id, `key`, tenant, stage, sent_at, shard, causes) \
     VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'relay', ",
    now!(),
    ", 0, '[]')"
);

const UPDATE: &str = concat!(
    "UPDATE postrider_dead_letter SET attempts = ?, history = ?, topic = ?, type = ?, error_type = ?, error = ?, \
       origin = ?, outbox_id = ?, envelope = ?, payload = ?, state = 'dead', died_at = ",
    now!(),
    " WHERE id = ?"
);

/// Which of these have failed already.
pub(super) async fn known(tx: &mut MySqlConnection, destination: &str, ids: &[i64]) -> Result<Vec<i64>> {
    let query = format!("{KNOWN} ({})", list(ids));
    let rows = sqlx::query(AssertSqlSafe(query)).persistent(false).bind(destination).fetch_all(tx).await.map_err(db)?;
    rows.iter().map(|row| row.try_get(0).map_err(db)).collect()
}

/// Writes the dead letters of parked events that have just failed.
pub(super) async fn bury(tx: &mut MySqlConnection, destination: &str, ids: &[i64]) -> Result<()> {
    let query = format!(
        "SELECT id, {}, attempts, COALESCE(failure_kind, 'other'), COALESCE(failure, ''), {}, \
           DATE_FORMAT(created_at, '%Y-%m-%dT%H:%i:%s.%fZ') \
         FROM postrider_parked WHERE destination = ? AND id IN ({}) ORDER BY id",
        event_columns!(),
        now_text!(),
        list(ids)
    );
    let rows =
        sqlx::query(AssertSqlSafe(query)).persistent(false).bind(destination).fetch_all(&mut *tx).await.map_err(db)?;
    for row in &rows {
        bury_one(tx, destination, row).await?;
    }
    Ok(())
}

async fn bury_one(tx: &mut MySqlConnection, destination: &str, row: &MySqlRow) -> Result<()> {
    let text = |index: usize| row.try_get::<Option<String>, _>(index).map_err(db);
    let (id, event_id): (i64, String) = (row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?);
    let (topic, key, kind) = (text(2)?, text(3)?, text(4)?);
    let payload: Vec<u8> = match text(5)? {
        Some(text) => text.into_bytes(),
        None => row.try_get::<Option<Vec<u8>>, _>(6).map_err(db)?.unwrap_or_default(),
    };
    let attempts = i64::from(row.try_get::<i32, _>(17).map_err(db)?);
    let (error_type, error, at) = (text(18)?, text(19)?, text(20)?);
    let consumer = format!("relay/{destination}");
    let kept = sqlx::query(KEPT).bind(&consumer).bind(&event_id).fetch_optional(&mut *tx).await.map_err(db)?;
    // One row for an event that stands in the outbox twice, or fails again after a replay.
    let (kept, before, mut history) = match &kept {
        Some(kept) => {
            let history: String = kept.try_get(2).map_err(db)?;
            let history: Vec<Value> = serde_json::from_str(&history).unwrap_or_default();
            (Some(kept.try_get::<i64, _>(0).map_err(db)?), kept.try_get::<i64, _>(1).map_err(db)?, history)
        }
        None => (None, 0, Vec::new()),
    };
    history.push(json!({ "at": at, "error_type": error_type, "error": error, "attempts": attempts }));
    let query = sqlx::query(if kept.is_some() { UPDATE } else { INSERT })
        .bind(before + attempts)
        .bind(Value::from(history).to_string())
        .bind(&topic)
        .bind(&kind)
        .bind(&error_type)
        .bind(&error)
        .bind(json!({ "destination": destination, "topic": topic, "outbox_id": id }).to_string())
        .bind(id)
        .bind(envelope(row)?)
        .bind(payload);
    let query = match kept {
        Some(kept) => query.bind(kept),
        None => query.bind(consumer).bind(event_id).bind(key).bind(text(10)?),
    };
    query.execute(tx).await.map_err(db)?;
    Ok(())
}

/// The event without its payload, also of a row that is none.
fn envelope(row: &MySqlRow) -> Result<String> {
    const NAMES: [(&str, usize); 12] = [
        ("id", 1),
        ("topic", 2),
        ("key", 3),
        ("type", 4),
        ("content_type", 7),
        ("source", 8),
        ("subject", 9),
        ("tenant", 10),
        ("correlation", 11),
        ("causation", 12),
        ("traceparent", 13),
        ("tracestate", 14),
    ];
    let mut envelope = Map::new();
    for (name, index) in NAMES {
        if let Some(text) = row.try_get::<Option<String>, _>(index).map_err(db)? {
            envelope.insert(name.to_owned(), Value::String(text));
        }
    }
    if let Some(headers) = row.try_get::<Option<&str>, _>(15).map_err(db)? {
        envelope.insert("headers".to_owned(), serde_json::from_str(headers).unwrap_or_default());
    }
    envelope.insert("time".to_owned(), Value::String(row.try_get(21).map_err(db)?));
    Ok(Value::Object(envelope).to_string())
}

/// Removes the dead letters of events that were published and are not parked any more, unless the same event failed under
/// another number.
pub(super) async fn published(tx: &mut MySqlConnection, destination: &str, events: &[String]) -> Result<()> {
    if events.is_empty() {
        return Ok(());
    }
    let query = format!(
        "SELECT d.id FROM postrider_dead_letter d WHERE d.consumer = ? AND d.state <> 'discarded' AND d.message_id IN ({}) \
           AND NOT EXISTS (SELECT 1 FROM postrider_parked p \
                            WHERE p.destination = ? AND p.state = 'failed' AND p.event_id = d.message_id)",
        marks(events.len())
    );
    let query = sqlx::query(AssertSqlSafe(query)).persistent(false).bind(format!("relay/{destination}"));
    let query = events.iter().fold(query, |query, event| query.bind(event)).bind(destination);
    let rows = query.fetch_all(&mut *tx).await.map_err(db)?;
    let ids = rows.iter().map(|row| row.try_get(0).map_err(db)).collect::<Result<Vec<i64>>>()?;
    if ids.is_empty() {
        return Ok(());
    }
    let delete = format!("DELETE FROM postrider_dead_letter WHERE state <> 'discarded' AND id IN ({})", list(&ids));
    sqlx::raw_sql(AssertSqlSafe(delete)).execute(tx).await.map_err(db)?;
    Ok(())
}

/// The parked rows in the second state of those of these dead letters that are in the first, locked; the letter, the
/// destination and the number.
async fn lock(tx: &mut MySqlConnection, dead: &[i64], letter: &str, state: &str) -> Result<Vec<(i64, String, i64)>> {
    if dead.is_empty() {
        return Ok(Vec::new());
    }
    let query = format!(
        "SELECT d.id, p.destination, p.id FROM postrider_dead_letter d JOIN postrider_parked p \
           ON p.destination = SUBSTR(d.consumer, 7) AND p.event_id = d.message_id \
         WHERE d.stage = 'relay' AND d.id IN ({}) AND d.state = ? AND p.state = ? ORDER BY p.destination, p.id",
        list(dead)
    );
    let query = sqlx::query(AssertSqlSafe(query)).persistent(false).bind(letter).bind(state);
    let rows = query.fetch_all(&mut *tx).await.map_err(db)?;
    let mut locked = Vec::with_capacity(rows.len());
    for row in &rows {
        let (dead, destination, id): (i64, String, i64) =
            (row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?, row.try_get(2).map_err(db)?);
        let is_there =
            sqlx::query("SELECT 1 FROM postrider_parked WHERE destination = ? AND id = ? AND state = ? FOR UPDATE")
                .bind(&destination)
                .bind(id)
                .bind(state)
                .fetch_optional(&mut *tx)
                .await
                .map_err(db)?;
        if is_there.is_some() {
            locked.push((dead, destination, id));
        }
    }
    Ok(locked)
}

/// The dead letters among these whose parked events have failed; locks the events.
pub(super) async fn lock_failed(tx: &mut MySqlConnection, dead: &[i64]) -> Result<Vec<(i64, String, i64)>> {
    lock(tx, dead, "dead", "failed").await
}

/// Lets the relay try the events of these dead letters again, at once.
pub(super) async fn revive(tx: &mut MySqlConnection, dead: &[i64], parked: &[(i64, String, i64)]) -> Result<()> {
    for (_, destination, id) in parked.iter().filter(|(letter, ..)| dead.contains(letter)) {
        sqlx::query(concat!(
            "UPDATE postrider_parked SET state = 'retrying', attempts = 0, next_at = ",
            now!(),
            " WHERE destination = ? AND id = ?"
        ))
        .bind(destination)
        .bind(id)
        .execute(&mut *tx)
        .await
        .map_err(db)?;
    }
    Ok(())
}

/// Takes back those that the relay has not tried; returns how many.
pub(super) async fn recall(tx: &mut MySqlConnection, dead: &[i64]) -> Result<u64> {
    let mut recalled = 0;
    for (letter, destination, id) in lock(tx, dead, "replaying", "retrying").await? {
        let back = sqlx::query(
            "UPDATE postrider_parked SET state = 'failed' WHERE destination = ? AND id = ? AND attempts = 0",
        )
        .bind(&destination)
        .bind(id)
        .execute(&mut *tx)
        .await
        .map_err(db)?;
        if back.rows_affected() == 1 {
            let letter =
                sqlx::query("UPDATE postrider_dead_letter SET state = 'dead' WHERE id = ? AND state = 'replaying'")
                    .bind(letter)
                    .execute(&mut *tx)
                    .await
                    .map_err(db)?;
            recalled += letter.rows_affected();
        }
    }
    Ok(recalled)
}

/// The outbox rows of what a person has discarded, the newest first.
const DISCARDED: &str = "SELECT outbox_id FROM postrider_dead_letter WHERE stage = 'relay' AND consumer = ? \
     AND state = 'discarded' AND outbox_id IS NOT NULL ORDER BY id DESC LIMIT ?";

/// The outbox rows of what a person has discarded.
pub(super) async fn discarded(tx: &mut MySqlConnection, destination: &str) -> Result<Vec<i64>> {
    let query = sqlx::query(DISCARDED).bind(format!("relay/{destination}")).bind(DISCARDED_MAX);
    query.fetch_all(tx).await.map_err(db)?.iter().map(|row| row.try_get(0).map_err(db)).collect()
}

/// Removes the events of discarded dead letters from the side table. The next of a key is due when it is the first.
pub(super) async fn unpark(tx: &mut MySqlConnection, dead: &[i64], parked: &[(i64, String, i64)]) -> Result<()> {
    for (_, destination, id) in parked.iter().filter(|(letter, ..)| dead.contains(letter)) {
        sqlx::query("DELETE FROM postrider_parked WHERE destination = ? AND id = ?")
            .bind(destination)
            .bind(id)
            .execute(&mut *tx)
            .await
            .map_err(db)?;
    }
    Ok(())
}
