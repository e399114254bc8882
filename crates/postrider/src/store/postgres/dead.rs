//! The desk.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{PgConnection, Postgres, Row as _};

use super::PostgresStore;
use super::error::db;
use crate::dead::{DeadCount, DeadDetail, DeadFilter, DeadLetters, DeadView, ReplayProgress};
use crate::error::Result;

/// The columns of a [`DeadView`], as a literal for `concat!`.
macro_rules! view {
    () => {
        "id, consumer, message_id, state, topic, type, key, tenant, error_type, error, attempts::bigint, died_at"
    };
}

/// `$1` to `$8` are [`filter`]'s.
macro_rules! filtered {
    () => {
        "($1::bigint[] IS NULL OR id = ANY ($1)) AND ($2::text IS NULL OR consumer = $2) \
         AND ($3::text IS NULL OR type = $3) AND ($4::text IS NULL OR error_type = $4) \
         AND ($5::text IS NULL OR key = $5) AND ($6::text IS NULL OR tenant = $6) \
         AND ($7::timestamptz IS NULL OR died_at >= $7) AND ($8::timestamptz IS NULL OR died_at < $8)"
    };
}

const LIST: &str = concat!(
    "SELECT ",
    view!(),
    " FROM postrider.dead_letter WHERE state <> 'discarded' AND id > $9 AND ",
    filtered!(),
    " ORDER BY id LIMIT $10"
);

const SHOW: &str = concat!(
    "SELECT ",
    view!(),
    ", causes, history, origin, envelope, headers, payload FROM postrider.dead_letter WHERE id = $1"
);

/// A message that was applied meanwhile needs no replay. The first of a key is due at once, unless the key has held
/// messages; the others wait behind it.
const REPLAY: &str = concat!(
    "WITH chosen AS ( \
       SELECT id FROM postrider.dead_letter d WHERE state = 'dead' AND envelope IS NOT NULL AND error_type <> 'forged' \
         AND NOT EXISTS (SELECT 1 FROM postrider.inbox i WHERE i.consumer = d.consumer \
                          AND i.message_id = d.message_id AND i.state <> 'dead') AND ",
    filtered!(),
    " ORDER BY id LIMIT $9 FOR UPDATE SKIP LOCKED \
     ), taken AS ( \
       UPDATE postrider.dead_letter d SET state = 'replaying' FROM chosen c WHERE d.id = c.id RETURNING d.* \
     ), held AS ( \
       INSERT INTO postrider.held (consumer, shard, message_id, key, state, next_at, origin, envelope, payload) \
       SELECT consumer, shard, message_id, key, CASE WHEN is_first THEN 'retrying' ELSE 'waiting' END, \
              CASE WHEN is_first THEN clock_timestamp() ELSE 'infinity' END, origin, envelope, payload \
       FROM (SELECT t.*, t.key IS NULL OR (row_number() OVER (PARTITION BY t.consumer, t.key ORDER BY t.id) = 1 \
               AND NOT EXISTS (SELECT 1 FROM postrider.held h WHERE h.consumer = t.consumer AND h.key = t.key)) AS is_first \
             FROM taken t) t \
       ORDER BY id ON CONFLICT (consumer, message_id) DO NOTHING \
     ) SELECT id FROM taken ORDER BY id"
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

const DISCARD: &str =
    concat!("UPDATE postrider.dead_letter SET state = 'discarded' WHERE state = 'dead' AND ", filtered!());

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
    })
}

async fn audit(connection: &mut PgConnection, actor: &str, action: &str, detail: Value) -> Result<()> {
    sqlx::query("INSERT INTO postrider.audit (actor, action, detail) VALUES ($1, $2, $3)")
        .bind(actor)
        .bind(action)
        .bind(detail)
        .execute(connection)
        .await
        .map_err(db)?;
    Ok(())
}

#[async_trait]
impl DeadLetters for PostgresStore {
    async fn dead_list(&self, wanted: &DeadFilter, after: i64, limit: usize) -> Result<Vec<DeadView>> {
        let query = filter(sqlx::query(LIST), wanted).bind(after).bind(limit as i64);
        let rows = query.fetch_all(&self.own).await.map_err(db)?;
        rows.iter().map(|row| view(row).map_err(db)).collect()
    }

    async fn dead_show(&self, id: i64) -> Result<Option<DeadDetail>> {
        let row = sqlx::query(SHOW).bind(id).fetch_optional(&self.own).await.map_err(db)?;
        let Some(row) = row else { return Ok(None) };
        let detail = || -> Result<DeadDetail, sqlx::Error> {
            Ok(DeadDetail {
                view: view(&row)?,
                causes: row.try_get(12)?,
                history: row.try_get(13)?,
                origin: row.try_get(14)?,
                envelope: row.try_get(15)?,
                headers: row.try_get(16)?,
                payload: row.try_get(17)?,
            })
        };
        detail().map(Some).map_err(db)
    }

    async fn dead_stats(&self) -> Result<Vec<DeadCount>> {
        let rows = sqlx::query(
            "SELECT consumer, error_type, state, count(*), min(died_at) FROM postrider.dead_letter \
             GROUP BY 1, 2, 3 ORDER BY 1, 2, 3",
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
            })
        };
        rows.iter().map(|row| count(row).map_err(db)).collect()
    }

    async fn dead_replay(&self, wanted: &DeadFilter, limit: usize, actor: &str) -> Result<Vec<i64>> {
        let mut tx = self.own.begin().await.map_err(db)?;
        let rows = filter(sqlx::query(REPLAY), wanted).bind(limit as i64).fetch_all(&mut *tx).await.map_err(db)?;
        let ids = rows.iter().map(|row| row.try_get(0).map_err(db)).collect::<Result<Vec<i64>>>()?;
        if !ids.is_empty() {
            audit(&mut tx, actor, "replay", json!({ "ids": ids })).await?;
        }
        tx.commit().await.map_err(db)?;
        Ok(ids)
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
        let recalled = sqlx::query(RECALL).bind(ids).execute(&mut *tx).await.map_err(db)?.rows_affected();
        sqlx::query(STRANDED).execute(&mut *tx).await.map_err(db)?;
        audit(&mut tx, actor, "recall", json!({ "count": recalled })).await?;
        tx.commit().await.map_err(db)?;
        Ok(recalled)
    }

    async fn dead_discard(&self, wanted: &DeadFilter, reason: &str, actor: &str) -> Result<u64> {
        let mut tx = self.own.begin().await.map_err(db)?;
        let query = filter(sqlx::query(DISCARD), wanted);
        let discarded = query.execute(&mut *tx).await.map_err(db)?.rows_affected();
        if discarded > 0 {
            let detail = json!({ "count": discarded, "reason": reason, "ids": wanted.ids });
            audit(&mut tx, actor, "discard", detail).await?;
        }
        tx.commit().await.map_err(db)?;
        Ok(discarded)
    }
}
