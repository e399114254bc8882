//! `postrider run`: relay, upkeep and HTTP in one process.
//!
//! Order of the start: bind the port (so that `/healthz` answers while the store is awaited), open the store, check its
//! schema, look at the broker, then work. What a person must change ends the process with a message; what time may mend
//! is waited for.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use futures_util::FutureExt;
use metrics_exporter_prometheus::PrometheusBuilder;
use postrider::broker::Broker;
use postrider::claim::Claims;
use postrider::doctor::{Finding, Severity};
use postrider::recovery::Witness;
use postrider::relay::Backoff;
use postrider::store::Store;
use postrider::{Error, Kind};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::failure::{Failure, Result, causes, io};
use super::signals;
use crate::api::{self, Health, Shared};
use crate::config::{Config, StoreUrl, redact};
use crate::duty::{
    self, BacklogDuty, ClaimsDuty, HistogramsDuty, Outbox, ProbeDuty, StandingDuty, UpkeepDuty, WitnessDuty,
    WitnessFile,
};
use crate::watch::{Local, Watch};
use crate::wire::{self, Destination};
use crate::{logging, sink, trace};

/// Waits for a store that cannot be reached at the start.
const STORE_WAIT: Backoff =
    Backoff { base: Duration::from_secs(1), max: Duration::from_secs(15), jitter: Duration::from_millis(500) };
/// A stop that takes longer is cut short, which is as safe as `kill -9`.
const STOP_WAIT: Duration = Duration::from_secs(60);
/// A client that still sends its request gets this long after the stop.
const HTTP_STOP_WAIT: Duration = Duration::from_secs(5);

/// Buckets for latencies in seconds: from an idle machine's milliseconds to an outage's minutes.
const BUCKETS: [f64; 14] = [0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 60.0, 300.0];

/// Arguments of `run`.
#[derive(Debug, Args)]
#[command(after_help = "\
Without a config it works on ./postrider.db with the embedded broker, and creates what is missing. On PostgreSQL it
wants the migrations to be there, unless --migrate is given. Run as many instances as you like: they share the lanes.

SIGTERM or Ctrl-C: stop taking events, finish what was taken, give the lanes back. A second one ends at once.

Examples:
  postrider run
  postrider run --config /etc/postrider.toml
  POSTRIDER__HTTP__LISTEN=127.0.0.1:8080 postrider run --migrate

  curl -i http://127.0.0.1:7070/api/v1/events -H 'content-type: application/json' \\
       -d '{\"topic\":\"orders.created\",\"type\":\"order.created\",\"key\":\"o-1\",\"payload\":{\"order\":\"o-1\"}}'")]
pub struct RunArgs {
    /// Create or update the tables first, also on PostgreSQL
    #[arg(long)]
    migrate: bool,
}

/// Runs until a signal, or until something ends that must not end.
pub async fn run(args: RunArgs, config: Config) -> Result<ExitCode> {
    let is_json = logging::init(&config.log);
    match start(args, config).await {
        // Whoever collects JSON lines wants the reason of the end as one of them.
        Err(Failure::Library(error)) if is_json => {
            tracing::error!(error_type = error.kind().as_str(), causes = ?causes(&error), remedy = error.remedy(),
                "{}", redact(error.message()));
            Ok(ExitCode::FAILURE)
        }
        result => result,
    }
}

async fn start(args: RunArgs, config: Config) -> Result<ExitCode> {
    let stop = signals::stop_on_signal()?;
    for warning in config.warnings() {
        tracing::warn!(check = warning.check, remedy = warning.remedy, "{}", warning.message);
    }
    let shared = shared(&config, &stop)?;
    let listener = bind(config.http.listen).await?;
    let address = listener.local_addr().map_err(|error| io("the HTTP address is unknown", error))?;
    tracing::info!(%address, "HTTP listens");
    let http = api::serve(listener, api::router(shared.clone()), api::Limits::default(), stop.clone());
    let http = tokio::spawn(http.boxed());
    // From the start: requests are measured while the store is awaited.
    tokio::spawn(duty::every(HistogramsDuty::new(shared.metrics.clone()), stop.clone()).boxed());

    let result = work(&args, &config, &shared, &stop).await;
    stop.cancel();
    let aborted = http.abort_handle();
    if tokio::time::timeout(HTTP_STOP_WAIT, http).await.is_err() {
        aborted.abort();
    }
    result.map(|()| ExitCode::SUCCESS)
}

