//! The file's lives, and past events for one consumer.

use async_trait::async_trait;
use chrono::{DateTime, SecondsFormat, Utc};
use serde_json::json;
use sqlx::Row as _;
use uuid::Uuid;

use super::dead::time;
use super::row::{self, event_columns, text_lossy};
use super::{SqliteStore, audit, retries};
use crate::broker::topic::Route;
use crate::dead::ReplayProgress;
use crate::error::Result;
use crate::event::Event;
use crate::inbox::Why;
use crate::recovery::{
    Before, Evidence, LookBack, Mark, NewLife, Recovery, Restored, republished_detail, republished_origin,
};
use crate::source::Row;
use crate::upkeep::Upkeep as _;

/// The event is gone when another one has its number, or when its number was never drawn here. That it is not there says
/// nothing: retention takes events away.
const IS_GONE: &str = "SELECT coalesce((SELECT event_id <> ?2 FROM outbox WHERE id = ?1),
        coalesce((SELECT max(seq) FROM sqlite_sequence WHERE name = 'outbox'), 0) < ?1)";

const KNOWN: &str = "SELECT m.value FROM json_each(?2) m
      WHERE EXISTS (SELECT 1 FROM inbox i WHERE i.consumer = ?1 AND i.message_id = m.value)
         OR EXISTS (SELECT 1 FROM held h WHERE h.consumer = ?1 AND h.message_id = m.value)
         OR EXISTS (SELECT 1 FROM dead_letter d WHERE d.consumer = ?1 AND d.message_id = m.value)";

/// A row that says `dead` belongs to a dead letter, which is the desk's.
const FORGET: &str = "DELETE FROM inbox WHERE consumer = ?1 AND message_id = ?2 AND state <> 'dead'
        AND NOT EXISTS (SELECT 1 FROM dead_letter d WHERE d.consumer = ?1 AND d.message_id = ?2)";

const PROGRESS: &str = "SELECT
      (SELECT count(*) FROM held WHERE consumer = ?1 AND message_id IN (SELECT value FROM json_each(?2))),
      (SELECT count(*) FROM dead_letter WHERE consumer = ?1 AND message_id IN (SELECT value FROM json_each(?2))
          AND state = 'dead')";

const PAST: &str = concat!(
    "SELECT id, ",
    event_columns!(),
    " FROM outbox WHERE id > ? AND created_at >= ? AND created_at < ? ORDER BY id LIMIT ?"
);

fn text(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::Micros, true)
}

fn list(ids: &[Uuid]) -> String {
    json!(ids).to_string()
}

/// See [`crate::source::Source::look_back`].
pub(super) async fn look_back(store: &SqliteStore, route: &Route, published: Option<&Mark>) -> Result<LookBack> {
    const DOING: &str = "the origin was not read";
    let mut tx = store.read(DOING).await?;
    let row = sqlx::query("SELECT life FROM origin").fetch_one(&mut *tx).await.map_err(store.failed(DOING))?;
    let life: i64 = row.try_get(0).map_err(store.failed(DOING))?;
    let Some(mark) = published.filter(|mark| mark.life >= life) else {
        return Ok(LookBack { life, restored: None });
    };
    let row = sqlx::query(IS_GONE).bind(mark.id).bind(mark.event_id.hyphenated().to_string()).fetch_one(&mut *tx).await;
    let is_gone: bool = row.and_then(|row| row.try_get(0)).map_err(store.failed(DOING))?;
    if !is_gone && mark.life == life {
        return Ok(LookBack { life, restored: None });
    }
    // What was committed since the restore is younger than what was published last.
    let newest = sqlx::query("SELECT id, created_at FROM outbox WHERE created_at <= ? ORDER BY id DESC LIMIT 1")
        .bind(text(mark.at))
        .fetch_optional(&mut *tx)
        .await
        .map_err(store.failed(DOING))?;
    let newest = newest.map(|row| Ok((row.try_get(0)?, time(&row, 1).unwrap_or_default()))).transpose();
    let newest = newest.map_err(store.failed(DOING))?;
    tx.rollback().await.map_err(store.failed(DOING))?;
    let (evidence, pending) = (Evidence::PublishedIsGone, store.backlog(route).await?.pending);
    Ok(LookBack { life, restored: Some(Restored { evidence, newest, published: Some(mark.clone()), pending }) })
}

