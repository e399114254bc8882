//! Instances tell that they live and what they counted; nothing is counted twice, nothing is lost, old counts go.

use std::time::Duration;

use postrider::lease::Leases as _;
use postrider::pulse::{Bucket, Count, Metric, Pulse, Pulses as _, Width};
use postrider::upkeep::{Retention, Upkeep as _};

use super::bed::{Bed, TTL};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn count(metric: Metric, label: &str, count: u64) -> Count {
    Count { metric, label: label.to_owned(), count }
}

fn pulse(group: &str, owner: &str, counts: Vec<Count>) -> Pulse {
    Pulse { group: group.to_owned(), owner: owner.to_owned(), version: "0.1.0".to_owned(), breaker: None, counts }
}

async fn buckets(bed: &impl Bed, width: Width, metrics: &[Metric]) -> Vec<Bucket> {
    bed.store().buckets(width, DAY, metrics).await.expect("the counts are read").1
}

/// A test may run across the end of a minute: what matters is the sum.
fn sum(buckets: &[Bucket], group: &str, metric: Metric, label: &str) -> u64 {
    let of = |bucket: &&Bucket| bucket.group == group && bucket.metric == metric && bucket.label == label;
    buckets.iter().filter(of).map(|bucket| bucket.count).sum()
}

/// What instances of a group count is one sum, in buckets that begin on their boundary.
pub async fn counts_are_added_up_by_minute_and_hour(bed: &impl Bed) {
    let counts = vec![count(Metric::Applied, "", 3), count(Metric::Failed, "http", 2), count(Metric::Failed, "db", 1)];
    for owner in ["a", "b"] {
        bed.store().pulse(&pulse("consumer/c", owner, counts.clone())).await.expect("taken");
    }
    bed.store().pulse(&pulse("relay/default", "a", vec![count(Metric::Published, "", 7)])).await.expect("taken");
    for width in [Width::Minute, Width::Quarter, Width::Hour] {
        let (now, buckets) = bed.store().buckets(width, DAY, &[]).await.expect("the counts are read");
        assert_eq!(sum(&buckets, "consumer/c", Metric::Applied, ""), 6);
        assert_eq!(sum(&buckets, "consumer/c", Metric::Failed, "http"), 4);
        assert_eq!(sum(&buckets, "consumer/c", Metric::Failed, "db"), 2);
        assert_eq!(sum(&buckets, "relay/default", Metric::Published, ""), 7);
        for bucket in &buckets {
            assert_eq!(bucket.at.timestamp() % i64::from(width.secs()), 0, "a bucket begins on its boundary");
            assert!(bucket.at <= now && now - bucket.at < chrono::Duration::hours(2), "{} {now}", bucket.at);
        }
        assert!(buckets.is_sorted_by_key(|bucket| bucket.at), "oldest first");
    }
    let failed = buckets(bed, Width::Minute, &[Metric::Failed, Metric::Dead]).await;
    assert!(failed.iter().all(|bucket| bucket.metric == Metric::Failed) && !failed.is_empty());
}

