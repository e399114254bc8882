//! The outbox as a source: lanes, positions, fenced settling.

use async_trait::async_trait;
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

use super::outbox::at;
use super::{SqliteStore, Tx, failed, now_ms, parked, recovery};
use crate::broker::topic::{self, Route, TopicFilter};
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::lease::Lease;
use crate::recovery::{LookBack, Mark};
use crate::source::{Opened, Page, ParkedKeys, ParkedRow, Position, Row, Settlement, Source};

/// The outbox for one destination.
pub(super) struct SqliteSource {
    pub store: SqliteStore,
    pub destination: String,
    pub topics: TopicFilter,
    pub lanes: u32,
}

/// A row of table `lane`.
struct LaneRow {
    lane: u32,
    lanes: u32,
    last_id: i64,
}

/// What decides the lane of a row: its key, or its number when it has none.
pub(super) fn hash(id: i64, key: Option<&str>) -> u32 {
    match key {
        Some(key) => topic::hash(key.as_bytes()),
        None => topic::hash(id.to_string().as_bytes()),
    }
}

impl SqliteSource {
    pub fn new(store: SqliteStore, route: &Route, lanes: u32) -> Self {
        Self { store, destination: route.destination.clone(), topics: route.topics.clone(), lanes: lanes.max(1) }
    }

    fn is_ours(&self, lease: &Lease, row: &Row) -> bool {
        let is_lane = self.lanes == 1 || hash(row.id, row.key.as_deref()) % self.lanes == lease.slot;
        // A row that is no event has no topic; the destination that takes the rest parks it.
        is_lane && self.topics.wants(row.event.as_ref().map_or("", Event::topic))
    }

    fn lost(&self, lease: &Lease) -> Error {
        let message =
            format!("lane {} of destination {:?} was opened by another instance", lease.slot, self.destination);
        Error::new(Kind::LeaseLost, message)
    }

    /// Makes sure that the destination has exactly our lanes, and returns them.
    async fn lanes(&self, tx: &mut Tx, lease: &Lease) -> Result<Vec<LaneRow>> {
        const DOING: &str = "the lane was not opened";
        let failed = |error| self.store.error(DOING, error);
        let rows = sqlx::query("SELECT lane, lanes, last_id FROM lane WHERE destination = ? ORDER BY lane")
            .bind(&self.destination)
            .fetch_all(&mut **tx)
            .await
            .map_err(failed)?;
        let mut found = Vec::with_capacity(rows.len());
        for row in &rows {
            found.push(lane_row(row).map_err(failed)?);
        }
        let other = found.iter().map(|row| row.lanes).find(|lanes| *lanes != self.lanes);
        if other.is_none() && !found.is_empty() {
            return Ok(found);
        }
        if let Some(other) = other {
            self.refuse_beside(tx, lease, other).await?;
        }
        // Other lanes hold other keys, so all begin where the slowest was: duplicates are allowed, losses are not.
        let last_id = found.iter().map(|row| row.last_id).min().unwrap_or(0);
        sqlx::query("DELETE FROM lane WHERE destination = ? AND lane >= ?")
            .bind(&self.destination)
            .bind(self.lanes)
            .execute(&mut **tx)
            .await
            .map_err(failed)?;
        // Epochs stay; a late settle of the old lanes is refused by their number.
        sqlx::query(
            "WITH RECURSIVE number(lane) AS (SELECT 0 UNION ALL SELECT lane + 1 FROM number WHERE lane + 1 < ?2)
             INSERT INTO lane (destination, lane, lanes, last_id, topics) SELECT ?1, lane, ?2, ?3, ?4 FROM number WHERE true
             ON CONFLICT DO UPDATE SET lanes = excluded.lanes, last_id = excluded.last_id",
        )
        .bind(&self.destination)
        .bind(self.lanes)
        .bind(last_id)
        .bind(self.topics.regex())
        .execute(&mut **tx)
        .await
        .map_err(failed)?;
        Ok((0..self.lanes).map(|lane| LaneRow { lane, lanes: self.lanes, last_id }).collect())
    }

    /// Two numbers of lanes at once would let two instances publish the same key. An instance counts when it has
    /// opened a lane under the other number and its lease still lasts.
    async fn refuse_beside(&self, tx: &mut Tx, lease: &Lease, other: u32) -> Result<()> {
        let holder = sqlx::query(concat!(
            "SELECT l.owner FROM lane n JOIN lease l ON l.group_name = ?2 AND l.slot = n.lane AND l.epoch = n.epoch
              WHERE n.destination = ?1 AND n.lanes <> ?3 AND l.owner <> ?4 AND l.expires_at > ",
            now_ms!(),
            " LIMIT 1"
        ))
        .bind(&self.destination)
        .bind(&lease.group)
        .bind(self.lanes)
        .bind(&lease.owner)
        .fetch_optional(&mut **tx)
        .await
        .map_err(self.store.failed("the lane was not opened"))?;
        let Some(holder) = holder else { return Ok(()) };
        let owner: String = holder.try_get(0).unwrap_or_default();
        Err(Error::new(
            Kind::Config,
            format!(
                "destination {:?} is set to {} lanes here, but {owner} works on it with {other}",
                self.destination, self.lanes
            ),
        )
        .with_remedy(format!(
            "set lanes to {other} here, or stop all instances of the destination and start them with {}",
            self.lanes
        )))
    }
}

