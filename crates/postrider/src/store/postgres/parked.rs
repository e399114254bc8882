//! The side table: what could not be published, and what waits behind it.

use sqlx::{PgConnection, Row as _};

use super::error::db;
use super::failed;
use super::source::{LaneFilter, columns, log_row};
use crate::error::{Error, Kind, Result};
use crate::source::{Park, ParkedKeys, ParkedRow, ParkedState};

/// Keys of the lane with parked events, with how many, and how many have no key.
pub(super) async fn keys(connection: &mut PgConnection, destination: &str, filter: &LaneFilter) -> Result<ParkedKeys> {
    let rows = sqlx::query(
        "SELECT key, count(*) FROM postrider.parked \
         WHERE destination = $1 AND ($2 = 1 OR postrider.lane_of(key, id, $2) = $3) GROUP BY key",
    )
    .bind(destination)
    .bind(filter.lanes)
    .bind(filter.lane)
    .fetch_all(connection)
    .await
    .map_err(db)?;
    let mut parked = ParkedKeys::default();
    for row in rows {
        let count = row.try_get::<i64, _>(1).map_err(db)? as u64;
        match row.try_get::<Option<String>, _>(0).map_err(db)? {
            Some(key) => parked.keys.push((key, count)),
            None => parked.keyless = count,
        }
    }
    Ok(parked)
}

/// A row that is parked already and is read again after a crash comes as `waiting` without an attempt; that must not
/// overwrite what is known of it.
const PARK: &str = "WITH p AS ( \
       SELECT * FROM unnest($2::bigint[], $3::text[], $4::int[], $5::float8[], $6::text[], $7::text[]) \
       AS p(id, state, attempts, delay, kind, failure) \
     ), known AS ( \
       SELECT q.id FROM postrider.parked q JOIN p ON p.id = q.id WHERE q.destination = $1 \
     ), updated AS ( \
       UPDATE postrider.parked q SET state = p.state, attempts = p.attempts, \
         next_at = clock_timestamp() + p.delay * interval '1 second', failure_kind = p.kind, failure = p.failure \
       FROM p WHERE q.destination = $1 AND q.id = p.id AND p.attempts > 0 \
     ), inserted AS ( \
       INSERT INTO postrider.parked (destination, id, state, attempts, next_at, failure_kind, failure, event_id, topic, \
         key, type, payload, payload_bytes, content_type, source, subject, tenant, correlation, causation, traceparent, \
         tracestate, headers, created_at) \
       SELECT $1, p.id, p.state, p.attempts, clock_timestamp() + p.delay * interval '1 second', p.kind, p.failure, \
         o.event_id, o.topic, o.key, o.type, o.payload, o.payload_bytes, o.content_type, o.source, o.subject, o.tenant, \
         o.correlation, o.causation, o.traceparent, o.tracestate, o.headers, o.created_at \
       FROM p JOIN postrider.outbox o ON o.id = p.id WHERE p.id NOT IN (SELECT id FROM known) RETURNING id \
     ) SELECT (SELECT count(*) FROM known) + (SELECT count(*) FROM inserted)";

/// Copies log rows into the side table and updates those that are there already, also when their log row is gone.
pub(super) async fn park(tx: &mut PgConnection, destination: &str, parks: &[Park]) -> Result<()> {
    if parks.is_empty() {
        return Ok(());
    }
    let ids: Vec<i64> = parks.iter().map(|park| park.id).collect();
    let states: Vec<&str> = parks.iter().map(|park| park.state.as_str()).collect();
    let attempts: Vec<i32> = parks.iter().map(|park| park.attempts as i32).collect();
    let delays: Vec<f64> = parks.iter().map(|park| park.delay.as_secs_f64()).collect();
    let kinds: Vec<Option<&str>> =
        parks.iter().map(|park| park.failure.as_ref().map(|failure| failure.kind.as_str())).collect();
    let failures: Vec<Option<&str>> =
        parks.iter().map(|park| park.failure.as_ref().map(|failure| failure.message.as_str())).collect();
    let mut dead: Vec<i64> =
        parks.iter().filter(|park| park.state == ParkedState::Failed).map(|park| park.id).collect();
    if !dead.is_empty() {
        let known = failed::known(tx, destination, &dead).await?;
        dead.retain(|id| !known.contains(id));
    }
    // Not kept: a plan from when the tables were small would scan them whole.
    let written: i64 = sqlx::query(PARK)
        .persistent(false)
        .bind(destination)
        .bind(&ids)
        .bind(states)
        .bind(attempts)
        .bind(delays)
        .bind(kinds)
        .bind(failures)
        .fetch_one(&mut *tx)
        .await
        .and_then(|row| row.try_get(0))
        .map_err(db)?;
    if written != ids.len() as i64 {
        // Moving the position past a row that is not in the side table would lose it.
        return Err(Error::new(Kind::Corrupt, format!("{} events to park, {written} found in the outbox", ids.len())));
    }
    if !dead.is_empty() {
        failed::bury(tx, destination, &dead).await?;
    }
    Ok(())
}

const DUE: &str = concat!(
    "WITH heads AS ( \
       SELECT DISTINCT ON (key IS NULL, coalesce(key, id::text)) key, id, state, next_at FROM postrider.parked \
       WHERE destination = $1 AND ($3 = 1 OR postrider.lane_of(key, id, $3) = $4) \
       ORDER BY key IS NULL, coalesce(key, id::text), id \
     ), due AS ( \
       SELECT key AS due_key, id AS due_id FROM heads \
       WHERE state = 'waiting' OR (state = 'retrying' AND next_at <= clock_timestamp()) ORDER BY id LIMIT $2 \
     ) \
     SELECT p.state, p.id, ",
    columns!(),
    ", p.attempts, p.id = due_id FROM due JOIN postrider.parked p ON p.destination = $1 \
       AND (p.id = due_id OR (p.key = due_key AND p.id > due_id)) ORDER BY p.id LIMIT $2"
);

/// Parked rows that may be tried now.
pub(super) async fn due(
    connection: &mut PgConnection,
    destination: &str,
    filter: &LaneFilter,
    limit: usize,
) -> Result<Vec<ParkedRow>> {
    let rows = sqlx::query(DUE)
        .bind(destination)
        .bind(limit as i64)
        .bind(filter.lanes)
        .bind(filter.lane)
        .fetch_all(connection)
        .await
        .map_err(db)?;
    let mut due = Vec::with_capacity(rows.len());
    let mut stopped_keys = Vec::new();
    for row in &rows {
        let parked = log_row(row)?;
        let is_head: bool = row.try_get(19).map_err(db)?;
        if let (false, Some(key)) = (is_head, &parked.key) {
            if stopped_keys.contains(key) {
                continue;
            }
            // Behind the head only those that never failed may follow.
            if row.try_get::<&str, _>(0).map_err(db)? != "waiting" {
                stopped_keys.push(key.clone());
                continue;
            }
        }
        due.push(ParkedRow { row: parked, attempts: row.try_get::<i32, _>(18).map_err(db)? as u32 });
    }
    Ok(due)
}
