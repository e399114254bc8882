//! What people see of parked events and consumers: through indexes, and counted up to a limit.

use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;
use uuid::Uuid;

use super::dead::time;
use super::pulse::of_millis;
use super::row::text_lossy;
use super::{SqliteStore, now_ms};
use crate::error::Result;
use crate::upkeep::{BACKLOG_COUNT_MAX, ConsumerView, ParkedView};

/// Waiting events are counted up to this for each that holds its key.
const WAITING_MAX: i64 = 1_000;

const PARKED: &str = "SELECT p.id, p.destination, p.event_id, p.topic, p.type, p.key, p.state, p.attempts,
        CASE p.state WHEN 'retrying' THEN p.next_at END, p.failure_kind, p.failure_message,
        (SELECT count(*) FROM (SELECT 1 FROM parked w WHERE w.destination = p.destination AND w.key = p.key
            AND w.id > p.id LIMIT ?4)), p.created_at
   FROM parked p WHERE p.destination = ?1 AND p.id > ?2 AND p.state <> 'waiting' ORDER BY p.id LIMIT ?3";

/// Names step from one to the next through an index; there are few, and many rows of each.
const CONSUMERS: &str = concat!(
    "WITH RECURSIVE held_names (name) AS (
        SELECT min(consumer) FROM held UNION ALL
        SELECT (SELECT min(h.consumer) FROM held h WHERE h.consumer > p.name) FROM held_names p WHERE p.name IS NOT NULL
     ), dead_names (name) AS (
        SELECT min(consumer) FROM dead_letter WHERE stage = 'consumer' UNION ALL
        SELECT (SELECT min(d.consumer) FROM dead_letter d WHERE d.stage = 'consumer' AND d.consumer > p.name)
          FROM dead_names p WHERE p.name IS NOT NULL
     ), names AS (
        SELECT name FROM held_names UNION SELECT name FROM dead_names UNION SELECT consumer FROM cursor
         UNION SELECT substr(group_name, 10) FROM instance WHERE group_name GLOB 'consumer/*'
     ), ends AS (SELECT coalesce((SELECT max(\"offset\") FROM message), 0) AS last, ",
    now_ms!(),
    " AS now)
     SELECT n.name,
        (SELECT count(*) FROM (SELECT 1 FROM held h WHERE h.consumer = n.name AND h.next_at IS NOT NULL LIMIT ?1)),
        (SELECT count(*) FROM (SELECT 1 FROM held h WHERE h.consumer = n.name AND h.next_at IS NULL LIMIT ?1)),
        (SELECT e.now / 1000 - unixepoch(h.held_at) FROM held h WHERE h.consumer = n.name ORDER BY h.id LIMIT 1),
        (SELECT count(*) FROM (SELECT 1 FROM dead_letter d WHERE d.consumer = n.name AND d.state = 'dead' LIMIT ?1)),
        (SELECT e.now / 1000 - unixepoch(d.died_at) FROM dead_letter d WHERE d.consumer = n.name AND d.state = 'dead'
          ORDER BY d.died_at LIMIT 1),
        (SELECT max(e.last - min(c.\"offset\"), 0) FROM cursor c WHERE c.consumer = n.name)
       FROM names n, ends e WHERE n.name IS NOT NULL ORDER BY n.name"
);

pub(super) async fn parked(
    store: &SqliteStore,
    destination: &str,
    after: i64,
    limit: usize,
) -> Result<Vec<ParkedView>> {
    const DOING: &str = "the parked events were not read";
    let rows = sqlx::query(PARKED)
        .bind(destination)
        .bind(after)
        .bind(i64::try_from(limit).unwrap_or(i64::MAX))
        .bind(WAITING_MAX)
        .fetch_all(&store.inner.reader)
        .await
        .map_err(store.failed(DOING))?;
    let view = |row: &SqliteRow| -> Result<ParkedView, sqlx::Error> {
        Ok(ParkedView {
            id: row.try_get(0)?,
            destination: row.try_get(1)?,
            event_id: Uuid::try_parse(&text_lossy(row, 2)?.unwrap_or_default()).unwrap_or_default(),
            topic: text_lossy(row, 3)?.unwrap_or_default(),
            kind: text_lossy(row, 4)?.unwrap_or_default(),
            key: text_lossy(row, 5)?,
            state: row.try_get(6)?,
            attempts: row.try_get(7)?,
            next_at: row.try_get::<Option<i64>, _>(8)?.map(of_millis),
            error_type: row.try_get(9)?,
            error: row.try_get(10)?,
            waiting: row.try_get::<i64, _>(11)? as u64,
            created_at: time(row, 12).unwrap_or_default(),
        })
    };
    rows.iter().map(|row| view(row).map_err(store.failed(DOING))).collect()
}

pub(super) async fn consumers(store: &SqliteStore) -> Result<Vec<ConsumerView>> {
    const DOING: &str = "the consumers were not read";
    let query = sqlx::query(CONSUMERS).bind(BACKLOG_COUNT_MAX as i64);
    let rows = query.fetch_all(&store.inner.reader).await.map_err(store.failed(DOING))?;
    let number = |row: &SqliteRow, index: usize| -> Result<Option<u64>, sqlx::Error> {
        Ok(row.try_get::<Option<i64>, _>(index)?.map(|number| u64::try_from(number).unwrap_or(0)))
    };
    let view = |row: &SqliteRow| -> Result<ConsumerView, sqlx::Error> {
        Ok(ConsumerView {
            name: row.try_get(0)?,
            retrying: number(row, 1)?.unwrap_or(0),
            waiting: number(row, 2)?.unwrap_or(0),
            oldest_secs: number(row, 3)?,
            dead: number(row, 4)?.unwrap_or(0),
            oldest_dead_secs: number(row, 5)?,
            behind: number(row, 6)?,
        })
    };
    rows.iter().map(|row| view(row).map_err(store.failed(DOING))).collect()
}