fn shared(config: &Config, stop: &CancellationToken) -> Result<Arc<Shared>> {
    let unusable = |error| Error::new(Kind::Other, "the metrics recorder cannot be installed").with_source(error);
    let metrics = PrometheusBuilder::new()
        .set_buckets(&BUCKETS)
        .and_then(PrometheusBuilder::install_recorder)
        .map_err(unusable)?;
    postrider::metrics::describe();
    let health = Arc::new(Health::default());
    health.trouble("store", "starting", "starting", "wait a moment");
    if config.relay.enabled {
        health.trouble("relay", "starting", "starting", "wait a moment");
    }
    Ok(Arc::new(Shared::new(Arc::new(config.clone()), health, metrics, stop)?))
}

async fn bind(address: SocketAddr) -> Result<TcpListener> {
    let listener = TcpListener::bind(address).await.map_err(|error| {
        io(format!("HTTP cannot listen on {address}"), error)
            .with_remedy("choose another address with http.listen (POSTRIDER__HTTP__LISTEN), or stop what uses it")
    })?;
    Ok(listener)
}

async fn work(args: &RunArgs, config: &Config, shared: &Arc<Shared>, stop: &CancellationToken) -> Result<()> {
    let (tasks, owner) = (TaskTracker::new(), postrider::lease::instance_name());
    let sinks = if config.alerts.enabled { sink::build(&config.sinks)? } else { Vec::new() };
    let patience = Patience { shared, local: Local::new(config, &owner, sinks, &tasks, stop), stop };
    let Some(store) = patience.with(async || open(args, config).await).await? else { return Ok(()) };
    // Set once, here.
    let _ = shared.store.set(store.clone());
    let destinations = wire::destinations(config, &store)?;
    for destination in &destinations {
        check_broker(destination.broker.as_ref()).await?;
    }
    let brokers = destinations.iter().map(|to| (to.route.destination.clone(), to.broker.clone())).collect();
    // Set once, here.
    let _ = shared.brokers.set(brokers);
    let claims = wire::claims(config)?;

    if let Some(claims) = &claims {
        check_claims(claims).await;
        tasks.spawn(duty::every(ClaimsDuty::new(claims.clone(), config.retention.claims()), stop.clone()).boxed());
    }
    let upkeep = UpkeepDuty::new(store.clone(), config.retention);
    tasks.spawn(duty::every(upkeep, stop.clone()).boxed());
    for (route, _) in config.destinations() {
        let outbox = Outbox::Own(store.clone(), route);
        tasks.spawn(duty::every(BacklogDuty::new(outbox, config.relay.stale_after), stop.clone()).boxed());
    }
    tasks.spawn(duty::every(ProbeDuty::new(store.clone(), shared.health.clone()), stop.clone()).boxed());
    if config.alerts.enabled {
        let (watch, deliverer) = Watch::new(config, store.clone(), &owner, patience.local.clone());
        tasks.spawn(watch.run(stop.clone()).boxed());
        tasks.spawn(deliverer.run(stop.clone()).boxed());
    }
    tasks.spawn(duty::every(StandingDuty::new(store.clone()), stop.clone()).boxed());
    let trace = trace::start(config)?;
    let (mut workers, relayed) = (Workers::new(), CancellationToken::new());
    let parts = Parts { config, store: &store, destinations: &destinations, tasks: &tasks, relayed: &relayed };
    let begun = match parts.begin_relays(&mut workers, &patience).await {
        Ok(()) => parts.begin_consumers(&mut workers, claims.as_ref(), stop),
        failure => failure,
    };
    match &begun {
        Ok(()) if stop.is_cancelled() => {}
        Ok(()) => {
            tracing::info!(store = %config.store, broker = %config.broker.url, lanes = config.relay.lanes,
                relay = config.relay.enabled, routes = config.routes.len(), outboxes = config.outboxes.len(),
                consumers = config.consumers.len(), "postrider {} is running", env!("CARGO_PKG_VERSION"));
        }
        // What has begun is ended in order.
        Err(_) => stop.cancel(),
    }

    let result = begun.and(finish(workers, shared, stop).await);
    relayed.cancel();
    if let Some(trace) = trace {
        trace.end().await;
    }
    tasks.close();
    let ended = async {
        tasks.wait().await;
        shared.ended().await;
    };
    if tokio::time::timeout(STOP_WAIT, ended).await.is_err() {
        tracing::warn!(error_type = "unavailable", "the store did not answer in time; ending all the same");
        return result;
    }
    store.close().await;
    tracing::info!("stopped");
    result
}

/// Relays and consumers, each with its name.
type Workers = JoinSet<(String, postrider::Result<()>)>;

