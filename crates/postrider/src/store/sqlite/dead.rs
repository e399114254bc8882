//! The desk.

use async_trait::async_trait;
use chrono::{DateTime, SecondsFormat, Utc};
use serde_json::{Value, json};
use sqlx::Row as _;
use sqlx::query::Query;
use sqlx::sqlite::{Sqlite, SqliteArguments, SqliteRow};
use uuid::Uuid;

use super::row::text_lossy;
use super::{SqliteStore, audit, failed, now_ms};
use crate::dead::{DeadCount, DeadDetail, DeadFilter, DeadLetters, DeadView, ReplayProgress, Stage, Taken, discarded};
use crate::error::{Error, Result};

/// Now, as text that sorts, as a literal for `concat!`.
macro_rules! now_text {
    () => {
        "strftime('%Y-%m-%dT%H:%M:%f', 'now') || '000Z'"
    };
}
pub(super) use now_text;

/// The columns of a [`DeadView`], as a literal for `concat!`.
macro_rules! view {
    () => {
        "id, consumer, message_id, state, topic, type, key, tenant, error_type, error, attempts, died_at, stage"
    };
}

/// `?1` to `?9` are [`filter`]'s.
macro_rules! filtered {
    () => {
        "(?1 IS NULL OR id IN (SELECT value FROM json_each(?1))) AND (?2 IS NULL OR consumer = ?2)
         AND (?3 IS NULL OR type = ?3) AND (?4 IS NULL OR error_type = ?4) AND (?5 IS NULL OR key = ?5)
         AND (?6 IS NULL OR tenant = ?6) AND (?7 IS NULL OR died_at >= ?7) AND (?8 IS NULL OR died_at < ?8)
         AND (?9 IS NULL OR stage = ?9)"
    };
}

/// A condition that may be absent cannot be found through an index. The one that most likely chooses few rows stands once
/// more, without its `IS NULL`.
macro_rules! list {
    ($lead:literal) => {
        concat!(
            "SELECT ",
            view!(),
            " FROM dead_letter WHERE state <> 'discarded' AND id > ?10 AND ",
            $lead,
            filtered!(),
            " ORDER BY id LIMIT ?11"
        )
    };
}

fn list(filter: &DeadFilter) -> &'static str {
    match filter {
        DeadFilter { ids: Some(_), .. } => list!("id IN (SELECT value FROM json_each(?1)) AND "),
        DeadFilter { key: Some(_), .. } => list!("key = ?5 AND "),
        DeadFilter { kind: Some(_), .. } => list!("type = ?3 AND "),
        DeadFilter { error_type: Some(_), .. } => list!("error_type = ?4 AND "),
        DeadFilter { tenant: Some(_), .. } => list!("tenant = ?6 AND "),
        DeadFilter { consumer: Some(_), .. } => list!("consumer = ?2 AND "),
        _ => list!(""),
    }
}

const SHOW: &str = concat!(
    "SELECT ",
    view!(),
    ", causes, history, origin, envelope, headers, octet_length(payload) FROM dead_letter WHERE id = ?1"
);

/// A message that was applied meanwhile needs no replay, nor does an event that is not parked any more.
const CHOOSE: &str = concat!(
    "UPDATE dead_letter SET state = 'replaying' WHERE id IN (
        SELECT id FROM dead_letter d WHERE state = 'dead' AND CASE stage
           WHEN 'relay' THEN EXISTS (SELECT 1 FROM parked p WHERE p.destination = substr(d.consumer, 7)
                                      AND p.state = 'failed' AND p.event_id = d.message_id)
           ELSE envelope IS NOT NULL AND error_type <> 'forged'
                AND NOT EXISTS (SELECT 1 FROM inbox i WHERE i.consumer = d.consumer AND i.message_id = d.message_id
                                 AND i.state <> 'dead') END AND ",
    filtered!(),
    " ORDER BY id LIMIT ?10) RETURNING id, consumer"
);

