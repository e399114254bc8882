//! The loop of an adopted table: lock rows, publish them, mark them.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::{AdoptedRow, AdoptedTable, Mapping, Outcome, Part};
use crate::broker::{Batching, Broker};
use crate::error::{Error, Kind, Result, Retry};
use crate::event::Event;
use crate::lease::instance_name;
use crate::metrics::RelayMeter;
use crate::pulse::{Heart, Pulses};
use crate::relay::{Backoff, Gate, Permit, RelaySettings};
use crate::source::{Failure, ParkedState};
use crate::task;
use crate::trace::Publish;

/// Two of them: while one waits for the broker the other waits for the database. While much waits each has half of the keys;
/// else the first has all, and the second sleeps.
const WORKERS: usize = 2;
/// A look takes so many pages: the more of them, the more keys there are to be sent at once.
const PAGES: usize = 4;
/// A second worker that found nothing it may take waits this many times as long as its look took: where there are few keys,
/// the first may have them all.
const VAIN_WAITS: u32 = 20;
/// The shortest wait between two looks at a table without work.
const POLL_MIN: Duration = Duration::from_millis(5);
/// While the broker is blocked or another worker probes it, ask again this often.
const GATE_EVERY: Duration = Duration::from_millis(100);
/// Rows that a worker of the service has left are looked for this often.
const FREE_EVERY: Duration = Duration::from_secs(30);
/// Waits after an error of the database, or of the destination before the breaker opens.
const OUTAGE: Backoff =
    Backoff { base: Duration::from_millis(200), max: Duration::from_secs(5), jitter: Duration::from_millis(200) };

/// Waits after an error that a person must mend.
const MISTAKE: Backoff =
    Backoff { base: Duration::from_millis(500), max: Duration::from_secs(60), jitter: Duration::from_millis(200) };

/// Carries the rows of an adopted table to a broker. Any number of instances may run at once.
pub struct Adopted {
    mapping: Mapping,
    source: String,
    table: Arc<dyn AdoptedTable>,
    broker: Arc<dyn Broker>,
    settings: RelaySettings,
    gate: Gate,
    meter: RelayMeter,
    pulses: Option<Arc<dyn Pulses>>,
    /// Whether the workers share the keys, because there is more than one can do.
    is_shared: AtomicBool,
    /// Whether the second worker waits to be told so.
    is_second_free: AtomicBool,
    /// Tells it.
    more: Notify,
}

impl Adopted {
    /// A relay of the table; nothing happens before [`Adopted::run`]. `source` is what events say they come from.
    pub fn new(
        mapping: Mapping,
        table: Box<dyn AdoptedTable>,
        broker: Arc<dyn Broker>,
        settings: RelaySettings,
    ) -> Self {
        let gate = Gate::new(&mapping.name, settings.breaker);
        let source = table.source();
        let meter = RelayMeter::new(&mapping.name);
        Self {
            mapping,
            source,
            table: table.into(),
            broker,
            settings,
            gate,
            meter,
            pulses: None,
            is_shared: AtomicBool::new(false),
            is_second_free: AtomicBool::new(false),
            more: Notify::new(),
        }
    }

    /// Tells this store that the relay lives and what it counts, as `relay/<name of the outbox>`. Without it nobody is told.
    #[must_use]
    pub fn pulses(mut self, pulses: Arc<dyn Pulses>) -> Self {
        self.pulses = Some(pulses);
        self
    }

    /// The breaker of the destination.
    pub fn gate(&self) -> Gate {
        self.gate.clone()
    }

    /// The table, for its figures.
    pub fn table(&self) -> Arc<dyn AdoptedTable> {
        self.table.clone()
    }

    /// Runs until `stop` is cancelled; what was locked is then published and marked first.
    pub async fn run(self, stop: CancellationToken) -> Result<()> {
        let heart = self.pulses.clone().map(|pulses| {
            let (group, gate) = (crate::relay::group(&self.mapping.name), self.gate.clone());
            Heart::new(pulses, group, instance_name(), self.meter.tally(), move || gate.trouble()).start()
        });
        let this = Arc::new(self);
        let workers = (0..WORKERS).map(|number| tokio::spawn(this.clone().work(number, stop.clone()).boxed()));
        for worker in join_all(workers).await {
            worker.map_err(task::ended)?;
        }
        if let Some(heart) = heart {
            heart.end().await;
        }
        Ok(())
    }

