//! Redis Streams keep every contract of a broker, hand over their places in order, and name what is unsafe.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

mod log_bed;

use std::sync::Arc;
use std::time::{Duration, Instant};

use log_bed::LogBed;
use postrider::Kind;
use postrider::broker::Broker;
use postrider::broker::redis::{RedisStreamSettings, RedisStreams};
use postrider::doctor::Severity;
use postrider::event::Event;
use postrider::handler::ConsumerSpec;
use postrider::lease::Lease;
use postrider_testkit::conformance::bed::{event, name};
use postrider_testkit::conformance::log;
use postrider_testkit::{suite, testbed};
use redis::aio::MultiplexedConnection;

/// Keys of its own on the shared server.
async fn fresh() -> RedisStreamSettings {
    let prefix = testbed::unique("suite");
    RedisStreamSettings { prefix, ..RedisStreamSettings::new(testbed::redis().await.url()) }
}

async fn bed() -> LogBed {
    LogBed::new(open(fresh().await))
}

fn open(settings: RedisStreamSettings) -> RedisStreams {
    RedisStreams::new(settings).expect("valid settings")
}

async fn connect(url: &str) -> MultiplexedConnection {
    let client = redis::Client::open(url).expect("an address");
    client.get_multiplexed_async_connection().await.expect("Redis answers")
}

async fn publish(broker: &RedisStreams, event: Event) -> postrider::Result<()> {
    broker.publish(&[Arc::new(event)]).await.remove(0)
}

fn lease(epoch: i64) -> Lease {
    Lease { group: "consumer/all".to_owned(), slot: 0, owner: "test".to_owned(), epoch }
}