const PARKED_UNREAD: &str = "the side table was not read";

#[async_trait]
impl Source for SqliteSource {
    async fn open(&self, lease: &Lease) -> Result<Opened> {
        const DOING: &str = "the lane was not opened";
        let mut tx = self.store.write(DOING).await?;
        let lanes = self.lanes(&mut tx, lease).await?;
        let Some(row) = lanes.iter().find(|row| row.lane == lease.slot) else {
            let message =
                format!("destination {:?} has {} lanes, there is no lane {}", self.destination, self.lanes, lease.slot);
            return Err(Error::new(Kind::Config, message));
        };
        let opened = sqlx::query("UPDATE lane SET epoch = ?3 WHERE destination = ?1 AND lane = ?2 AND epoch <= ?3")
            .bind(&self.destination)
            .bind(lease.slot)
            .bind(lease.epoch)
            .execute(&mut *tx)
            .await
            .map_err(self.store.failed(DOING))?;
        if opened.rows_affected() == 0 {
            return Err(self.lost(lease));
        }
        let topics: Option<String> = sqlx::query("SELECT topics FROM lane WHERE destination = ? AND lane = ?")
            .bind(&self.destination)
            .bind(lease.slot)
            .fetch_one(&mut *tx)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(self.store.failed(DOING))?;
        if topics != self.topics.regex() {
            return Err(topic::routes_changed(&self.destination));
        }
        let parked = parked::keys(&mut tx, self, lease.slot).await.map_err(self.store.failed(DOING))?;
        let discarded = failed::discarded(&mut tx, &self.destination).await.map_err(self.store.failed(DOING))?;
        tx.commit().await.map_err(self.store.failed(DOING))?;
        Ok(Opened { position: at(row.last_id), parked, discarded })
    }

    async fn look_back(&self, published: Option<&Mark>) -> Result<LookBack> {
        let route = Route { destination: self.destination.clone(), topics: self.topics.clone() };
        recovery::look_back(&self.store, &route, published).await
    }

    async fn read(&self, lease: &Lease, from: &Position, limit: usize) -> Result<Page> {
        let mut page = self.store.page(from.last_id, limit).await?;
        if self.lanes == 1 && self.topics.is_all() {
            return Ok(page);
        }
        loop {
            page.rows.retain(|row| self.is_ours(lease, row));
            if !page.rows.is_empty() {
                return Ok(page);
            }
            if !page.has_more {
                // Rows of others were passed. Said as more to come, so that the relay writes the position down
                // and an idle lane does not hold back retention.
                page.has_more = page.next.last_id > from.last_id;
                return Ok(page);
            }
            page = self.store.page(page.next.last_id, limit).await?;
        }
    }

    async fn settle(&self, lease: &Lease, settlement: &Settlement) -> Result<()> {
        const DOING: &str = "the lane was not settled";
        let mut tx = self.store.write(DOING).await?;
        let moved = sqlx::query(
            "UPDATE lane SET last_id = max(last_id, coalesce(?5, last_id))
              WHERE destination = ?1 AND lane = ?2 AND lanes = ?3 AND epoch = ?4",
        )
        .bind(&self.destination)
        .bind(lease.slot)
        .bind(self.lanes)
        .bind(lease.epoch)
        .bind(settlement.position.as_ref().map(|position| position.last_id))
        .execute(&mut *tx)
        .await
        .map_err(self.store.failed(DOING))?;
        if moved.rows_affected() == 0 {
            return Err(self.lost(lease));
        }
        parked::park(&mut tx, &self.destination, &settlement.park).await.map_err(self.store.failed(DOING))?;
        parked::remove(&mut tx, &self.destination, &settlement.published).await.map_err(self.store.failed(DOING))?;
        tx.commit().await.map_err(self.store.failed(DOING))
    }

    async fn parked(&self, lease: &Lease) -> Result<ParkedKeys> {
        let mut tx = self.store.read(PARKED_UNREAD).await?;
        let keys = parked::keys(&mut tx, self, lease.slot).await.map_err(self.store.failed(PARKED_UNREAD))?;
        tx.rollback().await.map_err(self.store.failed(PARKED_UNREAD))?;
        Ok(keys)
    }

    async fn due(&self, lease: &Lease, limit: usize) -> Result<Vec<ParkedRow>> {
        let mut tx = self.store.read(PARKED_UNREAD).await?;
        let rows = parked::due(&mut tx, self, lease.slot, limit).await.map_err(self.store.failed(PARKED_UNREAD))?;
        tx.rollback().await.map_err(self.store.failed(PARKED_UNREAD))?;
        Ok(rows)
    }

    async fn close(&self, _lease: &Lease) {}

    async fn set_asleep(&self, _lease: &Lease, _is_asleep: bool) -> Result<()> {
        // This process rings by itself; other processes are found by looking.
        Ok(())
    }

    async fn woken(&self) {
        self.store.inner.enqueued.notified().await;
    }
}

fn lane_row(row: &SqliteRow) -> Result<LaneRow, sqlx::Error> {
    Ok(LaneRow { lane: row.try_get(0)?, lanes: row.try_get(1)?, last_id: row.try_get(2)? })
}
