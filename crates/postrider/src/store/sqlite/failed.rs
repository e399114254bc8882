//! A parked event that failed is a dead letter of the relay too. It stays parked, so that its key waits behind it; the two
//! rows know each other by destination and event id.

use sqlx::{Row as _, SqliteConnection};

use super::dead::now_text;
use super::now_ms;
use crate::source::DISCARDED_MAX;
use crate::store::json;

type Result<T> = std::result::Result<T, sqlx::Error>;

/// Those that have failed before: a settlement that comes twice adds no attempts.
const KNOWN: &str = "SELECT id FROM parked
      WHERE destination = ?1 AND id IN (SELECT value FROM json_each(?2)) AND state = 'failed'";

/// Merging into an empty object leaves out what is null.
const BURY: &str = concat!(
    "INSERT INTO dead_letter (consumer, message_id, stage, sent_at, shard, topic, type, key, tenant, error_type, error,
                              attempts, history, origin, envelope, payload)
     SELECT 'relay/' || destination, event_id, 'relay', ",
    now_text!(),
    ", 0, topic, type, key, tenant, coalesce(failure_kind, 'other'), coalesce(failure_message, ''), attempts,
            json_array(json_object('at', ",
    now_text!(),
    ", 'error_type', failure_kind, 'error', failure_message, 'attempts', attempts)),
            json_object('destination', destination, 'topic', topic, 'outbox_id', id),
            json_patch('{}', json_object('id', event_id, 'topic', topic, 'key', key, 'type', type, 'time', created_at,
                'source', source, 'subject', subject, 'tenant', tenant, 'correlation', correlation,
                'causation', causation, 'traceparent', traceparent, 'tracestate', tracestate,
                'content_type', content_type, 'headers', CASE WHEN json_valid(headers) THEN json(headers) END)),
            CAST(payload AS BLOB)
       FROM parked WHERE destination = ?1 AND id IN (SELECT value FROM json_each(?2)) ORDER BY id
     ON CONFLICT DO UPDATE SET state = 'dead', topic = excluded.topic, type = excluded.type,
            error_type = excluded.error_type, error = excluded.error, attempts = attempts + excluded.attempts,
            origin = excluded.origin, envelope = excluded.envelope, payload = excluded.payload,
            died_at = excluded.died_at,
            history = (SELECT json_group_array(json(value)) FROM
                        (SELECT value FROM json_each(dead_letter.history)
                         UNION ALL SELECT value FROM json_each(excluded.history)))"
);

/// Its dead letter goes with a published event, unless the same event failed under another number.
const PUBLISHED: &str = "DELETE FROM dead_letter
      WHERE consumer = 'relay/' || ?1 AND message_id IN (SELECT value FROM json_each(?2)) AND state <> 'discarded'
        AND NOT EXISTS (SELECT 1 FROM parked p
                         WHERE p.destination = ?1 AND p.state = 'failed' AND p.event_id = dead_letter.message_id)";

const REVIVE: &str = concat!(
    "UPDATE parked SET state = 'retrying', attempts = 0, next_at = ",
    now_ms!(),
    " WHERE state = 'failed' AND (destination, event_id) IN
        (SELECT substr(consumer, 7), message_id FROM dead_letter
          WHERE stage = 'relay' AND id IN (SELECT value FROM json_each(?1)))"
);

const RECALL: &str = "UPDATE dead_letter SET state = 'dead' WHERE state = 'replaying' AND stage = 'relay'
        AND id IN (SELECT value FROM json_each(?1))
        AND EXISTS (SELECT 1 FROM parked p WHERE p.destination = substr(dead_letter.consumer, 7)
                     AND p.state = 'retrying' AND p.attempts = 0 AND p.event_id = dead_letter.message_id)";

const RECALLED: &str = "UPDATE parked SET state = 'failed' WHERE state = 'retrying' AND attempts = 0
        AND (destination, event_id) IN (SELECT substr(consumer, 7), message_id FROM dead_letter
              WHERE stage = 'relay' AND state = 'dead' AND id IN (SELECT value FROM json_each(?1)))";

const UNPARK: &str = "DELETE FROM parked WHERE state = 'failed' AND (destination, event_id) IN
        (SELECT substr(consumer, 7), message_id FROM dead_letter
          WHERE stage = 'relay' AND id IN (SELECT value FROM json_each(?1)))";

/// Which of these have failed already.
pub(super) async fn known(connection: &mut SqliteConnection, destination: &str, ids: &[i64]) -> Result<Vec<i64>> {
    let rows = sqlx::query(KNOWN).bind(destination).bind(json(&ids)).fetch_all(connection).await?;
    rows.iter().map(|row| row.try_get(0)).collect()
}

/// Writes the dead letters of parked events that have just failed.
pub(super) async fn bury(connection: &mut SqliteConnection, destination: &str, ids: &[i64]) -> Result<()> {
    sqlx::query(BURY).bind(destination).bind(json(&ids)).execute(connection).await?;
    Ok(())
}

/// Removes the dead letters of events that were published, and are not parked any more.
pub(super) async fn published(connection: &mut SqliteConnection, destination: &str, events: &[String]) -> Result<()> {
    sqlx::query(PUBLISHED).bind(destination).bind(json(&events)).execute(connection).await?;
    Ok(())
}

/// Lets the relay try the events of these dead letters again, at once.
pub(super) async fn revive(connection: &mut SqliteConnection, dead: &[i64]) -> Result<()> {
    sqlx::query(REVIVE).bind(json(&dead)).execute(connection).await?;
    Ok(())
}

/// The outbox rows of what a person has discarded, the newest first.
const DISCARDED: &str = "SELECT CAST(json_extract(origin, '$.outbox_id') AS INTEGER) FROM dead_letter
      WHERE stage = 'relay' AND consumer = 'relay/' || ?1 AND state = 'discarded'
        AND json_extract(origin, '$.outbox_id') IS NOT NULL ORDER BY id DESC LIMIT ?2";

/// The outbox rows of what a person has discarded.
pub(super) async fn discarded(connection: &mut SqliteConnection, destination: &str) -> Result<Vec<i64>> {
    let rows = sqlx::query(DISCARDED).bind(destination).bind(DISCARDED_MAX).fetch_all(connection).await?;
    rows.iter().map(|row| row.try_get(0)).collect()
}

/// Takes back those that the relay has not tried; returns how many.
pub(super) async fn recall(connection: &mut SqliteConnection, dead: &[i64]) -> Result<u64> {
    let recalled = sqlx::query(RECALL).bind(json(&dead)).execute(&mut *connection).await?.rows_affected();
    sqlx::query(RECALLED).bind(json(&dead)).execute(connection).await?;
    Ok(recalled)
}

/// Removes the events of discarded dead letters from the side table. The next of a key is due when it is the first.
pub(super) async fn unpark(connection: &mut SqliteConnection, dead: &[i64]) -> Result<()> {
    sqlx::query(UNPARK).bind(json(&dead)).execute(connection).await?;
    Ok(())
}
