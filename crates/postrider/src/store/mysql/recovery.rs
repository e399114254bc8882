//! The database's lives, and past events for one consumer.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde_json::json;
use sqlx::{AssertSqlSafe, Row as _};
use uuid::Uuid;

use super::error::db;
use super::row::{self, event_columns};
use super::{MysqlStore, audit, marks, retries};
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

/// Whether another event has the number; no row when none has.
const IS_OTHER: &str = "SELECT event_id <> ? FROM postrider_outbox WHERE id = ?";

/// A row that says `dead` belongs to a dead letter, which is the desk's.
const FORGET: &str = "DELETE FROM postrider_inbox WHERE consumer = ? AND message_id = ? AND state <> 'dead' \
     AND NOT EXISTS (SELECT 1 FROM postrider_dead_letter d WHERE d.consumer = ? AND d.message_id = ?)";

const PAST: &str = concat!(
    "SELECT id, ",
    event_columns!(),
    " FROM postrider_outbox WHERE id > ? AND created_at >= ? AND created_at < ? ORDER BY id LIMIT ?"
);

/// Whoever holds a lane loses it: its next settlement is refused.
const FENCE: [&str; 2] = [
    "UPDATE postrider_lease SET owner = '', epoch = epoch + 1, expires_at = '1970-01-01' WHERE group_name LIKE 'relay/%'",
    "UPDATE postrider_lane n JOIN postrider_lease l ON l.group_name = CONCAT('relay/', n.destination) AND l.slot = n.lane \
     SET n.epoch = GREATEST(n.epoch, l.epoch)",
];

/// The event is gone when another one has its number, or when its number was never drawn here. That it is not there says
/// nothing: retention takes events away.
async fn is_gone(store: &MysqlStore, mark: &Mark) -> Result<bool> {
    let query = sqlx::query(IS_OTHER).bind(mark.event_id.hyphenated().to_string()).bind(mark.id);
    if let Some(row) = query.fetch_optional(&store.own).await.map_err(db)? {
        return row.try_get(0).map_err(db);
    }
    // information_schema tells the number as it was up to a day ago; this asks the table.
    let row = sqlx::raw_sql("SHOW CREATE TABLE postrider_outbox").fetch_one(&store.own).await.map_err(db)?;
    Ok(next_number(row.try_get(1).map_err(db)?) <= mark.id)
}

/// The number that the next row gets, of a table's definition, which names it once there was a row.
fn next_number(definition: &str) -> i64 {
    let options = definition.rsplit_once("\n)").map_or("", |(_, options)| options);
    let number = options.split_whitespace().find_map(|option| option.strip_prefix("AUTO_INCREMENT="));
    number.and_then(|number| number.parse().ok()).unwrap_or(1)
}

/// See [`crate::source::Source::look_back`].
pub(super) async fn look_back(store: &MysqlStore, route: &Route, published: Option<&Mark>) -> Result<LookBack> {
    let row = sqlx::query("SELECT life FROM postrider_origin").fetch_one(&store.own).await.map_err(db)?;
    let life: i64 = row.try_get(0).map_err(db)?;
    let Some(mark) = published.filter(|mark| mark.life >= life) else {
        return Ok(LookBack { life, restored: None });
    };
    if !is_gone(store, mark).await? && mark.life == life {
        return Ok(LookBack { life, restored: None });
    }
    // What was committed since the restore is younger than what was published last.
    let newest =
        sqlx::query("SELECT id, created_at FROM postrider_outbox WHERE created_at <= ? ORDER BY id DESC LIMIT 1")
            .bind(mark.at.naive_utc())
            .fetch_optional(&store.own)
            .await
            .map_err(db)?;
    let newest = newest.map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).transpose().map_err(db)?;
    let (evidence, pending) = (Evidence::PublishedIsGone, store.backlog(route).await?.pending);
    Ok(LookBack { life, restored: Some(Restored { evidence, newest, published: Some(mark.clone()), pending }) })
}

impl MysqlStore {
    /// How many rows of a table have one of these ids for the consumer.
    async fn count_messages(&self, from: &str, consumer: &str, ids: &[Uuid]) -> Result<u64> {
        let sql = format!("SELECT COUNT(*) FROM {from} AND consumer = ? AND message_id IN ({})", marks(ids.len()));
        let mut query = sqlx::query(AssertSqlSafe(sql)).persistent(false).bind(consumer);
        for id in ids {
            query = query.bind(id.hyphenated().to_string());
        }
        let count: i64 = query.fetch_one(&self.own).await.and_then(|row| row.try_get(0)).map_err(db)?;
        Ok(count as u64)
    }
}

