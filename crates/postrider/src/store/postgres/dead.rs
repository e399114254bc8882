//! The desk.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde_json::json;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{Postgres, Row as _};

use super::error::db;
use super::{PostgresStore, audit, failed};
use crate::dead::{DeadCount, DeadDetail, DeadFilter, DeadLetters, DeadView, ReplayProgress, Stage, Taken, discarded};
use crate::error::{Error, Result};

/// The columns of a [`DeadView`], as a literal for `concat!`.
macro_rules! view {
    () => {
        "id, consumer, message_id, state, topic, type, key, tenant, error_type, error, attempts::bigint, died_at, \
         stage"
    };
}

/// `$1` to `$9` are [`filter`]'s.
macro_rules! filtered {
    () => {
        "($1::bigint[] IS NULL OR id = ANY ($1)) AND ($2::text IS NULL OR consumer = $2) \
         AND ($3::text IS NULL OR type = $3) AND ($4::text IS NULL OR error_type = $4) \
         AND ($5::text IS NULL OR key = $5) AND ($6::text IS NULL OR tenant = $6) \
         AND ($7::timestamptz IS NULL OR died_at >= $7) AND ($8::timestamptz IS NULL OR died_at < $8) \
         AND ($9::text IS NULL OR stage = $9)"
    };
}

/// A condition that may be absent cannot be found through an index. The one that most likely chooses few rows stands once
/// more, without its `IS NULL`.
macro_rules! list {
    ($lead:literal) => {
        concat!(
            "SELECT ",
            view!(),
            " FROM postrider.dead_letter WHERE state <> 'discarded' AND id > $10 AND ",
            $lead,
            filtered!(),
            " ORDER BY id LIMIT $11"
        )
    };
}

fn list(filter: &DeadFilter) -> &'static str {
    match filter {
        DeadFilter { ids: Some(_), .. } => list!("id = ANY ($1) AND "),
        DeadFilter { key: Some(_), .. } => list!("key = $5 AND "),
        DeadFilter { kind: Some(_), .. } => list!("type = $3 AND "),
        DeadFilter { error_type: Some(_), .. } => list!("error_type = $4 AND "),
        DeadFilter { tenant: Some(_), .. } => list!("tenant = $6 AND "),
        DeadFilter { consumer: Some(_), .. } => list!("consumer = $2 AND "),
        _ => list!(""),
    }
}

const SHOW: &str = concat!(
    "SELECT ",
    view!(),
    ", causes, history, origin, envelope, headers, octet_length(payload)::bigint FROM postrider.dead_letter WHERE id = $1"
);

/// A message that was applied meanwhile needs no replay, nor does an event that is not parked any more. Of held messages
/// the first of a key is due at once, unless the key has others; those wait behind it. Of parked events at most one of a key
/// has failed.
const REPLAY: &str = concat!(
    "WITH chosen AS ( \
       SELECT id FROM postrider.dead_letter d WHERE state = 'dead' AND CASE stage \
         WHEN 'relay' THEN EXISTS (SELECT 1 FROM postrider.parked p WHERE p.destination = substr(d.consumer, 7) \
                                    AND p.state = 'failed' AND p.event_id = d.message_id) \
         ELSE envelope IS NOT NULL AND error_type <> 'forged' \
              AND NOT EXISTS (SELECT 1 FROM postrider.inbox i WHERE i.consumer = d.consumer \
                               AND i.message_id = d.message_id AND i.state <> 'dead') END AND ",
    filtered!(),
    " ORDER BY id LIMIT $10 FOR UPDATE SKIP LOCKED \
     ), taken AS ( \
       UPDATE postrider.dead_letter d SET state = 'replaying' FROM chosen c WHERE d.id = c.id RETURNING d.* \
     ), parked AS ( \
       UPDATE postrider.parked p SET state = 'retrying', attempts = 0, next_at = clock_timestamp() FROM taken t \
       WHERE t.stage = 'relay' AND p.destination = substr(t.consumer, 7) AND p.state = 'failed' \
         AND p.event_id = t.message_id \
     ), held AS ( \
       INSERT INTO postrider.held (consumer, shard, message_id, key, state, next_at, origin, envelope, payload) \
       SELECT consumer, shard, message_id, key, CASE WHEN is_first THEN 'retrying' ELSE 'waiting' END, \
              CASE WHEN is_first THEN clock_timestamp() ELSE 'infinity' END, \
              coalesce(origin, '{}') || '{\"is_replayed\": true}', envelope, payload \
       FROM (SELECT t.*, t.key IS NULL OR (row_number() OVER (PARTITION BY t.consumer, t.key ORDER BY t.id) = 1 \
               AND NOT EXISTS (SELECT 1 FROM postrider.held h WHERE h.consumer = t.consumer AND h.key = t.key)) AS is_first \
             FROM taken t WHERE t.stage = 'consumer') t \
       ORDER BY id ON CONFLICT (consumer, message_id) DO NOTHING \
     ) SELECT id, consumer FROM taken ORDER BY id"
);

