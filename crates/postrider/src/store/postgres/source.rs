//! The log between two snapshots.
//!
//! `done` is the snapshot up to which everything was handled. A *window* is every row that is not visible in `done` but
//! is visible now: rows of transactions that began after `done` (`tx >= xmax(done)`), and of those that were open then
//! (`tx = any(xip(done))`). Inside the window rows are ordered by id: of two transactions on one key the later one draws
//! its id after the earlier one has committed, so the order of ids is the order of commits within a key. The order of
//! transaction ids is not: a transaction may get its id long before it touches the key.
//!
//! A window with more rows than one page is kept as `target` and read on by id; `(done, target, last_id)` is the position.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use sqlx::pool::PoolConnection;
use sqlx::postgres::PgRow;
use sqlx::{Connection as _, PgConnection, PgPool, Postgres, Row as _};
use tokio::sync::Mutex;

use super::PostgresStore;
use super::error::db;
use super::wake::Wake;
use super::{failed, parked, recovery, row};
use crate::broker::topic::{self, Route};
use crate::error::{Error, Kind, Result};
use crate::lease::Lease;
use crate::recovery::{LookBack, Mark};
use crate::source::{Opened, Page, ParkedKeys, ParkedRow, Position, Row, Settlement, Source};

/// The event's columns, as `row::event` reads them.
macro_rules! columns {
    () => {
        "event_id, topic, key, type, payload::text, payload_bytes, content_type, source, subject, tenant, correlation, \
         causation, traceparent, tracestate, headers, created_at"
    };
}
pub(super) use columns;

/// A new window. `id + 0` keeps the planner from walking the id index from the oldest row on. The payloads are made text
/// after the limit: above a sort they would be, all of the window's, before it.
const WINDOW: &str = concat!(
    "SELECT s.now::text, w.id, ",
    "w.event_id, w.topic, w.key, w.type, w.payload::text, w.payload_bytes, w.content_type, w.source, w.subject, ",
    "w.tenant, w.correlation, w.causation, w.traceparent, w.tracestate, w.headers, w.created_at ",
    "FROM (SELECT pg_current_snapshot() AS now) s LEFT JOIN ( \
       SELECT * FROM ( \
         SELECT * FROM postrider.outbox \
         WHERE tx >= (SELECT pg_snapshot_xmax($1::text::pg_snapshot)) \
           AND tx < (SELECT pg_snapshot_xmax(pg_current_snapshot())) \
           AND ($3 = 1 OR postrider.lane_of(key, id, $3) = $4) AND ($5::text IS NULL OR topic ~ $5) \
         UNION ALL \
         SELECT * FROM postrider.outbox \
         WHERE tx = ANY (ARRAY(SELECT pg_snapshot_xip($1::text::pg_snapshot))) \
           AND ($3 = 1 OR postrider.lane_of(key, id, $3) = $4) AND ($5::text IS NULL OR topic ~ $5) \
       ) u ORDER BY u.id + 0 LIMIT $2 \
     ) w ON true ORDER BY w.id + 0"
);

/// The next page of a window that is being read. The conditions on tx are functions, so that only the id index fits.
const NEXT_PAGE: &str = concat!(
    "SELECT '', id, ",
    columns!(),
    " FROM postrider.outbox WHERE id > $6 \
       AND pg_visible_in_snapshot(tx, (SELECT $7::text::pg_snapshot)) \
       AND NOT pg_visible_in_snapshot(tx, (SELECT $1::text::pg_snapshot)) \
       AND ($3 = 1 OR postrider.lane_of(key, id, $3) = $4) AND ($5::text IS NULL OR topic ~ $5) \
     ORDER BY id LIMIT $2"
);

/// The beginning of the log: before every transaction.
pub(super) fn start() -> Position {
    Position { done: "1:1:".to_owned(), target: None, last_id: 0 }
}

/// Which part of the log is read.
#[derive(Debug, Clone)]
pub(super) struct LaneFilter {
    pub lanes: i32,
    pub lane: i32,
    pub topics: Option<String>,
}

impl LaneFilter {
    pub const ALL: LaneFilter = LaneFilter { lanes: 1, lane: 0, topics: None };
}

/// The outbox of PostgreSQL as a source.
pub struct LogSource {
    store: PostgresStore,
    route: Route,
    pool: PgPool,
    wake: Arc<Wake>,
    destination: String,
    /// Which topics go there, as a regular expression.
    topics: Option<String>,
    lanes: u32,
    /// The lanes that this process works on.
    open: Mutex<HashMap<u32, Arc<OpenLane>>>,
}

