//! The database's lives, and past events for one consumer.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde_json::json;
use sqlx::{PgConnection, Row as _};
use uuid::Uuid;

use super::error::db;
use super::source::{columns, log_row};
use super::{PostgresStore, audit, retries};
use crate::broker::topic::Route;
use crate::dead::ReplayProgress;
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::inbox::Why;
use crate::recovery::{
    Before, Evidence, LookBack, Mark, NewLife, Recovery, Restored, republished_detail, republished_origin,
};
use crate::source::Row;
use crate::upkeep::Upkeep as _;

/// Which database this is, as a literal for `concat!`: the cluster and the database in it.
macro_rules! identity {
    () => {
        "(SELECT system_identifier::text || '/' || (SELECT oid FROM pg_database WHERE datname = current_database()) \
          FROM pg_control_system())"
    };
}

const LOOK: &str = concat!(
    "SELECT o.life, o.identity, ",
    identity!(),
    ", EXISTS (SELECT 1 FROM postrider.lane l WHERE ($1 = '' OR l.destination = $1) \
         AND pg_snapshot_xmax(l.done) > pg_snapshot_xmax(pg_current_snapshot())) FROM postrider.origin o"
);

/// The event is gone when another one has its number, or when its number was never drawn here. That it is not there says
/// nothing: retention takes events away.
const IS_GONE: &str = "SELECT coalesce((SELECT event_id <> $2 FROM postrider.outbox WHERE id = $1 LIMIT 1), \
     (SELECT CASE WHEN is_called THEN last_value ELSE 0 END < $1 FROM postrider.outbox_id_seq))";

/// The newest event from before: what was committed since the restore is younger than what was published last.
const NEWEST: &str = "SELECT id, created_at FROM postrider.outbox WHERE $1::timestamptz IS NULL OR created_at <= $1 \
     ORDER BY id DESC LIMIT 1";

/// What some destination has not handled belongs to this transaction from now on, and so comes after every position. So does
/// what has a number that this database has reached: it may have been committed since the restore, and must not be taken for
/// published because an old position says so.
const MOVE_WAITING: &str = "UPDATE postrider.outbox o SET tx = pg_current_xact_id() \
     WHERE o.tx <= pg_current_xact_id() OR NOT EXISTS (SELECT 1 FROM postrider.lane) OR EXISTS (SELECT 1 FROM postrider.lane l \
       WHERE l.lane = postrider.lane_of(o.key, o.id, l.lanes) AND (l.topics IS NULL OR o.topic ~ l.topics) \
         AND NOT pg_visible_in_snapshot(o.tx, l.done) \
         AND NOT coalesce(o.id <= l.last_id AND pg_visible_in_snapshot(o.tx, l.target), false))";

/// What was handled and has a number that is yet to come here gets the oldest of all.
const MOVE_HANDLED: &str = "UPDATE postrider.outbox SET tx = '3'::xid8 WHERE tx > pg_current_xact_id()";

/// Whoever holds a lane loses it: its next settlement is refused.
const FENCE: &str = "WITH fenced AS ( \
       UPDATE postrider.lease SET epoch = epoch + 1, expires_at = '-infinity' WHERE group_name LIKE 'relay/%' AND slot >= 0 \
       RETURNING group_name, slot, epoch \
     ) UPDATE postrider.lane l SET epoch = greatest(l.epoch, f.epoch) FROM fenced f \
       WHERE f.group_name = 'relay/' || l.destination AND f.slot = l.lane";

const PAST: &str = concat!(
    "SELECT '', id, ",
    columns!(),
    " FROM postrider.outbox WHERE id > $1 AND created_at >= $2 AND created_at < $3 ORDER BY id LIMIT $4"
);

const KNOWN: &str = "SELECT m.id FROM unnest($2::uuid[]) AS m (id) \
     WHERE EXISTS (SELECT 1 FROM postrider.inbox i WHERE i.consumer = $1 AND i.message_id = m.id) \
        OR EXISTS (SELECT 1 FROM postrider.held h WHERE h.consumer = $1 AND h.message_id = m.id) \
        OR EXISTS (SELECT 1 FROM postrider.dead_letter d WHERE d.consumer = $1 AND d.message_id = m.id)";

/// A row that says `dead` belongs to a dead letter, which is the desk's.
const FORGET: &str = "DELETE FROM postrider.inbox i WHERE consumer = $1 AND message_id = $2 AND state <> 'dead' \
     AND NOT EXISTS (SELECT 1 FROM postrider.dead_letter d WHERE d.consumer = $1 AND d.message_id = $2)";

const PROGRESS: &str = "SELECT \
       (SELECT count(*) FROM postrider.held WHERE consumer = $1 AND message_id = ANY ($2)), \
       (SELECT count(*) FROM postrider.dead_letter WHERE consumer = $1 AND message_id = ANY ($2) AND state = 'dead')";

