//! NATS JetStream keeps every contract of a broker, hands over its places in order, and names what is unsafe.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

mod log_bed;

use std::sync::Arc;

use async_nats::jetstream::stream::{Config, DiscardPolicy, RetentionPolicy, StorageType};
use futures_util::StreamExt;
use log_bed::LogBed;
use postrider::Kind;
use postrider::broker::Broker;
use postrider::broker::nats::{Nats, NatsSettings};
use postrider::doctor::Severity;
use postrider::event::Event;
use postrider::handler::ConsumerSpec;
use postrider::lease::Lease;
use postrider_testkit::conformance::bed::{event, name};
use postrider_testkit::conformance::log;
use postrider_testkit::{suite, testbed};

/// A stream of its own on the shared server.
async fn fresh() -> NatsSettings {
    let name = testbed::unique("suite");
    NatsSettings { stream: name.clone(), prefix: name, ..NatsSettings::new(testbed::nats().await.url()) }
}

async fn bed() -> LogBed {
    LogBed::new(open(fresh().await))
}

fn open(settings: NatsSettings) -> Nats {
    Nats::new(settings).expect("valid settings")
}

async fn jetstream() -> async_nats::jetstream::Context {
    let client = async_nats::connect(testbed::nats().await.url()).await.expect("NATS answers");
    async_nats::jetstream::new(client)
}

fn config(settings: &NatsSettings) -> Config {
    Config { name: settings.stream.clone(), subjects: vec![format!("{}.>", settings.prefix)], ..Config::default() }
}

async fn publish(broker: &Nats, event: Event) -> postrider::Result<()> {
    broker.publish(&[Arc::new(event)]).await.remove(0)
}

fn lease(epoch: i64) -> Lease {
    Lease { group: "consumer/all".to_owned(), slot: 0, owner: "test".to_owned(), epoch }
}

suite!(
    broker,
    bed().await,
    [
        the_whole_envelope_arrives,
        every_consumer_gets_what_it_wants,
        messages_of_a_key_keep_their_order,
        what_was_not_acked_comes_again,
        prefetch_bounds_what_is_held,
        messages_wait_for_an_absent_consumer,
        slots_split_messages_by_key,
    ]
);