/// What is replayed and was not begun with goes back; the next of its key becomes due.
const RECALL: &str = "WITH gone AS ( \
       DELETE FROM postrider.held h USING postrider.dead_letter d WHERE d.id = ANY ($1) AND d.state = 'replaying' \
         AND h.consumer = d.consumer AND h.message_id = d.message_id AND h.state IN ('retrying', 'waiting') \
         AND h.attempts = 0 RETURNING d.id \
     ) UPDATE postrider.dead_letter d SET state = 'dead' FROM gone g WHERE d.id = g.id";

const STRANDED: &str = "UPDATE postrider.held h SET state = 'retrying', next_at = clock_timestamp() \
     WHERE next_at = 'infinity' AND NOT EXISTS \
       (SELECT 1 FROM postrider.held p WHERE p.consumer = h.consumer AND p.key = h.key AND p.id < h.id)";

/// An event that the relay tries again by itself, because a person changed its row, is not discarded. The next of a parked
/// event's key is due when it is the first.
const DISCARD: &str = concat!(
    "WITH gone AS ( \
       UPDATE postrider.dead_letter d SET state = 'discarded' WHERE state = 'dead' \
         AND (stage <> 'relay' OR NOT EXISTS (SELECT 1 FROM postrider.parked p \
                WHERE p.destination = substr(d.consumer, 7) AND p.state = 'retrying' AND p.event_id = d.message_id)) AND ",
    filtered!(),
    " RETURNING id, stage, consumer, message_id \
     ), unparked AS ( \
       DELETE FROM postrider.parked p USING gone g WHERE g.stage = 'relay' AND p.destination = substr(g.consumer, 7) \
         AND p.state = 'failed' AND p.event_id = g.message_id \
     ) SELECT id FROM gone ORDER BY id"
);

fn filter<'q>(query: Query<'q, Postgres, PgArguments>, filter: &'q DeadFilter) -> Query<'q, Postgres, PgArguments> {
    query
        .bind(filter.ids.as_deref())
        .bind(filter.consumer.as_deref())
        .bind(filter.kind.as_deref())
        .bind(filter.error_type.as_deref())
        .bind(filter.key.as_deref())
        .bind(filter.tenant.as_deref())
        .bind(filter.since)
        .bind(filter.until)
        .bind(filter.stage.map(Stage::as_str))
}

fn view(row: &PgRow) -> Result<DeadView, sqlx::Error> {
    Ok(DeadView {
        id: row.try_get(0)?,
        consumer: row.try_get(1)?,
        message_id: row.try_get(2)?,
        state: row.try_get(3)?,
        topic: row.try_get(4)?,
        kind: row.try_get(5)?,
        key: row.try_get(6)?,
        tenant: row.try_get(7)?,
        error_type: row.try_get(8)?,
        error: row.try_get(9)?,
        attempts: row.try_get(10)?,
        died_at: row.try_get(11)?,
        stage: stage(row, 12)?,
    })
}

fn stage(row: &PgRow, index: usize) -> Result<Stage, sqlx::Error> {
    row.try_get::<&str, _>(index)?.parse().map_err(|error: Error| sqlx::Error::Decode(error.into()))
}

#[async_trait]
impl DeadLetters for PostgresStore {
    async fn dead_list(&self, wanted: &DeadFilter, after: i64, limit: usize) -> Result<Vec<DeadView>> {
        let query = filter(sqlx::query(list(wanted)), wanted).bind(after).bind(limit as i64);
        let rows = query.fetch_all(&self.own).await.map_err(db)?;
        rows.iter().map(|row| view(row).map_err(db)).collect()
    }

    async fn dead_show(&self, id: i64) -> Result<Option<DeadDetail>> {
        let row = sqlx::query(SHOW).bind(id).fetch_optional(&self.own).await.map_err(db)?;
        let Some(row) = row else { return Ok(None) };
        let detail = || -> Result<DeadDetail, sqlx::Error> {
            Ok(DeadDetail {
                view: view(&row)?,
                causes: row.try_get(13)?,
                history: row.try_get(14)?,
                origin: row.try_get(15)?,
                envelope: row.try_get(16)?,
                headers: row.try_get(17)?,
                payload_bytes: row.try_get(18)?,
            })
        };
        detail().map(Some).map_err(db)
    }

