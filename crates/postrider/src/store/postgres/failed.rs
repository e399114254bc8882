//! A parked event that failed is a dead letter of the relay too. It stays parked, so that its key waits behind it; the two
//! rows know each other by destination and event id.

use sqlx::{PgConnection, Row as _};

use super::error::db;
use crate::error::Result;
use crate::source::DISCARDED_MAX;

/// Those that have failed before: a settlement that comes twice adds no attempts.
const KNOWN: &str = "SELECT id FROM postrider.parked WHERE destination = $1 AND id = ANY ($2) AND state = 'failed'";

/// One row for an event that stands in the log twice.
const BURY: &str = "INSERT INTO postrider.dead_letter AS d (consumer, message_id, stage, sent_at, shard, topic, type, key, \
       tenant, error_type, error, attempts, history, origin, envelope, payload) \
     SELECT DISTINCT ON (event_id) 'relay/' || destination, event_id, 'relay', clock_timestamp(), 0, topic, type, key, \
       tenant, coalesce(failure_kind, 'other'), coalesce(failure, ''), attempts, \
       jsonb_build_array(jsonb_build_object('at', clock_timestamp(), 'error_type', failure_kind, 'error', failure, \
         'attempts', attempts)), \
       jsonb_build_object('destination', destination, 'topic', topic, 'outbox_id', id), \
       jsonb_strip_nulls(jsonb_build_object('id', event_id, 'topic', topic, 'key', key, 'type', type, 'time', created_at, \
         'source', source, 'subject', subject, 'tenant', tenant, 'correlation', correlation, 'causation', causation, \
         'traceparent', traceparent, 'tracestate', tracestate, 'content_type', content_type, 'headers', headers)), \
       coalesce(convert_to(payload::text, 'UTF8'), payload_bytes, '') \
     FROM postrider.parked WHERE destination = $1 AND id = ANY ($2) ORDER BY event_id, id \
     ON CONFLICT (consumer, message_id) DO UPDATE SET state = 'dead', topic = excluded.topic, type = excluded.type, \
       error_type = excluded.error_type, error = excluded.error, attempts = d.attempts + excluded.attempts, \
       history = d.history || excluded.history, origin = excluded.origin, envelope = excluded.envelope, \
       payload = excluded.payload, died_at = clock_timestamp()";

/// Its dead letter goes with a published event, unless the same event failed under another number.
const PUBLISHED: &str = "WITH gone AS ( \
       DELETE FROM postrider.parked WHERE destination = $1 AND id = ANY ($2) RETURNING event_id \
     ) DELETE FROM postrider.dead_letter d USING gone g \
     WHERE d.consumer = 'relay/' || $1 AND d.message_id = g.event_id AND d.state <> 'discarded' \
       AND NOT EXISTS (SELECT 1 FROM postrider.parked p WHERE p.destination = $1 AND p.state = 'failed' \
                        AND p.event_id = g.event_id AND p.id <> ALL ($2))";

/// The parked row first, as in a settlement, so that the two never wait for each other.
const RECALL: &str = "WITH back AS ( \
       UPDATE postrider.parked p SET state = 'failed' FROM postrider.dead_letter d \
       WHERE d.id = ANY ($1) AND d.stage = 'relay' AND d.state = 'replaying' AND p.destination = substr(d.consumer, 7) \
         AND p.state = 'retrying' AND p.attempts = 0 AND p.event_id = d.message_id RETURNING d.id \
     ) UPDATE postrider.dead_letter d SET state = 'dead' WHERE d.id IN (SELECT id FROM back)";

/// The outbox rows of what a person has discarded, the newest first.
const DISCARDED: &str = "SELECT (origin ->> 'outbox_id')::bigint FROM postrider.dead_letter \
     WHERE stage = 'relay' AND consumer = 'relay/' || $1 AND state = 'discarded' AND origin ->> 'outbox_id' IS NOT NULL \
     ORDER BY id DESC LIMIT $2";

/// The outbox rows of what a person has discarded.
pub(super) async fn discarded(connection: &mut PgConnection, destination: &str) -> Result<Vec<i64>> {
    let query = sqlx::query(DISCARDED).persistent(false).bind(destination).bind(DISCARDED_MAX);
    query.fetch_all(connection).await.map_err(db)?.iter().map(|row| row.try_get(0).map_err(db)).collect()
}

/// Which of these have failed already.
pub(super) async fn known(connection: &mut PgConnection, destination: &str, ids: &[i64]) -> Result<Vec<i64>> {
    let rows =
        sqlx::query(KNOWN).persistent(false).bind(destination).bind(ids).fetch_all(connection).await.map_err(db)?;
    rows.iter().map(|row| row.try_get(0).map_err(db)).collect()
}

/// Writes the dead letters of parked events that have just failed.
pub(super) async fn bury(connection: &mut PgConnection, destination: &str, ids: &[i64]) -> Result<()> {
    sqlx::query(BURY).persistent(false).bind(destination).bind(ids).execute(connection).await.map_err(db)?;
    Ok(())
}

/// Removes parked events that were published, and their dead letters.
pub(super) async fn published(connection: &mut PgConnection, destination: &str, ids: &[i64]) -> Result<()> {
    sqlx::query(PUBLISHED).persistent(false).bind(destination).bind(ids).execute(connection).await.map_err(db)?;
    Ok(())
}

/// Takes back those that the relay has not tried; returns how many.
pub(super) async fn recall(connection: &mut PgConnection, dead: &[i64]) -> Result<u64> {
    Ok(sqlx::query(RECALL).bind(dead).execute(connection).await.map_err(db)?.rows_affected())
}
