//! The desk.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use sqlx::mysql::{MySql, MySqlRow};
use sqlx::{AssertSqlSafe, MySqlConnection, QueryBuilder, Row as _};
use uuid::Uuid;

use super::error::db;
use super::{MysqlStore, audit, failed, list, now};
use crate::dead::{DeadCount, DeadDetail, DeadFilter, DeadLetters, DeadView, ReplayProgress, Stage, Taken, discarded};
use crate::error::{Error, Result};

/// The columns of a [`DeadView`], as a literal for `concat!`.
macro_rules! view {
    () => {
        "id, consumer, message_id, state, topic, type, `key`, tenant, error_type, error, attempts, died_at, stage"
    };
}

/// Discarded in one go; the rest follows in the same transaction.
const DISCARD_CHUNK: usize = 1_000;

/// A message that was applied meanwhile needs no replay, nor does an event that is not parked any more.
const REPLAYABLE: &str = "SELECT id FROM postrider_dead_letter d WHERE state = 'dead' AND CASE stage \
       WHEN 'relay' THEN EXISTS (SELECT 1 FROM postrider_parked p WHERE p.destination = SUBSTR(d.consumer, 7) \
                                  AND p.state = 'failed' AND p.event_id = d.message_id) \
       ELSE envelope IS NOT NULL AND error_type <> 'forged' \
            AND NOT EXISTS (SELECT 1 FROM postrider_inbox i WHERE i.consumer = d.consumer \
                             AND i.message_id = d.message_id AND i.state <> 'dead') END";

/// The first of a key is due at once, unless the key has held messages; the others wait behind it.
const HOLD: &str = concat!(
    "INSERT INTO postrider_held (consumer, shard, message_id, `key`, state, next_at, history, origin, envelope, payload) \
     SELECT t.consumer, t.shard, t.message_id, t.`key`, CASE WHEN t.is_first THEN 'retrying' ELSE 'waiting' END, \
            CASE WHEN t.is_first THEN ",
    now!(),
    " END, '[]', JSON_MERGE_PATCH(COALESCE(t.origin, '{}'), '{\"is_replayed\": true}'), t.envelope, t.payload \
       FROM (SELECT d.id, d.consumer, d.shard, d.message_id, d.`key`, d.origin, d.envelope, d.payload, d.`key` IS NULL \
                 OR (ROW_NUMBER() OVER (PARTITION BY d.consumer, d.`key` ORDER BY d.id) = 1 \
                     AND NOT EXISTS (SELECT 1 FROM postrider_held h WHERE h.consumer = d.consumer AND h.`key` = d.`key`)) \
                 AS is_first \
               FROM postrider_dead_letter d WHERE d.stage = 'consumer' AND d.id IN "
);

/// An event that the relay tries again by itself, because a person changed its row, is not discarded.
const DISCARDABLE: &str = "SELECT id FROM postrider_dead_letter d WHERE state = 'dead' \
     AND (stage <> 'relay' OR NOT EXISTS (SELECT 1 FROM postrider_parked p \
           WHERE p.destination = SUBSTR(d.consumer, 7) AND p.state = 'retrying' AND p.event_id = d.message_id))";

const STRANDED: &str = "SELECT h.id FROM postrider_held h WHERE h.next_at IS NULL \
     AND NOT EXISTS (SELECT 1 FROM postrider_held p WHERE p.consumer = h.consumer AND p.`key` = h.`key` AND p.id < h.id)";

/// Adds the conditions of a filter.
fn filter(query: &mut QueryBuilder<MySql>, filter: &DeadFilter) {
    if let Some(ids) = &filter.ids {
        query.push(format!(" AND id IN ({})", if ids.is_empty() { "NULL".to_owned() } else { list(ids) }));
    }
    let texts = [
        ("consumer", &filter.consumer),
        ("type", &filter.kind),
        ("error_type", &filter.error_type),
        ("`key`", &filter.key),
        ("tenant", &filter.tenant),
    ];
    for (column, value) in texts {
        if let Some(value) = value {
            query.push(format!(" AND {column} = ")).push_bind(value.clone());
        }
    }
    if let Some(stage) = filter.stage {
        query.push(" AND stage = ").push_bind(stage.as_str());
    }
    if let Some(since) = filter.since {
        query.push(" AND died_at >= ").push_bind(since.naive_utc());
    }
    if let Some(until) = filter.until {
        query.push(" AND died_at < ").push_bind(until.naive_utc());
    }
}

fn view(row: &MySqlRow) -> Result<DeadView, sqlx::Error> {
    Ok(DeadView {
        id: row.try_get(0)?,
        consumer: row.try_get(1)?,
        message_id: Uuid::try_parse(row.try_get(2)?).unwrap_or_default(),
        state: row.try_get(3)?,
        topic: row.try_get(4)?,
        kind: row.try_get(5)?,
        key: row.try_get(6)?,
        tenant: row.try_get(7)?,
        error_type: row.try_get(8)?,
        error: row.try_get(9)?,
        attempts: row.try_get(10)?,
        died_at: row.try_get::<DateTime<Utc>, _>(11)?,
        stage: stage(row, 12)?,
    })
}