/// See [`crate::source::Source::look_back`].
pub(super) async fn look_back(store: &PostgresStore, route: &Route, published: Option<&Mark>) -> Result<LookBack> {
    let row = sqlx::query(LOOK).bind(&route.destination).fetch_one(&store.own).await.map_err(db)?;
    let (life, noted): (i64, Option<String>) = (row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?);
    let (identity, is_ahead): (Option<String>, bool) = (row.try_get(2).map_err(db)?, row.try_get(3).map_err(db)?);
    let published = published.filter(|mark| mark.life >= life);
    let mut evidence = match &noted {
        None => {
            note(&store.own, identity.as_deref()).await?;
            None
        }
        Some(noted) if identity.as_ref().is_some_and(|identity| identity != noted) => Some(Evidence::OtherDatabase),
        Some(_) => None,
    };
    if is_ahead {
        evidence = Some(Evidence::PositionAhead);
    }
    if let (false, Some(mark)) = (is_ahead, published) {
        let is_gone: bool = sqlx::query(IS_GONE)
            .bind(mark.id)
            .bind(mark.event_id)
            .fetch_one(&store.own)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(db)?;
        if is_gone || mark.life > life {
            evidence = Some(Evidence::PublishedIsGone);
        }
    }
    let Some(evidence) = evidence else { return Ok(LookBack { life, restored: None }) };
    let newest =
        sqlx::query(NEWEST).bind(published.map(|mark| mark.at)).fetch_optional(&store.own).await.map_err(db)?;
    let newest = newest.map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).transpose().map_err(db)?;
    let pending = store.backlog(route).await?.pending;
    Ok(LookBack { life, restored: Some(Restored { evidence, newest, published: published.cloned(), pending }) })
}

/// The first relay that looks writes down which database this is.
async fn note(pool: &sqlx::PgPool, identity: Option<&str>) -> Result<()> {
    sqlx::query("UPDATE postrider.origin SET identity = $1, noted_at = clock_timestamp() WHERE identity IS NULL")
        .bind(identity)
        .execute(pool)
        .await
        .map_err(db)?;
    Ok(())
}

/// Everything before this transaction, but for what is still open; what this transaction and later ones write comes after.
fn before(xid: u64, snapshot: &str) -> Result<String> {
    let corrupt = || Error::new(Kind::Corrupt, "the database gave no snapshot");
    let open = snapshot.split(':').nth(2).ok_or_else(corrupt)?;
    let open: Vec<u64> = open.split(',').filter_map(|xid| xid.parse().ok()).filter(|open| *open < xid).collect();
    let oldest = open.iter().copied().min().unwrap_or(xid);
    let list: Vec<String> = open.iter().map(u64::to_string).collect();
    Ok(format!("{oldest}:{xid}:{}", list.join(",")))
}

/// Brings positions and transaction numbers of another database into those of this one. Producers wait meanwhile.
async fn translate(tx: &mut PgConnection) -> Result<u64> {
    sqlx::raw_sql("SET LOCAL enable_seqscan = on; LOCK TABLE postrider.outbox IN SHARE ROW EXCLUSIVE MODE")
        .execute(&mut *tx)
        .await
        .map_err(db)?;
    let row = sqlx::query("SELECT pg_current_xact_id()::text").fetch_one(&mut *tx).await.map_err(db)?;
    let xid: String = row.try_get(0).map_err(db)?;
    // A statement later, so that our own number is below the end of the snapshot.
    let row = sqlx::query("SELECT pg_current_snapshot()::text").fetch_one(&mut *tx).await.map_err(db)?;
    let xid = xid.parse().map_err(|_| Error::new(Kind::Corrupt, "the database gave no transaction number"))?;
    let position = before(xid, row.try_get(0).map_err(db)?)?;
    let moved = sqlx::query(MOVE_WAITING).execute(&mut *tx).await.map_err(db)?.rows_affected();
    sqlx::query(MOVE_HANDLED).execute(&mut *tx).await.map_err(db)?;
    sqlx::query("UPDATE postrider.lane SET done = $1::text::pg_snapshot, target = NULL, last_id = 0")
        .bind(position)
        .execute(tx)
        .await
        .map_err(db)?;
    Ok(moved)
}