/// The connections of an open lane, from `open` to `close`. What a lane knows in memory is true only as long as the server
/// lives: after a crash transaction ids that were never written to disk are given out again. The server's end ends both
/// connections, and with them the lane's run; no other connection stands in for them, and the next run begins at the
/// position on disk.
struct OpenLane {
    epoch: i64,
    reader: Mutex<PoolConnection<Postgres>>,
    settler: Mutex<PoolConnection<Postgres>>,
    /// [`Wake::rings`] before the last look.
    rings: AtomicU64,
}

impl LogSource {
    /// The outbox as a source for one destination.
    pub fn new(store: &PostgresStore, route: &Route, lanes: u32) -> Self {
        Self {
            store: store.clone(),
            route: route.clone(),
            pool: store.own.clone(),
            wake: store.wake.clone(),
            destination: route.destination.clone(),
            topics: route.topics.regex(),
            lanes,
            open: Mutex::default(),
        }
    }

    async fn open_lane(&self, lease: &Lease) -> Result<Arc<OpenLane>> {
        let open = self.open.lock().await.get(&lease.slot).cloned();
        match open {
            Some(lane) if lane.epoch == lease.epoch => Ok(lane),
            Some(lane) if lane.epoch > lease.epoch => Err(lease_lost(lease)),
            _ => Err(Error::new(Kind::Unavailable, "the lane's connection to the database is gone")),
        }
    }

    /// After an error of the database the lane must start over.
    async fn checked<T>(&self, lease: &Lease, result: Result<T>) -> Result<T> {
        if result.is_err() {
            self.close(lease).await;
        }
        result
    }

    fn filter(&self, lease: &Lease) -> LaneFilter {
        LaneFilter { lanes: self.lanes as i32, lane: lease.slot as i32, topics: self.topics.clone() }
    }

    /// Makes the destination have `lanes` lanes. When the number has changed all lanes begin at the oldest position of
    /// the old ones: events may be published again, none is passed over.
    async fn set_lanes(&self, tx: &mut PgConnection, lease: &Lease) -> Result<()> {
        // Two instances that open their first lanes at once take turns.
        sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended($1, 7062611490211870))")
            .bind(&self.destination)
            .execute(&mut *tx)
            .await
            .map_err(db)?;
        // First the locks, then the look: a late settle may move a position while we wait.
        sqlx::query("SELECT 1 FROM postrider.lane WHERE destination = $1 FOR UPDATE")
            .bind(&self.destination)
            .execute(&mut *tx)
            .await
            .map_err(db)?;
        let rows = sqlx::query(
            "SELECT lanes, done::text FROM postrider.lane WHERE destination = $1 \
             ORDER BY pg_snapshot_xmax(done), (SELECT count(*) FROM pg_snapshot_xip(done)) DESC",
        )
        .bind(&self.destination)
        .fetch_all(&mut *tx)
        .await
        .map_err(db)?;
        let found: Option<i32> = rows.first().map(|row| row.try_get(0)).transpose().map_err(db)?;
        if found == Some(self.lanes as i32) {
            return Ok(());
        }
        if let Some(found) = found {
            self.require_alone(tx, lease, found).await?;
        }
        let oldest: String = match rows.first() {
            Some(row) => row.try_get(1).map_err(db)?,
            None => start().done,
        };
        sqlx::query("DELETE FROM postrider.lane WHERE destination = $1")
            .bind(&self.destination)
            .execute(&mut *tx)
            .await
            .map_err(db)?;
        sqlx::query(
            "INSERT INTO postrider.lane (destination, lane, lanes, epoch, done, topics) \
             SELECT $1, n, $2, 0, $3::text::pg_snapshot, $4 FROM generate_series(0, $2 - 1) n",
        )
        .bind(&self.destination)
        .bind(self.lanes as i32)
        .bind(oldest)
        .bind(&self.topics)
        .execute(&mut *tx)
        .await
        .map_err(db)?;
        Ok(())
    }

    async fn require_alone(&self, tx: &mut PgConnection, lease: &Lease, found: i32) -> Result<()> {
        // An instance counts when it has opened a lane under the other number and its lease still lasts. Two that start
        // together hold leases before either has opened a lane, and must not wait for each other.
        let is_alone: bool = sqlx::query(
            "SELECT NOT EXISTS (SELECT 1 FROM postrider.lease l JOIN postrider.lane n \
               ON n.destination = $3 AND n.lane = l.slot AND n.epoch = l.epoch \
             WHERE l.group_name = $1 AND l.slot >= 0 AND l.owner <> $2 AND l.expires_at > clock_timestamp())",
        )
        .bind(&lease.group)
        .bind(&lease.owner)
        .bind(&self.destination)
        .fetch_one(tx)
        .await
        .and_then(|row| row.try_get(0))
        .map_err(db)?;
        if is_alone {
            return Ok(());
        }
        Err(Error::new(
            Kind::Config,
            format!(
                "destination {} has {found} lanes in the database, relay.lanes says {}",
                self.destination, self.lanes
            ),
        )
        .with_remedy(format!("stop all other instances before changing the number, or set relay.lanes = {found}")))
    }

    async fn write(&self, settler: &mut PgConnection, lease: &Lease, settlement: &Settlement) -> Result<()> {
        let position = settlement.position.as_ref();
        let is_position_only = settlement.park.is_empty() && settlement.published.is_empty();
        let fence = sqlx::query(if is_position_only { SETTLE_POSITION } else { SETTLE })
            .bind(&self.destination)
            .bind(lease.slot as i32)
            .bind(lease.epoch)
            .bind(position.map(|position| position.done.as_str()))
            .bind(position.and_then(|position| position.target.as_deref()))
            .bind(position.map(|position| position.last_id));
        if is_position_only {
            let result = fence.execute(settler).await.map_err(db)?;
            return if result.rows_affected() == 1 { Ok(()) } else { Err(lease_lost(lease)) };
        }
        let mut tx = settler.begin().await.map_err(db)?;
        // The lane's row stays locked until the commit, so that nobody can take over between the check and the writes.
        if fence.execute(&mut *tx).await.map_err(db)?.rows_affected() != 1 {
            tx.rollback().await.map_err(db)?;
            return Err(lease_lost(lease));
        }
        parked::park(&mut tx, &self.destination, &settlement.park).await?;
        if !settlement.published.is_empty() {
            failed::published(&mut tx, &self.destination, &settlement.published).await?;
        }
        tx.commit().await.map_err(db)
    }
}