fn stage(row: &MySqlRow, index: usize) -> Result<Stage, sqlx::Error> {
    row.try_get::<&str, _>(index)?.parse().map_err(|error: Error| sqlx::Error::Decode(error.into()))
}

/// A column of JSON; what is none is shown as text.
pub(super) fn value(row: &MySqlRow, index: usize) -> Result<Option<Value>, sqlx::Error> {
    let text: Option<String> = row.try_get(index)?;
    Ok(text.map(|text| serde_json::from_str(&text).unwrap_or(Value::String(text))))
}

fn numbers(rows: &[MySqlRow]) -> Result<Vec<i64>> {
    rows.iter().map(|row| row.try_get(0).map_err(db)).collect()
}

/// Of these dead letters those that are dead, locked, by number and consumer. What another operator has in hand is left out.
/// One of the relay must have a parked event among `parked`.
async fn lock_dead(tx: &mut MySqlConnection, ids: &[i64], parked: &[(i64, String, i64)]) -> Result<Vec<Taken>> {
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let query = format!(
        "SELECT id, consumer, stage FROM postrider_dead_letter WHERE state = 'dead' AND id IN ({}) ORDER BY id \
         FOR UPDATE SKIP LOCKED",
        list(ids)
    );
    let rows = sqlx::raw_sql(AssertSqlSafe(query)).fetch_all(tx).await.map_err(db)?;
    let mut taken = Vec::with_capacity(rows.len());
    for row in &rows {
        let id = row.try_get(0).map_err(db)?;
        if stage(row, 2).map_err(db)? == Stage::Consumer || parked.iter().any(|(letter, ..)| *letter == id) {
            taken.push(Taken { id, consumer: row.try_get(1).map_err(db)? });
        }
    }
    Ok(taken)
}

async fn set_state(tx: &mut MySqlConnection, ids: &[i64], state: &str) -> Result<()> {
    let query = format!("UPDATE postrider_dead_letter SET state = ? WHERE id IN ({})", list(ids));
    sqlx::query(AssertSqlSafe(query)).persistent(false).bind(state).execute(tx).await.map_err(db)?;
    Ok(())
}

/// What is replayed to a consumer and was not begun with goes back; returns how many.
async fn recall(tx: &mut MySqlConnection, ids: &[i64]) -> Result<u64> {
    let query = format!(
        "SELECT h.id, d.id FROM postrider_held h JOIN postrider_dead_letter d \
           ON d.consumer = h.consumer AND d.message_id = h.message_id \
         WHERE d.id IN ({}) AND d.state = 'replaying' AND h.state IN ('retrying', 'waiting') AND h.attempts = 0 ORDER BY h.id",
        list(ids)
    );
    let rows = sqlx::raw_sql(AssertSqlSafe(query)).fetch_all(&mut *tx).await.map_err(db)?;
    let mut recalled = 0;
    for row in &rows {
        let (held, letter): (i64, i64) = (row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?);
        // Begun with meanwhile, it is there with an attempt, or gone.
        let gone = sqlx::query(
            "DELETE FROM postrider_held WHERE id = ? AND attempts = 0 AND state IN ('retrying', 'waiting')",
        )
        .bind(held)
        .execute(&mut *tx)
        .await
        .map_err(db)?;
        if gone.rows_affected() == 1 {
            set_state(tx, &[letter], "dead").await?;
            recalled += 1;
        }
    }
    Ok(recalled)
}

#[async_trait]
impl DeadLetters for MysqlStore {
    async fn dead_list(&self, wanted: &DeadFilter, after: i64, limit: usize) -> Result<Vec<DeadView>> {
        let mut query = QueryBuilder::new(concat!(
            "SELECT ",
            view!(),
            " FROM postrider_dead_letter WHERE state <> 'discarded' AND id > "
        ));
        query.push_bind(after);
        filter(&mut query, wanted);
        query.push(" ORDER BY id LIMIT ").push_bind(i64::try_from(limit).unwrap_or(i64::MAX));
        let rows = query.build().persistent(false).fetch_all(&self.own).await.map_err(db)?;
        rows.iter().map(|row| view(row).map_err(db)).collect()
    }

    async fn dead_show(&self, id: i64) -> Result<Option<DeadDetail>> {
        let row = sqlx::query(concat!(
            "SELECT ",
            view!(),
            ", causes, history, origin, envelope, headers, CAST(OCTET_LENGTH(payload) AS SIGNED) \
             FROM postrider_dead_letter WHERE id = ?"
        ))
        .bind(id)
        .fetch_optional(&self.own)
        .await
        .map_err(db)?;
        let Some(row) = row else { return Ok(None) };
        let detail = || -> Result<DeadDetail, sqlx::Error> {
            Ok(DeadDetail {
                view: view(&row)?,
                causes: value(&row, 13)?.unwrap_or_default(),
                history: value(&row, 14)?.unwrap_or_default(),
                origin: value(&row, 15)?.unwrap_or_default(),
                envelope: value(&row, 16)?,
                headers: value(&row, 17)?,
                payload_bytes: row.try_get(18)?,
            })
        };
        detail().map(Some).map_err(db)
    }