/// The first of a key is due at once, unless the key has held messages; the others wait behind it.
const HOLD: &str = concat!(
    "INSERT INTO held (consumer, shard, message_id, key, state, next_at, origin, envelope, payload)
     SELECT consumer, shard, message_id, key, CASE WHEN is_first THEN 'retrying' ELSE 'waiting' END,
            CASE WHEN is_first THEN ",
    now_ms!(),
    " END, json_patch(coalesce(origin, '{}'), '{\"is_replayed\": true}'), envelope, payload
       FROM (SELECT d.*, d.key IS NULL OR (row_number() OVER (PARTITION BY d.consumer, d.key ORDER BY d.id) = 1
                AND NOT EXISTS (SELECT 1 FROM held h WHERE h.consumer = d.consumer AND h.key = d.key)) AS is_first
               FROM dead_letter d WHERE d.stage = 'consumer' AND d.id IN (SELECT value FROM json_each(?1)))
      WHERE true ORDER BY id ON CONFLICT DO NOTHING"
);

/// What is replayed and was not begun with.
const RECALL: &str = "UPDATE dead_letter SET state = 'dead' WHERE state = 'replaying'
        AND id IN (SELECT value FROM json_each(?1))
        AND EXISTS (SELECT 1 FROM held h WHERE h.consumer = dead_letter.consumer
                     AND h.message_id = dead_letter.message_id AND h.state IN ('retrying', 'waiting') AND h.attempts = 0)";

const RECALLED: &str = "DELETE FROM held WHERE state IN ('retrying', 'waiting') AND attempts = 0
        AND EXISTS (SELECT 1 FROM dead_letter d WHERE d.consumer = held.consumer AND d.message_id = held.message_id
                     AND d.state = 'dead' AND d.id IN (SELECT value FROM json_each(?1)))";

const STRANDED: &str = concat!(
    "UPDATE held SET state = 'retrying', next_at = ",
    now_ms!(),
    " WHERE next_at IS NULL AND NOT EXISTS
        (SELECT 1 FROM held p WHERE p.consumer = held.consumer AND p.key = held.key AND p.id < held.id)"
);

/// An event that the relay tries again by itself, because a person changed its row, is not discarded.
const DISCARD: &str = concat!(
    "UPDATE dead_letter SET state = 'discarded' WHERE state = 'dead'
        AND (stage <> 'relay' OR NOT EXISTS (SELECT 1 FROM parked p
              WHERE p.destination = substr(dead_letter.consumer, 7) AND p.state = 'retrying'
                AND p.event_id = dead_letter.message_id)) AND ",
    filtered!(),
    " RETURNING id"
);

fn filter<'q>(query: Query<'q, Sqlite, SqliteArguments>, filter: &DeadFilter) -> Query<'q, Sqlite, SqliteArguments> {
    let time = |time: Option<DateTime<Utc>>| time.map(|time| time.to_rfc3339_opts(SecondsFormat::Micros, true));
    query
        .bind(filter.ids.as_ref().map(|ids| json!(ids).to_string()))
        .bind(filter.consumer.clone())
        .bind(filter.kind.clone())
        .bind(filter.error_type.clone())
        .bind(filter.key.clone())
        .bind(filter.tenant.clone())
        .bind(time(filter.since))
        .bind(time(filter.until))
        .bind(filter.stage.map(Stage::as_str))
}

/// A dead letter of the relay may be a row that is no event, because its texts are not UTF-8 or its id is no UUID.
fn view(row: &SqliteRow) -> Result<DeadView, sqlx::Error> {
    Ok(DeadView {
        id: row.try_get(0)?,
        consumer: row.try_get(1)?,
        message_id: Uuid::try_parse(&text_lossy(row, 2)?.unwrap_or_default()).unwrap_or_default(),
        state: row.try_get(3)?,
        topic: text_lossy(row, 4)?,
        kind: text_lossy(row, 5)?,
        key: text_lossy(row, 6)?,
        tenant: text_lossy(row, 7)?,
        error_type: row.try_get(8)?,
        error: row.try_get(9)?,
        attempts: row.try_get(10)?,
        died_at: time(row, 11)?,
        stage: stage(row, 12)?,
    })
}

