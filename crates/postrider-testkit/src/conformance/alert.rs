//! Alerts open once, are told once, and are resolved; deliveries keep their order and survive a failing sink.

use std::time::Duration;

use postrider::alert::{Alert, Alerts as _, Condition, Delivery, Urgency};
use postrider::audit::Audit as _;
use postrider::upkeep::{Retention, Upkeep as _};

use super::bed::Bed;

const HOLD: Duration = Duration::from_secs(60);

fn condition(rule: &str, subject: &str, summary: &str) -> Condition {
    Condition {
        rule: rule.to_owned(),
        subject: subject.to_owned(),
        urgency: Urgency::Warning,
        summary: summary.to_owned(),
        remedy: "look".to_owned(),
    }
}

fn sinks() -> Vec<String> {
    vec!["log".to_owned(), "hook".to_owned()]
}

async fn update(bed: &impl Bed, conditions: &[Condition]) -> Vec<Alert> {
    bed.store().alerts_update(conditions, &sinks()).await.expect("brought up to date")
}

async fn open(bed: &impl Bed) -> Vec<Alert> {
    bed.store().alerts(true, None, 100).await.expect("read")
}

async fn due(bed: &impl Bed) -> Vec<Delivery> {
    bed.store().deliveries_due(100, HOLD).await.expect("read")
}

/// A condition that goes on is one alert with its newest text; when it ends, the alert does.
pub async fn an_alert_is_told_once_and_resolved_once(bed: &impl Bed) {
    let first = update(bed, &[condition("latency", "consumer/c", "31 s")]).await;
    assert_eq!((first.len(), first[0].resolved_at, first[0].silenced), (1, None, false));
    let mut worse = condition("latency", "consumer/c", "90 s");
    worse.urgency = Urgency::Critical;
    for _ in 0..3 {
        assert!(update(bed, std::slice::from_ref(&worse)).await.is_empty(), "nothing opened, nothing resolved");
    }
    let now = open(bed).await;
    assert_eq!((now.len(), now[0].id, now[0].summary.as_str()), (1, first[0].id, "90 s"));
    assert_eq!((now[0].urgency, now[0].fired_at), (Urgency::Critical, first[0].fired_at));
    let deliveries = due(bed).await;
    assert_eq!(deliveries.iter().map(|d| d.sink.as_str()).collect::<Vec<_>>(), ["log", "hook"]);
    assert!(deliveries.iter().all(|d| d.alert.resolved_at.is_none() && d.failures == 0));

    let over = update(bed, &[]).await;
    assert_eq!((over.len(), over[0].id), (1, first[0].id));
    assert!(over[0].resolved_at.is_some_and(|at| at >= over[0].fired_at));
    assert!(update(bed, &[]).await.is_empty() && open(bed).await.is_empty());
    assert_eq!(bed.store().alerts(false, None, 100).await.expect("read").len(), 1);
    assert_eq!(bed.store().alerts_mended().await.expect("read").0, 1);

    let again = update(bed, &[condition("latency", "consumer/c", "40 s")]).await;
    assert_ne!(again[0].id, first[0].id, "another alert");
    let page = bed.store().alerts(false, Some(again[0].id), 1).await.expect("read");
    assert_eq!(page.iter().map(|alert| alert.id).collect::<Vec<_>>(), [first[0].id]);
}

/// Instances that give the same conditions at once open one alert, and tell it once.
pub async fn instances_at_once_open_one_alert(bed: &impl Bed) {
    let conditions = [condition("stale", "relay/default", "2 h"), condition("latency", "", "31 s")];
    let mut tasks = tokio::task::JoinSet::new();
    for turn in 0..8 {
        let (store, mut conditions) = (bed.store().clone(), conditions.to_vec());
        conditions.rotate_left(turn % 2);
        tasks.spawn(async move { store.alerts_update(&conditions, &sinks()).await.expect("brought up to date").len() });
    }
    assert_eq!(tasks.join_all().await.into_iter().sum::<usize>(), 2);
    assert_eq!((open(bed).await.len(), due(bed).await.len()), (2, 4));
}

/// Nobody hears that something is over before it was said that it began, also when the sink fails meanwhile.
pub async fn a_resolution_waits_behind_its_firing(bed: &impl Bed) {
    update(bed, &[condition("latency", "", "31 s")]).await;
    update(bed, &[]).await;
    let firing = due(bed).await;
    assert_eq!(firing.len(), 2);
    assert!(firing.iter().all(|d| d.alert.resolved_at.is_none()), "told as it fired, although it is over");
    assert!(due(bed).await.is_empty(), "held by its taker, and the resolution waits");
    bed.store().delivered(firing[0].id).await.expect("told");
    let resolution = due(bed).await;
    assert_eq!((resolution.len(), resolution[0].sink.as_str()), (1, "log"));
    assert!(resolution[0].alert.resolved_at.is_some());

    bed.store().delivery_failed(firing[1].id, "refused", Duration::ZERO).await.expect("put off");
    let again = due(bed).await;
    assert_eq!((again.len(), again[0].id, again[0].failures), (1, firing[1].id, 1));
    bed.store().delivery_failed(firing[1].id, "refused", HOLD).await.expect("put off");
    assert!(due(bed).await.is_empty());
    for id in [firing[1].id, resolution[0].id] {
        bed.store().delivered(id).await.expect("given up");
    }
    let rest = due(bed).await;
    assert_eq!((rest.len(), rest[0].sink.as_str(), rest[0].alert.resolved_at.is_some()), (1, "hook", true));
}