    async fn dead_payload(&self, id: i64, actor: &str) -> Result<Option<Vec<u8>>> {
        let mut tx = self.write().await?;
        let row = sqlx::query("SELECT payload FROM postrider_dead_letter WHERE id = ?")
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
            "SELECT consumer, error_label, state, COUNT(*), MIN(died_at), stage FROM postrider_dead_letter \
             FORCE INDEX (postrider_dead_letter_stats) \
             GROUP BY stage, consumer, error_label, state ORDER BY stage, consumer, error_label, state",
        )
        .fetch_all(&self.own)
        .await
        .map_err(db)?;
        let count = |row: &MySqlRow| -> Result<DeadCount, sqlx::Error> {
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
        let row = sqlx::query(concat!("SELECT ", now!())).fetch_one(&self.own).await.map_err(db)?;
        row.try_get(0).map_err(db)
    }

    async fn dead_replay(&self, wanted: &DeadFilter, limit: usize, actor: &str) -> Result<Vec<Taken>> {
        let mut tx = self.write().await?;
        let mut query = QueryBuilder::new(REPLAYABLE);
        filter(&mut query, wanted);
        query.push(" ORDER BY id LIMIT ").push_bind(i64::try_from(limit).unwrap_or(i64::MAX));
        let rows = query.build().persistent(false).fetch_all(&mut *tx).await.map_err(db)?;
        let ids = numbers(&rows)?;
        let parked = failed::lock_failed(&mut tx, &ids).await?;
        let taken = lock_dead(&mut tx, &ids, &parked).await?;
        if !taken.is_empty() {
            let ids: Vec<i64> = taken.iter().map(|taken| taken.id).collect();
            set_state(&mut tx, &ids, "replaying").await?;
            let hold = format!(
                "{HOLD} ({})) t ORDER BY t.id ON DUPLICATE KEY UPDATE postrider_held.attempts = postrider_held.attempts",
                list(&ids)
            );
            sqlx::raw_sql(AssertSqlSafe(hold)).execute(&mut *tx).await.map_err(db)?;
            failed::revive(&mut tx, &ids, &parked).await?;
            audit::write(&mut tx, actor, "replay", &json!({ "ids": ids })).await?;
        }
        tx.commit().await.map_err(db)?;
        Ok(taken)
    }

    async fn dead_progress(&self, ids: &[i64]) -> Result<ReplayProgress> {
        let mut progress = ReplayProgress { applied: ids.len() as u64, ..ReplayProgress::default() };
        if ids.is_empty() {
            return Ok(progress);
        }
        let query = format!("SELECT state FROM postrider_dead_letter WHERE id IN ({})", list(ids));
        let rows = sqlx::raw_sql(AssertSqlSafe(query)).fetch_all(&self.own).await.map_err(db)?;
        for row in &rows {
            progress.applied -= 1;
            match row.try_get(0).map_err(db)? {
                "dead" => progress.failed += 1,
                "replaying" => progress.open += 1,
                _ => {}
            }
        }
        Ok(progress)
    }

    async fn dead_recall(&self, ids: &[i64], actor: &str) -> Result<u64> {
        if ids.is_empty() {
            return Ok(0);
        }
        let mut tx = self.write().await?;
        let recalled = failed::recall(&mut tx, ids).await? + recall(&mut tx, ids).await?;
        audit::write(&mut tx, actor, "recall", &json!({ "count": recalled })).await?;
        tx.commit().await.map_err(db)?;
        let stranded = sqlx::query(STRANDED).fetch_all(&self.own).await.map_err(db)?;
        self.free(&numbers(&stranded)?).await?;
        Ok(recalled)
    }

    async fn dead_discard(&self, wanted: &DeadFilter, reason: &str, actor: &str) -> Result<u64> {
        let mut tx = self.write().await?;
        let mut gone = Vec::new();
        let mut after = 0;
        loop {
            let mut query = QueryBuilder::new(DISCARDABLE);
            filter(&mut query, wanted);
            query.push(" AND id > ").push_bind(after);
            query.push(" ORDER BY id LIMIT ").push_bind(DISCARD_CHUNK as i64);
            let rows = query.build().persistent(false).fetch_all(&mut *tx).await.map_err(db)?;
            let found = numbers(&rows)?;
            let Some(last) = found.last() else { break };
            after = *last;
            // One whose event is not parked any more has nothing to unpark.
            let parked = failed::lock_failed(&mut tx, &found).await?;
            let all: Vec<_> = found.iter().map(|id| (*id, String::new(), 0)).collect();
            let ids: Vec<i64> = lock_dead(&mut tx, &found, &all).await?.iter().map(|taken| taken.id).collect();
            if !ids.is_empty() {
                set_state(&mut tx, &ids, "discarded").await?;
                failed::unpark(&mut tx, &ids, &parked).await?;
                gone.extend(ids);
            }
        }
        if !gone.is_empty() {
            audit::write(&mut tx, actor, "discard", &discarded(&gone, reason)).await?;
        }
        tx.commit().await.map_err(db)?;
        Ok(gone.len() as u64)
    }
}
