//! The side table: what could not be published, and what waits behind it.

use std::collections::{BTreeMap, HashSet};

use sqlx::{Row as _, SqliteConnection};

use super::lease::millis;
use super::row::{self, event_columns};
use super::source::{SqliteSource, hash};
use super::{failed, now_ms};
use crate::source::{Park, ParkedKeys, ParkedRow, ParkedState};

type Result<T> = std::result::Result<T, sqlx::Error>;

/// Keys of the lane with parked events, with how many, and how many have no key.
pub(super) async fn keys(connection: &mut SqliteConnection, source: &SqliteSource, lane: u32) -> Result<ParkedKeys> {
    let rows = sqlx::query("SELECT key, count(*) FROM parked WHERE destination = ? AND hash % ? = ? GROUP BY key")
        .bind(&source.destination)
        .bind(source.lanes)
        .bind(lane)
        .fetch_all(connection)
        .await?;
    let mut parked = ParkedKeys::default();
    for row in rows {
        let count = row.try_get(1)?;
        match row::text_lossy(&row, 0)? {
            Some(key) => parked.keys.push((key, count)),
            None => parked.keyless = count,
        }
    }
    Ok(parked)
}

/// Copies log rows into the side table and updates those that are there already, also when their log row is gone.
pub(super) async fn park(connection: &mut SqliteConnection, destination: &str, parks: &[Park]) -> Result<()> {
    let mut latest: BTreeMap<i64, &Park> = BTreeMap::new();
    for park in parks {
        if is_news(park) || !latest.contains_key(&park.id) {
            latest.insert(park.id, park);
        }
    }
    if latest.is_empty() {
        return Ok(());
    }
    let mut dead: Vec<i64> =
        latest.values().filter(|park| park.state == ParkedState::Failed).map(|park| park.id).collect();
    if !dead.is_empty() {
        let known = failed::known(connection, destination, &dead).await?;
        dead.retain(|id| !known.contains(id));
    }
    let ids = serde_json::to_string(&latest.keys().collect::<Vec<_>>()).unwrap_or_default();
    let rows = sqlx::query("SELECT id, key FROM outbox WHERE id IN (SELECT value FROM json_each(?))")
        .bind(&ids)
        .fetch_all(&mut *connection)
        .await?;
    let mut hashes = BTreeMap::new();
    for row in rows {
        let id: i64 = row.try_get(0)?;
        let key: Option<String> = row::text_lossy(&row, 1)?;
        hashes.insert(id, hash(id, key.as_deref()));
    }
    let entries: Vec<_> = latest.values().map(|park| entry(park, hashes.get(&park.id).copied())).collect();
    let entries = serde_json::Value::from(entries).to_string();

    // CROSS and MATERIALIZED, because SQLite would otherwise walk the whole side table for every entry.
    sqlx::query(concat!(
        "WITH n AS MATERIALIZED (
             SELECT p.rowid AS place, j.value FROM json_each(?2) j CROSS JOIN parked p
              WHERE p.destination = ?1 AND p.id = j.value ->> 'id' AND j.value ->> 'is_news')
         UPDATE parked
            SET state = n.value ->> 'state', attempts = n.value ->> 'attempts',
                next_at = ",
        now_ms!(),
        " + (n.value ->> 'delay'), failure_kind = n.value ->> 'kind', failure_message = n.value ->> 'message'
           FROM n WHERE parked.rowid = n.place"
    ))
    .bind(destination)
    .bind(&entries)
    .execute(&mut *connection)
    .await?;
    sqlx::query(concat!(
        "INSERT INTO parked (destination, id, hash, state, attempts, next_at, failure_kind, failure_message, ",
        event_columns!(),
        ") SELECT ?1, o.id, n.value ->> 'hash', n.value ->> 'state', n.value ->> 'attempts', ",
        now_ms!(),
        " + (n.value ->> 'delay'), n.value ->> 'kind', n.value ->> 'message', ",
        event_columns!(),
        // A subquery, because json_each has columns named id, key and type too.
        " FROM (SELECT value FROM json_each(?2)) n CROSS JOIN outbox o
          WHERE o.id = n.value ->> 'id' ON CONFLICT DO NOTHING"
    ))
    .bind(destination)
    .bind(&entries)
    .execute(&mut *connection)
    .await?;

    let kept: i64 =
        sqlx::query("SELECT count(*) FROM parked WHERE destination = ? AND id IN (SELECT value FROM json_each(?))")
            .bind(destination)
            .bind(&ids)
            .fetch_one(&mut *connection)
            .await?
            .try_get(0)?;
    if kept as usize != latest.len() {
        // Upkeep deletes only what every lane has passed, so it was a person, who must not stop the lane by it.
        tracing::warn!(
            destination,
            missing = latest.len() - kept as usize,
            "events to be parked are gone from the outbox"
        );
    }
    if !dead.is_empty() {
        failed::bury(connection, destination, &dead).await?;
    }
    Ok(())
}