/// What relays and consumers are made of.
struct Parts<'a> {
    config: &'a Config,
    store: &'a Arc<dyn Store>,
    destinations: &'a [Destination],
    tasks: &'a TaskTracker,
    /// Cancelled when the last relay has ended.
    relayed: &'a CancellationToken,
}

impl Parts<'_> {
    /// Begins the relays, unless asked to stop before the store had answered.
    async fn begin_relays(&self, workers: &mut Workers, patience: &Patience<'_>) -> Result<()> {
        let Parts { config, store, destinations, .. } = *self;
        if !config.relay.enabled {
            return Ok(());
        }
        let Some(()) = set_routes(config, store.as_ref(), patience).await? else { return Ok(()) };
        let witness = patience.with(async || wire::witness_file(config, store.as_ref()).await);
        let Some(file) = witness.await? else { return Ok(()) };
        let known = file.as_ref().map(WitnessFile::load).unwrap_or_default();
        let mut witnesses = Vec::new();
        for destination in destinations {
            let name = format!("the relay to {:?}", destination.route.destination);
            let witness = Witness::of(known.get(&destination.route.destination).cloned());
            witnesses.push((destination.route.destination.clone(), witness.clone()));
            let relay = wire::relay(config, store, destination).witness(witness).run(patience.stop.clone());
            workers.spawn(async move { (name, relay.await) }.boxed());
        }
        if let Some(file) = file {
            self.tasks.spawn(WitnessDuty::new(file, witnesses).run(self.relayed.clone()).boxed());
        }
        for outbox in &config.outboxes {
            let name = format!("the relay of {}", outbox.mapping.table);
            let adopt = patience.with(async || {
                let adopted = wire::adopted(config, store, outbox, destinations).await?;
                let findings = adopted.table().inspect().await?;
                Ok((adopted, findings))
            });
            let Some((adopted, findings)) = adopt.await? else { return Ok(()) };
            tell(&name, findings);
            let table = Outbox::Adopted(outbox.mapping.name.clone(), adopted.table());
            self.tasks
                .spawn(duty::every(BacklogDuty::new(table, config.relay.stale_after), patience.stop.clone()).boxed());
            let relay = adopted.run(patience.stop.clone());
            workers.spawn(async move { (name, relay.await) }.boxed());
        }
        patience.shared.health.clear("relay");
        Ok(())
    }

    fn begin_consumers(
        &self,
        workers: &mut Workers,
        claims: Option<&Arc<Claims>>,
        stop: &CancellationToken,
    ) -> Result<()> {
        for consumer in &self.config.consumers {
            let name = format!("the consumer {:?}", consumer.spec.name);
            let handler = wire::webhook(self.config, consumer)?;
            let broker = wire::broker_of(self.destinations, &consumer.destination)?;
            let store = self.store.clone();
            let consume = store.consume(consumer.spec.clone(), broker, handler, claims.cloned(), stop.clone());
            workers.spawn(async move { (name, consume.await) }.boxed());
        }
        Ok(())
    }
}

/// Waits for a store that does not answer, and tells of it.
struct Patience<'a> {
    shared: &'a Shared,
    local: Local,
    stop: &'a CancellationToken,
}

