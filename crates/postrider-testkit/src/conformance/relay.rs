//! What the relay keeps on every store, whatever the broker answers.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use postrider::Kind;
use postrider::Route;
use postrider::broker::Broker;
use postrider::event::Event;
use postrider::lease::{LeaseTimes, Leases};
use postrider::relay::{Backoff, BreakerSettings, Relay, RelaySettings};
use postrider::upkeep::Upkeep;
use tokio_util::sync::CancellationToken;

use super::bed::{Bed, event, name};
use crate::faults::{Answer, ScriptedBroker};

/// Fast enough for tests, the same in kind as the defaults.
pub(super) fn settings() -> RelaySettings {
    let backoff = Backoff { base: Duration::from_millis(50), max: Duration::from_millis(200), jitter: Duration::ZERO };
    RelaySettings {
        poll: Duration::from_millis(20),
        page: 16,
        batch: 4,
        backoff,
        attempts_max: 3,
        lease: LeaseTimes { ttl: Duration::from_millis(900) },
        breaker: BreakerSettings { open: Duration::from_millis(300), ..BreakerSettings::default() },
        ..RelaySettings::default()
    }
}

pub(super) struct Running {
    stop: CancellationToken,
    task: tokio::task::JoinHandle<postrider::Result<()>>,
}

impl Running {
    pub(super) fn start(bed: &impl Bed, broker: Arc<dyn Broker>, settings: RelaySettings) -> Self {
        let leases: Arc<dyn Leases> = Arc::new(bed.store().clone());
        let relay = Relay::new("default", bed.source(settings.lanes), leases, broker, settings);
        let stop = CancellationToken::new();
        Self { task: tokio::spawn(relay.run(stop.clone())), stop }
    }

    pub(super) async fn stop(self) {
        self.stop.cancel();
        self.task.await.expect("no panic").expect("the relay stops well");
    }

    /// Ends the renewal of leases but not the work: an instance that was cut off and does not know it.
    fn stop_renewing(&self) {
        self.task.abort();
    }
}

pub(super) async fn commit(bed: &impl Bed, events: &[Event]) {
    for event in events {
        let mut tx = bed.begin().await;
        tx.append(event).await;
        tx.commit().await;
    }
}

