//! The crash run: the real binary between a real database and a real broker, everything killed at random.
//!
//! Producers change accounts and append events in overlapping transactions; two relays and two groups of consumers
//! carry and apply them. Meanwhile processes, broker and database are killed as the plan says, which the seed
//! decides. When the producers are done and everything has had time to recover, the [`crate::checker`] compares what was
//! committed with what was applied.

mod broker;
mod consumer;
mod drain;
mod duplicates;
mod faults;
mod fleet;
mod outcome;
mod plan;
mod producer;
mod store;

pub use broker::BrokerKind;
pub use consumer::{ConsumeOptions, consume, declare};
pub use outcome::Outcome;
pub use store::StoreKind;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tokio::task::{JoinSet, LocalSet};
use tokio_util::sync::CancellationToken;

use crate::testbed::Result;
use faults::{Faults, Record};
use fleet::{Fleet, GROUPS, Places, RELAYS, consumer_arguments};
use plan::Planned;
use producer::Production;

/// How often progress is looked at, and with it whether a fault is due.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How often processes that ended by themselves are looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// How often progress is shown.
const SHOW_EVERY: Duration = Duration::from_secs(5);

/// What to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Events to commit, at least.
    pub events: u64,
    /// `kill -9` of relays and consumers.
    pub kills: usize,
    /// `kill -9` of consumers alone, beside those.
    pub consumer_kills: usize,
    /// Of so many attempts at an event, one fails; none when 0.
    pub failing_in: u32,
    /// Of so many events, one ends every process that has it; none when 0.
    pub poison_in: u32,
    /// Of so many applied events, one is published once more; none when 0.
    pub duplicate_in: u32,
    /// The broker.
    pub broker: BrokerKind,
    /// The database.
    pub store: StoreKind,
    /// Restarts of the broker, by `kill -9` and by an orderly stop in turn.
    pub broker_restarts: usize,
    /// `kill -9` of the whole database server.
    pub store_restarts: usize,
    /// SIGSTOPs of a relay for twice its lease.
    pub freezes: usize,
    /// Concurrent producers.
    pub producers: usize,
    /// Keys.
    pub keys: usize,
    /// Lanes of the relays.
    pub lanes: u32,
    /// The lease of lanes and slots.
    pub lease: Duration,
    /// How long the relays' breaker stays open.
    pub breaker_open: Duration,
    /// Decides faults and the producers' dice.
    pub seed: u64,
    /// The run fails when it is not over by then.
    pub deadline: Duration,
    /// Where configuration and logs go; a folder that is removed after a clean run otherwise.
    pub logs: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            events: 200_000,
            kills: 20,
            consumer_kills: 0,
            failing_in: 0,
            poison_in: 0,
            duplicate_in: 0,
            broker: BrokerKind::default(),
            store: StoreKind::default(),
            broker_restarts: 3,
            store_restarts: 2,
            freezes: 1,
            producers: 16,
            keys: 1000,
            lanes: 2,
            lease: Duration::from_secs(3),
            breaker_open: Duration::from_secs(2),
            seed: fastrand::u64(..1 << 32),
            deadline: Duration::from_secs(1500),
            logs: None,
        }
    }
}

/// The names of the consumer groups.
fn groups() -> [&'static str; GROUPS.len()] {
    GROUPS.map(|(group, _)| group)
}

/// Runs it. An error means that the run itself could not be done; what it found is in the outcome.
pub async fn run(options: Options) -> Result<Outcome> {
    let started = Instant::now();
    let (faults, places) = set_up(&options).await?;
    if let Some(note) = options.broker.note() {
        eprintln!("{note}");
    }
    eprintln!("set up after {:.1} s; logs in {}", started.elapsed().as_secs_f64(), places.folder.display());

    let production = Arc::new(Production {
        ledger: faults.ledger.clone(),
        keys: options.keys,
        poison_in: options.poison_in,
        target: options.events,
        consumers: GROUPS.len() as u64,
        stop: CancellationToken::new(),
        committed: AtomicU64::new(0),
        effects: AtomicU64::new(0),
        unknown: AtomicU64::new(0),
        failed: AtomicU64::new(0),
    });
    let mut rng = fastrand::Rng::with_seed(options.seed);
    let mut producers = JoinSet::new();
    for _ in 0..options.producers {
        producers.spawn(producer::produce(production.clone(), rng.fork()));
    }
    let duplicating =
        duplicates::start(&options, &places, faults.ledger.clone(), production.stop.child_token()).await?;
    let plan = plan::plan(&options, RELAYS, faults.fleet.len());
    let run = Run { options: &options, started, faults: &faults, production: &production };
    let mut problems = Vec::new();
    // The testbed's futures do not leave their thread.
    if let Err(problem) = LocalSet::new().run_until(run.work(plan)).await {
        problems.push(problem.to_string());
    }
    production.stop.cancel();
    let rolled_back = producers.join_all().await.concat();
    let duplicated = match duplicating {
        Some(duplicating) => duplicating.stop().await,
        None => 0,
    };
    if problems.is_empty() {
        problems.extend(run.drain().await);
    }
    let worked = started.elapsed();
    if !problems.is_empty() {
        problems.push(faults.fleet.logs());
        let servers = [faults.store.lock().await.pid(), faults.broker.lock().await.pid()];
        servers.into_iter().flatten().for_each(|pid| keep_server_logs(pid, &places.folder));
    }
    problems.extend(faults.fleet.stop().await?);

    problems.extend(faults.ledger.misjudged(&groups()).await?);
    let history = faults.ledger.history(&groups(), rolled_back).await?;
    let report = tokio::task::spawn_blocking(move || history.check()).await?;
    let mut record = std::mem::take(&mut *faults.record.lock().await);
    record.duplicates = duplicated;
    record.aborts = faults.fleet.aborts().await;
    let unknown = production.unknown.load(Ordering::Relaxed);
    let failed = production.failed.load(Ordering::Relaxed);
    let outcome = Outcome::new(options, report, record, problems, worked, unknown, failed);
    outcome.keep_or_remove(&places.folder);
    Ok(outcome)
}

