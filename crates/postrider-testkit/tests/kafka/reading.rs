//! Offsets, takeovers and topics that appear.

use std::time::Duration;

use postrider::Kind;
use postrider::broker::Broker;
use postrider::doctor::Severity;
use postrider::event::Event;
use postrider::handler::ConsumerSpec;
use postrider_testkit::conformance::broker::BrokerBed;

use crate::bed::{KafkaBed, next, take};

/// Longer than the time between two commits.
const COMMITS: Duration = Duration::from_millis(600);

/// Waits for a commit while the subscription has nothing to give.
async fn idle(subscription: &mut Box<dyn postrider::broker::Subscription>) {
    let more = tokio::time::timeout(COMMITS, subscription.next()).await;
    assert!(more.is_err(), "a message came that was not expected");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_is_below_the_lowest_unfinished_is_committed() {
    let bed = KafkaBed::mock(&[("one", 1)]).await;
    let spec = ConsumerSpec::new("all", &["one"]);
    let mut subscription = bed.subscribe(&spec).await;
    for name in ["0", "1", "2", "3"] {
        let event = Event::builder("one", "t").key(name).json(&name).expect("JSON").build().expect("valid");
        bed.publish_all(vec![event]).await;
    }
    let mut tags = Vec::new();
    for _ in 0..4 {
        tags.push(next(&mut subscription).await.tag);
    }
    for tag in [tags[1], tags[3]] {
        subscription.ack(tag).await.expect("acked");
    }
    idle(&mut subscription).await;
    assert_eq!(bed.committed("all", "one", 0).await, Some(0), "the first is not finished");
    subscription.ack(tags[0]).await.expect("acked");
    idle(&mut subscription).await;
    assert_eq!(bed.committed("all", "one", 0).await, Some(2));
    subscription.ack(tags[2]).await.expect("acked");
    subscription.close().await.expect("closed");
    assert_eq!(bed.committed("all", "one", 0).await, Some(4));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_is_taken_over_gives_everything_unfinished_again_in_order() {
    let bed = KafkaBed::new().await;
    let spec = ConsumerSpec { prefetch: 4, ..ConsumerSpec::new("all", &["test.*"]) };
    let mut first = bed.subscribe(&spec).await;
    for n in 0..30 {
        bed.publish("k", &format!("{n:02}")).await;
    }
    let (tag, name, is_redelivered) = take(&mut first).await;
    assert_eq!((name.as_str(), is_redelivered), ("00", false));
    for expected in ["01", "02"] {
        assert_eq!(take(&mut first).await.1, expected);
    }
    first.ack(tag).await.expect("acked");
    idle_or_more(&mut first).await;
    // It ends without a word.
    drop(first);

    let mut second = bed.subscribe(&spec).await;
    let mut names = Vec::new();
    let mut doubtful = 0;
    while names.len() < 29 {
        let (tag, name, is_redelivered) = take(&mut second).await;
        doubtful += usize::from(is_redelivered);
        if ["01", "02", "03"].contains(&name.as_str()) {
            assert!(is_redelivered, "{name} may have ended the process that had it");
        }
        names.push(name);
        second.ack(tag).await.expect("acked");
    }
    let expected: Vec<String> = (1..30).map(|n| format!("{n:02}")).collect();
    assert_eq!(names, expected);
    println!("{doubtful} of 29 messages were doubted");
    assert!(doubtful <= 16, "what nobody had is not doubted");
    second.close().await.expect("closed");

    let mut third = bed.subscribe(&spec).await;
    bed.publish("k", "30").await;
    let (_, name, is_redelivered) = take(&mut third).await;
    assert_eq!((name.as_str(), is_redelivered), ("30", false), "the second one ended in good order");
}

/// Lets a commit happen; one more message may come.
async fn idle_or_more(subscription: &mut Box<dyn postrider::broker::Subscription>) {
    for _ in 0..2 {
        let _ = tokio::time::timeout(COMMITS, subscription.next()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_appears_is_found() {
    let bed = KafkaBed::mock(&[("orders.paid", 2)]).await;
    let mut subscription = bed.subscribe(&ConsumerSpec::new("all", &["orders.#"])).await;
    let make = |topic: &str| Event::builder(topic, "t").key("k").json(&topic).expect("JSON").build().expect("valid");
    bed.publish_all(vec![make("orders.paid")]).await;
    assert_eq!(take(&mut subscription).await.1, "orders.paid");
    for topic in ["orders.sent", "orders.sent.dlq", "users.made"] {
        bed.create(topic, 4).await;
    }
    bed.publish_all(vec![make("orders.sent.dlq"), make("users.made"), make("orders.sent")]).await;
    let (tag, name, _) = take(&mut subscription).await;
    assert_eq!(name, "orders.sent");
    subscription.ack(tag).await.expect("acked");
    idle(&mut subscription).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slots_that_do_not_divide_the_partitions_are_refused_by_name() {
    let bed = KafkaBed::mock(&[("orders.paid", 4)]).await;
    let spec = ConsumerSpec { slots: 3, ..ConsumerSpec::new("all", &["#"]) };
    let lease = bed.lease(&spec, 0).await;
    let error = bed.broker.subscribe(&spec, &lease).await.err().expect("refused");
    assert_eq!(error.kind(), Kind::Config);
    assert!(error.to_string().contains("orders.paid"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_says_what_it_cannot_see_instead_of_hanging() {
    let bed = KafkaBed::new().await;
    let began = std::time::Instant::now();
    let findings = bed.broker.inspect().await.expect("inspected");
    println!("{:#?} after {:?}", findings, began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(10));
    let connection = findings.iter().find(|finding| finding.check == "kafka.connection").expect("connected");
    assert_eq!(connection.severity, Severity::Ok);
    let has_settings = !findings.iter().any(|finding| finding.check == "kafka.settings");
    assert_eq!(has_settings, !bed.server.is_mock(), "the mock has no administrator's interface");
}