#[async_trait]
impl Recovery for SqliteStore {
    async fn begin_life(&self, before: Before, actor: &str) -> Result<NewLife> {
        const DOING: &str = "the next life was not begun";
        let mut tx = self.write(DOING).await?;
        for sql in [
            "UPDATE lease SET owner = '', epoch = epoch + 1, expires_at = 0 WHERE group_name GLOB 'relay/*'",
            "UPDATE lane SET epoch = max(epoch, coalesce((SELECT l.epoch FROM lease l
                WHERE l.group_name = 'relay/' || lane.destination AND l.slot = lane.lane), 0))",
        ] {
            sqlx::query(sql).execute(&mut *tx).await.map_err(self.failed(DOING))?;
        }
        // There is no row before the first event.
        for sql in [
            "INSERT INTO sqlite_sequence (name, seq) SELECT 'outbox', 0
              WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'outbox')",
            "UPDATE sqlite_sequence SET seq = max(seq, ?1) WHERE name = 'outbox' AND ?1 > 0",
        ] {
            sqlx::query(sql).bind(before.id).execute(&mut *tx).await.map_err(self.failed(DOING))?;
        }
        let next = sqlx::query("UPDATE origin SET life = max(life, ?) + 1 RETURNING life").bind(before.life);
        let row = next.fetch_one(&mut *tx).await;
        let life: i64 = row.and_then(|row| row.try_get(0)).map_err(self.failed(DOING))?;
        let detail = json!({ "life": life, "moved": 0, "used": before.id });
        audit::write(&mut tx, actor, "recover", &detail).await.map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))?;
        Ok(NewLife { life, moved: 0 })
    }

    async fn lineage(&self) -> Result<String> {
        const DOING: &str = "the origin was not read";
        let row = sqlx::query("SELECT lineage FROM origin").fetch_one(&self.inner.reader).await;
        row.and_then(|row| row.try_get(0)).map_err(self.failed(DOING))
    }

    async fn past(&self, from: DateTime<Utc>, to: DateTime<Utc>, after: i64, limit: usize) -> Result<Vec<Row>> {
        const DOING: &str = "the outbox was not read";
        let rows = sqlx::query(PAST)
            .bind(after)
            .bind(text(from))
            .bind(text(to))
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .fetch_all(&self.inner.reader)
            .await
            .map_err(self.failed(DOING))?;
        rows.iter().map(|row| row::read_row(row).map_err(self.failed(DOING))).collect()
    }

    async fn knows_consumer(&self, consumer: &str) -> Result<bool> {
        const DOING: &str = "the inbox was not read";
        let query = sqlx::query("SELECT EXISTS (SELECT 1 FROM inbox WHERE consumer = ?)").bind(consumer);
        let row = query.fetch_one(&self.inner.reader).await;
        let has_inbox: bool = row.and_then(|row| row.try_get(0)).map_err(self.failed(DOING))?;
        Ok(has_inbox || self.consumers().await?.iter().any(|view| view.name == consumer))
    }

    async fn known_to(&self, consumer: &str, ids: &[Uuid]) -> Result<Vec<Uuid>> {
        const DOING: &str = "the inbox was not read";
        let query = sqlx::query(KNOWN).bind(consumer).bind(list(ids));
        let rows = query.fetch_all(&self.inner.reader).await.map_err(self.failed(DOING))?;
        let mut known = Vec::with_capacity(rows.len());
        for row in &rows {
            let id = text_lossy(row, 0).map_err(self.failed(DOING))?.unwrap_or_default();
            known.push(Uuid::try_parse(&id).unwrap_or_default());
        }
        Ok(known)
    }

    async fn republish(
        &self,
        consumer: &str,
        events: &[Event],
        up_to: i64,
        is_again: bool,
        actor: &str,
    ) -> Result<Vec<Uuid>> {
        const DOING: &str = "the events were not given to the consumer";
        let mut tx = self.write(DOING).await?;
        let mut given = Vec::with_capacity(events.len());
        for event in events {
            if is_again {
                let forget = sqlx::query(FORGET).bind(consumer).bind(event.id().hyphenated().to_string());
                forget.execute(&mut *tx).await.map_err(self.failed(DOING))?;
            }
            let origin = republished_origin(event);
            let hold = retries::hold(consumer, event, event.envelope()?, &origin, Why::Behind);
            if hold.execute(&mut *tx).await.map_err(self.failed(DOING))?.rows_affected() == 1 {
                given.push(event.id());
            }
        }
        if !given.is_empty() {
            let detail = republished_detail(consumer, &given, is_again, up_to);
            audit::write(&mut tx, actor, "republish", &detail).await.map_err(self.failed(DOING))?;
        }
        tx.commit().await.map_err(self.failed(DOING))?;
        Ok(given)
    }

    async fn republish_progress(&self, consumer: &str, ids: &[Uuid]) -> Result<ReplayProgress> {
        const DOING: &str = "the progress was not read";
        let query = sqlx::query(PROGRESS).bind(consumer).bind(list(ids));
        let row = query.fetch_one(&self.inner.reader).await.map_err(self.failed(DOING))?;
        let read = || -> Result<(i64, i64), sqlx::Error> { Ok((row.try_get(0)?, row.try_get(1)?)) };
        let (open, failed) = read().map_err(self.failed(DOING))?;
        let (open, failed) = (open as u64, failed as u64);
        Ok(ReplayProgress { open, failed, applied: (ids.len() as u64).saturating_sub(open + failed) })
    }
}