/// Copies a server's logs out of its folder, which goes with the server. What cannot be copied is not worth failing for.
fn keep_server_logs(pid: u32, folder: &Path) {
    let Ok(home) = std::fs::read_link(format!("/proc/{pid}/cwd")) else { return };
    // RabbitMQ has a folder of logs beside what it says on its standard output; PostgreSQL works in a folder below.
    let places = [home.join("logs"), home.clone(), home.join("..")];
    let files = places.into_iter().flat_map(|place| std::fs::read_dir(place).into_iter().flatten());
    for file in files.filter_map(|entry| Some(entry.ok()?.path())) {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if file.is_file() && (name == "log" || name.ends_with(".log")) {
            let _ = std::fs::copy(&file, folder.join(format!("server-{pid}-{name}")));
        }
    }
}

/// Servers, tables, queues and processes.
async fn set_up(options: &Options) -> Result<(Arc<Faults>, Places)> {
    let crash = std::env::current_exe()?;
    let postrider = crash.with_file_name("postrider");
    if !postrider.exists() {
        return Err(format!(
            "there is no {}: build it first, with `cargo build -p postrider-server` in the same profile",
            postrider.display()
        )
        .into());
    }
    let folder = match &options.logs {
        Some(folder) => folder.clone(),
        None => std::env::temp_dir().join(crate::testbed::unique("postrider-crash")),
    };
    std::fs::create_dir_all(&folder)?;
    let (store, broker) = tokio::try_join!(store::start(options.store), broker::start(options.broker))?;
    let places = Places {
        folder,
        postrider,
        crash,
        store: store.url().to_owned(),
        broker: broker.url().to_owned(),
        broker_settings: broker.settings(),
    };
    let ledger = store::ledger(options.store, &places.store, options.keys, &groups()).await?;
    for (group, slots) in GROUPS {
        // A process of its own, so that nothing of it stays connected.
        let arguments = consumer_arguments("declare", group, slots, &places, options);
        let mut command = Command::new(&places.crash);
        command.args(arguments);
        let output = tokio::task::spawn_blocking(move || command.output()).await??;
        if !output.status.success() {
            return Err(format!("cannot declare {group}: {}", String::from_utf8_lossy(&output.stderr)).into());
        }
    }
    let fleet = Fleet::new(&places, options)?;
    fleet.start().await?;
    let faults = Faults {
        fleet,
        ledger,
        titles: (options.broker.title(), options.store.title()),
        store: Mutex::new(store),
        broker: Mutex::new(broker),
        record: Mutex::new(Record::default()),
    };
    Ok((Arc::new(faults), places))
}

struct Run<'a> {
    options: &'a Options,
    started: Instant,
    faults: &'a Arc<Faults>,
    production: &'a Production,
}

impl Run<'_> {
    /// Injects the plan while the work goes on, until all faults are over and all events are committed.
    async fn work(&self, plan: Vec<Planned>) -> Result<()> {
        let mut under_way = JoinSet::new();
        let worked = self.inject(plan, &mut under_way).await;
        // What was ended is started again, whatever went wrong: the history is read from the database.
        while let Some(ended) = under_way.join_next().await {
            ended??;
        }
        worked
    }

    async fn inject(&self, plan: Vec<Planned>, under_way: &mut JoinSet<Result<()>>) -> Result<()> {
        let mut plan = plan.into_iter().peekable();
        let (mut shown, mut swept) = (Instant::now(), Instant::now());
        let mut moved = (Instant::now(), 0);
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let done = self.look().await;
            if done != moved.1 {
                moved = (Instant::now(), done);
            }
            let share = done as f64 / (self.options.events * (1 + GROUPS.len() as u64)) as f64;
            while let Some(planned) = plan.next_if(|planned| planned.at <= share) {
                under_way.spawn_local(self.faults.clone().inject(planned));
            }
            while let Some(ended) = under_way.try_join_next() {
                ended??;
            }
            if swept.elapsed() > SWEEP_EVERY {
                self.faults.fleet.sweep().await?;
                swept = Instant::now();
            }
            if shown.elapsed() > SHOW_EVERY {
                self.show(share);
                shown = Instant::now();
            }
            let is_produced = self.production.committed.load(Ordering::Relaxed) >= self.options.events;
            if is_produced && under_way.is_empty() && plan.peek().is_none() {
                return Ok(());
            }
            self.check_time(moved.0).await?;
        }
    }

    /// Events committed and effects done, together.
    async fn look(&self) -> u64 {
        // A database that is away has not moved.
        if let Ok(effects) = self.faults.ledger.effects_about().await {
            self.production.effects.store(effects, Ordering::Relaxed);
        }
        self.production.committed.load(Ordering::Relaxed) + self.production.effects.load(Ordering::Relaxed)
    }

    fn show(&self, share: f64) {
        eprintln!(
            "{:>5.0} s {:>3.0} %: {} events committed, {} effects",
            self.started.elapsed().as_secs_f64(),
            (share * 100.0).min(100.0),
            self.production.committed.load(Ordering::Relaxed),
            self.production.effects.load(Ordering::Relaxed),
        );
    }
}