    async fn work(self: Arc<Self>, number: usize, stop: CancellationToken) {
        let mut failures = 0;
        let mut last_work = Instant::now();
        let mut next_free = Instant::now();
        while !stop.is_cancelled() {
            if number == 0 && Instant::now() >= next_free {
                next_free = Instant::now() + FREE_EVERY;
                self.free_abandoned().await;
            }
            let began = Instant::now();
            match self.round(number).await {
                Ok(Round::Worked) => {
                    failures = 0;
                    last_work = Instant::now();
                }
                Ok(Round::Idle) => {
                    failures = 0;
                    if number > 0 {
                        sleep_until(Instant::now() + VAIN_WAITS * began.elapsed(), &stop).await;
                    }
                    self.idle(number, last_work, &stop).await;
                }
                Ok(Round::Closed(until)) => sleep_until(until, &stop).await,
                Err(error) => {
                    failures += 1;
                    // The first one need not leave half of the keys to one that does nothing.
                    if number > 0 {
                        self.is_shared.store(false, Ordering::Relaxed);
                    }
                    self.tell(failures, &error);
                    // What was published and cannot be marked would be published again at each try.
                    let waits = if error.kind() == Kind::Unavailable { OUTAGE } else { MISTAKE };
                    waits.wait(failures, &stop).await;
                }
            }
        }
    }