/// What is taken and neither told nor put off is due again after its hold.
pub async fn a_delivery_comes_back_when_its_taker_died(bed: &impl Bed) {
    update(bed, &[condition("latency", "", "31 s")]).await;
    let taken = bed.store().deliveries_due(1, Duration::from_millis(300)).await.expect("read");
    assert_eq!(taken.len(), 1);
    assert_eq!(bed.store().deliveries_due(100, HOLD).await.expect("read").len(), 1, "the other one");
    tokio::time::sleep(Duration::from_millis(400)).await;
    let again = bed.store().deliveries_due(100, HOLD).await.expect("read");
    assert_eq!((again.len(), again[0].id), (1, taken[0].id));
}

/// A silence keeps an alert from being told, not from being seen; who silenced it is written down.
pub async fn a_silenced_alert_is_told_when_its_silence_ends(bed: &impl Bed) {
    let store = bed.store();
    let id = store.silence("latency", "", Duration::from_secs(3600), "a release", "ops").await.expect("silenced");
    let other = store.silence("", "consumer/x", Duration::from_secs(3600), "it's <b>", "ops").await.expect("silenced");
    assert_eq!(store.silences().await.expect("read").len(), 2);
    let conditions = [condition("latency", "consumer/c", "31 s")];
    assert!(update(bed, &conditions).await[0].silenced);
    assert!(due(bed).await.is_empty() && open(bed).await[0].silenced);
    update(bed, &[]).await;
    assert!(due(bed).await.is_empty(), "nobody heard of it, nobody hears of its end");

    update(bed, &conditions).await;
    assert!(store.unsilence(id, "ops").await.expect("ended"));
    assert!(!store.unsilence(id, "ops").await.expect("answers"), "it has ended");
    assert!(update(bed, &conditions).await.is_empty());
    assert_eq!(due(bed).await.len(), 2, "told now");
    assert!(!open(bed).await[0].silenced);
    assert_eq!(store.silences().await.expect("read").iter().map(|s| s.id).collect::<Vec<_>>(), [other]);
    let lines = store.audit_list(None, 10).await.expect("read");
    let actions: Vec<_> = lines.iter().map(|line| (line.actor.as_str(), line.action.as_str())).collect();
    assert_eq!(actions, [("ops", "unsilence"), ("ops", "silence"), ("ops", "silence")]);
    assert_eq!(lines[1].detail["reason"], "it's <b>");
    assert_eq!(store.audit_list(Some(lines[1].id), 10).await.expect("read").len(), 1);
}

/// A silence lasts as long as it was meant to.
pub async fn a_silence_ends_by_itself(bed: &impl Bed) {
    bed.store().silence("", "", Duration::from_millis(300), "short", "ops").await.expect("silenced");
    let conditions = [condition("latency", "", "31 s")];
    update(bed, &conditions).await;
    assert!(due(bed).await.is_empty());
    tokio::time::sleep(Duration::from_millis(400)).await;
    update(bed, &conditions).await;
    assert_eq!(due(bed).await.len(), 2);
    assert!(bed.store().silences().await.expect("read").is_empty());
}

/// What is over goes after a month, what is open stays.
pub async fn upkeep_forgets_alerts_that_are_over(bed: &impl Bed) {
    let store = bed.store();
    update(bed, &[condition("latency", "", "31 s"), condition("stale", "", "2 h")]).await;
    update(bed, &[condition("stale", "", "2 h")]).await;
    store.silence("", "x", Duration::from_secs(1), "old", "ops").await.expect("silenced");
    bed.sql([
        "UPDATE postrider.alert SET fired_at = fired_at - interval '31 days', resolved_at = resolved_at - interval '31 days'; \
         UPDATE postrider.silence SET until_at = until_at - interval '31 days'; \
         UPDATE postrider.audit SET at = at - interval '366 days'",
        "UPDATE alert SET fired_at = fired_at - 2678400000, resolved_at = resolved_at - 2678400000; \
         UPDATE silence SET until_at = until_at - 2678400000; UPDATE audit SET at = '2020' || substr(at, 5)",
        "UPDATE postrider_alert SET fired_at = fired_at - INTERVAL 31 DAY, resolved_at = resolved_at - INTERVAL 31 DAY; \
         UPDATE postrider_silence SET until_at = until_at - INTERVAL 31 DAY; \
         UPDATE postrider_audit SET at = at - INTERVAL 366 DAY",
    ])
    .await;
    store.maintain(&Retention::default()).await.expect("upkeep");
    let left = store.alerts(false, None, 10).await.expect("read");
    assert_eq!(left.iter().map(|alert| alert.rule.as_str()).collect::<Vec<_>>(), ["stale"], "what is open stays");
    assert_eq!(due(bed).await.len(), 2, "deliveries went with their alert");
    assert!(store.audit_list(None, 10).await.expect("read").is_empty());
    assert_eq!(store.alerts_mended().await.expect("read"), (0, None));
}
