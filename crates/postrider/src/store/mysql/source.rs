//! The outbox as a source: pending rows, fenced settling.
//!
//! A position is the number of a page. The lane remembers in memory which rows it has handed out in which page; a read returns
//! the oldest pending rows that are in none of them, a settle marks the rows of all pages up to the position as handled. What
//! a lane remembers dies with it: the next holder reads everything again that is still pending.
//!
//! A transaction that commits late leaves a pending row below those that were read, and the next read finds it. Within a key
//! the order of ids is the order of commits: the later of two transactions draws its id after the first has committed.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, MySqlConnection, Row as _};

use super::error::{db, is_deadlock};
use super::lease::is_alive;
use super::row::{self, event_columns};
use super::{DEADLOCKS_MAX, MysqlStore, failed, list, parked, recovery};
use crate::broker::topic::Route;
use crate::error::{Error, Kind, Result};
use crate::lease::Lease;
use crate::recovery::{LookBack, Mark};
use crate::source::{Opened, Page, ParkedKeys, ParkedRow, Position, Settlement, Source};

/// Rows that one statement marks.
const MARK_CHUNK: usize = 1_000;

/// The outbox for one destination.
pub(super) struct MysqlSource {
    pub store: MysqlStore,
    route: Route,
    pub destination: String,
    /// Which topics go there, as a regular expression.
    pub topics: Option<String>,
    pub lanes: u32,
    /// The lanes that this process works on.
    open: Mutex<HashMap<u32, OpenLane>>,
}

/// What a lane remembers, from `open` to `close`.
struct OpenLane {
    epoch: i64,
    /// The last page whose rows are all handled.
    settled: i64,
    /// The rows of the pages after it.
    pages: BTreeMap<i64, Vec<i64>>,
}

impl MysqlSource {
    pub fn new(store: MysqlStore, route: &Route, lanes: u32) -> Self {
        let (destination, topics) = (route.destination.clone(), route.topics.regex());
        Self { store, route: route.clone(), destination, topics, lanes: lanes.max(1), open: Mutex::default() }
    }

    fn lanes_open(&self) -> MutexGuard<'_, HashMap<u32, OpenLane>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Works on what the lane remembers.
    fn remembered<T>(&self, lease: &Lease, work: impl FnOnce(&mut OpenLane) -> T) -> Result<T> {
        match self.lanes_open().get_mut(&lease.slot) {
            Some(lane) if lane.epoch == lease.epoch => Ok(work(lane)),
            Some(lane) if lane.epoch > lease.epoch => Err(self.lost(lease)),
            _ => Err(Error::new(Kind::Unavailable, "the lane is not open")),
        }
    }

    fn lost(&self, lease: &Lease) -> Error {
        let message =
            format!("lane {} of destination {:?} was opened by another instance", lease.slot, self.destination);
        Error::new(Kind::LeaseLost, message)
    }

    /// Makes sure that the destination has exactly our lanes.
    async fn set_lanes(&self, tx: &mut MySqlConnection, lease: &Lease) -> Result<()> {
        // Two instances that open their first lanes at once take turns.
        super::lock(tx, &format!("lanes/{}", self.destination)).await?;
        let rows = sqlx::query("SELECT lanes FROM postrider_lane WHERE destination = ? FOR UPDATE")
            .bind(&self.destination)
            .fetch_all(&mut *tx)
            .await
            .map_err(db)?;
        let found = rows.iter().map(|row| row.try_get::<i32, _>(0).map_err(db)).collect::<Result<Vec<_>>>()?;
        let other = found.iter().copied().find(|lanes| *lanes != self.lanes as i32);
        if other.is_none() && !found.is_empty() {
            return Ok(());
        }
        if let Some(other) = other {
            self.refuse_beside(tx, lease, other).await?;
        }
        sqlx::query("DELETE FROM postrider_lane WHERE destination = ? AND lane >= ?")
            .bind(&self.destination)
            .bind(self.lanes)
            .execute(&mut *tx)
            .await
            .map_err(db)?;
        // Epochs stay; a late settle of the old lanes is refused by their number.
        let values = vec!["(?, ?, ?, ?)"; self.lanes as usize].join(", ");
        let insert = format!(
            "INSERT INTO postrider_lane (destination, lane, lanes, topics) VALUES {values} \
             ON DUPLICATE KEY UPDATE lanes = VALUES(lanes)"
        );
        let insert = (0..self.lanes).fold(sqlx::query(AssertSqlSafe(insert)).persistent(false), |query, lane| {
            query.bind(&self.destination).bind(lane).bind(self.lanes).bind(&self.topics)
        });
        insert.execute(tx).await.map_err(db)?;
        Ok(())
    }