    async fn idle(&self, number: usize, last_work: Instant, stop: &CancellationToken) {
        let wait = (last_work.elapsed() / 2).clamp(POLL_MIN, self.settings.poll);
        if number > 0 {
            self.is_second_free.store(true, Ordering::Relaxed);
        }
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(wait), if number == 0 => {}
            () = self.more.notified(), if number > 0 => {}
        }
    }

    fn tell(&self, failures: u32, error: &Error) {
        let outbox = &self.mapping.name;
        if failures == 1 || failures.is_power_of_two() {
            tracing::error!(outbox, table = %self.mapping.table, error_type = error.kind().as_str(), %error,
                causes = ?error.causes(), remedy = error.remedy(), failures,
                "the adopted table cannot be relayed; nothing is lost, trying again");
        }
    }

    async fn free_abandoned(&self) {
        let (table, outbox) = (self.table.clone(), &self.mapping.name);
        match task::start(async move { table.free_abandoned().await }).await {
            Ok(0) => {}
            Ok(freed) => tracing::warn!(
                outbox,
                freed,
                error_type = "abandoned",
                "rows that a worker had taken and left are relayed now"
            ),
            // The next look says why.
            Err(error) => tracing::debug!(outbox, %error, "abandoned rows cannot be looked for"),
        }
    }

    /// Locks rows, publishes them, marks them.
    async fn round(&self, worker: usize) -> Result<Round> {
        let part = match self.is_shared.load(Ordering::Relaxed) {
            true => Part { number: worker, of: WORKERS },
            false if worker == 0 => Part::ALL,
            false => return Ok(Round::Idle),
        };
        self.gate.set_blocked(self.broker.blocked());
        if self.broker.blocked().is_some() {
            return Ok(Round::Closed(Instant::now() + GATE_EVERY));
        }
        let (table, limit) = (self.table.clone(), PAGES * self.settings.page);
        // A call that is given up drops the rows when it ends, and with them their locks.
        let locked = task::start(async move { table.lock(part, limit).await }).await?;
        // Some that were found may be behind rows of others.
        let is_much = locked.rows().len() >= limit / 2;
        if !is_much {
            self.is_shared.store(false, Ordering::Relaxed);
        }
        if locked.rows().is_empty() {
            return Ok(Round::Idle);
        }
        let limit = match self.gate.permit() {
            Permit::All => usize::MAX,
            Permit::Probe => 1,
            // Dropped: nobody should wait for rows that we hold and cannot send.
            Permit::None(until) => return Ok(Round::Closed(until.unwrap_or(Instant::now() + GATE_EVERY))),
        };
        let (outcomes, outage) = self.publish(locked.rows(), limit).await;
        let is_all_untouched = outcomes.iter().all(|outcome| *outcome == Outcome::Untouched);
        if !is_all_untouched {
            task::start(async move { locked.settle(&outcomes).await }).await?;
        }
        // Not before: as long as one has rows of all keys, what the other finds is behind them.
        if is_much && part == Part::ALL && self.is_second_free.swap(false, Ordering::Relaxed) {
            self.is_shared.store(true, Ordering::Relaxed);
            self.more.notify_one();
        }
        match outage {
            Some(wait) => Ok(Round::Closed(Instant::now() + wait)),
            None => Ok(Round::Worked),
        }
    }

    /// Publishes rows, one of a key at a time, and says what became of each; and how long to leave the destination alone.
    async fn publish(&self, rows: &[AdoptedRow], limit: usize) -> (Vec<Outcome>, Option<Duration>) {
        let mut outcomes = vec![Outcome::Untouched; rows.len()];
        let mut flight = Flight::default();
        for (index, row) in rows.iter().enumerate() {
            if flight.open.len() >= limit {
                break;
            }
            let key = row.key(&self.mapping);
            if key.is_some_and(|key| flight.stopped.contains(key)) {
                continue;
            }
            match row.event(&self.mapping, &self.source).and_then(|event| self.broker.check(&event).map(|()| event)) {
                Ok(event) => flight.open.push((index, Arc::new(event))),
                Err(error) => {
                    flight.stopped.extend(key.map(str::to_owned));
                    outcomes[index] = self.failed(row, &error);
                }
            }
        }
        let batching = self.broker.batching();
        let mut flying = FuturesUnordered::new();
        let mut outage: Option<(Instant, Error)> = None;
        loop {
            while outage.is_none() && flying.len() < self.settings.calls_max(batching) {
                let wave = flight.wave(batching, &self.settings, flying.is_empty());
                if wave.is_empty() {
                    break;
                }
                flying.push(self.send(wave));
            }
            let Some((began, wave, results)) = flying.next().await else { break };
            let is_events_fault =
                |result: &Result<()>| result.as_ref().is_err_and(|error| error.kind().belongs_to_event());
            if batching == Batching::Atomic && wave.len() > 1 && results.iter().any(is_events_fault) {
                // Refused as a whole; which one it was is found out one by one.
                (flight.open, flight.is_single) = (wave, true);
                continue;
            }
            let mut confirmed = 0;
            let mut results = results.into_iter();
            for (index, event) in wave {
                flight.landed(&event);
                match results.next().unwrap_or_else(|| Err(Error::new(Kind::Other, "the broker gave no result"))) {
                    Ok(()) => {
                        confirmed += 1;
                        outcomes[index] = Outcome::Published;
                    }
                    Err(error) if error.kind().belongs_to_event() => {
                        self.meter.publish_failed(error.kind());
                        flight.stop(rows[index].key(&self.mapping));
                        outcomes[index] = self.failed(&rows[index], &error);
                    }
                    Err(error) => {
                        outage.get_or_insert((began, error));
                    }
                }
            }
            self.meter.published(confirmed);
            if outage.is_none() {
                self.gate.succeeded();
            }
        }
        let wait = outage.map(|(began, error)| self.outage(began, &error));
        (outcomes, wait)
    }

    /// Publishes events that may fly together.
    async fn send(&self, wave: Vec<(usize, Arc<Event>)>) -> (Instant, Vec<(usize, Arc<Event>)>, Vec<Result<()>>) {
        let began = Instant::now();
        let mut events: Vec<Arc<Event>> = wave.iter().map(|(_, event)| event.clone()).collect();
        let spans = Publish::begin(&self.mapping.name, &mut events);
        let results = self.broker.publish(&events).await;
        spans.end(&results);
        (began, wave, results)
    }

    fn failed(&self, row: &AdoptedRow, error: &Error) -> Outcome {
        let attempts = row.attempts + 1;
        let attempts_max = row.attempts_max.unwrap_or(self.settings.attempts_max);
        let failure =
            Failure { kind: error.kind().as_str().to_owned(), message: format!("{error}; {}", error.remedy()) };
        let (outbox, row_id, error_type) = (&self.mapping.name, &row.id, error.kind().as_str());
        if error.kind().retry() == Retry::Later && attempts < attempts_max {
            self.meter.parked(ParkedState::Retrying, error_type);
            tracing::warn!(outbox, row_id, attempts, error_type, %error, "a row failed and is tried again");
            let delay = self.settings.backoff.delay_with(attempts, &mut fastrand::Rng::new());
            return Outcome::Retry { attempts, delay, failure };
        }
        self.meter.parked(ParkedState::Failed, error_type);
        tracing::error!(outbox, row_id, attempts, error_type, %error, remedy = error.remedy(),
            "a row failed and is kept; a person must decide, its key waits behind it");
        Outcome::Failed { attempts, failure }
    }

    fn outage(&self, began: Instant, error: &Error) -> Duration {
        self.meter.publish_failed(error.kind());
        let failures = self.gate.failed(began, error);
        if failures <= 1 {
            tracing::warn!(outbox = self.mapping.name, error_type = error.kind().as_str(), %error,
                causes = ?error.causes(), remedy = error.remedy(), "publishing failed, trying again");
        }
        OUTAGE.delay_with(failures, &mut fastrand::Rng::new())
    }
}