impl Patience<'_> {
    /// Calls until the store answers; `None` when asked to stop before it did. What time does not mend is an error.
    async fn with<T>(&self, mut call: impl AsyncFnMut() -> postrider::Result<T>) -> Result<Option<T>> {
        let mut failures = 0;
        while !self.stop.is_cancelled() {
            let began = Instant::now();
            let error = match call().await {
                Ok(answer) => {
                    self.local.answered();
                    self.shared.health.clear("store");
                    return Ok(Some(answer));
                }
                Err(error) => error,
            };
            if error.kind() != Kind::Unavailable {
                return Err(error.into());
            }
            self.local.failed(began, &error);
            failures += 1;
            let wait = STORE_WAIT.delay_with(failures, &mut fastrand::Rng::new());
            tracing::error!(error_type = error.kind().as_str(), %error, causes = ?error.causes(),
                remedy = error.remedy(), retry_in_s = wait.as_secs(), "the store cannot be reached, trying again");
            self.shared.health.failed("store", &error);
            tokio::select! {
                () = self.stop.cancelled() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
        Ok(None)
    }
}

/// Takes the routes over. An instance that was killed holds its leases for a while yet; that is waited for.
async fn set_routes(config: &Config, store: &dyn Store, patience: &Patience<'_>) -> Result<Option<()>> {
    let until = Instant::now() + 2 * config.relay.lease;
    loop {
        match patience.with(async || store.set_routes(&config.destination_routes()).await).await {
            Err(Failure::Library(error)) if error.kind() == Kind::Config && Instant::now() < until => {
                tracing::warn!(error_type = error.kind().as_str(), %error, "waiting for the leases to end");
                tokio::time::sleep(config.relay.lease / 3).await;
            }
            result => return result,
        }
    }
}

/// Says what was found about an adopted table.
fn tell(name: &str, findings: Vec<Finding>) {
    for Finding { check, severity, message, remedy } in findings {
        match severity {
            Severity::Ok => tracing::debug!(check, "{name}: {message}"),
            Severity::Warning => tracing::warn!(check, remedy, "{name}: {message}"),
            Severity::Error => tracing::error!(error_type = "mismatch", check, remedy, "{name}: {message}"),
        }
    }
}

/// Waits for the end of relay and consumers: after a signal that is what was asked for, before it is a failure.
async fn finish(mut workers: Workers, shared: &Shared, stop: &CancellationToken) -> Result<()> {
    let mut failure = None;
    while !stop.is_cancelled() {
        let ended = tokio::select! {
            () = stop.cancelled() => break,
            Some(ended) = workers.join_next() => ended,
            else => {
                stop.cancelled().await;
                break;
            }
        };
        let (name, result) = ended.unwrap_or_else(|error| {
            let error = Error::new(Kind::Other, "it ended unexpectedly").with_source(error);
            ("a worker".to_owned(), Err(error))
        });
        if stop.is_cancelled() {
            break;
        }
        shared.health.trouble("relay", "ended", &format!("{name} has ended"), "look at the log and start again");
        failure = result.err().map(|error| error.context(name));
        stop.cancel();
    }
    let all = async {
        while let Some(ended) = workers.join_next().await {
            if let Ok((name, Err(error))) = ended {
                // Leases expire by themselves; nothing is lost.
                tracing::warn!(error_type = error.kind().as_str(), %error, causes = ?error.causes(),
                    "{name} did not stop cleanly");
            }
        }
    };
    if tokio::time::timeout(STOP_WAIT, all).await.is_err() {
        tracing::warn!(error_type = "unavailable", "relay and consumers did not stop in time; ending all the same");
    }
    match failure {
        Some(error) => Err(error.into()),
        None => Ok(()),
    }
}

/// Opens the store and brings or checks its schema. A SQLite file belongs to this process alone, so it is migrated
/// without asking; a PostgreSQL database belongs to somebody.
async fn open(args: &RunArgs, config: &Config) -> postrider::Result<Arc<dyn Store>> {
    let store = wire::create_store(config).await?;
    let is_ours = matches!(config.store, StoreUrl::Sqlite(_));
    if is_ours || args.migrate {
        for migration in store.migrate().await? {
            tracing::info!(version = migration.version, name = migration.name, "migrated");
        }
        return Ok(store);
    }
    let schema = store.schema().await?;
    schema.require().map_err(|error| match error.kind() {
        Kind::NotMigrated => error.with_remedy("run `postrider migrate`, or start with `postrider run --migrate`"),
        _ => error,
    })?;
    Ok(store)
}

/// Reads the broker's settings back. What would lose events is refused; a broker that is away is the relay's business.
async fn check_broker(broker: &dyn Broker) -> Result<()> {
    let findings = match broker.inspect().await {
        Ok(findings) => findings,
        Err(error) if error.kind() == Kind::Unavailable => {
            tracing::error!(error_type = error.kind().as_str(), %error, causes = ?error.causes(), remedy = error.remedy(),
                "the broker cannot be reached; events stay in the outbox until it can");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    for finding in &findings {
        let Finding { check, severity, message, remedy } = finding;
        match severity {
            Severity::Ok => tracing::debug!(check, "{message}"),
            Severity::Warning => tracing::warn!(check, remedy, "{message}"),
            Severity::Error if is_passing(finding) => {
                tracing::error!(
                    error_type = "unavailable",
                    check,
                    remedy,
                    "{message}; events stay in the outbox meanwhile"
                );
            }
            Severity::Error => {
                return Err(Error::new(Kind::Mismatch, format!("{check}: {message}"))
                    .with_remedy(remedy.as_str())
                    .into());
            }
        }
    }
    Ok(())
}

/// A storage that cannot be used holds up large events only until it can.
async fn check_claims(claims: &Claims) {
    if let Err(error) = claims.inspect().await {
        tracing::error!(error_type = error.kind().as_str(), %error, causes = ?error.causes(), remedy = error.remedy(),
            "the claim storage cannot be used; events with large payloads stay in the outbox until it can");
    }
}

/// Whether time may mend it: the broker asks publishers to wait.
fn is_passing(finding: &Finding) -> bool {
    finding.check.ends_with(".blocked")
}
