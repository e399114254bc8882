//! The storage is a folder.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use crate::bed::{ClaimBed, event, soon};
use chrono::{TimeDelta, Utc};
use postrider::Kind;
use postrider::broker::Broker;
use postrider::broker::embedded::Embedded;
use postrider::broker::rabbitmq::{RabbitMq, RabbitMqSettings};
use postrider::claim::{ClaimCheck, Folder, Hash};
use postrider::event::{Event, PAYLOAD_BYTES_MAX};
use postrider::handler::ConsumerSpec;
use postrider::lease::Lease;
use postrider_testkit::conformance::bed::Bed;
use postrider_testkit::testbed;
use tempfile::TempDir;

const LARGE: usize = 300_000;

/// A bed whose storage is the folder `claims` of a temporary one.
async fn bed() -> (ClaimBed, TempDir) {
    let place = TempDir::new().expect("a temporary folder");
    fs::create_dir(place.path().join("claims")).expect("created");
    let objects = Arc::new(Folder::new(place.path().join("claims")));
    (ClaimBed::new(objects).await, place)
}

fn file(place: &TempDir, event: &Event) -> PathBuf {
    let day = event.time().format("%Y-%m-%d").to_string();
    place.path().join("claims/shop/orders").join(day).join(event.id().to_string())
}