#[async_trait]
impl Recovery for MysqlStore {
    async fn begin_life(&self, before: Before, actor: &str) -> Result<NewLife> {
        let mut tx = self.write().await?;
        for sql in FENCE {
            sqlx::query(sql).execute(&mut *tx).await.map_err(db)?;
        }
        let next = sqlx::query("UPDATE postrider_origin SET life = GREATEST(life, ?) + 1").bind(before.life);
        next.execute(&mut *tx).await.map_err(db)?;
        let row = sqlx::query("SELECT life FROM postrider_origin").fetch_one(&mut *tx).await.map_err(db)?;
        let life: i64 = row.try_get(0).map_err(db)?;
        audit::write(&mut tx, actor, "recover", &json!({ "life": life, "moved": 0, "used": before.id })).await?;
        tx.commit().await.map_err(db)?;
        if before.id > 0 {
            // Commits by itself, and never sets the number back.
            let sql = format!("ALTER TABLE postrider_outbox AUTO_INCREMENT = {}", before.id.saturating_add(1));
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(&self.own).await.map_err(db)?;
        }
        Ok(NewLife { life, moved: 0 })
    }

    async fn lineage(&self) -> Result<String> {
        let row = sqlx::query("SELECT lineage FROM postrider_origin").fetch_one(&self.own).await.map_err(db)?;
        row.try_get(0).map_err(db)
    }

    async fn past(&self, from: DateTime<Utc>, to: DateTime<Utc>, after: i64, limit: usize) -> Result<Vec<Row>> {
        let rows = sqlx::query(PAST)
            .bind(after)
            .bind(from.naive_utc())
            .bind(to.naive_utc())
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .fetch_all(&self.own)
            .await
            .map_err(db)?;
        rows.iter().map(|row| row::read_row(row).map_err(db)).collect()
    }

    async fn knows_consumer(&self, consumer: &str) -> Result<bool> {
        let row = sqlx::query("SELECT EXISTS (SELECT 1 FROM postrider_inbox WHERE consumer = ?) = 1").bind(consumer);
        let has_inbox: bool = row.fetch_one(&self.own).await.and_then(|row| row.try_get(0)).map_err(db)?;
        Ok(has_inbox || self.consumers().await?.iter().any(|view| view.name == consumer))
    }

    async fn known_to(&self, consumer: &str, ids: &[Uuid]) -> Result<Vec<Uuid>> {
        let mut known = Vec::new();
        for table in ["postrider_inbox", "postrider_held", "postrider_dead_letter"] {
            let sql =
                format!("SELECT message_id FROM {table} WHERE consumer = ? AND message_id IN ({})", marks(ids.len()));
            let mut query = sqlx::query(AssertSqlSafe(sql)).persistent(false).bind(consumer);
            for id in ids {
                query = query.bind(id.hyphenated().to_string());
            }
            for row in &query.fetch_all(&self.own).await.map_err(db)? {
                known.push(Uuid::try_parse(row.try_get(0).map_err(db)?).unwrap_or_default());
            }
        }
        known.sort_unstable();
        known.dedup();
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
        let mut tx = self.write().await?;
        let mut given = Vec::with_capacity(events.len());
        for event in events {
            let id = event.id().hyphenated().to_string();
            if is_again {
                let forget = sqlx::query(FORGET).bind(consumer).bind(&id).bind(consumer).bind(&id);
                forget.execute(&mut *tx).await.map_err(db)?;
            }
            let origin = republished_origin(event);
            if retries::hold(&mut tx, consumer, event, &origin, Why::Behind).await? {
                given.push(event.id());
            }
        }
        if !given.is_empty() {
            let detail = republished_detail(consumer, &given, is_again, up_to);
            audit::write(&mut tx, actor, "republish", &detail).await?;
        }
        tx.commit().await.map_err(db)?;
        Ok(given)
    }

    async fn republish_progress(&self, consumer: &str, ids: &[Uuid]) -> Result<ReplayProgress> {
        if ids.is_empty() {
            return Ok(ReplayProgress::default());
        }
        let open = self.count_messages("postrider_held WHERE true", consumer, ids).await?;
        let failed = self.count_messages("postrider_dead_letter WHERE state = 'dead'", consumer, ids).await?;
        Ok(ReplayProgress { open, failed, applied: (ids.len() as u64).saturating_sub(open + failed) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_number_is_read_from_the_options_alone() {
        let table =
            "CREATE TABLE `t` (\n  `id` bigint NOT NULL AUTO_INCREMENT,\n  `AUTO_INCREMENT=9` int\n) ENGINE=InnoDB";
        assert_eq!(next_number(table), 1);
        assert_eq!(next_number(&format!("{table} AUTO_INCREMENT=4711 DEFAULT CHARSET=utf8mb4")), 4711);
        assert_eq!(next_number(&format!("{table} AUTO_INCREMENT=12")), 12);
    }
}