    /// Two numbers of lanes at once would let two instances publish the same key. An instance counts when it has opened a
    /// lane under the other number and its lease still lasts.
    async fn refuse_beside(&self, tx: &mut MySqlConnection, lease: &Lease, other: i32) -> Result<()> {
        let holder = sqlx::query(concat!(
            "SELECT l.owner FROM postrider_lane n JOIN postrider_lease l \
               ON l.group_name = ? AND l.slot = n.lane AND l.epoch = n.epoch \
             WHERE n.destination = ? AND n.lanes <> ? AND l.owner <> ? AND ",
            is_alive!(),
            " LIMIT 1"
        ))
        .bind(&lease.group)
        .bind(&self.destination)
        .bind(self.lanes)
        .bind(&lease.owner)
        .fetch_optional(tx)
        .await
        .map_err(db)?;
        let Some(holder) = holder else { return Ok(()) };
        let owner: String = holder.try_get(0).map_err(db)?;
        let (destination, lanes) = (&self.destination, self.lanes);
        let text =
            format!("destination {destination:?} is set to {lanes} lanes here, but {owner} works on it with {other}");
        Err(Error::new(Kind::Config, text).with_remedy(format!(
            "set lanes to {other} here, or stop all instances of the destination and start them with {lanes}"
        )))
    }

    /// The oldest pending numbers of the lane.
    async fn pending(&self, lease: &Lease, limit: usize) -> Result<Vec<i64>> {
        // The index by force: an optimizer that walks the primary key looks at everything that was ever published.
        let query = match (&self.topics, self.lanes) {
            (None, 1) => sqlx::query(
                "SELECT id FROM postrider_outbox FORCE INDEX (postrider_outbox_state) WHERE state = 0 ORDER BY id LIMIT ?",
            ),
            (None, lanes) => sqlx::query(
                "SELECT id FROM postrider_outbox FORCE INDEX (postrider_outbox_state) \
                 WHERE state = 0 AND hash % ? = ? ORDER BY id LIMIT ?",
            )
            .bind(lanes)
            .bind(lease.slot),
            (Some(topics), lanes) => sqlx::query(
                "SELECT id FROM postrider_outbox FORCE INDEX (postrider_outbox_state) \
                 WHERE state = 0 AND hash % ? = ? AND topic REGEXP ? ORDER BY id LIMIT ?",
            )
            .bind(lanes)
            .bind(lease.slot)
            .bind(topics),
        };
        let rows = query.bind(limit as i64).fetch_all(&self.store.own).await.map_err(db)?;
        rows.iter().map(|row| row.try_get(0).map_err(db)).collect()
    }

    /// The rows of all unsettled pages up to this one.
    fn handled(&self, lease: &Lease, position: Option<&Position>) -> Result<Vec<i64>> {
        let Some(position) = position else { return Ok(Vec::new()) };
        self.remembered(lease, |lane| lane.pages.range(..=position.last_id).flat_map(|(_, ids)| ids).copied().collect())
    }

    async fn write(&self, lease: &Lease, settlement: &Settlement, handled: &[i64]) -> Result<()> {
        let mut tx = self.store.write().await?;
        // The lane's row stays locked until the commit, so that nobody can take over between the check and the writes.
        let fence = sqlx::query(
            "SELECT 1 FROM postrider_lane WHERE destination = ? AND lane = ? AND lanes = ? AND epoch = ? FOR UPDATE",
        )
        .bind(&self.destination)
        .bind(lease.slot)
        .bind(self.lanes)
        .bind(lease.epoch)
        .fetch_optional(&mut *tx)
        .await
        .map_err(db)?;
        if fence.is_none() {
            tx.rollback().await.map_err(db)?;
            return Err(self.lost(lease));
        }
        parked::park(&mut tx, &self.destination, &settlement.park).await?;
        parked::remove(&mut tx, &self.destination, &settlement.published).await?;
        // What is parked is handled: the side table has it.
        let mut handled: Vec<i64> = handled.iter().copied().chain(settlement.park.iter().map(|park| park.id)).collect();
        handled.sort_unstable();
        handled.dedup();
        for chunk in handled.chunks(MARK_CHUNK) {
            // By the primary key, however small the table: a scan would meet the rows of producers that are not done.
            let mark =
                format!("UPDATE postrider_outbox FORCE INDEX (PRIMARY) SET state = 1 WHERE id IN ({})", list(chunk));
            sqlx::raw_sql(AssertSqlSafe(mark)).execute(&mut *tx).await.map_err(db)?;
        }
        tx.commit().await.map_err(db)
    }
}