/// Fences, and moves the position.
macro_rules! settle {
    () => {
        "UPDATE postrider.lane SET settled_at = clock_timestamp(), \
         done = coalesce($4::text::pg_snapshot, done), \
         target = CASE WHEN $4 IS NULL THEN target ELSE $5::text::pg_snapshot END, \
         last_id = coalesce($6, last_id) \
         WHERE destination = $1 AND lane = $2 AND epoch = $3"
    };
}

const SETTLE: &str = settle!();

/// A position alone does not wait for the disk, so that producers' commits do not wait behind it. A server that crashes may
/// forget the last ones; the events since are published again.
const SETTLE_POSITION: &str = concat!(settle!(), " AND (SELECT set_config('synchronous_commit', 'off', true)) = 'off'");

#[async_trait]
impl Source for LogSource {
    async fn open(&self, lease: &Lease) -> Result<Opened> {
        let mut reader = self.pool.acquire().await.map_err(db)?;
        let settler = self.pool.acquire().await.map_err(db)?;
        let mut tx = reader.begin().await.map_err(db)?;
        self.set_lanes(&mut tx, lease).await?;
        let row = sqlx::query(
            "UPDATE postrider.lane SET epoch = $3 WHERE destination = $1 AND lane = $2 AND epoch <= $3 \
             RETURNING done::text, target::text, last_id, topics",
        )
        .bind(&self.destination)
        .bind(lease.slot as i32)
        .bind(lease.epoch)
        .fetch_optional(&mut *tx)
        .await
        .map_err(db)?;
        let Some(row) = row else { return Err(lease_lost(lease)) };
        if row.try_get::<Option<String>, _>(3).map_err(db)? != self.topics {
            return Err(topic::routes_changed(&self.destination));
        }
        let position = Position {
            done: row.try_get(0).map_err(db)?,
            target: row.try_get(1).map_err(db)?,
            last_id: row.try_get(2).map_err(db)?,
        };
        let parked = parked::keys(&mut tx, &self.destination, &self.filter(lease)).await?;
        let discarded = failed::discarded(&mut tx, &self.destination).await?;
        let now: String = sqlx::query("SELECT pg_current_snapshot()::text")
            .fetch_one(&mut *tx)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(db)?;
        tx.commit().await.map_err(db)?;
        require_not_ahead(&position.done, &now)?;
        let mut open = self.open.lock().await;
        // A lane that is opened once more keeps its connections.
        if open.get(&lease.slot).is_none_or(|lane| lane.epoch != lease.epoch) {
            let (reader, settler) = (Mutex::new(reader), Mutex::new(settler));
            let lane = OpenLane { epoch: lease.epoch, reader, settler, rings: AtomicU64::default() };
            open.insert(lease.slot, Arc::new(lane));
        }
        drop(open);
        Ok(Opened { position, parked, discarded })
    }

    async fn look_back(&self, published: Option<&Mark>) -> Result<LookBack> {
        recovery::look_back(&self.store, &self.route, published).await
    }

    async fn read(&self, lease: &Lease, from: &Position, limit: usize) -> Result<Page> {
        let lane = self.open_lane(lease).await?;
        lane.rings.store(self.wake.rings(), Ordering::SeqCst);
        let result = read(&mut *lane.reader.lock().await, &self.filter(lease), from, limit).await;
        self.checked(lease, result).await
    }