#[async_trait]
impl Recovery for PostgresStore {
    async fn begin_life(&self, before: Before, actor: &str) -> Result<NewLife> {
        let mut tx = self.own.begin().await.map_err(db)?;
        // No lane is opened, none settles, until this is done.
        sqlx::raw_sql("LOCK TABLE postrider.lane IN ACCESS EXCLUSIVE MODE").execute(&mut *tx).await.map_err(db)?;
        let row = sqlx::query(LOOK).bind("").fetch_one(&mut *tx).await.map_err(db)?;
        let (noted, identity): (Option<String>, Option<String>) =
            (row.try_get(1).map_err(db)?, row.try_get(2).map_err(db)?);
        // Databases of one cluster share their numbers, so positions stay true there.
        let cluster = |identity: &Option<String>| identity.as_ref()?.split('/').next().map(str::to_owned);
        let is_other = noted.is_some() && cluster(&noted) != cluster(&identity);
        let moved = match is_other || row.try_get(3).map_err(db)? {
            true => translate(&mut tx).await?,
            false => 0,
        };
        sqlx::query(FENCE).execute(&mut *tx).await.map_err(db)?;
        if before.id > 0 {
            sqlx::query(
                "SELECT setval('postrider.outbox_id_seq', greatest(last_value, $1)) FROM postrider.outbox_id_seq",
            )
            .bind(before.id)
            .execute(&mut *tx)
            .await
            .map_err(db)?;
        }
        let life: i64 = sqlx::query(
            "UPDATE postrider.origin SET identity = $1, life = greatest(life, $2) + 1, noted_at = clock_timestamp() \
             RETURNING life",
        )
        .bind(&identity)
        .bind(before.life)
        .fetch_one(&mut *tx)
        .await
        .and_then(|row| row.try_get(0))
        .map_err(db)?;
        audit::write(&mut tx, actor, "recover", &json!({ "life": life, "moved": moved, "used": before.id })).await?;
        tx.commit().await.map_err(db)?;
        Ok(NewLife { life, moved })
    }

    async fn keep_positions(&self, actor: &str) -> Result<()> {
        let mut tx = self.own.begin().await.map_err(db)?;
        let row = sqlx::query(LOOK).bind("").fetch_one(&mut *tx).await.map_err(db)?;
        if row.try_get(3).map_err(db)? {
            return Err(Error::new(Kind::Mismatch, "positions are ahead of this database, so they cannot be kept")
                .with_remedy("this is no pg_upgrade but a restore: begin the next life, without --keep-positions"));
        }
        let (noted, identity): (Option<String>, Option<String>) =
            (row.try_get(1).map_err(db)?, row.try_get(2).map_err(db)?);
        sqlx::query("UPDATE postrider.origin SET identity = $1, noted_at = clock_timestamp()")
            .bind(&identity)
            .execute(&mut *tx)
            .await
            .map_err(db)?;
        audit::write(&mut tx, actor, "recover", &json!({ "kept": true, "from": noted, "to": identity })).await?;
        tx.commit().await.map_err(db)
    }

    async fn lineage(&self) -> Result<String> {
        let row = sqlx::query("SELECT lineage::text FROM postrider.origin").fetch_one(&self.own).await.map_err(db)?;
        row.try_get(0).map_err(db)
    }

    async fn past(&self, from: DateTime<Utc>, to: DateTime<Utc>, after: i64, limit: usize) -> Result<Vec<Row>> {
        let rows = sqlx::query(PAST)
            .bind(after)
            .bind(from)
            .bind(to)
            .bind(limit as i64)
            .fetch_all(&self.own)
            .await
            .map_err(db)?;
        rows.iter().map(log_row).collect()
    }

    async fn knows_consumer(&self, consumer: &str) -> Result<bool> {
        let row = sqlx::query("SELECT EXISTS (SELECT 1 FROM postrider.inbox WHERE consumer = $1)").bind(consumer);
        let has_inbox: bool = row.fetch_one(&self.own).await.and_then(|row| row.try_get(0)).map_err(db)?;
        Ok(has_inbox || self.consumers().await?.iter().any(|view| view.name == consumer))
    }

    async fn known_to(&self, consumer: &str, ids: &[Uuid]) -> Result<Vec<Uuid>> {
        let rows = sqlx::query(KNOWN).bind(consumer).bind(ids).fetch_all(&self.own).await.map_err(db)?;
        rows.iter().map(|row| row.try_get(0).map_err(db)).collect()
    }

    async fn republish(
        &self,
        consumer: &str,
        events: &[Event],
        up_to: i64,
        is_again: bool,
        actor: &str,
    ) -> Result<Vec<Uuid>> {
        let mut tx = self.own.begin().await.map_err(db)?;
        let mut given = Vec::with_capacity(events.len());
        for event in events {
            if is_again {
                sqlx::query(FORGET).bind(consumer).bind(event.id()).execute(&mut *tx).await.map_err(db)?;
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
        let row = sqlx::query(PROGRESS).bind(consumer).bind(ids).fetch_one(&self.own).await.map_err(db)?;
        let (open, failed): (i64, i64) = (row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?);
        let (open, failed) = (open as u64, failed as u64);
        Ok(ReplayProgress { open, failed, applied: (ids.len() as u64).saturating_sub(open + failed) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_position_leaves_out_what_is_open_and_what_comes() {
        assert_eq!(before(90, "90:92:").unwrap(), "90:90:");
        assert_eq!(before(90, "70:99:70,85,95").unwrap(), "70:90:70,85");
        assert!(before(90, "").is_err());
    }
}