pub(super) async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    while !is_so().await {
        assert!(tokio::time::Instant::now() < deadline, "{what} did not happen");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

pub(super) fn names(events: &[Event]) -> Vec<String> {
    events.iter().map(name).collect()
}

/// The first arrival of each event, in order, per key.
fn first_arrivals(events: &[Event]) -> HashMap<String, Vec<String>> {
    let mut seen = HashSet::new();
    let mut keys: HashMap<String, Vec<String>> = HashMap::new();
    for event in events.iter().filter(|event| seen.insert(event.id())) {
        keys.entry(event.key().unwrap_or_default().to_owned()).or_default().push(name(event));
    }
    keys
}

/// What is committed is published, once when nothing fails, and the position is settled at the stop.
pub async fn committed_events_are_published(bed: &impl Bed) {
    let broker = ScriptedBroker::new(|_, _| Answer::Confirm);
    let relay = Running::start(bed, broker.clone(), settings());
    let events: Vec<Event> = (0..100).map(|n| event(&format!("{}", n % 7), &format!("{n:03}"))).collect();
    commit(bed, &events).await;
    until("publishing", async || broker.arrived().len() >= 100).await;
    relay.stop().await;
    assert_eq!(broker.arrived().len(), 100, "nothing is published twice without need");
    assert_eq!(bed.store().backlog(&Route::all("default")).await.expect("answers").pending, 0);

    let relay = Running::start(bed, broker.clone(), settings());
    commit(bed, &[event("k", "last")]).await;
    until("publishing", async || broker.arrived().len() >= 101).await;
    relay.stop().await;
    assert_eq!(name(&broker.arrived()[100]), "last", "a graceful stop leaves nothing to be published again");
}

/// A refused event parks its key; other keys flow; when it is taken, what waited follows in order.
pub async fn a_refused_event_holds_back_only_its_key(bed: &impl Bed) {
    let broker = ScriptedBroker::new(|event, attempt| match name(event).as_str() {
        "k1" if attempt < 3 => Answer::Refuse(Kind::Unroutable),
        _ => Answer::Confirm,
    });
    let relay = Running::start(bed, broker.clone(), settings());
    let mut all = vec![event("k", "k0"), event("k", "k1"), event("k", "k2"), event("k", "k3")];
    all.extend((0..20).map(|n| event("other", &format!("o{n:02}"))));
    commit(bed, &all).await;
    until("publishing", async || broker.arrived().len() >= 24).await;
    commit(bed, &[event("k", "k4")]).await;
    until("publishing", async || broker.arrived().len() >= 25).await;
    relay.stop().await;
    let keys = first_arrivals(&broker.arrived());
    assert_eq!(keys["k"], ["k0", "k1", "k2", "k3", "k4"]);
    assert!(keys["other"].is_sorted());
    let backlog = bed.store().backlog(&Route::all("default")).await.expect("answers");
    assert_eq!((backlog.pending, backlog.retrying, backlog.waiting, backlog.failed), (0, 0, 0, 0));
}

/// Attempts spent means failed: kept with its error, its key waits, everything else flows.
pub async fn a_poison_event_ends_as_failed(bed: &impl Bed) {
    let broker = ScriptedBroker::new(|event, _| match name(event).as_str() {
        "poison" => Answer::Refuse(Kind::Unroutable),
        _ => Answer::Confirm,
    });
    let relay = Running::start(bed, broker.clone(), settings());
    commit(bed, &[event("k", "poison"), event("k", "behind"), event("other", "fine")]).await;
    until("failing", async || bed.store().backlog(&Route::all("default")).await.expect("answers").failed == 1).await;
    commit(bed, &[event("k", "later"), event("other", "fine too")]).await;
    until("publishing", async || broker.arrived().len() >= 2).await;
    until("waiting", async || bed.store().backlog(&Route::all("default")).await.expect("answers").waiting == 2).await;
    relay.stop().await;
    assert_eq!(names(&broker.arrived()), ["fine", "fine too"]);
}

/// An event that can never be sent is failed at once, without troubling the broker.
pub async fn an_event_too_large_is_failed_at_once(bed: &impl Bed) {
    let broker = ScriptedBroker::new(|event, _| match name(event).as_str() {
        "large" => Answer::Refuse(Kind::TooLarge),
        _ => Answer::Confirm,
    });
    let relay = Running::start(bed, broker.clone(), settings());
    commit(bed, &[event("k", "large"), event("other", "small")]).await;
    until("failing", async || bed.store().backlog(&Route::all("default")).await.expect("answers").failed == 1).await;
    until("publishing", async || broker.arrived().len() == 1).await;
    relay.stop().await;
}

/// A broker that is down costs no attempt; when it is back everything flows, in order.
pub async fn an_outage_costs_no_attempts(bed: &impl Bed) {
    let is_down = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let flag = is_down.clone();
    let broker = ScriptedBroker::new(move |_, _| {
        if flag.load(std::sync::atomic::Ordering::SeqCst) { Answer::Down } else { Answer::Confirm }
    });
    let relay = Running::start(bed, broker.clone(), settings());
    let events: Vec<Event> = (0..40).map(|n| event(&format!("{}", n % 5), &format!("{n:02}"))).collect();
    commit(bed, &events).await;
    // More failing calls than an event has attempts, and than the breaker needs to open.
    until("failing calls", async || broker.calls() >= 7).await;
    let backlog = bed.store().backlog(&Route::all("default")).await.expect("answers");
    assert_eq!((backlog.pending, backlog.retrying, backlog.failed), (40, 0, 0), "the outage was blamed on events");
    is_down.store(false, std::sync::atomic::Ordering::SeqCst);
    until("publishing", async || broker.arrived().len() >= 40).await;
    relay.stop().await;
    for names in first_arrivals(&broker.arrived()).values() {
        assert!(names.is_sorted(), "a key lost its order: {names:?}");
    }
}

/// A broker that asks publishers to stop is left alone.
pub async fn a_blocked_broker_is_left_alone(bed: &impl Bed) {
    let broker = ScriptedBroker::new(|_, _| Answer::Confirm);
    broker.set_blocked(true);
    let relay = Running::start(bed, broker.clone(), settings());
    commit(bed, &[event("k", "a")]).await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(broker.calls(), 0);
    broker.set_blocked(false);
    until("publishing", async || broker.arrived().len() == 1).await;
    relay.stop().await;
}

/// Lost confirmations, refusals and outages at random: nothing lost, first arrivals in order.
pub async fn random_trouble_loses_and_reorders_nothing(bed: &impl Bed) {
    let trouble = std::sync::Mutex::new(fastrand::Rng::with_seed(42));
    let broker = ScriptedBroker::new(move |_, attempt| {
        let mut rng = trouble.lock().expect("not poisoned");
        match rng.u32(0..100) {
            0..4 if attempt < 3 => Answer::Refuse(Kind::Unroutable),
            4..8 => Answer::DownAfterWrite,
            8..12 => Answer::Down,
            _ => Answer::Confirm,
        }
    });
    let settings = RelaySettings {
        attempts_max: 100,
        breaker: BreakerSettings { open: Duration::from_millis(20), ..BreakerSettings::default() },
        ..settings()
    };
    let events: Vec<Event> = (0..200).map(|n| event(&format!("{}", n % 9), &format!("{n:03}"))).collect();
    commit(bed, &events).await;
    let relay = Running::start(bed, broker.clone(), settings);
    let all: HashSet<_> = events.iter().map(Event::id).collect();
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    loop {
        let arrived: HashSet<_> = broker.arrived().iter().map(Event::id).collect();
        let backlog = bed.store().backlog(&Route::all("default")).await.expect("answers");
        if arrived == all && backlog.pending + backlog.retrying + backlog.waiting == 0 {
            break;
        }
        assert!(tokio::time::Instant::now() < deadline, "{} of 200 arrived, {backlog:?}", arrived.len());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    relay.stop().await;
    for (key, names) in first_arrivals(&broker.arrived()) {
        assert!(names.is_sorted(), "key {key} lost its order: {names:?}");
    }
}

/// An instance that does not notice the loss of its lease cannot hinder its successor.
pub async fn an_instance_that_lost_its_lease_does_no_harm(bed: &impl Bed) {
    let broker = ScriptedBroker::new(|_, _| Answer::Confirm);
    let first = Running::start(bed, broker.clone(), settings());
    commit(bed, &[event("k", "0")]).await;
    until("publishing", async || broker.arrived().len() == 1).await;
    first.stop_renewing();
    let second = Running::start(bed, broker.clone(), settings());
    let store = bed.store().clone();
    let mut count = 1usize;
    until("takeover", async || {
        commit(bed, &[event("k", &count.to_string())]).await;
        count += 1;
        store.leases().await.expect("answers").iter().any(|view| view.lease.epoch == 2)
    })
    .await;
    commit(bed, &[event("k", &count.to_string())]).await;
    until("publishing", async || first_arrivals(&broker.arrived())["k"].len() == count + 1).await;
    second.stop().await;
    let expected: Vec<String> = (0..=count).map(|n| n.to_string()).collect();
    assert_eq!(first_arrivals(&broker.arrived())["k"], expected);
}

/// Several lanes on two instances publish everything, each key in order.
pub async fn lanes_are_shared_between_instances(bed: &impl Bed) {
    let broker = ScriptedBroker::new(|_, _| Answer::Confirm);
    let settings = RelaySettings { lanes: 4, ..settings() };
    let first = Running::start(bed, broker.clone(), settings.clone());
    let second = Running::start(bed, broker.clone(), settings);
    let store = bed.store().clone();
    until("sharing", async || {
        let leases = store.leases().await.expect("answers");
        let owners: HashSet<_> =
            leases.iter().filter(|view| view.remaining.is_some()).map(|v| &v.lease.owner).collect();
        leases.len() == 4 && owners.len() == 2
    })
    .await;
    let events: Vec<Event> = (0..120).map(|n| event(&format!("{}", n % 20), &format!("{n:03}"))).collect();
    commit(bed, &events).await;
    let all: HashSet<_> = events.iter().map(Event::id).collect();
    until("publishing", async || broker.arrived().iter().map(Event::id).collect::<HashSet<_>>() == all).await;
    first.stop().await;
    second.stop().await;
    for names in first_arrivals(&broker.arrived()).values() {
        assert!(names.is_sorted(), "a key lost its order");
    }
}