/// Many pulses on the same buckets at once neither fail nor lose a count.
pub async fn instances_at_once_lose_no_count(bed: &impl Bed) {
    let mut tasks = tokio::task::JoinSet::new();
    for owner in 0..8 {
        let store = bed.store().clone();
        tasks.spawn(async move {
            for turn in 0..10 {
                // In another order each time.
                let mut counts: Vec<Count> = (0..12).map(|n| count(Metric::Failed, &format!("e{n}"), 1)).collect();
                counts.rotate_left((owner + turn) % 12);
                store.pulse(&pulse("consumer/c", &format!("i{owner}"), counts)).await.expect("taken");
            }
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.expect("no panic");
    }
    for width in [Width::Minute, Width::Quarter, Width::Hour] {
        let buckets = buckets(bed, width, &[Metric::Failed]).await;
        for n in 0..12 {
            assert_eq!(sum(&buckets, "consumer/c", Metric::Failed, &format!("e{n}")), 80);
        }
    }
}

/// A label is cut between characters, and holds nothing that the database refuses.
pub async fn a_label_that_is_too_long_is_cut(bed: &impl Bed) {
    let counts = vec![count(Metric::Failed, &"ü".repeat(5000), 1), count(Metric::Failed, "nul\0\u{1F980}", 1)];
    bed.store().pulse(&pulse("consumer/c", "a", counts)).await.expect("taken");
    let labels: Vec<String> = buckets(bed, Width::Minute, &[]).await.into_iter().map(|bucket| bucket.label).collect();
    assert!(labels.contains(&"ü".repeat(100)) && labels.contains(&"nul \u{1F980}".to_owned()), "{labels:?}");
}

/// An instance is shown with its slots; one that went without a word is lost, one that withdraws is forgotten.
pub async fn an_instance_is_known_until_it_withdraws(bed: &impl Bed) {
    let store = bed.store();
    store.take("relay/default", 2, "a", TTL).await.expect("answers").expect("free");
    store.take("relay/default", 0, "a", TTL).await.expect("answers").expect("free");
    store.pulse(&pulse("relay/default", "a", Vec::new())).await.expect("taken");
    store.pulse(&pulse("consumer/c", "a", Vec::new())).await.expect("taken");
    let instances = store.instances().await.expect("read");
    let seen: Vec<_> = instances.iter().map(|i| (i.group.as_str(), i.owner.as_str(), i.slots.clone())).collect();
    assert_eq!(seen, [("consumer/c", "a", vec![]), ("relay/default", "a", vec![0, 2])]);
    assert!(instances.iter().all(|i| i.silent_secs < 5 && !i.is_lost() && i.version == "0.1.0" && i.breaker.is_none()));

    bed.sql([
        "UPDATE postrider.instance SET seen_at = seen_at - interval '1 minute' WHERE group_name = 'relay/default'",
        "UPDATE instance SET seen_at = seen_at - 60000 WHERE group_name = 'relay/default'",
        "UPDATE postrider_instance SET seen_at = seen_at - INTERVAL 1 MINUTE WHERE group_name = 'relay/default'",
    ])
    .await;
    let lost = store.instances().await.expect("read").into_iter().find(|i| i.is_lost()).expect("one is lost");
    assert!(lost.group == "relay/default" && (60..70).contains(&lost.silent_secs), "{lost:?}");
    store.withdraw("consumer/c", "a").await.expect("withdrawn");
    assert_eq!(store.instances().await.expect("read").len(), 1);
}

/// Another reason does not make a breaker open anew.
pub async fn an_open_breaker_keeps_its_beginning(bed: &impl Bed) {
    let store = bed.store();
    let mut pulse = pulse("relay/default", "a", Vec::new());
    pulse.breaker = Some("the broker is away".to_owned());
    store.pulse(&pulse).await.expect("taken");
    bed.sql([
        "UPDATE postrider.instance SET breaker_since = breaker_since - interval '1 minute'",
        "UPDATE instance SET breaker_since = breaker_since - 60000",
        "UPDATE postrider_instance SET breaker_since = breaker_since - INTERVAL 1 MINUTE",
    ])
    .await;
    pulse.breaker = Some("it is still away".to_owned());
    store.pulse(&pulse).await.expect("taken");
    let instance = store.instances().await.expect("read").remove(0);
    assert_eq!(instance.breaker.as_deref(), Some("it is still away"));
    assert!(instance.breaker_secs.is_some_and(|secs| (60..70).contains(&secs)), "{instance:?}");
    pulse.breaker = None;
    store.pulse(&pulse).await.expect("taken");
    let instance = store.instances().await.expect("read").remove(0);
    assert_eq!((instance.breaker, instance.breaker_secs), (None, None));
}

/// Minutes go after a day, hours stay, an instance that is long lost is forgotten.
pub async fn upkeep_forgets_old_counts_and_instances(bed: &impl Bed) {
    let store = bed.store();
    let counts = vec![count(Metric::Applied, "", 1)];
    store.pulse(&pulse("consumer/c", "old", counts.clone())).await.expect("taken");
    // All widths a day and three hours back: minute and quarter are past their time, the hour is not.
    bed.sql([
        "UPDATE postrider.bucket SET at = at - interval '27 hours'; \
         UPDATE postrider.instance SET seen_at = seen_at - interval '27 hours'",
        "UPDATE bucket SET at = at - 97200000; UPDATE instance SET seen_at = seen_at - 97200000",
        "UPDATE postrider_bucket SET at = at - INTERVAL 27 HOUR; \
         UPDATE postrider_instance SET seen_at = seen_at - INTERVAL 27 HOUR",
    ])
    .await;
    store.pulse(&pulse("consumer/c", "new", counts)).await.expect("taken");
    assert_eq!(store.instances().await.expect("read").len(), 1, "forgotten even before upkeep");
    store.maintain(&Retention::default()).await.expect("upkeep");
    let total = async |width| {
        let (_, buckets) = store.buckets(width, 40 * DAY, &[]).await.expect("read");
        buckets.iter().map(|bucket| bucket.count).sum::<u64>()
    };
    assert_eq!((total(Width::Minute).await, total(Width::Quarter).await, total(Width::Hour).await), (1, 1, 2));
}