mod takeover {
    use super::*;
    suite!(
        log,
        bed().await,
        [
            a_successor_gets_first_what_was_in_hand,
            a_stale_holder_ends_and_disturbs_nobody,
            a_holder_may_subscribe_again,
            what_was_put_back_is_not_suspect,
            slots_may_change_their_number,
            a_raw_event_travels_without_its_envelope,
        ]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repetition_is_stored_once() {
    let settings = fresh().await;
    let broker = open(settings.clone());
    let once = event("k", "a");
    for _ in 0..3 {
        publish(&broker, once.clone()).await.expect("confirmed each time");
    }
    let mut stream = jetstream().await.get_stream(&settings.stream).await.expect("is there");
    assert_eq!(stream.info().await.expect("answers").state.messages, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_message_id_of_another_source_is_no_repetition() {
    let settings = fresh().await;
    let broker = open(settings.clone());
    let make = |source: &str, payload: &'static str| {
        Event::builder("a", "k").source(source).message_id("outbox-17").payload("text/plain", payload)
    };
    let events = [
        make("orders", "1").build(),
        make("bills", "2").build(),
        // Raw ones have no source.
        make("orders", "3").raw().build(),
        make("bills", "4").raw().build(),
    ];
    let events = events.map(|event| event.expect("valid"));
    for event in events.iter().chain(&events) {
        publish(&broker, event.clone()).await.expect("confirmed");
    }
    let mut subscription =
        broker.subscribe(&ConsumerSpec::new("all", &["#"]), &lease(1)).await.expect("the subscription begins");
    for event in &events {
        let got = subscription.next().await.expect("a message").event.expect("an event");
        assert_eq!((got.payload(), got.id()), (event.payload(), event.id()));
    }
    let mut stream = jetstream().await.get_stream(&settings.stream).await.expect("is there");
    assert_eq!(stream.info().await.expect("answers").state.messages, 4, "repetitions are stored once");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subject_without_a_shard_is_received() {
    let settings = fresh().await;
    let broker = open(settings.clone());
    let mut subscription = broker
        .subscribe(&ConsumerSpec::new("all", &["orders.created"]), &lease(1))
        .await
        .expect("the subscription begins");
    let jetstream = jetstream().await;
    for (topic, id) in [("other.topic", "m-1"), ("orders.created", "m-2")] {
        let mut headers = async_nats::HeaderMap::new();
        headers.insert("Nats-Msg-Id", id);
        let subject = format!("{}.{topic}", settings.prefix);
        let published = jetstream.publish_with_headers(subject, headers, id.into()).await.expect("sent");
        published.await.expect("confirmed");
    }
    let got = subscription.next().await.expect("a message").event.expect("an event");
    assert_eq!((got.topic(), got.payload().as_ref()), ("orders.created", b"m-2".as_slice()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_over_is_followed_by_another() {
    let broker = open(fresh().await);
    let mut subscription =
        broker.subscribe(&ConsumerSpec::new("all", &["#"]), &lease(1)).await.expect("the subscription begins");
    // Some of what was asked for comes, then nothing for longer than the server waits.
    for n in ["1", "2"] {
        publish(&broker, event("k", n)).await.expect("confirmed");
        assert_eq!(name(&subscription.next().await.expect("a message").event.expect("an event")), n);
    }
    let silence = tokio::time::timeout(std::time::Duration::from_secs(12), subscription.next()).await;
    assert!(silence.is_err(), "what the server still owes is what is still missing");
    publish(&broker, event("k", "3")).await.expect("confirmed");
    assert_eq!(name(&subscription.next().await.expect("a message").event.expect("an event")), "3");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_with_a_successor_leaves_nothing_behind() {
    let settings = fresh().await;
    let broker = open(settings.clone());
    let spec = ConsumerSpec::new("all", &["#"]);
    let mut first = broker.subscribe(&spec, &lease(1)).await.expect("subscribes");
    publish(&broker, event("k", "a")).await.expect("confirmed");
    first.next().await.expect("a message");
    let mut second = broker.subscribe(&spec, &lease(2)).await.expect("subscribes");
    // It does not know yet.
    first.close().await.expect("closes");
    second.next().await.expect("a message");
    let stream = jetstream().await.get_stream(&settings.stream).await.expect("is there");
    let names: Vec<_> = stream.consumer_names().map(|name| name.expect("a name")).collect().await;
    assert_eq!(names.len(), 1, "{names:?}");
    assert!(names[0].starts_with("all-1-0-2-"), "{names:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_too_large_or_no_subject_troubles_nobody_else() {
    let broker = open(fresh().await);
    let make = |topic: &str, bytes: usize| {
        Event::builder(topic, "t").payload("text/plain", vec![b'x'; bytes]).build().expect("valid")
    };
    publish(&broker, make("a.b", 1)).await.expect("confirmed");
    let batch = [make("a.b", 2_000_000), make("a b", 1), make("a.b", 900_000)].map(Arc::new);
    let results = broker.publish(&batch).await;
    let kinds: Vec<_> = results.iter().map(|result| result.as_ref().err().map(postrider::Error::kind)).collect();
    assert_eq!(kinds, [Some(Kind::TooLarge), Some(Kind::Invalid), None]);
    assert_eq!(broker.check(&batch[0]).expect_err("refused").kind(), Kind::TooLarge);
    assert_eq!(broker.check(&batch[1]).expect_err("refused").kind(), Kind::Invalid);
    assert!(broker.check(&batch[2]).is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_stream_is_named_and_not_the_events_fault() {
    let settings = NatsSettings { declare: false, ..fresh().await };
    let broker = open(settings.clone());
    let error = publish(&broker, event("k", "a")).await.expect_err("nothing is there");
    assert_eq!(error.kind(), Kind::Missing);
    assert!(error.to_string().contains(&settings.stream), "{error}");
    let spec = ConsumerSpec::new("all", &["#"]);
    assert_eq!(broker.subscribe(&spec, &lease(1)).await.err().expect("refused").kind(), Kind::Missing);
    let findings = broker.inspect().await.expect("answers");
    assert!(findings.iter().any(|finding| finding.check == "nats.stream" && finding.severity == Severity::Error));

    // It comes, goes, and comes back without the subjects.
    let jetstream = jetstream().await;
    jetstream.create_stream(config(&settings)).await.expect("created");
    publish(&broker, event("k", "a")).await.expect("confirmed");
    jetstream.delete_stream(&settings.stream).await.expect("deleted");
    assert_eq!(publish(&broker, event("k", "b")).await.expect_err("gone").kind(), Kind::Missing);
    jetstream.create_stream(config(&settings)).await.expect("created");
    publish(&broker, event("k", "b")).await.expect("confirmed");
    let elsewhere = Config { subjects: vec![format!("{}-other", settings.prefix)], ..config(&settings) };
    jetstream.update_stream(elsewhere).await.expect("changed");
    let error = publish(&broker, event("k", "c")).await.expect_err("nobody has the subject");
    assert_eq!(error.kind(), Kind::Unroutable);
    assert!(error.to_string().contains("test.created"), "the error names the subject: {error}");
    assert_eq!(publish(&broker, event("k", "c")).await.expect_err("named").kind(), Kind::Mismatch);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unsafe_stream_is_refused_by_name() {
    let jetstream = jetstream().await;
    type Change = fn(&mut Config);
    let changes: [(&str, Change); 4] = [
        ("memory", |config| config.storage = StorageType::Memory),
        ("before others", |config| config.retention = RetentionPolicy::Interest),
        ("oldest", |config| {
            config.max_messages = 10;
            config.discard = DiscardPolicy::Old;
        }),
        ("subjects", |config| config.subjects = vec![format!("{}-other", config.name)]),
    ];
    for (word, change) in changes {
        let settings = fresh().await;
        let mut config = config(&settings);
        change(&mut config);
        jetstream.create_stream(config).await.expect("created");
        let broker = open(settings);
        let error = publish(&broker, event("k", "a")).await.expect_err("refused");
        assert_eq!(error.kind(), Kind::Mismatch);
        assert!(error.to_string().contains(word), "{error}");
        let findings = broker.inspect().await.expect("answers");
        let named =
            findings.iter().any(|finding| finding.severity == Severity::Error && finding.message.contains(word));
        assert!(named, "{findings:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_disk_that_no_client_can_see_is_spoken_of() {
    let broker = open(fresh().await);
    publish(&broker, event("k", "a")).await.expect("confirmed");
    let findings = broker.inspect().await.expect("answers");
    let severity = |check: &str| findings.iter().find(|finding| finding.check == check).map(|finding| finding.severity);
    assert_eq!(severity("nats.sync_interval"), Some(Severity::Warning));
    assert_eq!(severity("nats.stream"), Some(Severity::Ok));
    assert_eq!(severity("nats.max_payload"), Some(Severity::Warning));
    assert!(!findings.iter().any(|finding| finding.severity == Severity::Error), "{findings:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_has_a_place_that_no_consumer_reads() {
    let settings = fresh().await;
    let broker = open(settings.clone());
    let mut subscription =
        broker.subscribe(&ConsumerSpec::new("all", &["#"]), &lease(1)).await.expect("the subscription begins");
    let letter = event("k", "before");
    publish(&broker, letter).await.expect("confirmed");
    let letter = log::set_aside(&broker).await;
    let delivery = subscription.next().await.expect("a message");
    assert_eq!(name(&delivery.event.expect("an event")), "before");
    let silence = tokio::time::timeout(std::time::Duration::from_millis(300), subscription.next()).await;
    assert!(silence.is_err(), "a consumer got what was set aside");

    let places = jetstream().await.get_stream(format!("{}-places", settings.stream)).await.expect("is there");
    let config = async_nats::jetstream::consumer::pull::Config::default();
    let reader = places.create_consumer(config).await.expect("created");
    let mut messages = reader.fetch().max_messages(10).messages().await.expect("asked");
    let message = messages.next().await.expect("a message").expect("received");
    assert_eq!(message.subject.as_str(), format!("{}-places.all_error", settings.prefix));
    assert_eq!(message.payload, letter.payload());
    let headers = message.headers.clone().expect("headers");
    let header = |name: &str| headers.get(name).map(|value| value.as_str().to_owned()).unwrap_or_default();
    assert_eq!(header("ce-id"), letter.id().to_string());
    assert_eq!((header("postrider-reason"), header("postrider-attempts")), ("dead".to_owned(), "4".to_owned()));
    assert_eq!(header("postrider-error"), "line 1 line 2");
    assert_eq!(header("postrider-routing-key"), "test.created");
    assert!(messages.next().await.is_none(), "nowhere is nowhere");
}

#[tokio::test(flavor = "multi_thread")]
async fn durable_consumers_do_not_pile_up() {
    let settings = fresh().await;
    let broker = open(settings.clone());
    let spec = ConsumerSpec::new("all.of-us", &["#"]);
    for epoch in 1..6 {
        let mut subscription = broker.subscribe(&spec, &lease(epoch)).await.expect("the subscription begins");
        publish(&broker, event("k", "a")).await.expect("confirmed");
        let delivery = subscription.next().await.expect("a message");
        subscription.ack(delivery.tag).await.expect("acked");
        if epoch % 2 == 0 {
            subscription.close().await.expect("closes");
        }
    }
    let stream = jetstream().await.get_stream(&settings.stream).await.expect("is there");
    let names: Vec<_> = stream.consumer_names().map(|name| name.expect("a name")).collect().await;
    assert_eq!(names.len(), 1, "{names:?}");
    assert!(names[0].starts_with("all=of-us-1-0-5-"), "{names:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_everybody_has_done_is_purged() {
    let settings = NatsSettings { retention: std::time::Duration::ZERO, ..fresh().await };
    let broker = open(settings.clone());
    let (slow, quick) = (ConsumerSpec::new("slow", &["#"]), ConsumerSpec::new("quick", &["#"]));
    let idle = ConsumerSpec::new("idle", &["other.topic"]);
    for spec in [&slow, &quick, &idle] {
        broker.subscribe(spec, &lease(1)).await.expect("subscribes").close().await.expect("closes");
    }
    let events: Vec<_> = (0..100).map(|n| Arc::new(event("k", &format!("{n:02}")))).collect();
    assert!(broker.publish(&events).await.iter().all(Result::is_ok));
    let read = async |spec: &ConsumerSpec, count: usize| {
        let mut subscription = broker.subscribe(spec, &lease(2)).await.expect("subscribes");
        for _ in 0..count {
            let delivery = subscription.next().await.expect("a message");
            subscription.ack(delivery.tag).await.expect("acked");
        }
        subscription.close().await.expect("closes");
    };
    read(&quick, 100).await;
    assert_eq!(broker.trim().await.expect("trims"), 0, "the slow one has read nothing");
    read(&slow, 45).await;
    assert_eq!(broker.trim().await.expect("trims"), 0, "the idle one has not looked at it");
    let mut subscription = broker.subscribe(&idle, &lease(2)).await.expect("subscribes");
    let silence = tokio::time::timeout(std::time::Duration::from_millis(500), subscription.next()).await;
    assert!(silence.is_err(), "it wants nothing of all this");
    subscription.close().await.expect("closes");
    // Times are compared by the second.
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    assert_eq!(broker.trim().await.expect("trims"), 45);
    let kept = open(NatsSettings { retention: std::time::Duration::from_secs(3600), ..settings });
    read(&slow, 5).await;
    assert_eq!(kept.trim().await.expect("trims"), 0, "it is not old enough");
    let mut subscription = broker.subscribe(&slow, &lease(3)).await.expect("subscribes");
    assert_eq!(name(&subscription.next().await.expect("a message").event.expect("an event")), "50");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_climbs_the_ladder_and_comes_back_by_replay() {
    log_bed::a_message_climbs_the_ladder(Arc::new(open(fresh().await))).await;
}

mod own_servers {
    use std::time::Duration;

    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_that_is_killed_and_restarted_loses_and_reorders_nothing() {
        let mut server = testbed::Nats::start_private().await.expect("NATS starts");
        let settings = NatsSettings { publish_timeout: Duration::from_secs(5), ..NatsSettings::new(server.url()) };
        let broker = Arc::new(open(settings));
        log_bed::nothing_is_lost_or_reordered(broker, async || {
            server.kill().await.expect("killed");
            server.restart().await.expect("restarted");
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_that_hangs_is_given_up_in_time() {
        let mut server = testbed::Nats::start_private().await.expect("NATS starts");
        let settings = NatsSettings { publish_timeout: Duration::from_secs(1), ..NatsSettings::new(server.url()) };
        let broker = open(settings);
        publish(&broker, event("k", "a")).await.expect("confirmed");
        server.signal(testbed::Signal::Stop).expect("stopped");
        let began = std::time::Instant::now();
        assert_eq!(publish(&broker, event("k", "b")).await.expect_err("too late").kind(), Kind::Unavailable);
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        server.signal(testbed::Signal::Cont).expect("goes on");
        publish(&broker, event("k", "c")).await.expect("confirmed");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_that_is_away_costs_no_event() {
        let mut server = testbed::Nats::start_private().await.expect("NATS starts");
        let broker = open(NatsSettings {
            connect_timeout: Duration::from_secs(2),
            publish_timeout: Duration::from_secs(3),
            ..NatsSettings::new(server.url())
        });
        server.kill().await.expect("killed");
        assert_eq!(publish(&broker, event("k", "a")).await.expect_err("away").kind(), Kind::Unavailable);
        assert!(broker.inspect().await.is_err());
        server.restart().await.expect("restarted");
        publish(&broker, event("k", "a")).await.expect("confirmed");
    }

    /// The subjects that the guide names.
    fn rights() -> Vec<&'static str> {
        const GUIDE: &str = include_str!("../../../docs/guides/nats.md");
        let section = GUIDE.split("## 4. Rights").nth(1).expect("rights").split("## 5").next().expect("rights");
        section.split('`').filter(|text| text.contains('.') && !text.contains([' ', '\n'])).collect()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_rights_of_the_guide_are_enough_and_missing_ones_are_named() {
        let (inbox, subjects): (Vec<_>, Vec<_>) = rights().into_iter().partition(|right| right.starts_with("_INBOX"));
        let user = |name: &str, subjects: &[&str]| {
            format!(
                "  {{ user: {name}, password: secret, permissions: {{ publish: {subjects:?}, subscribe: {inbox:?} }} }}\n"
            )
        };
        let users = user("shop", &subjects) + &user("guest", &["postrider.>"]);
        let server = testbed::Nats::start_with(&format!("authorization {{ users: [\n{users}] }}\n")).await;
        let server = server.expect("NATS starts");
        let of = |login: &str| {
            open(NatsSettings {
                connect_timeout: Duration::from_secs(2),
                retention: Duration::ZERO,
                ..NatsSettings::new(server.url().replace("nats://", &format!("nats://{login}@")))
            })
        };
        let shop = of("shop:secret");
        publish(&shop, event("k", "a")).await.expect("confirmed");
        let spec = ConsumerSpec::new("all", &["#"]);
        let mut subscription = shop.subscribe(&spec, &lease(1)).await.expect("the subscription begins");
        let delivery = subscription.next().await.expect("a message");
        subscription.ack(delivery.tag).await.expect("acked");
        subscription.close().await.expect("closes");
        log::set_aside(&shop).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(shop.trim().await.expect("trims"), 1);
        let again = shop.subscribe(&spec, &lease(2)).await;
        drop(again.expect("the subscription begins"));

        let error = publish(&of("guest:secret"), event("k", "a")).await.expect_err("no right");
        assert_eq!(error.kind(), Kind::Denied, "{error:?}");
        assert!(error.to_string().contains("STREAM.INFO"), "{error}");
        let error = publish(&of("shop:wrong"), event("k", "a")).await.expect_err("no login");
        assert_eq!(error.kind(), Kind::Denied, "{error:?}");
        assert!(!format!("{error:?} {:?}", error.causes()).contains("wrong"), "{error:?}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_without_jetstream_is_named() {
        // An account of its own, in which JetStream is off.
        let accounts = "accounts { shop: { users: [ { user: shop, password: secret } ] } }\n";
        let server = testbed::Nats::start_with(accounts).await.expect("NATS starts");
        let url = server.url().replace("nats://", "nats://shop:secret@");
        let broker = open(NatsSettings { connect_timeout: Duration::from_secs(2), ..NatsSettings::new(url) });
        let error = publish(&broker, event("k", "a")).await.expect_err("no JetStream");
        assert_eq!(error.kind(), Kind::Missing, "{error:?}");
        assert!(error.to_string().contains("not enabled"), "{error}");
    }
}