    async fn dead_payload(&self, id: i64, actor: &str) -> Result<Option<Vec<u8>>> {
        let mut tx = self.own.begin().await.map_err(db)?;
        let row = sqlx::query("SELECT payload FROM postrider.dead_letter WHERE id = $1")
            .bind(id)
            .fetch_optional(&mut *tx)
            .await
            .map_err(db)?;
        let Some(row) = row else { return Ok(None) };
        audit::write(&mut tx, actor, "payload", &json!({ "id": id })).await?;
        tx.commit().await.map_err(db)?;
        row.try_get(0).map(Some).map_err(db)
    }

    async fn dead_stats(&self) -> Result<Vec<DeadCount>> {
        let rows = sqlx::query(
            "SELECT consumer, error_type, state, count(*), min(died_at), stage FROM postrider.dead_letter \
             GROUP BY 6, 1, 2, 3 ORDER BY 6, 1, 2, 3",
        )
        .fetch_all(&self.own)
        .await
        .map_err(db)?;
        let count = |row: &PgRow| -> Result<DeadCount, sqlx::Error> {
            Ok(DeadCount {
                consumer: row.try_get(0)?,
                error_type: row.try_get(1)?,
                state: row.try_get(2)?,
                count: row.try_get(3)?,
                oldest: row.try_get::<DateTime<Utc>, _>(4)?,
                stage: stage(row, 5)?,
            })
        };
        rows.iter().map(|row| count(row).map_err(db)).collect()
    }

    async fn dead_now(&self) -> Result<DateTime<Utc>> {
        let row = sqlx::query("SELECT clock_timestamp()").fetch_one(&self.own).await.map_err(db)?;
        row.try_get(0).map_err(db)
    }

    async fn dead_replay(&self, wanted: &DeadFilter, limit: usize, actor: &str) -> Result<Vec<Taken>> {
        let mut tx = self.own.begin().await.map_err(db)?;
        let rows = filter(sqlx::query(REPLAY), wanted).bind(limit as i64).fetch_all(&mut *tx).await.map_err(db)?;
        let read = |row: &PgRow| -> Result<Taken, sqlx::Error> {
            Ok(Taken { id: row.try_get(0)?, consumer: row.try_get(1)? })
        };
        let taken = rows.iter().map(|row| read(row).map_err(db)).collect::<Result<Vec<Taken>>>()?;
        if !taken.is_empty() {
            let ids: Vec<i64> = taken.iter().map(|taken| taken.id).collect();
            audit::write(&mut tx, actor, "replay", &json!({ "ids": ids })).await?;
        }
        tx.commit().await.map_err(db)?;
        Ok(taken)
    }

    async fn dead_progress(&self, ids: &[i64]) -> Result<ReplayProgress> {
        let row = sqlx::query(
            "SELECT count(*) FILTER (WHERE state = 'dead'), count(*) FILTER (WHERE state = 'replaying'), count(*) \
             FROM postrider.dead_letter WHERE id = ANY ($1)",
        )
        .bind(ids)
        .fetch_one(&self.own)
        .await
        .map_err(db)?;
        let (failed, open, there): (i64, i64, i64) =
            (row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?, row.try_get(2).map_err(db)?);
        Ok(ReplayProgress { applied: ids.len() as u64 - there as u64, failed: failed as u64, open: open as u64 })
    }

    async fn dead_recall(&self, ids: &[i64], actor: &str) -> Result<u64> {
        let mut tx = self.own.begin().await.map_err(db)?;
        let mut recalled = failed::recall(&mut tx, ids).await?;
        recalled += sqlx::query(RECALL).bind(ids).execute(&mut *tx).await.map_err(db)?.rows_affected();
        sqlx::query(STRANDED).execute(&mut *tx).await.map_err(db)?;
        audit::write(&mut tx, actor, "recall", &json!({ "count": recalled })).await?;
        tx.commit().await.map_err(db)?;
        Ok(recalled)
    }

    async fn dead_discard(&self, wanted: &DeadFilter, reason: &str, actor: &str) -> Result<u64> {
        let mut tx = self.own.begin().await.map_err(db)?;
        let rows = filter(sqlx::query(DISCARD), wanted).fetch_all(&mut *tx).await.map_err(db)?;
        let ids = rows.iter().map(|row| row.try_get(0).map_err(db)).collect::<Result<Vec<i64>>>()?;
        if !ids.is_empty() {
            audit::write(&mut tx, actor, "discard", &discarded(&ids, reason)).await?;
        }
        tx.commit().await.map_err(db)?;
        Ok(ids.len() as u64)
    }
}
