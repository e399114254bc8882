//! One lane: reads ahead, publishes in parallel batches, settles. All waiting happens in one `select!`; database and
//! broker calls run as tasks of their own, so that none is ever dropped half-way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::nap::Nap;
use super::pipeline::{Item, Notice, Pipeline, RetryPolicy};
use super::{Backoff, Gate, Permit, RelaySettings};
use crate::broker::{Batching, Broker};
use crate::error::{Error, Kind, Result};
use crate::lease::Lease;
use crate::metrics::RelayMeter;
use crate::recovery::Witness;
use crate::source::{Page, ParkedKeys, ParkedRow, ParkedState, Position, Settlement, Source};
use crate::task::{self, Call};
use crate::trace::Publish;

/// The position is written at most this often while events flow. A crash republishes what was confirmed since; the
/// longer the wait, the fewer row versions pile up under a long-running snapshot.
const SETTLE_EVERY: Duration = Duration::from_millis(100);
/// The side table is looked at this often while it holds something.
const DUE_EVERY: Duration = Duration::from_millis(500);
/// A look at a large side table takes long; this many times as long it is then left alone.
const DUE_REST: u32 = 4;
/// Rows of the side table taken at once.
const DUE_LIMIT: usize = 500;
/// The side table's keys are read anew this often, in case a person discarded some.
const KEYS_EVERY: Duration = Duration::from_secs(30);
/// Pages that are read before their events are confirmed. One event of a key is in flight at a time, so the more events
/// are at hand, the more of them may fly.
const READ_AHEAD_PAGES: usize = 4;
/// The shortest wait between two looks at an empty outbox.
const POLL_MIN: Duration = Duration::from_micros(500);
/// A lane that is sure to be woken looks this many times less often.
const REST: u32 = 3;
/// The wait between two looks is this part of the time without work: an event whose transaction was open for a while is
/// found after at most an eighth of that while.
const PATIENCE: u32 = 8;
/// From this wait on a commit must wake us; below it, looking again is cheaper than being woken.
const SLEEP_FROM: Duration = Duration::from_millis(4);
/// While the broker is blocked or another lane probes it, ask again this often.
const GATE_EVERY: Duration = Duration::from_millis(100);
/// A stop waits this long for what was read to be published.
const DRAIN_WAIT: Duration = Duration::from_secs(10);
/// Waits between publish calls that fail because of the destination, before the breaker opens. Five of them outlast
/// the usual restart of a broker.
const OUTAGE: Backoff =
    Backoff { base: Duration::from_millis(200), max: Duration::from_secs(5), jitter: Duration::from_millis(200) };
pub(super) struct Lane {
    pub destination: String,
    pub lease: Lease,
    pub source: Arc<dyn Source>,
    pub broker: Arc<dyn Broker>,
    pub settings: RelaySettings,
    pub gate: Gate,
    pub meter: RelayMeter,
    pub witness: Witness,
}

impl Lane {
    /// Works until `stop`, until the lease is lost, or until an error. After an error the lease is given back and taken
    /// anew: with the new epoch, a statement of the old run that was left to its fate can do no harm.
    pub async fn run(self, stop: CancellationToken) {
        self.meter.lanes_held(1.0);
        let result = match Run::open(&self).await {
            Ok(mut run) => run.work(&stop).await,
            Err(error) => Err(error),
        };
        self.meter.lanes_held(-1.0);
        let (destination, lane) = (&self.destination, self.lease.slot);
        match result {
            Ok(()) => {}
            Err(error) if error.kind() == Kind::LeaseLost => {
                tracing::warn!(destination, lane, "another instance has taken over the lane");
            }
            // Another life of the database, or a setting: nothing flows until a person has looked.
            Err(error) if error.kind() != Kind::Unavailable => {
                if error.kind() == Kind::Mismatch {
                    self.gate.halt(error.message());
                }
                tracing::error!(destination, lane, error_type = error.kind().as_str(), %error, causes = ?error.causes(),
                    remedy = error.remedy(), "the lane stands still and tries again");
            }
            Err(error) => {
                tracing::warn!(destination, lane, error_type = error.kind().as_str(), %error,
                    causes = ?error.causes(), remedy = error.remedy(), "the lane starts over from its position");
            }
        }
    }
}

/// A publish call: when it began, what was sent, what came of it.
type Batch = (Instant, Vec<Item>, Vec<Result<()>>);

/// A page, and whether whatever is committed after it will wake the lane.
type Read = (Page, bool);

/// What a look at the side table found: rows to try, and now and then its keys (with the version they stand for).
struct Due {
    keys: Option<(u64, ParkedKeys)>,
    rows: Vec<ParkedRow>,
}

