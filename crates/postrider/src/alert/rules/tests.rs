//! Each rule: at its threshold, below it, and when it is over.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};

use super::super::measure::{CertificateMeasure, FreeSlot, GroupMeasure, Measurements, OutboxMeasure};
use super::super::{Condition, Urgency};
use super::{RULES, Thresholds, evaluate};
use crate::integrity::ReportView;
use crate::pulse::Instance;
use crate::upkeep::{Backlog, ConsumerView};

fn now() -> DateTime<Utc> {
    "2026-11-16T10:00:00Z".parse().unwrap()
}

fn quiet() -> Measurements {
    Measurements { now: now(), ..Measurements::default() }
}

fn outbox(backlog: Backlog, waiting_secs: u64) -> Measurements {
    let waiting = Duration::from_secs(waiting_secs);
    let outbox = OutboxMeasure { group: "relay/default".to_owned(), backlog, waiting };
    Measurements { outboxes: vec![outbox], ..quiet() }
}

fn consumer(view: ConsumerView) -> Measurements {
    Measurements { consumers: vec![ConsumerView { name: "billing".to_owned(), ..view }], ..quiet() }
}

fn group(measure: GroupMeasure) -> Measurements {
    Measurements { groups: vec![GroupMeasure { group: "consumer/billing".to_owned(), ..measure }], ..quiet() }
}

fn instance(owner: &str, started_secs_ago: i64, silent_secs: u64) -> Instance {
    Instance {
        group: "relay/default".to_owned(),
        owner: owner.to_owned(),
        version: "0.1.0".to_owned(),
        started_at: now() - TimeDelta::seconds(started_secs_ago),
        silent_secs,
        breaker: None,
        breaker_secs: None,
        slots: Vec::new(),
    }
}

fn of(seen: &Measurements, rule: &str) -> Option<Condition> {
    let found = evaluate(seen, &Thresholds::default());
    assert!(found.iter().all(|condition| RULES.iter().any(|(rule, _)| *rule == condition.rule)));
    found.into_iter().find(|condition| condition.rule == rule)
}

#[track_caller]
fn fires(seen: &Measurements, rule: &str, says: &str) -> Condition {
    let condition = of(seen, rule).unwrap_or_else(|| panic!("{rule} does not fire: {seen:?}"));
    assert!(condition.summary.contains(says), "{says:?} is missing in {:?}", condition.summary);
    assert!(!condition.remedy.is_empty());
    condition
}

#[track_caller]
fn rests(seen: &Measurements, rule: &str) {
    let found = of(seen, rule);
    assert!(found.is_none(), "{found:?}");
}

#[test]
fn nothing_is_wrong_with_a_quiet_system() {
    assert_eq!(evaluate(&quiet(), &Thresholds::default()), []);
    let busy = Measurements {
        instances: vec![instance("a", 100, 4)],
        groups: vec![GroupMeasure { attempts: 1000, flowed: 1000, ..GroupMeasure::default() }],
        ..outbox(Backlog { pending: 500, oldest_secs: Some(1), ..Backlog::default() }, 600)
    };
    assert_eq!(evaluate(&Measurements { groups: busy.groups.clone(), ..quiet() }, &Thresholds::default()), []);
}

#[test]
fn an_open_breaker_is_told_once_for_its_group() {
    let open = |owner: &str, secs| Instance {
        breaker: Some(format!("{owner}: connection refused\nsecond line")),
        breaker_secs: Some(secs),
        ..instance(owner, 100, 1)
    };
    let seen = Measurements { instances: vec![open("a", 3), open("b", 7)], ..quiet() };
    let condition = fires(&seen, "breaker_open", "for 7 s: b: connection refused second line");
    assert_eq!((condition.subject.as_str(), condition.urgency), ("relay/default", Urgency::Critical));
    assert_eq!(evaluate(&seen, &Thresholds::default()).len(), 1);
    rests(&Measurements { instances: vec![instance("a", 100, 1)], ..quiet() }, "breaker_open");
    // Nobody knows how the breaker of one that is gone stands.
    rests(&Measurements { instances: vec![Instance { silent_secs: 30, ..open("a", 3) }], ..quiet() }, "breaker_open");
}