#[async_trait]
impl Source for MysqlSource {
    async fn open(&self, lease: &Lease) -> Result<Opened> {
        let mut tx = self.store.write().await?;
        self.set_lanes(&mut tx, lease).await?;
        let opened = sqlx::query(
            "UPDATE postrider_lane SET epoch = ? WHERE destination = ? AND lane = ? AND lanes = ? AND epoch <= ?",
        )
        .bind(lease.epoch)
        .bind(&self.destination)
        .bind(lease.slot)
        .bind(self.lanes)
        .bind(lease.epoch)
        .execute(&mut *tx)
        .await
        .map_err(db)?;
        if opened.rows_affected() == 0 {
            return Err(self.lost(lease));
        }
        let parked = parked::keys(&mut tx, self, lease.slot).await?;
        let discarded = failed::discarded(&mut tx, &self.destination).await?;
        tx.commit().await.map_err(db)?;
        let mut open = self.lanes_open();
        let fresh = || OpenLane { epoch: lease.epoch, settled: 0, pages: BTreeMap::new() };
        let lane = open.entry(lease.slot).or_insert_with(fresh);
        if lane.epoch > lease.epoch {
            return Err(self.lost(lease));
        }
        // A lane that is opened once more keeps its pages.
        if lane.epoch < lease.epoch {
            *lane = fresh();
        }
        Ok(Opened { position: Position::at_id(lane.settled), parked, discarded })
    }

    async fn look_back(&self, published: Option<&Mark>) -> Result<LookBack> {
        recovery::look_back(&self.store, &self.route, published).await
    }

    async fn read(&self, lease: &Lease, from: &Position, limit: usize) -> Result<Page> {
        // Before the look: what is settled meanwhile may be seen as pending by it, and must not count as new.
        let known: HashSet<i64> = self.remembered(lease, |lane| {
            lane.pages.split_off(&(from.last_id + 1));
            lane.pages.values().flatten().copied().collect()
        })?;
        let wanted = known.len() + limit;
        let pending = self.pending(lease, wanted).await?;
        let mut has_more = pending.len() >= wanted;
        let mut ids: Vec<i64> = pending.into_iter().filter(|id| !known.contains(id)).collect();
        has_more |= ids.len() > limit;
        ids.truncate(limit);
        if ids.is_empty() {
            return Ok(Page { rows: Vec::new(), next: from.clone(), has_more: false });
        }
        let query =
            format!("SELECT id, {} FROM postrider_outbox WHERE id IN ({}) ORDER BY id", event_columns!(), list(&ids));
        let found = sqlx::raw_sql(AssertSqlSafe(query)).fetch_all(&self.store.own).await.map_err(db)?;
        let mut rows = Vec::with_capacity(found.len());
        for row in &found {
            rows.push(row::read_row(row).map_err(db)?);
        }
        let next = from.last_id + 1;
        self.remembered(lease, |lane| lane.pages.insert(next, ids))?;
        Ok(Page { rows, next: Position::at_id(next), has_more })
    }

    async fn settle(&self, lease: &Lease, settlement: &Settlement) -> Result<()> {
        let handled = self.handled(lease, settlement.position.as_ref())?;
        let mut tries = 0;
        loop {
            match self.write(lease, settlement, &handled).await {
                Ok(()) => break,
                Err(error) if is_deadlock(&error) && tries < DEADLOCKS_MAX => tries += 1,
                Err(error) => return Err(error),
            }
        }
        if let Some(position) = &settlement.position {
            // A lane that was closed or opened anew meanwhile has forgotten the pages already.
            let _ = self.remembered(lease, |lane| {
                lane.settled = lane.settled.max(position.last_id);
                lane.pages = lane.pages.split_off(&(lane.settled + 1));
            });
        }
        Ok(())
    }

    async fn parked(&self, lease: &Lease) -> Result<ParkedKeys> {
        let mut connection = self.store.own.acquire().await.map_err(db)?;
        parked::keys(&mut connection, self, lease.slot).await
    }

    async fn due(&self, lease: &Lease, limit: usize) -> Result<Vec<ParkedRow>> {
        let mut connection = self.store.own.acquire().await.map_err(db)?;
        parked::due(&mut connection, self, lease.slot, limit).await
    }

    async fn close(&self, lease: &Lease) {
        let mut open = self.lanes_open();
        if open.get(&lease.slot).is_some_and(|lane| lane.epoch == lease.epoch) {
            open.remove(&lease.slot);
        }
    }

    async fn set_asleep(&self, _lease: &Lease, _is_asleep: bool) -> Result<()> {
        // This process rings by itself; other processes are found by looking.
        Ok(())
    }

    async fn woken(&self) {
        self.store.rings.enqueued.notified().await;
    }
}