struct Run<'a> {
    lane: &'a Lane,
    pipeline: Pipeline,
    /// Up to where the log was read, confirmed or not.
    cursor: Position,
    reading: Option<Call<Read>>,
    dueing: Option<Call<Due>>,
    settling: Option<Call<()>>,
    batches: JoinSet<Batch>,
    nap: Nap,
    /// Publish one by one for this many events: an atomic batch was refused, and it must be found out by which.
    singles: usize,
    hold_until: Option<Instant>,
    last_work: Instant,
    next_poll: Instant,
    due_began: Instant,
    next_due: Instant,
    next_keys: Instant,
    last_settle: Instant,
    is_asleep: bool,
    /// Whether the next commit will wake the lane.
    will_wake: bool,
}

impl<'a> Run<'a> {
    async fn open(lane: &'a Lane) -> Result<Run<'a>> {
        let (source, mark) = (lane.source.clone(), lane.witness.mark());
        let found = task::start(async move { source.look_back(mark.as_ref()).await }).await?;
        if let Some(restored) = found.restored {
            return Err(restored.error());
        }
        lane.witness.set_life(found.life);
        let (source, lease) = (lane.source.clone(), lane.lease.clone());
        let opened = task::start(async move { source.open(&lease).await }).await?;
        let backoff = lane.settings.backoff;
        let policy = RetryPolicy {
            attempts_max: lane.settings.attempts_max,
            delay: Box::new(move |attempts| backoff.delay_with(attempts, &mut fastrand::Rng::new())),
        };
        let pipeline = Pipeline::new(lane.broker.batching(), policy, &opened);
        let now = Instant::now();
        Ok(Run {
            lane,
            pipeline,
            cursor: opened.position,
            reading: None,
            dueing: None,
            settling: None,
            batches: JoinSet::new(),
            nap: Nap::new(),
            singles: 0,
            hold_until: None,
            last_work: now,
            next_poll: now,
            due_began: now,
            next_due: now,
            next_keys: now + KEYS_EVERY,
            last_settle: now,
            is_asleep: false,
            will_wake: false,
        })
    }

    async fn work(&mut self, stop: &CancellationToken) -> Result<()> {
        let result = self.work_until(stop).await;
        // Publish calls under way run to their end, and the breaker hears of a probe, whatever ended the work.
        while let Some(batch) = self.batches.join_next().await {
            match batch {
                Ok(batch) => self.published(batch),
                Err(error) => tracing::error!(%error, "a publish task ended unexpectedly"),
            }
        }
        // So do statements: one that is still under way must not come after those of the next run.
        let _ = (end(&mut self.reading).await, end(&mut self.dueing).await, end(&mut self.settling).await);
        if self.is_asleep {
            self.lane.source.set_asleep(&self.lane.lease, false).await?;
        }
        self.lane.source.close(&self.lane.lease).await;
        result
    }

    async fn work_until(&mut self, stop: &CancellationToken) -> Result<()> {
        let mut drain_until = None;
        loop {
            let is_stopping = stop.is_cancelled();
            if is_stopping {
                let until = *drain_until.get_or_insert_with(|| Instant::now() + DRAIN_WAIT);
                let is_drained = self.pipeline.open() == 0 && self.batches.is_empty();
                if is_drained || Instant::now() >= until || self.lane.gate.closed_because().is_some() {
                    return self.finish().await;
                }
            }
            let timer = self.start_work(is_stopping);
            tokio::select! {
                () = stop.cancelled(), if !is_stopping => {}
                page = task::join(&mut self.reading) => {
                    self.reading = None;
                    self.read(page?);
                }
                due = task::join(&mut self.dueing) => {
                    self.dueing = None;
                    self.take_due(due?);
                }
                settled = task::join(&mut self.settling) => {
                    self.settling = None;
                    settled?;
                    self.last_settle = Instant::now();
                }
                Some(batch) = self.batches.join_next(), if !self.batches.is_empty() => {
                    self.published(batch.map_err(task::ended)?);
                }
                () = self.lane.source.woken(), if self.is_asleep && self.reading.is_none() => {
                    self.next_poll = Instant::now();
                }
                () = self.nap.until(timer) => {}
            }
        }
    }

    /// Starts whatever can be started, and says when to look again if nothing happens before.
    fn start_work(&mut self, is_stopping: bool) -> Instant {
        let now = Instant::now();
        let mut timer = now + self.longest_wait();
        timer = timer.min(self.start_batches(now));
        timer = timer.min(self.start_settling(now));
        if !is_stopping {
            timer = timer.min(self.start_reading(now));
            timer = timer.min(self.start_dueing(now));
        }
        timer
    }

    fn start_batches(&mut self, now: Instant) -> Instant {
        // Also when nothing is ready: a blocked broker just does not confirm what is in flight.
        self.lane.gate.set_blocked(self.lane.broker.blocked());
        let limits = self.lane.settings.calls_max(self.lane.broker.batching());
        while self.batches.len() < limits && self.pipeline.has_ready() {
            if let Some(until) = self.hold_until {
                if now < until {
                    return until;
                }
                self.hold_until = None;
            }
            let size = match self.lane.gate.permit() {
                Permit::All if self.singles > 0 => 1,
                Permit::All => self.batch_size(),
                Permit::Probe => 1,
                Permit::None(until) => return until.unwrap_or(now + GATE_EVERY),
            };
            let batch = self.pipeline.take(size);
            self.singles = self.singles.saturating_sub(batch.len());
            let (began, broker) = (Instant::now(), self.lane.broker.clone());
            let mut events: Vec<_> = batch.iter().map(|item| item.event.clone()).collect();
            let spans = Publish::begin(&self.lane.destination, &mut events);
            self.batches.spawn(async move {
                let results = broker.publish(&events).await;
                spans.end(&results);
                (began, batch, results)
            });
        }
        now + self.longest_wait()
    }

    fn batch_size(&self) -> usize {
        match self.lane.broker.batching() {
            Batching::Independent => self.lane.settings.batch,
            // A batch is one transaction there: the larger, the cheaper. As much is read meanwhile.
            Batching::Atomic => READ_AHEAD_PAGES / 2 * self.lane.settings.page,
        }
    }

    fn published(&mut self, (began, items, results): Batch) {
        let destination = &self.lane.destination;
        let is_atomic = self.lane.broker.batching() == Batching::Atomic;
        if is_atomic && items.len() > 1 && results.iter().any(is_events_fault) {
            self.singles = items.len();
            self.pipeline.put_back(items);
            return;
        }
        let mut confirmed = 0;
        let mut newest = None;
        let mut outage: Option<Error> = None;
        let mut back = Vec::new();
        let mut results = results.into_iter();
        for item in items {
            // A broker that returns too few results has said nothing about the rest.
            let result = results.next().unwrap_or_else(|| Err(Error::new(Kind::Other, "the broker gave no result")));
            match result {
                Ok(()) => {
                    confirmed += 1;
                    newest = newest.max(Some((item.id, item.event.id())));
                    self.pipeline.confirmed(item);
                }
                Err(error) if error.kind().belongs_to_event() => {
                    self.lane.meter.publish_failed(error.kind());
                    self.pipeline.refused(item, &error);
                }
                Err(error) => {
                    back.push(item);
                    outage.get_or_insert(error);
                }
            }
        }
        self.pipeline.put_back(back);
        if let Some((id, event_id)) = newest {
            self.lane.witness.published(id, event_id);
        }
        match outage {
            Some(error) => {
                self.lane.meter.publish_failed(error.kind());
                let failures = self.lane.gate.failed(began, &error);
                if failures <= 1 {
                    tracing::warn!(destination = %destination, error_type = error.kind().as_str(), %error,
                        causes = ?error.causes(), remedy = error.remedy(), "publishing failed, trying again");
                }
                self.hold_until = Some(Instant::now() + OUTAGE.delay_with(failures, &mut fastrand::Rng::new()));
            }
            None => self.lane.gate.succeeded(),
        }
        self.lane.meter.published(confirmed);
    }

    fn start_settling(&mut self, now: Instant) -> Instant {
        self.tell();
        let is_due =
            self.pipeline.has_urgent() || (self.pipeline.has_finished_page() && now >= self.last_settle + SETTLE_EVERY);
        if self.settling.is_none() && is_due {
            let settlement = self.pipeline.settlement();
            self.settling = Some(self.settle(settlement));
        }
        match self.settling.is_none() && self.pipeline.has_finished_page() {
            true => self.last_settle + SETTLE_EVERY,
            false => now + self.longest_wait(),
        }
    }

    /// Says what was set aside, and why.
    fn tell(&mut self) {
        let (destination, lane) = (&self.lane.destination, self.lane.lease.slot);
        for Notice { id, state, attempts, failure } in self.pipeline.notices() {
            self.lane.meter.parked(state, &failure.kind);
            let (error_type, error) = (&failure.kind, &failure.message);
            match state {
                ParkedState::Failed => tracing::error!(
                    destination,
                    lane,
                    outbox_id = id,
                    attempts,
                    error_type,
                    error,
                    "an event failed and is kept; a person must decide, its key waits behind it"
                ),
                ParkedState::Retrying | ParkedState::Waiting => tracing::warn!(
                    destination,
                    lane,
                    outbox_id = id,
                    attempts,
                    error_type,
                    error,
                    "an event was set aside and is tried again"
                ),
            }
        }
    }

    fn settle(&self, settlement: Settlement) -> Call<()> {
        let (source, lease) = (self.lane.source.clone(), self.lane.lease.clone());
        task::start(async move { source.settle(&lease, &settlement).await })
    }

    fn start_reading(&mut self, now: Instant) -> Instant {
        if self.reading.is_some() || self.pipeline.open() >= READ_AHEAD_PAGES * self.lane.settings.page {
            return now + self.longest_wait();
        }
        if now < self.next_poll {
            return self.next_poll;
        }
        let wait = self.poll_wait(now);
        let (source, lease) = (self.lane.source.clone(), self.lane.lease.clone());
        let (cursor, limit) = (self.cursor.clone(), self.lane.settings.page);
        let change = (wait >= SLEEP_FROM && !self.is_asleep).then_some(true);
        let change = change.or((wait < SLEEP_FROM && self.is_asleep).then_some(false));
        if let Some(is_asleep) = change {
            self.is_asleep = is_asleep;
        }
        self.reading = Some(task::start(async move {
            if let Some(is_asleep) = change {
                source.set_asleep(&lease, is_asleep).await?;
            }
            let page = source.read(&lease, &cursor, limit).await?;
            let will_wake = page.rows.is_empty() && source.will_wake(&lease, &page.next).await;
            Ok((page, will_wake))
        }));
        now + self.longest_wait()
    }

    fn longest_wait(&self) -> Duration {
        self.lane.settings.poll * if self.will_wake { REST } else { 1 }
    }

    /// The longer there was no work, the longer the wait.
    fn poll_wait(&self, now: Instant) -> Duration {
        (now.saturating_duration_since(self.last_work) / PATIENCE).clamp(POLL_MIN, self.longest_wait())
    }

    fn read(&mut self, (page, will_wake): Read) {
        let now = Instant::now();
        self.will_wake = will_wake;
        self.cursor = page.next.clone();
        if page.rows.is_empty() && !page.has_more {
            self.next_poll = now + self.poll_wait(now);
            return;
        }
        self.last_work = now;
        self.next_poll = now;
        let broker = &self.lane.broker;
        self.pipeline.accept(page, |event| broker.check(event));
    }

    fn start_dueing(&mut self, now: Instant) -> Instant {
        if !self.pipeline.has_parked() || self.dueing.is_some() || self.settling.is_some() {
            return now + DUE_EVERY;
        }
        if now < self.next_due {
            return self.next_due;
        }
        if !self.pipeline.is_due_settled() {
            return now + DUE_EVERY;
        }
        self.due_began = now;
        let (source, lease) = (self.lane.source.clone(), self.lane.lease.clone());
        let version = (now >= self.next_keys).then(|| self.pipeline.parked_version());
        self.dueing = Some(task::start(async move {
            let keys = match version {
                Some(version) => Some((version, source.parked(&lease).await?)),
                None => None,
            };
            Ok(Due { keys, rows: source.due(&lease, DUE_LIMIT).await? })
        }));
        now + DUE_EVERY
    }

    fn take_due(&mut self, due: Due) {
        let now = Instant::now();
        if let Some((version, parked)) = due.keys
            && self.pipeline.set_parked(&parked, version)
        {
            self.next_keys = now + KEYS_EVERY;
        }
        // A full page means that there is more to come.
        let rest = DUE_EVERY.max(now.saturating_duration_since(self.due_began) * DUE_REST);
        self.next_due = if due.rows.len() < DUE_LIMIT { now + rest } else { now };
        let broker = &self.lane.broker;
        self.pipeline.accept_due(due.rows, |event| broker.check(event));
    }

    /// Lets every call under way end, and writes down what is known.
    async fn finish(&mut self) -> Result<()> {
        while let Some(batch) = self.batches.join_next().await {
            self.published(batch.map_err(task::ended)?);
        }
        end(&mut self.settling).await?;
        let settlement = self.pipeline.settlement();
        if !settlement.is_empty() {
            self.lane.source.settle(&self.lane.lease, &settlement).await?;
        }
        Ok(())
    }
}

/// Waits for a call that may be under way.
async fn end<T>(call: &mut Option<Call<T>>) -> Result<()> {
    match call.take() {
        Some(call) => call.await.map(|_| ()),
        None => Ok(()),
    }
}

fn is_events_fault(result: &Result<()>) -> bool {
    result.as_ref().is_err_and(|error| error.kind().belongs_to_event())
}