#[test]
fn waiting_while_nothing_flows_needs_an_explanation() {
    let pending = Backlog { pending: 3, oldest_secs: Some(5), ..Backlog::default() };
    let stalled = outbox(pending.clone(), 120);
    fires(&stalled, "stalled", "3 events wait and none was published for 2 min (limit 2 min); no relay is running");
    rests(&outbox(pending.clone(), 119), "stalled");
    rests(&outbox(Backlog { failed: 3, oldest_secs: Some(5), ..Backlog::default() }, 120), "stalled");

    let alive = Measurements { instances: vec![instance("a", 500, 2)], ..outbox(pending.clone(), 120) };
    fires(&alive, "stalled", "its relay runs");
    let mut explained = alive.clone();
    explained.instances[0].breaker = Some("away".to_owned());
    rests(&explained, "stalled");
    let flowing = GroupMeasure { group: "relay/default".to_owned(), flowed: 1, ..GroupMeasure::default() };
    rests(&Measurements { groups: vec![flowing], ..alive }, "stalled");
}

#[test]
fn an_old_event_is_stale() {
    let waits = |secs| outbox(Backlog { failed: 1, oldest_secs: Some(secs), ..Backlog::default() }, 0);
    fires(&waits(3600), "stale", "has waited for 60 min (limit 60 min); 0 pending, 0 retrying, 0 waiting");
    rests(&waits(3599), "stale");
    let held = |secs| consumer(ConsumerView { retrying: 2, oldest_secs: Some(secs), ..ConsumerView::default() });
    assert_eq!(fires(&held(3600), "stale", "2 retrying").subject, "consumer/billing");
    rests(&held(3599), "stale");
}

#[test]
fn slow_events_raise_an_alert_that_stays_until_they_are_clearly_faster() {
    let slow = |millis| group(GroupMeasure { latency_p99: Some(Duration::from_millis(millis)), ..Default::default() });
    fires(&slow(30_000), "latency", "took 30 s from creation to effect (limit 30 s)");
    rests(&slow(29_999), "latency");
    let open = [("latency".to_owned(), "consumer/billing".to_owned())].into_iter().collect();
    fires(&Measurements { open, ..slow(24_000) }, "latency", "24 s");
    let open = [("latency".to_owned(), "consumer/billing".to_owned())].into_iter().collect();
    rests(&Measurements { open, ..slow(23_999) }, "latency");

    let waits = |secs| Backlog { pending: 1, oldest_secs: Some(secs), ..Backlog::default() };
    fires(&outbox(waits(30), 0), "latency", "has waited for 30 s to be published");
    rests(&outbox(waits(29), 0), "latency");
    // The old one may be the one that is parked.
    rests(&outbox(Backlog { retrying: 1, ..waits(30) }, 0), "latency");
}

#[test]
fn too_many_errors_of_enough_attempts() {
    let failed = |attempts, failures| group(GroupMeasure { attempts, failures, ..GroupMeasure::default() });
    fires(&failed(1000, 11), "error_rate", "11 of 1000 attempts failed within 5 minutes: 1.1 % (limit 1.0 %)");
    rests(&failed(1000, 10), "error_rate");
    fires(&failed(20, 20), "error_rate", "100.0 %");
    rests(&failed(19, 19), "error_rate");
    let open = [("error_rate".to_owned(), "consumer/billing".to_owned())].into_iter().collect();
    fires(&Measurements { open, ..failed(1000, 9) }, "error_rate", "0.9 %");
    let open = [("error_rate".to_owned(), "consumer/billing".to_owned())].into_iter().collect();
    rests(&Measurements { open, ..failed(1000, 8) }, "error_rate");
}

#[test]
fn dead_letters_are_told_until_somebody_decides() {
    let dead = |new, waiting| {
        let groups = group(GroupMeasure { dead: new, ..GroupMeasure::default() }).groups;
        Measurements { groups, ..consumer(ConsumerView { dead: waiting, ..ConsumerView::default() }) }
    };
    let told = fires(&dead(10, 10), "dead_letters", "10 events were given up within an hour and still wait (limit 10)");
    assert!(told.remedy.contains("postrider dead replay --consumer billing"), "{}", told.remedy);
    rests(&dead(9, 100), "dead_letters");
    rests(&dead(10, 9), "dead_letters");
    rests(&dead(10, 0), "dead_letters");

    let relay = GroupMeasure { group: "relay/default".to_owned(), dead: 12, ..GroupMeasure::default() };
    let seen = Measurements { groups: vec![relay], ..outbox(Backlog { failed: 11, ..Backlog::default() }, 0) };
    assert!(fires(&seen, "dead_letters", "11 events").remedy.contains("--consumer relay/default"));
}