fn stage(row: &SqliteRow, index: usize) -> Result<Stage, sqlx::Error> {
    row.try_get::<&str, _>(index)?.parse().map_err(|error: Error| sqlx::Error::Decode(error.into()))
}

pub(super) fn time(row: &SqliteRow, index: usize) -> Result<DateTime<Utc>, sqlx::Error> {
    let text: &str = row.try_get(index)?;
    let time = DateTime::parse_from_rfc3339(text).map_err(|error| sqlx::Error::Decode(error.into()))?;
    Ok(time.with_timezone(&Utc))
}

/// A column of JSON; what is none is shown as text.
pub(super) fn value(row: &SqliteRow, index: usize) -> Result<Option<Value>, sqlx::Error> {
    Ok(text_lossy(row, index)?.map(|text| serde_json::from_str(&text).unwrap_or(Value::String(text))))
}

#[async_trait]
impl DeadLetters for SqliteStore {
    async fn dead_list(&self, wanted: &DeadFilter, after: i64, limit: usize) -> Result<Vec<DeadView>> {
        const DOING: &str = "the dead letters were not read";
        let query =
            filter(sqlx::query(list(wanted)), wanted).bind(after).bind(i64::try_from(limit).unwrap_or(i64::MAX));
        let rows = query.fetch_all(&self.inner.reader).await.map_err(self.failed(DOING))?;
        rows.iter().map(|row| view(row).map_err(self.failed(DOING))).collect()
    }

    async fn dead_show(&self, id: i64) -> Result<Option<DeadDetail>> {
        const DOING: &str = "the dead letter was not read";
        let row = sqlx::query(SHOW).bind(id).fetch_optional(&self.inner.reader).await.map_err(self.failed(DOING))?;
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
        detail().map(Some).map_err(self.failed(DOING))
    }