/// What a look came to.
enum Round {
    Worked,
    Idle,
    /// The destination is to be left alone until then.
    Closed(Instant),
}

/// Events that wait to be sent, oldest first.
#[derive(Default)]
struct Flight {
    open: Vec<(usize, Arc<Event>)>,
    /// Keys of which one is on its way.
    flying: HashSet<String>,
    /// Keys of which one has failed.
    stopped: HashSet<String>,
    /// Whether they are sent one by one.
    is_single: bool,
}

impl Flight {
    /// What may be sent now in one call: of each key the oldest, if none of the key is on its way; or everything where
    /// batches are taken whole. While others are on their way, a few are kept until they are more.
    fn wave(&mut self, batching: Batching, settings: &RelaySettings, is_alone: bool) -> Vec<(usize, Arc<Event>)> {
        if self.is_single {
            return self.open.drain(..self.open.len().min(1)).collect();
        }
        if batching == Batching::Atomic {
            return std::mem::take(&mut self.open);
        }
        let size = settings.batch.max(1);
        // Keys of the wave, and keys with an earlier event that stays.
        let mut passed: HashSet<&str> = HashSet::new();
        let mut taken: Vec<usize> = Vec::new();
        for (place, (_, event)) in self.open.iter().enumerate() {
            if taken.len() == size {
                break;
            }
            let is_free = event.key().is_none_or(|key| passed.insert(key) && !self.flying.contains(key));
            if is_free {
                taken.push(place);
            }
        }
        if !is_alone && taken.len() < size / 2 {
            return Vec::new();
        }
        let mut wave = Vec::with_capacity(taken.len());
        let mut taken = taken.into_iter().peekable();
        let mut kept = Vec::with_capacity(self.open.len());
        for (place, entry) in std::mem::take(&mut self.open).into_iter().enumerate() {
            match taken.next_if_eq(&place) {
                Some(_) => {
                    self.flying.extend(entry.1.key().map(str::to_owned));
                    wave.push(entry);
                }
                None => kept.push(entry),
            }
        }
        self.open = kept;
        wave
    }

    /// An event has come back, in whatever way.
    fn landed(&mut self, event: &Event) {
        if let Some(key) = event.key() {
            self.flying.remove(key);
        }
    }

    /// Takes back what is behind a row that failed.
    fn stop(&mut self, key: Option<&str>) {
        if let Some(key) = key {
            self.open.retain(|(_, event)| event.key() != Some(key));
            self.stopped.insert(key.to_owned());
        }
    }
}

async fn sleep_until(until: Instant, stop: &CancellationToken) {
    tokio::select! {
        () = stop.cancelled() => {}
        () = tokio::time::sleep_until(until.into()) => {}
    }
}