/// How many entries all shards have.
async fn entries(settings: &RedisStreamSettings) -> usize {
    let mut redis = connect(&settings.url).await;
    let mut total = 0;
    for shard in 0..32 {
        let key = format!("{{{}}}:{shard:02}", settings.prefix);
        total += redis::cmd("XLEN").arg(key).query_async::<usize>(&mut redis).await.expect("answers");
    }
    total
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
async fn a_position_is_seen_in_the_group_of_the_consumer() {
    let settings = fresh().await;
    let broker = open(settings.clone());
    let spec = ConsumerSpec::new("all", &["#"]);
    let mut subscription = broker.subscribe(&spec, &lease(1)).await.expect("the subscription begins");
    publish(&broker, event("k", "a")).await.expect("confirmed");
    let delivery = subscription.next().await.expect("a message");
    let stream = delivery.origin.exchange.clone();
    subscription.ack(delivery.tag).await.expect("acked");
    subscription.close().await.expect("closes");
    let mut redis = connect(&settings.url).await;
    let entries: Vec<(String, Vec<String>)> =
        redis::cmd("XRANGE").arg(&stream).arg("-").arg("+").query_async(&mut redis).await.expect("answers");
    let groups: redis::Value =
        redis::cmd("XINFO").arg("GROUPS").arg(&stream).query_async(&mut redis).await.expect("answers");
    assert!(format!("{groups:?}").contains(&entries[0].0), "{groups:?} {entries:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_has_a_place_that_no_consumer_reads() {
    let settings = fresh().await;
    let broker = open(settings.clone());
    let spec = ConsumerSpec::new("all", &["#"]);
    let mut subscription = broker.subscribe(&spec, &lease(1)).await.expect("the subscription begins");
    let letter = log::set_aside(&broker).await;
    publish(&broker, event("k", "after")).await.expect("confirmed");
    let delivery = subscription.next().await.expect("a message");
    assert_eq!(name(&delivery.event.expect("an event")), "after");
    let mut redis = connect(&settings.url).await;
    let place = format!("{{{}}}:place:all_error", settings.prefix);
    let entries: Vec<(String, Vec<String>)> =
        redis::cmd("XRANGE").arg(place).arg("-").arg("+").query_async(&mut redis).await.expect("answers");
    assert_eq!(entries.len(), 1, "nowhere is nowhere");
    let fields: std::collections::BTreeMap<_, _> =
        entries[0].1.chunks(2).map(|pair| (pair[0].as_str(), pair[1].as_str())).collect();
    assert_eq!(fields["ce_id"], letter.id().to_string());
    assert_eq!(fields["data"].as_bytes(), letter.payload());
    assert_eq!((fields["h_postrider-reason"], fields["h_postrider-attempts"]), ("dead", "4"));
    assert_eq!(fields["h_postrider-routing-key"], "test.created");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_entry_of_somebody_else_is_delivered_too() {
    let settings = fresh().await;
    let broker = open(settings.clone());
    let spec = ConsumerSpec::new("all", &["#"]);
    let mut subscription = broker.subscribe(&spec, &lease(1)).await.expect("the subscription begins");
    let mut redis = connect(&settings.url).await;
    let mut add = async |fields: &[(&str, &str)]| {
        let key = format!("{{{}}}:03", settings.prefix);
        let mut command = redis::cmd("XADD");
        command.arg(key).arg("*");
        for (name, value) in fields {
            command.arg(name).arg(value);
        }
        command.exec_async(&mut redis).await.expect("added");
    };
    add(&[("topic", "a.b"), ("id", "m-1"), ("data", "x")]).await;
    add(&[("no", "event")]).await;
    let first = subscription.next().await.expect("a message").event.expect("an event");
    assert_eq!((first.topic(), first.payload().as_ref()), ("a.b", b"x".as_slice()));
    let second = subscription.next().await.expect("a message").event.expect_err("no event");
    assert_eq!((second.error.kind(), second.raw.headers["no"].as_str()), (Kind::Corrupt, "event"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_of_another_type_is_the_places_fault() {
    let settings = fresh().await;
    let mut redis = connect(&settings.url).await;
    for shard in 0..32 {
        let key = format!("{{{}}}:{shard:02}", settings.prefix);
        redis::cmd("SET").arg(key).arg("x").exec_async(&mut redis).await.expect("set");
    }
    let broker = open(settings);
    assert_eq!(publish(&broker, event("k", "a")).await.expect_err("no stream").kind(), Kind::Mismatch);
    let spec = ConsumerSpec::new("all", &["#"]);
    assert_eq!(broker.subscribe(&spec, &lease(1)).await.err().expect("no stream").kind(), Kind::Mismatch);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_payload_does_not_come_in_crowds() {
    let broker = open(fresh().await);
    let spec = ConsumerSpec::new("all", &["#"]);
    let mut subscription = broker.subscribe(&spec, &lease(1)).await.expect("the subscription begins");
    for _ in 0..3 {
        let events: Vec<_> = (0..4)
            .map(|_| Event::builder("t", "k").payload("text/plain", vec![b'x'; 3_000_000]).build().expect("valid"))
            .map(Arc::new)
            .collect();
        assert!(broker.publish(&events).await.iter().all(Result::is_ok));
    }
    for _ in 0..12 {
        let delivery = subscription.next().await.expect("a message");
        assert_eq!(delivery.event.expect("an event").payload().len(), 3_000_000);
        subscription.ack(delivery.tag).await.expect("acked");
    }
    let small = RedisStreamSettings { payload_bytes_max: 10, ..fresh().await };
    let large = Event::builder("t", "k").payload("text/plain", "12345678901").build().expect("valid");
    assert_eq!(open(small).check(&large).expect_err("too large").kind(), Kind::TooLarge);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_climbs_the_ladder_and_comes_back_by_replay() {
    log_bed::a_message_climbs_the_ladder(Arc::new(open(fresh().await))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_dead_holder_had_in_hand_stays_suspect_until_it_is_done() {
    let broker = open(fresh().await);
    let spec = |prefetch| ConsumerSpec { prefetch, ..ConsumerSpec::new("all", &["#"]) };
    let events: Vec<_> = (0..20).map(|n| Arc::new(event("k", &format!("{n:02}")))).collect();
    assert!(broker.publish(&events).await.iter().all(Result::is_ok));
    let mut dead = broker.subscribe(&spec(20), &lease(1)).await.expect("subscribes");
    for _ in 0..20 {
        dead.next().await.expect("a message");
    }
    drop(dead);
    // One that reads less dies too, and one ends in good order.
    let mut dead = broker.subscribe(&spec(2), &lease(2)).await.expect("subscribes");
    assert!(dead.next().await.expect("a message").is_redelivered);
    drop(dead);
    let mut orderly = broker.subscribe(&spec(2), &lease(3)).await.expect("subscribes");
    let delivery = orderly.next().await.expect("a message");
    orderly.ack(delivery.tag).await.expect("acked");
    orderly.close().await.expect("closes");
    let last = event("k", "20");
    publish(&broker, last).await.expect("confirmed");
    let mut last = broker.subscribe(&spec(50), &lease(4)).await.expect("subscribes");
    for n in 1..=20 {
        let delivery = last.next().await.expect("a message");
        assert_eq!(delivery.is_redelivered, n < 20, "message {n}");
        assert_eq!(name(&delivery.event.expect("an event")), format!("{n:02}"));
    }
}

mod own_servers {
    use super::*;

    async fn set(url: &str, name: &str, value: &str) {
        let mut redis = connect(url).await;
        redis::cmd("CONFIG").arg("SET").arg(name).arg(value).exec_async(&mut redis).await.expect("set");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_that_is_killed_and_restarted_loses_and_reorders_nothing() {
        let mut server = testbed::Redis::start_private().await.expect("Redis starts");
        let broker = Arc::new(open(RedisStreamSettings::new(server.url())));
        log_bed::nothing_is_lost_or_reordered(broker, async || {
            server.kill().await.expect("killed");
            server.restart().await.expect("restarted");
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_that_loads_its_data_is_waited_for_and_not_taken_for_an_unsafe_one() {
        let mut server = testbed::Redis::start_private().await.expect("Redis starts");
        let broker = open(RedisStreamSettings::new(server.url()));
        // Enough to take a while.
        let mut redis = connect(server.url()).await;
        for part in 0..200 {
            let fill = "for i = 1, 3000 do redis.call('SET', ARGV[1] .. ':' .. i, i) end";
            redis::cmd("EVAL").arg(fill).arg(0).arg(part).exec_async(&mut redis).await.expect("filled");
        }
        server.kill().await.expect("killed");
        let look = async {
            let (mut has_loaded, until) = (false, Instant::now() + Duration::from_secs(60));
            loop {
                assert!(Instant::now() < until, "it does not come back");
                match broker.inspect().await {
                    Ok(findings) => {
                        assert!(findings.iter().all(|finding| finding.severity == Severity::Ok), "{findings:?}");
                        return has_loaded;
                    }
                    Err(error) => {
                        assert_eq!(error.kind(), Kind::Unavailable, "{error}");
                        has_loaded |= error.to_string().contains("it loads its data");
                    }
                }
            }
        };
        let (restarted, has_loaded) = tokio::join!(server.restart(), look);
        restarted.expect("restarted");
        assert!(has_loaded, "it was never seen loading");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_loses_events_is_named_or_refused() {
        let server = testbed::Redis::start_private().await.expect("Redis starts");
        let broker = || open(RedisStreamSettings::new(server.url()));
        let severity = async |check: &str| {
            let findings = broker().inspect().await.expect("answers");
            findings.into_iter().find(|finding| finding.check == check).expect(check).severity
        };
        assert!(broker().inspect().await.expect("answers").iter().all(|finding| finding.severity == Severity::Ok));
        set(server.url(), "appendfsync", "everysec").await;
        assert_eq!(severity("redis.persistence").await, Severity::Warning);
        set(server.url(), "appendonly", "no").await;
        assert_eq!(severity("redis.persistence").await, Severity::Error);
        let error = publish(&broker(), event("k", "a")).await.expect_err("a restart would lose it");
        assert_eq!(error.kind(), Kind::Mismatch);
        assert!(error.to_string().contains("appendonly"), "{error}");
        set(server.url(), "appendonly", "yes").await;
        set(server.url(), "maxmemory-policy", "volatile-lru").await;
        assert_eq!(severity("redis.eviction").await, Severity::Warning);
        set(server.url(), "maxmemory-policy", "allkeys-lru").await;
        publish(&broker(), event("k", "a")).await.expect("without a limit nothing is evicted");
        set(server.url(), "maxmemory", "100mb").await;
        assert_eq!(severity("redis.eviction").await, Severity::Error);
        let error = publish(&broker(), event("k", "a")).await.expect_err("it would be forgotten");
        assert_eq!(error.kind(), Kind::Mismatch);
        assert!(error.to_string().contains("allkeys-lru"), "{error}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_that_becomes_a_replica_is_connected_to_anew() {
        let server = testbed::Redis::start_private().await.expect("Redis starts");
        let broker = open(RedisStreamSettings::new(server.url()));
        publish(&broker, event("k", "a")).await.expect("confirmed");
        let connections = async || {
            let mut redis = connect(server.url()).await;
            let info: String = redis::cmd("INFO").arg("stats").query_async(&mut redis).await.expect("answers");
            let total = info.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
            total.expect("counted").trim().parse::<u64>().expect("a number")
        };
        let mut redis = connect(server.url()).await;
        // Nobody is at the other end, which is enough to refuse writes.
        redis::cmd("REPLICAOF").arg("127.0.0.1").arg(1).exec_async(&mut redis).await.expect("becomes a replica");
        let before = connections().await;
        let error = publish(&broker, event("k", "b")).await.expect_err("a replica takes nothing");
        assert_eq!(error.kind(), Kind::ReadOnly, "{error:?}");
        redis::cmd("REPLICAOF").arg("NO").arg("ONE").exec_async(&mut redis).await.expect("is a primary again");
        publish(&broker, event("k", "b")).await.expect("confirmed");
        assert_eq!(connections().await - before, 2, "the broker's new one, and the one that counts");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_full_redis_blocks_publishers_but_not_consumers() {
        let server = testbed::Redis::start_private().await.expect("Redis starts");
        let settings =
            RedisStreamSettings { retention: Duration::from_millis(1), ..RedisStreamSettings::new(server.url()) };
        let broker = open(settings.clone());
        let events: Vec<_> = (0..300).map(|n| Arc::new(event("k", &format!("{n}")))).collect();
        assert!(broker.publish(&events).await.iter().all(Result::is_ok));
        assert_eq!(broker.blocked(), None);
        set(server.url(), "maxmemory", "1").await;
        let error = publish(&broker, event("k", "b")).await.expect_err("memory is full");
        assert_eq!(error.kind(), Kind::Unavailable, "{error:?}");
        assert!(broker.blocked().is_some_and(|reason| reason.contains("memory")));
        // What is there is consumed, and makes room.
        let spec = ConsumerSpec::new("all", &["#"]);
        let mut subscription = broker.subscribe(&spec, &lease(1)).await.expect("the subscription begins");
        for _ in 0..300 {
            let delivery = subscription.next().await.expect("a message");
            subscription.ack(delivery.tag).await.expect("acked");
        }
        subscription.close().await.expect("closes");
        assert!(broker.trim().await.expect("trims") >= 100);
        assert!(entries(&settings).await <= 200);
        set(server.url(), "maxmemory", "0").await;
        publish(&broker, event("k", "b")).await.expect("confirmed");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_that_hangs_is_given_up_in_time() {
        let mut server = testbed::Redis::start_private().await.expect("Redis starts");
        let settings =
            RedisStreamSettings { publish_timeout: Duration::from_secs(1), ..RedisStreamSettings::new(server.url()) };
        let broker = open(settings);
        publish(&broker, event("k", "a")).await.expect("confirmed");
        server.signal(testbed::Signal::Stop).expect("stopped");
        let began = std::time::Instant::now();
        assert_eq!(publish(&broker, event("k", "b")).await.expect_err("too late").kind(), Kind::Unavailable);
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
        server.signal(testbed::Signal::Cont).expect("goes on");
        publish(&broker, event("k", "c")).await.expect("confirmed");
    }

    /// Trims through a subscription whose retention is over at once; what one consumer has not done stays for all.
    #[tokio::test(flavor = "multi_thread")]
    async fn only_what_everybody_has_done_is_trimmed() {
        const EVENTS: usize = 1_000;
        let server = testbed::Redis::start_private().await.expect("Redis starts");
        let settings =
            RedisStreamSettings { retention: Duration::from_millis(1), ..RedisStreamSettings::new(server.url()) };
        let broker = open(settings.clone());
        let (slow, quick) = (ConsumerSpec::new("slow", &["#"]), ConsumerSpec::new("quick", &["#"]));
        // One key, so one shard; it keeps nodes of 100 entries.
        for subscriber in [&slow, &quick] {
            let mut subscription = broker.subscribe(subscriber, &lease(1)).await.expect("subscribes");
            subscription.close().await.expect("closes");
        }
        let events: Vec<_> = (0..EVENTS).map(|n| Arc::new(event("k", &format!("{n:04}")))).collect();
        assert!(broker.publish(&events).await.iter().all(Result::is_ok));
        let read = async |spec: &ConsumerSpec, count: usize| {
            let mut subscription = broker.subscribe(spec, &lease(2)).await.expect("subscribes");
            for _ in 0..count {
                let delivery = subscription.next().await.expect("a message");
                subscription.ack(delivery.tag).await.expect("acked");
            }
            subscription.close().await.expect("closes");
        };
        read(&quick, EVENTS).await;
        assert_eq!(broker.trim().await.expect("trims"), 0, "the slow one has read nothing");
        read(&slow, 450).await;
        let trimmed = broker.trim().await.expect("trims");
        assert_eq!(entries(&settings).await, EVENTS - trimmed as usize);
        assert!((300..450).contains(&trimmed), "{trimmed}");
        // The slow one goes on where it was.
        let mut subscription = broker.subscribe(&slow, &lease(3)).await.expect("subscribes");
        assert_eq!(name(&subscription.next().await.expect("a message").event.expect("an event")), "0450");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_rights_of_the_guide_are_enough() {
        const GUIDE: &str = include_str!("../../../docs/guides/redis-streams.md");
        let server = testbed::Redis::start_private().await.expect("Redis starts");
        let mut redis = connect(server.url()).await;
        let rights = GUIDE.split('`').find(|text| text.starts_with("~{postrider}:*")).expect("rights");
        let mut setuser = redis::cmd("ACL");
        setuser.arg("SETUSER").arg("shop").arg("on").arg(">secret");
        setuser.arg(rights.split_whitespace().collect::<Vec<_>>());
        setuser.exec_async(&mut redis).await.expect("a user");
        let settings = RedisStreamSettings {
            retention: Duration::from_millis(1),
            ..RedisStreamSettings::new(server.url().replace("redis://", "redis://shop:secret@"))
        };
        let broker = open(settings.clone());
        let events: Vec<_> = (0..200).map(|n| Arc::new(event("k", &format!("{n}")))).collect();
        assert!(broker.publish(&events).await.iter().all(Result::is_ok));
        let spec = ConsumerSpec::new("all", &["#"]);
        let mut subscription = broker.subscribe(&spec, &lease(1)).await.expect("the subscription begins");
        for _ in 0..200 {
            let delivery = subscription.next().await.expect("a message");
            subscription.ack(delivery.tag).await.expect("acked");
        }
        subscription.close().await.expect("closes");
        log::set_aside(&broker).await;
        assert!(broker.trim().await.expect("trims") >= 100);
        assert!(broker.inspect().await.expect("answers").iter().all(|finding| finding.severity == Severity::Ok));
        let elsewhere = open(RedisStreamSettings { prefix: "other".to_owned(), ..settings });
        assert_eq!(publish(&elsewhere, event("k", "a")).await.expect_err("other keys").kind(), Kind::Denied);
    }
}