/// After a crash the relay reads rows again that it had parked before its position passed them, and lets them wait
/// behind their key. That must not undo what was known of them.
fn is_news(park: &Park) -> bool {
    park.state != ParkedState::Waiting || park.attempts > 0
}

fn entry(park: &Park, hash: Option<u32>) -> serde_json::Value {
    serde_json::json!({
        "id": park.id,
        "hash": hash,
        "state": park.state.as_str(),
        "attempts": park.attempts,
        "delay": millis(park.delay),
        "kind": park.failure.as_ref().map(|failure| &failure.kind),
        "message": park.failure.as_ref().map(|failure| &failure.message),
        "is_news": is_news(park),
    })
}

/// Removes what was published, with its dead letters.
pub(super) async fn remove(connection: &mut SqliteConnection, destination: &str, ids: &[i64]) -> Result<()> {
    if ids.is_empty() {
        return Ok(());
    }
    let rows = sqlx::query(
        "DELETE FROM parked WHERE destination = ? AND id IN (SELECT value FROM json_each(?)) RETURNING event_id",
    )
    .bind(destination)
    .bind(serde_json::to_string(ids).unwrap_or_default())
    .fetch_all(&mut *connection)
    .await?;
    let events = rows.iter().map(|row| row.try_get(0)).collect::<Result<Vec<String>>>()?;
    failed::published(connection, destination, &events).await
}

/// The oldest row of each key of the lane, if it may be tried now, oldest first. Walks from key to key in the index, so
/// that a long queue behind one key costs nothing.
const HEADS: &str = concat!(
    "WITH RECURSIVE k(key) AS (
         SELECT min(key) FROM parked WHERE destination = ?1 AND key IS NOT NULL
         UNION ALL
         SELECT (SELECT min(key) FROM parked WHERE destination = ?1 AND key > k.key) FROM k WHERE k.key IS NOT NULL
     )
     SELECT p.id FROM k CROSS JOIN parked p
      WHERE k.key IS NOT NULL AND p.destination = ?1 AND p.key = k.key
        AND p.id = (SELECT min(id) FROM parked WHERE destination = ?1 AND key = k.key)
        AND p.hash % ?2 = ?3
        AND (p.state = 'waiting' OR (p.state = 'retrying' AND p.next_at <= ",
    now_ms!(),
    "))
     UNION ALL
     SELECT id FROM parked
      WHERE destination = ?1 AND key IS NULL AND hash % ?2 = ?3
        AND (state = 'waiting' OR (state = 'retrying' AND next_at <= ",
    now_ms!(),
    "))
      ORDER BY 1 LIMIT ?4"
);

/// The heads, and the queues behind those that have a key, in one order.
const DUE: &str = concat!(
    "SELECT id, ",
    event_columns!(),
    ", attempts, state FROM parked
      WHERE destination = ?1 AND id IN (
            SELECT value FROM json_each(?2)
            UNION ALL
            SELECT id FROM (SELECT id FROM parked INDEXED BY parked_by_key
                             WHERE destination = ?1
                               AND key IN (SELECT p.key FROM json_each(?2) j CROSS JOIN parked p
                                            WHERE p.destination = ?1 AND p.id = j.value)
                             ORDER BY +id LIMIT ?3))
      ORDER BY id LIMIT ?3"
);

/// See [`crate::source::Source::due`].
pub(super) async fn due(
    connection: &mut SqliteConnection,
    source: &SqliteSource,
    lane: u32,
    limit: usize,
) -> Result<Vec<ParkedRow>> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let heads = sqlx::query(HEADS)
        .bind(&source.destination)
        .bind(source.lanes)
        .bind(lane)
        .bind(limit)
        .fetch_all(&mut *connection)
        .await?;
    if heads.is_empty() {
        return Ok(Vec::new());
    }
    let heads = heads.iter().map(|head| head.try_get(0)).collect::<Result<Vec<i64>>>()?;
    let found = sqlx::query(DUE)
        .bind(&source.destination)
        .bind(serde_json::to_string(&heads).unwrap_or_default())
        .bind(limit)
        .fetch_all(connection)
        .await?;
    let mut begun = HashSet::new();
    let mut stopped = HashSet::new();
    let mut due = Vec::with_capacity(found.len());
    for found in &found {
        let row = row::read_row(found)?;
        if let Some(key) = &row.key {
            // Behind the head follow only rows that wait; one that failed by itself stops its key.
            let is_waiting = found.try_get::<&str, _>("state")? == ParkedState::Waiting.as_str();
            if stopped.contains(key) || (!begun.insert(key.clone()) && !is_waiting) {
                stopped.insert(key.clone());
                continue;
            }
        }
        due.push(ParkedRow { row, attempts: found.try_get("attempts")? });
    }
    Ok(due)
}