    async fn settle(&self, lease: &Lease, settlement: &Settlement) -> Result<()> {
        let lane = self.open_lane(lease).await?;
        let result = self.write(&mut *lane.settler.lock().await, lease, settlement).await;
        self.checked(lease, result).await
    }

    async fn parked(&self, lease: &Lease) -> Result<ParkedKeys> {
        let mut connection = self.pool.acquire().await.map_err(db)?;
        parked::keys(&mut connection, &self.destination, &self.filter(lease)).await
    }

    async fn due(&self, lease: &Lease, limit: usize) -> Result<Vec<ParkedRow>> {
        let mut connection = self.pool.acquire().await.map_err(db)?;
        parked::due(&mut connection, &self.destination, &self.filter(lease), limit).await
    }

    async fn close(&self, lease: &Lease) {
        let mut open = self.open.lock().await;
        if open.get(&lease.slot).is_some_and(|lane| lane.epoch == lease.epoch) {
            open.remove(&lease.slot);
        }
    }

    async fn set_asleep(&self, _lease: &Lease, is_asleep: bool) -> Result<()> {
        self.wake.set_asleep(is_asleep).await;
        Ok(())
    }

    async fn woken(&self) {
        self.wake.woken().await;
    }

    async fn will_wake(&self, lease: &Lease, next: &Position) -> bool {
        let Ok(lane) = self.open_lane(lease).await else { return false };
        // A transaction that was open may have inserted before the lane slept; whoever inserts later notifies.
        has_no_open(&next.done) && self.wake.is_sure(lane.rings.load(Ordering::SeqCst))
    }
}

fn lease_lost(lease: &Lease) -> Error {
    Error::new(
        Kind::LeaseLost,
        format!("{} slot {} was taken over after epoch {}", lease.group, lease.slot, lease.epoch),
    )
}

pub(super) async fn read(
    reader: &mut PgConnection,
    filter: &LaneFilter,
    from: &Position,
    limit: usize,
) -> Result<Page> {
    let query = if from.target.is_some() { NEXT_PAGE } else { WINDOW };
    // One more than asked for tells whether the window ends here.
    let mut query = sqlx::query(query)
        .bind(&from.done)
        .bind(limit as i64 + 1)
        .bind(filter.lanes)
        .bind(filter.lane)
        .bind(&filter.topics);
    if let Some(target) = &from.target {
        query = query.bind(from.last_id).bind(target);
    }
    let rows = query.fetch_all(&mut *reader).await.map_err(db)?;
    let target = match (&from.target, rows.first()) {
        (Some(target), _) => target.clone(),
        (None, Some(row)) => row.try_get(0).map_err(db)?,
        (None, None) => return Err(Error::new(Kind::Corrupt, "the database gave no snapshot")),
    };
    require_not_ahead(&from.done, &target)?;
    let mut page_rows = Vec::with_capacity(rows.len());
    for row in rows.iter().take(limit) {
        // The snapshot comes even when there is no event.
        if row.try_get::<Option<i64>, _>(1).map_err(db)?.is_some() {
            page_rows.push(log_row(row)?);
        }
    }
    let has_more = rows.len() > limit;
    let next = match page_rows.last() {
        Some(last) if has_more => Position { done: from.done.clone(), target: Some(target), last_id: last.id },
        _ => Position { done: target, target: None, last_id: 0 },
    };
    Ok(Page { rows: page_rows, next, has_more })
}

pub(super) fn log_row(row: &PgRow) -> Result<Row> {
    // A key that is not text makes the row no event; it must be parked, not stop the lane.
    let key = row::optional_text(row, 4).unwrap_or_default();
    Ok(Row { id: row.try_get(1).map_err(db)?, key, event: row::event(row, 2) })
}

/// Whether no transaction was under way at the snapshot (`xmin:xmax:xip,…`).
fn has_no_open(snapshot: &str) -> bool {
    snapshot.split(':').nth(2).is_some_and(str::is_empty)
}

/// A position that the database has not reached yet comes from another life of it: restored from a dump, or failed over to
/// a replica that lagged. Reading on would pass over every new event until the ids have caught up.
fn require_not_ahead(done: &str, now: &str) -> Result<()> {
    let xmax = |snapshot: &str| snapshot.split(':').nth(1).and_then(|xmax| xmax.parse::<u64>().ok());
    match (xmax(done), xmax(now)) {
        (Some(done), Some(now)) if done <= now => Ok(()),
        _ => Err(Error::new(
            Kind::Mismatch,
            format!("the relay's position {done} is ahead of the database, which is at {now}: was it restored?"),
        )
        .with_remedy("see docs/operations/runbook.md, \"After a restore\"")),
    }
}
