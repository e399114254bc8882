//! What people see of parked events and consumers: through indexes, and counted up to a limit.

use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::PostgresStore;
use super::error::db;
use crate::error::Result;
use crate::upkeep::{BACKLOG_COUNT_MAX, ConsumerView, ParkedView};

/// Waiting events are counted up to this for each that holds its key.
const WAITING_MAX: i64 = 1_000;

const PARKED: &str = "SELECT p.id, p.destination, p.event_id, p.topic, p.type, p.key, p.state, p.attempts, \
       CASE p.state WHEN 'retrying' THEN p.next_at END, p.failure_kind, p.failure, \
       (SELECT count(*) FROM (SELECT 1 FROM postrider.parked w WHERE w.destination = p.destination AND w.key = p.key \
          AND w.id > p.id LIMIT $4) w), p.created_at \
     FROM postrider.parked p WHERE p.destination = $1 AND p.id > $2 AND p.state <> 'waiting' ORDER BY p.id LIMIT $3";

/// Names step from one to the next through an index; there are few, and many rows of each.
const CONSUMERS: &str = "WITH RECURSIVE held (name) AS ( \
       (SELECT consumer FROM postrider.held ORDER BY consumer LIMIT 1) UNION ALL \
       SELECT (SELECT h.consumer FROM postrider.held h WHERE h.consumer > p.name ORDER BY h.consumer LIMIT 1) \
       FROM held p WHERE p.name IS NOT NULL \
     ), dead (name) AS ( \
       (SELECT consumer FROM postrider.dead_letter WHERE stage = 'consumer' ORDER BY consumer LIMIT 1) UNION ALL \
       SELECT (SELECT d.consumer FROM postrider.dead_letter d WHERE d.stage = 'consumer' AND d.consumer > p.name \
               ORDER BY d.consumer LIMIT 1) \
       FROM dead p WHERE p.name IS NOT NULL \
     ), names AS ( \
       SELECT name FROM held UNION SELECT name FROM dead UNION SELECT consumer FROM postrider.cursor \
       UNION SELECT substr(group_name, 10) FROM postrider.instance WHERE group_name LIKE 'consumer/%' \
     ), ends AS (SELECT coalesce(max(\"offset\"), 0) AS last, clock_timestamp() AS now FROM postrider.message) \
     SELECT n.name, \
       (SELECT count(*) FROM (SELECT 1 FROM postrider.held h WHERE h.consumer = n.name AND h.next_at < 'infinity' \
          LIMIT $1) h), \
       (SELECT count(*) FROM (SELECT 1 FROM postrider.held h WHERE h.consumer = n.name AND h.next_at = 'infinity' \
          LIMIT $1) h), \
       (SELECT extract(epoch FROM e.now - h.held_at)::bigint FROM postrider.held h WHERE h.consumer = n.name \
          ORDER BY h.id LIMIT 1), \
       (SELECT count(*) FROM (SELECT 1 FROM postrider.dead_letter d WHERE d.consumer = n.name AND d.state = 'dead' \
          LIMIT $1) d), \
       (SELECT extract(epoch FROM e.now - d.died_at)::bigint FROM postrider.dead_letter d \
          WHERE d.consumer = n.name AND d.state = 'dead' ORDER BY d.died_at LIMIT 1), \
       (SELECT greatest(e.last - min(c.\"offset\"), 0) FROM postrider.cursor c WHERE c.consumer = n.name \
          HAVING count(*) > 0) \
     FROM names n, ends e WHERE n.name IS NOT NULL ORDER BY n.name COLLATE \"C\"";

pub(super) async fn parked(
    store: &PostgresStore,
    destination: &str,
    after: i64,
    limit: usize,
) -> Result<Vec<ParkedView>> {
    let rows = sqlx::query(PARKED)
        .bind(destination)
        .bind(after)
        .bind(limit as i64)
        .bind(WAITING_MAX)
        .fetch_all(&store.own)
        .await
        .map_err(db)?;
    let view = |row: &PgRow| -> Result<ParkedView, sqlx::Error> {
        Ok(ParkedView {
            id: row.try_get(0)?,
            destination: row.try_get(1)?,
            event_id: row.try_get(2)?,
            topic: row.try_get(3)?,
            kind: row.try_get(4)?,
            key: row.try_get(5)?,
            state: row.try_get(6)?,
            attempts: row.try_get::<i32, _>(7)? as u32,
            next_at: row.try_get(8)?,
            error_type: row.try_get(9)?,
            error: row.try_get(10)?,
            waiting: row.try_get::<i64, _>(11)? as u64,
            created_at: row.try_get(12)?,
        })
    };
    rows.iter().map(|row| view(row).map_err(db)).collect()
}

pub(super) async fn consumers(store: &PostgresStore) -> Result<Vec<ConsumerView>> {
    let query = sqlx::query(CONSUMERS).bind(BACKLOG_COUNT_MAX as i64);
    let rows = query.fetch_all(&store.own).await.map_err(db)?;
    let number = |row: &PgRow, index: usize| -> Result<Option<u64>, sqlx::Error> {
        Ok(row.try_get::<Option<i64>, _>(index)?.map(|number| u64::try_from(number).unwrap_or(0)))
    };
    let view = |row: &PgRow| -> Result<ConsumerView, sqlx::Error> {
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
    rows.iter().map(|row| view(row).map_err(db)).collect()
}