    async fn dead_payload(&self, id: i64, actor: &str) -> Result<Option<Vec<u8>>> {
        const DOING: &str = "the payload was not read";
        let mut tx = self.write(DOING).await?;
        let row = sqlx::query("SELECT payload FROM dead_letter WHERE id = ?").bind(id).fetch_optional(&mut *tx).await;
        let Some(row) = row.map_err(self.failed(DOING))? else { return Ok(None) };
        let payload = row.try_get(0).map_err(self.failed(DOING))?;
        audit::write(&mut tx, actor, "payload", &json!({ "id": id })).await.map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))?;
        Ok(Some(payload))
    }

    async fn dead_stats(&self) -> Result<Vec<DeadCount>> {
        const DOING: &str = "the dead letters were not counted";
        let rows = sqlx::query(
            "SELECT consumer, error_type, state, count(*), min(died_at), stage FROM dead_letter
              GROUP BY 6, 1, 2, 3 ORDER BY 6, 1, 2, 3",
        )
        .fetch_all(&self.inner.reader)
        .await
        .map_err(self.failed(DOING))?;
        let count = |row: &SqliteRow| -> Result<DeadCount, sqlx::Error> {
            Ok(DeadCount {
                consumer: row.try_get(0)?,
                error_type: row.try_get(1)?,
                state: row.try_get(2)?,
                count: row.try_get(3)?,
                oldest: time(row, 4)?,
                stage: stage(row, 5)?,
            })
        };
        rows.iter().map(|row| count(row).map_err(self.failed(DOING))).collect()
    }

    async fn dead_now(&self) -> Result<DateTime<Utc>> {
        const DOING: &str = "the clock was not read";
        let row = sqlx::query(concat!("SELECT ", now_text!())).fetch_one(&self.inner.reader).await;
        row.and_then(|row| time(&row, 0)).map_err(self.failed(DOING))
    }

    async fn dead_replay(&self, wanted: &DeadFilter, limit: usize, actor: &str) -> Result<Vec<Taken>> {
        const DOING: &str = "the dead letters were not replayed";
        let mut tx = self.write(DOING).await?;
        let query = filter(sqlx::query(CHOOSE), wanted).bind(i64::try_from(limit).unwrap_or(i64::MAX));
        let rows = query.fetch_all(&mut *tx).await.map_err(self.failed(DOING))?;
        let read = |row: &SqliteRow| -> Result<Taken, sqlx::Error> {
            Ok(Taken { id: row.try_get(0)?, consumer: row.try_get(1)? })
        };
        let taken: Result<Vec<Taken>, sqlx::Error> = rows.iter().map(read).collect();
        let mut taken = taken.map_err(self.failed(DOING))?;
        taken.sort_unstable_by_key(|taken| taken.id);
        if !taken.is_empty() {
            let ids: Vec<i64> = taken.iter().map(|taken| taken.id).collect();
            sqlx::query(HOLD).bind(json!(ids).to_string()).execute(&mut *tx).await.map_err(self.failed(DOING))?;
            failed::revive(&mut tx, &ids).await.map_err(self.failed(DOING))?;
            audit::write(&mut tx, actor, "replay", &json!({ "ids": ids })).await.map_err(self.failed(DOING))?;
        }
        tx.commit().await.map_err(self.failed(DOING))?;
        Ok(taken)
    }

    async fn dead_progress(&self, ids: &[i64]) -> Result<ReplayProgress> {
        const DOING: &str = "the replay's progress was not read";
        let row = sqlx::query(
            "SELECT coalesce(sum(state = 'dead'), 0), coalesce(sum(state = 'replaying'), 0), count(*) FROM dead_letter
              WHERE id IN (SELECT value FROM json_each(?1))",
        )
        .bind(json!(ids).to_string())
        .fetch_one(&self.inner.reader)
        .await
        .map_err(self.failed(DOING))?;
        let read =
            || -> Result<(i64, i64, i64), sqlx::Error> { Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?)) };
        let (failed, open, there) = read().map_err(self.failed(DOING))?;
        Ok(ReplayProgress { applied: ids.len() as u64 - there as u64, failed: failed as u64, open: open as u64 })
    }

    async fn dead_recall(&self, ids: &[i64], actor: &str) -> Result<u64> {
        const DOING: &str = "the replay was not taken back";
        let mut tx = self.write(DOING).await?;
        let recalled = failed::recall(&mut tx, ids).await.map_err(self.failed(DOING))? + {
            let ids = json!(ids).to_string();
            let recalled = sqlx::query(RECALL).bind(&ids).execute(&mut *tx).await.map_err(self.failed(DOING))?;
            sqlx::query(RECALLED).bind(&ids).execute(&mut *tx).await.map_err(self.failed(DOING))?;
            recalled.rows_affected()
        };
        sqlx::query(STRANDED).execute(&mut *tx).await.map_err(self.failed(DOING))?;
        audit::write(&mut tx, actor, "recall", &json!({ "count": recalled })).await.map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))?;
        Ok(recalled)
    }

    async fn dead_discard(&self, wanted: &DeadFilter, reason: &str, actor: &str) -> Result<u64> {
        const DOING: &str = "the dead letters were not discarded";
        let mut tx = self.write(DOING).await?;
        let rows = filter(sqlx::query(DISCARD), wanted).fetch_all(&mut *tx).await.map_err(self.failed(DOING))?;
        let ids: Result<Vec<i64>, sqlx::Error> = rows.iter().map(|row| row.try_get(0)).collect();
        let ids = ids.map_err(self.failed(DOING))?;
        if !ids.is_empty() {
            failed::unpark(&mut tx, &ids).await.map_err(self.failed(DOING))?;
            audit::write(&mut tx, actor, "discard", &discarded(&ids, reason)).await.map_err(self.failed(DOING))?;
        }
        tx.commit().await.map_err(self.failed(DOING))?;
        Ok(ids.len() as u64)
    }
}
