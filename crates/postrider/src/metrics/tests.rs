//! The page of the documentation says what there is, and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

use super::*;
use crate::alert::{Alert, Urgency};
use crate::error::Kind;
use crate::event::{Event, EventBuilder};
use crate::pulse::Instance;
use crate::source::ParkedState;
use crate::upkeep::{Backlog, ConsumerView};

const PAGE: &str = include_str!("../../../../docs/reference/metrics.md");

/// Type and labels of each metric.
type Found = BTreeMap<String, (String, BTreeSet<String>)>;

#[derive(Default)]
struct Notes {
    described: Mutex<BTreeMap<String, String>>,
    registered: Mutex<Found>,
    gauges: Mutex<BTreeMap<String, Arc<std::sync::atomic::AtomicU64>>>,
}

impl Notes {
    fn describe(&self, name: &KeyName, kind: &str) {
        let before = self.described.lock().unwrap().insert(name.as_str().to_owned(), kind.to_owned());
        assert_eq!(before, None, "{} is described twice", name.as_str());
    }

    fn register(&self, key: &Key, kind: &str) {
        let labels: BTreeSet<String> = key.labels().map(|label| label.key().to_owned()).collect();
        let found = (kind.to_owned(), labels);
        let before = self.registered.lock().unwrap().insert(key.name().to_owned(), found.clone());
        assert!(before.is_none_or(|before| before == found), "{} has other labels elsewhere", key.name());
    }
}

impl Recorder for Notes {
    fn describe_counter(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.describe(&name, "counter");
    }
    fn describe_gauge(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.describe(&name, "gauge");
    }
    fn describe_histogram(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.describe(&name, "histogram");
    }
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        self.register(key, "counter");
        Counter::noop()
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        self.register(key, "gauge");
        let labels: Vec<&str> = key.labels().map(metrics::Label::value).collect();
        let name = format!("{} {}", key.name(), labels.join(" "));
        Gauge::from_arc(self.gauges.lock().unwrap().entry(name).or_default().clone())
    }
    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        self.register(key, "histogram");
        Histogram::noop()
    }
}

/// The rows of the page's tables: `| `name` | type | `label`, … | meaning |`.
fn documented() -> Found {
    let row = |line: &str| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let name = cells.get(1)?.strip_prefix("`postrider_")?.strip_suffix('`')?;
        let labels = cells.get(3)?.split(',').map(|label| label.trim().trim_matches('`').to_owned());
        let labels = labels.filter(|label| !label.is_empty()).collect();
        Some((format!("postrider_{name}"), ((*cells.get(2)?).to_owned(), labels)))
    };
    PAGE.lines().filter_map(row).collect()
}

fn consumer(name: &str, dead: u64) -> ConsumerView {
    ConsumerView { name: name.to_owned(), dead, ..ConsumerView::default() }
}

fn instance(owner: &str, silent_secs: u64) -> Instance {
    Instance {
        group: "relay/default".to_owned(),
        owner: owner.to_owned(),
        version: String::new(),
        started_at: chrono::DateTime::UNIX_EPOCH,
        silent_secs,
        breaker: None,
        breaker_secs: None,
        slots: Vec::new(),
    }
}

fn alert() -> Alert {
    Alert {
        id: 1,
        rule: "latency".to_owned(),
        subject: String::new(),
        urgency: Urgency::Critical,
        summary: String::new(),
        remedy: String::new(),
        fired_at: chrono::DateTime::UNIX_EPOCH,
        resolved_at: None,
        silenced: false,
    }
}

#[test]
fn the_page_has_every_metric_with_its_type_and_labels() {
    let notes = Notes::default();
    metrics::with_local_recorder(&notes, || {
        describe();
        let relay = RelayMeter::new("default");
        relay.published(1);
        relay.publish_failed(Kind::Unavailable);
        relay.parked(ParkedState::Failed, "too_large");
        relay.lanes_held(1.0);
        breaker("default", true);
        backlog("default", &Backlog::default(), false);
        claim_stored();
        let billing = ConsumerMeter::new("billing");
        let event = Event::builder("orders.paid", "order.paid").json(&1).and_then(EventBuilder::build).unwrap();
        billing.applied(&event);
        billing.applied_all(&[Arc::new(event)]);
        billing.duplicate();
        billing.skipped();
        billing.failed("timeout");
        billing.held();
        billing.buried("timeout");
        billing.undecodable();
        billing.subscription_lost();
        billing.claim_fetched();
        replayed("billing", 1, 1);
        spans(true, 1);
        Standing::new().show(&[consumer("billing", 1)], &[instance("a", 0)], &[alert()]);
        watching(true);
        alert_told("oncall", "told");
        http::called("h:80", "answered");
        http::retried("h:80");
        http::fell_back("h:80", "cached");
        http::breakers_open("h:80", 1.0);
        http::took("h:80", std::time::Duration::from_secs(1));
    });
    let (described, registered) = (notes.described.lock().unwrap(), notes.registered.lock().unwrap());
    let kinds: BTreeMap<String, String> =
        registered.iter().map(|(name, (kind, _))| (name.clone(), kind.clone())).collect();
    assert_eq!(*described, kinds, "what is described is what is counted");
    assert_eq!(documented(), *registered, "docs/reference/metrics.md is what is counted");
}

#[test]
fn an_event_that_was_sent_again_has_no_latency() {
    let meter = ConsumerMeter::new("billing");
    meter.applied_again();
    let counted: Vec<_> = meter.tally().take().into_iter().map(|count| (count.metric, count.count)).collect();
    assert_eq!(counted, [(crate::pulse::Metric::Applied, 1)]);
}

#[test]
fn what_is_gone_is_shown_as_none() {
    let notes = Notes::default();
    let value = |name: &str| {
        let gauges = notes.gauges.lock().unwrap();
        gauges.get(name).map(|bits| f64::from_bits(bits.load(std::sync::atomic::Ordering::SeqCst)))
    };
    metrics::with_local_recorder(&notes, || {
        let mut standing = Standing::new();
        let instances = [instance("a", 0), instance("b", 0), instance("c", 31)];
        standing.show(&[consumer("billing", 7), consumer("mail", 2)], &instances, &[alert(), alert()]);
        assert_eq!(value("postrider_dead_letters billing"), Some(7.0));
        assert_eq!(value("postrider_instances relay/default"), Some(2.0));
        assert_eq!(value("postrider_instances_lost relay/default"), Some(1.0));
        assert_eq!(value("postrider_alerts latency critical"), Some(2.0));
        standing.show(&[consumer("mail", 2)], &[], &[]);
        assert_eq!(value("postrider_dead_letters billing"), Some(0.0));
        assert_eq!(value("postrider_dead_letters mail"), Some(2.0));
        assert_eq!(value("postrider_instances_lost relay/default"), Some(0.0));
        assert_eq!(value("postrider_alerts latency critical"), Some(0.0));
    });
}