async fn publish(broker: &Arc<dyn Broker>, event: &Event) {
    let results = broker.publish(&[Arc::new(event.clone())]).await;
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_payload_arrives_as_if_it_had_come_along() {
    let (bed, place) = bed().await;
    let broker = bed.over(bed.embedded());
    let text = Event::builder("test.created", "created").key("k").payload("text/csv", "a;b\n".repeat(1_000));
    let events = [event("k", LARGE), event("k", 10), text.build().expect("valid")];
    let crew = bed.start(&broker);
    bed.send(&events).await;
    assert_eq!(bed.applied(3).await, events, "the same, in order");
    crew.stop().await;
    bed.no_dead_letters().await;

    assert_eq!(fs::read(file(&place, &events[0])).expect("stored"), events[0].payload().as_ref());
    assert!(!file(&place, &events[1]).exists(), "a small payload travels");
    let sizes: Vec<i64> = sqlx::query_scalar("SELECT length(payload) FROM message ORDER BY \"offset\"")
        .fetch_all(bed.bed.store().reader())
        .await
        .expect("messages are read");
    assert_eq!(sizes, [0, events[1].payload().len() as i64, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_fails_is_given_the_payload_again() {
    let (bed, _place) = bed().await;
    let broker = bed.over(bed.embedded());
    bed.seen.failures_left.store(3, Ordering::SeqCst);
    let large = event("k", LARGE);
    publish(&broker, &large).await;
    let crew = bed.consume(&broker, Some(bed.claims.clone()));
    soon("held", async || !bed.held().await.is_empty() || !bed.bed.effects("c").await.is_empty()).await;
    assert!(bed.held().await.iter().all(|(_, bytes)| *bytes == 0), "held as it came");
    assert_eq!(bed.applied(1).await[0], large);

    // What comes again has been applied, whether its payload travels with it or not, and whether it is still there.
    publish(&broker, &large).await;
    publish(&bed.embedded(), &large).await;
    bed.claims.expire(Utc::now() + TimeDelta::days(2)).await.expect("expired");
    publish(&bed.embedded(), &event("k", 10)).await;
    bed.applied(2).await;
    bed.no_dead_letters().await;
    crew.stop().await;
}

/// Breaks the stored payload, sees the dead letter, puts the payload back and replays.
async fn a_broken_object_is_a_dead_letter(break_it: impl Fn(&PathBuf), says: &str) {
    let (bed, place) = bed().await;
    let broker = bed.over(bed.embedded());
    let (large, next) = (event("k", LARGE), event("k", 10));
    publish(&broker, &large).await;
    publish(&broker, &next).await;
    let file = file(&place, &large);
    break_it(&file);

    let crew = bed.consume(&broker, Some(bed.claims.clone()));
    let dead = bed.dead().await;
    assert_eq!((dead.view.error_type.as_str(), dead.view.attempts), ("claim", 1), "at once");
    let path = format!("shop/orders/{}/{}", large.time().format("%Y-%m-%d"), large.id());
    assert!(dead.view.error.contains(&path) && dead.view.error.contains(says), "{}", dead.view.error);
    assert_eq!(dead.payload_bytes, 0, "the reference is kept, not what was found");
    assert_eq!(dead.envelope.expect("an event")["headers"]["dataref"], path);
    assert_eq!(bed.applied(1).await[0], next, "the key goes on");

    // A repetition of it changes nothing.
    publish(&broker, &large).await;
    fs::write(&file, large.payload()).expect("put back");
    bed.replay().await;
    assert_eq!(bed.applied(2).await, [next, large.clone()]);
    publish(&broker, &large).await;
    publish(&broker, &event("k", 11)).await;
    assert_eq!(bed.applied(3).await[1], large, "once");
    bed.no_dead_letters().await;
    crew.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_object_is_a_dead_letter_until_it_is_put_back() {
    a_broken_object_is_a_dead_letter(|file| fs::remove_file(file).expect("removed"), "is missing").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_altered_object_is_a_dead_letter() {
    let alter = |file: &PathBuf| {
        let mut content = fs::read(file).expect("read");
        content[LARGE / 2] ^= 1;
        fs::write(file, content).expect("written");
    };
    a_broken_object_is_a_dead_letter(alter, "was altered").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_truncated_object_is_a_dead_letter() {
    let truncate = |file: &PathBuf| fs::File::options().write(true).open(file).expect("open").set_len(9).expect("cut");
    a_broken_object_is_a_dead_letter(truncate, "has 9 bytes instead of").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_has_grown_is_a_dead_letter() {
    let grow = |file: &PathBuf| {
        let file = fs::File::options().write(true).open(file).expect("open");
        file.set_len(2 * PAYLOAD_BYTES_MAX as u64).expect("grown");
    };
    a_broken_object_is_a_dead_letter(grow, "has more than").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_without_the_storage_says_so() {
    let (bed, _place) = bed().await;
    let broker = bed.over(bed.embedded());
    let large = event("k", LARGE);
    publish(&broker, &large).await;
    let crew = bed.consume(&broker, None);
    let dead = bed.dead().await;
    assert!(dead.view.error.contains("no claim storage"), "{}", dead.view.error);
    crew.stop().await;

    let crew = bed.consume(&broker, Some(bed.claims.clone()));
    bed.replay().await;
    assert_eq!(bed.applied(1).await, [large]);
    crew.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storage_that_is_away_costs_the_consumer_no_attempt() {
    let (bed, place) = bed().await;
    let broker = bed.over(bed.embedded());
    let events = [event("k", LARGE), event("k", 10), event("k", LARGE + 1)];
    for event in &events {
        publish(&broker, event).await;
    }
    let (here, away) = (place.path().join("claims"), place.path().join("away"));
    fs::rename(&here, &away).expect("away");

    let crew = bed.consume(&broker, Some(bed.claims.clone()));
    soon("held", async || bed.held().await.len() == 3).await;
    publish(&broker, &event("other", 10)).await;
    assert_eq!(bed.applied(1).await[0].key(), Some("other"), "other keys flow");
    // More tries than the consumer has attempts.
    bed.asked(6).await;
    assert!(bed.held().await.iter().all(|(attempts, _)| *attempts <= 1), "{:?}", bed.held().await);
    bed.no_dead_letters().await;

    fs::rename(&away, &here).expect("back");
    assert_eq!(bed.applied(4).await[1..], events, "in order");
    bed.no_dead_letters().await;
    crew.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storage_that_is_away_holds_the_relay_up_and_loses_nothing() {
    let (bed, place) = bed().await;
    let broker = bed.over(bed.embedded());
    let (here, away) = (place.path().join("claims"), place.path().join("away"));
    fs::rename(&here, &away).expect("away");
    let crew = bed.start(&broker);
    let events = [event("k", LARGE), event("k", 10)];
    bed.send(&events).await;
    // This relay has one attempt.
    bed.asked(3).await;
    let backlog = bed.backlog().await;
    assert_eq!((backlog.pending, backlog.retrying, backlog.failed), (2, 0, 0));

    fs::rename(&away, &here).expect("back");
    assert_eq!(bed.applied(2).await, events, "in order");
    assert_eq!(bed.backlog().await.failed, 0);
    crew.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forged_reference_reads_nothing_else() {
    let (bed, place) = bed().await;
    fs::create_dir_all(place.path().join("claims/shop/billing")).expect("created");
    let content = "somebody else's payload";
    for dataref in ["shop/billing/ID", "shop/orders/../billing/ID", "/etc/passwd/ID", "file:///etc/ID"] {
        let bed = bed.again().await;
        let id = uuid::Uuid::now_v7();
        fs::write(place.path().join("claims/shop/billing").join(id.to_string()), content).expect("written");
        let forged = Event::builder("test.created", "created")
            .id(id)
            .header("dataref", dataref.replace("ID", &id.to_string()))
            .header("datasize", content.len().to_string())
            .header("datahash", Hash::of(content.as_bytes()).to_string())
            .payload("text/plain", "")
            .build()
            .expect("a valid event");
        publish(&bed.embedded(), &forged).await;
        let crew = bed.consume(&bed.embedded(), Some(bed.claims.clone()));
        let dead = bed.dead().await;
        assert_eq!(dead.view.error_type, "claim", "{dataref}");
        crew.stop().await;
        assert!(bed.seen.events.lock().expect("no panic").is_empty(), "no handler saw it");
    }
}

#[tokio::test]
async fn what_the_broker_refuses_goes_when_it_is_claimed() {
    let (bed, _place) = bed().await;
    let small = Arc::new(Embedded::new(Arc::new(bed.bed.store().clone())).payload_bytes_max(2_000));
    let broker = ClaimCheck::new(small.clone(), bed.claims.clone()).above_bytes(2_000);
    let large = event("k", LARGE);
    assert_eq!(small.check(&large).expect_err("too large").kind(), Kind::TooLarge);
    broker.check(&large).expect("stored elsewhere");
    broker.check(&event("k", 1_500)).expect("small enough");

    // The limit of all events stays, and so do the rules.
    let huge = Event::builder("a", "b").payload("text/plain", vec![b'x'; PAYLOAD_BYTES_MAX]).build().expect("valid");
    broker.check(&huge).expect("the largest");
    let lying = large.clone().rebuild().header("dataref", "elsewhere").build().expect("valid");
    assert_eq!(broker.check(&lying).expect_err("taken").kind(), Kind::Invalid);
    let mut full = large.rebuild();
    for n in 0..62 {
        full = full.header(format!("h{n}"), "x");
    }
    assert_eq!(broker.check(&full.build().expect("valid")).expect_err("no room").kind(), Kind::Invalid);
}

#[tokio::test]
async fn publishing_again_stores_the_same_object_again() {
    let (bed, place) = bed().await;
    let broker = bed.over(bed.embedded());
    let large = event("k", LARGE);
    for _ in 0..3 {
        publish(&broker, &large).await;
        assert_eq!(fs::read(file(&place, &large)).expect("stored"), large.payload().as_ref());
    }
    let day = file(&place, &large);
    let names = fs::read_dir(day.parent().expect("a day")).expect("listed").count();
    assert_eq!(names, 1, "and nothing else");
}

#[tokio::test]
async fn only_what_is_old_expires() {
    let (bed, place) = bed().await;
    let broker = bed.over(bed.embedded());
    let now = Utc::now();
    let of = |days: i64| event("k", LARGE).rebuild().time(now - TimeDelta::days(days)).build().expect("valid");
    let (today, young, old, late) = (of(0), of(20), of(40), of(41));
    for event in [&today, &young, &old, &late] {
        publish(&broker, event).await;
    }
    let stored = |event: &Event, days: u64| {
        let file = fs::File::options().write(true).open(file(&place, event)).expect("open");
        let time: SystemTime = now.into();
        file.set_modified(time - Duration::from_secs(days * 86_400)).expect("an older file");
    };
    stored(&young, 20);
    stored(&old, 40);
    // `late` is an old event that was published today. Beside it lies what a crash has left, and what is not ours.
    let left = file(&place, &old).with_file_name(".x.part");
    fs::write(&left, "half").expect("written");
    fs::File::options()
        .write(true)
        .open(&left)
        .and_then(|file| file.set_modified(SystemTime::UNIX_EPOCH))
        .expect("old");
    let foreign = place.path().join("claims/2001-01-01");
    fs::create_dir(&foreign).expect("created");
    fs::write(foreign.join("x"), "of another prefix").expect("written");

    let expired = bed.claims.expire(now - TimeDelta::days(35)).await.expect("expired");
    assert_eq!((expired.deleted, expired.has_more), (2, false));
    assert!(!file(&place, &old).parent().expect("a day").exists(), "the whole day is gone");
    for event in [&today, &young, &late] {
        assert!(file(&place, event).exists());
    }
    assert!(foreign.join("x").exists());
    assert_eq!(bed.claims.expire(now - TimeDelta::days(35)).await.expect("expired").deleted, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_megabytes_travel_over_rabbitmq() {
    let (bed, _place) = bed().await;
    let url = testbed::rabbitmq().await.vhost(&testbed::unique("claims")).await.expect("a fresh virtual host");
    let settings = RabbitMqSettings { payload_bytes_max: 2_000, ..RabbitMqSettings::new(url) };
    let rabbitmq: Arc<dyn Broker> = Arc::new(RabbitMq::new(settings).expect("valid settings"));
    let broker = bed.over(rabbitmq.clone());
    // Another consumer, to see what travels.
    let spec = ConsumerSpec::new("raw", &["#"]);
    let lease = Lease { group: spec.group(), slot: 0, owner: "test".to_owned(), epoch: 1 };
    let mut raw = rabbitmq.subscribe(&spec, &lease).await.expect("subscribed");

    let crew = bed.start(&broker);
    let events = [event("k", 10_000_000), event("k", 10)];
    bed.send(&events).await;
    assert_eq!(bed.applied(2).await, events);
    crew.stop().await;
    bed.no_dead_letters().await;

    let slim = raw.next().await.expect("a message").event.expect("an event");
    assert!(slim.payload().is_empty());
    assert_eq!(slim.content_type(), "application/json");
    assert_eq!(slim.headers()["datasize"], events[0].payload().len().to_string());
    assert_eq!(slim.headers()["datahash"], Hash::of(events[0].payload()).to_string());
    assert_eq!(slim.headers()["region"], "eu");
}