#[test]
fn what_was_given_up_must_not_lie_for_an_hour() {
    let dead = |secs| consumer(ConsumerView { dead: 1, oldest_dead_secs: Some(secs), ..ConsumerView::default() });
    fires(&dead(3600), "failed", "1 events that were given up wait for a decision, for up to 60 min (limit 60 min)");
    rests(&dead(3599), "failed");
    let failed = |failed, secs| outbox(Backlog { failed, oldest_secs: Some(secs), ..Backlog::default() }, 0);
    assert_eq!(fires(&failed(2, 3600), "failed", "2 events").subject, "relay/default");
    rests(&failed(0, 3600), "failed");
    rests(&failed(2, 3599), "failed");
}

#[test]
fn one_refusal_is_enough() {
    let denied = |denied| group(GroupMeasure { denied, ..GroupMeasure::default() });
    assert_eq!(fires(&denied(1), "denied", "1 attempts").urgency, Urgency::Critical);
    rests(&denied(0), "denied");
}

#[test]
fn a_lost_instance_is_told_until_another_takes_its_place() {
    let seen = |instances: Vec<Instance>| Measurements { instances, ..quiet() };
    let alone = seen(vec![instance("a", 100, 30)]);
    assert_eq!(
        fires(&alone, "instance_lost", "1 went without a word, the last one 30 s ago (a); 0 left").urgency,
        Urgency::Critical
    );
    rests(&seen(vec![instance("a", 100, 29)]), "instance_lost");

    let old_friend = seen(vec![instance("a", 100, 30), instance("b", 90, 1)]);
    assert_eq!(fires(&old_friend, "instance_lost", "1 left").urgency, Urgency::Warning);
    rests(&seen(vec![instance("a", 100, 30), instance("b", 20, 1)]), "instance_lost");
    let two = seen(vec![instance("a", 100, 30), instance("b", 100, 40), instance("c", 20, 1)]);
    fires(&two, "instance_lost", "1 went without a word, the last one 30 s ago (a); 1 left");
}

#[test]
fn a_slot_without_a_holder_is_trouble_where_there_is_work() {
    let free = |group: &str, secs| FreeSlot { group: group.to_owned(), slot: 1, free: Duration::from_secs(secs) };
    let seen = |free_slots, pending| Measurements {
        instances: vec![instance("a", 100, 1)],
        free_slots,
        ..outbox(Backlog { pending, ..Backlog::default() }, 0)
    };
    fires(&seen(vec![free("relay/default", 30)], 1), "lease", "nobody has held slot 1 for 30 s (limit 30 s)");
    rests(&seen(vec![free("relay/default", 29)], 1), "lease");
    rests(&seen(vec![free("relay/default", 30)], 0), "lease");
    // Nobody is there to hold it: that is another alert.
    rests(&Measurements { instances: Vec::new(), ..seen(vec![free("relay/default", 30)], 1) }, "lease");
    rests(&seen(vec![free("consumer/billing", 30)], 1), "lease");
}

#[test]
fn a_certificate_that_ends_soon_is_told_in_time() {
    let ends = |at: &str| {
        let ends_at = at.parse().unwrap();
        let certificate = CertificateMeasure { server: "api.example:443".to_owned(), ends_at };
        Measurements { certificates: vec![certificate], ..quiet() }
    };
    fires(&ends("2026-11-30T09:59:59Z"), "certificate", "api.example:443: its certificate ends in 13 days");
    rests(&ends("2026-11-30T10:00:00Z"), "certificate");
    assert_eq!(fires(&ends("2026-11-16T09:59:59Z"), "certificate", "has ended").urgency, Urgency::Critical);
}

#[test]
fn the_last_report_decides() {
    let report = |warnings, errors| {
        let view = ReportView {
            id: 7,
            began_at: now(),
            ended_at: Some(now()),
            actor: "schedule".to_owned(),
            checks: 12,
            warnings,
            errors,
        };
        Measurements { report: Some(view), ..quiet() }
    };
    let told = fires(&report(1, 2), "integrity", "integrity check 7 found 2 errors and 1 warnings");
    assert!(told.urgency == Urgency::Critical && told.remedy.contains("postrider check --report 7"));
    assert_eq!(fires(&report(1, 0), "integrity", "0 errors").urgency, Urgency::Warning);
    rests(&report(0, 0), "integrity");
}
