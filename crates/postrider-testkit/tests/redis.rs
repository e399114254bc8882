//! Idempotency in Redis: one claim at a time, nothing overwritten, nothing lost while Redis is away.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use postrider::Kind;
use postrider::event::Event;
use postrider::handler::{Handler, HandlerError};
use postrider::idempotency::{Begun, Claim, Idempotent, RedisIdempotency, RedisSettings};
use postrider_testkit::conformance::bed::event;
use postrider_testkit::testbed;
use redis::AsyncCommands;
use redis::aio::MultiplexedConnection;
use uuid::Uuid;

/// Claims that end within a test.
const SHORT: Duration = Duration::from_millis(300);

fn open(settings: RedisSettings) -> RedisIdempotency {
    RedisIdempotency::new(settings).expect("the settings are valid")
}

async fn shared() -> RedisIdempotency {
    open(RedisSettings::new(testbed::redis().await.url()))
}

async fn short() -> RedisIdempotency {
    open(RedisSettings { claim: SHORT, ..RedisSettings::new(testbed::redis().await.url()) })
}

async fn connect(url: &str) -> MultiplexedConnection {
    let client = redis::Client::open(url).expect("an address");
    client.get_multiplexed_async_connection().await.expect("Redis answers")
}

async fn claim(idempotency: &RedisIdempotency, id: Uuid) -> Claim {
    match idempotency.begin(id).await.expect("Redis answers") {
        Begun::New(claim) => claim,
        other => panic!("not new: {other:?}"),
    }
}

async fn is_done(idempotency: &RedisIdempotency, id: Uuid) -> bool {
    matches!(idempotency.begin(id).await.expect("Redis answers"), Begun::Done { .. })
}

async fn is_in_progress(idempotency: &RedisIdempotency, id: Uuid) -> bool {
    matches!(idempotency.begin(id).await.expect("Redis answers"), Begun::InProgress)
}

/// Waits until a claim has run out, and takes the next one.
async fn claim_again(idempotency: &RedisIdempotency, id: Uuid) -> Claim {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    loop {
        if let Begun::New(claim) = idempotency.begin(id).await.expect("Redis answers") {
            return claim;
        }
        assert!(tokio::time::Instant::now() < deadline, "the claim does not run out");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn an_event_is_new_then_in_progress_then_done() {
    let (idempotency, id) = (shared().await, Uuid::now_v7());
    let before = Utc::now() - chrono::TimeDelta::milliseconds(1);
    let first = claim(&idempotency, id).await;
    assert!(is_in_progress(&idempotency, id).await);
    assert!(first.done().await.expect("Redis answers"));
    let Begun::Done { processed_at } = idempotency.begin(id).await.expect("Redis answers") else { panic!("not done") };
    assert!(before <= processed_at && processed_at <= Utc::now());
}

#[tokio::test]
async fn a_released_event_is_new_again() {
    let (idempotency, id) = (shared().await, Uuid::now_v7());
    assert!(claim(&idempotency, id).await.release().await.expect("Redis answers"));
    assert!(claim(&idempotency, id).await.release().await.expect("Redis answers"));
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_hundred_who_begin_at_once_one_is_first() {
    let (one, two, id) = (shared().await, shared().await, Uuid::now_v7());
    let begins = (0..100).map(|n| if n % 2 == 0 { one.begin(id) } else { two.begin(id) });
    let begun = futures_util::future::join_all(begins).await;
    let is_new = |begun: &postrider::Result<Begun>| matches!(begun, Ok(Begun::New(_)));
    assert_eq!(begun.iter().filter(|begun| is_new(begun)).count(), 1);
    assert_eq!(begun.iter().filter(|begun| matches!(begun, Ok(Begun::InProgress))).count(), 99);
}

#[tokio::test]
async fn key_value_and_time_are_as_promised() {
    let server = testbed::redis().await;
    let (idempotency, id) = (shared().await, Uuid::now_v7());
    let mut redis = connect(server.url()).await;
    let key = format!("event:{id}");

    let claim = claim(&idempotency, id).await;
    let value: String = redis.get(&key).await.expect("a text");
    assert!(value.starts_with(r#"{"status":"PROCESSING","claim":""#), "{value}");
    let ttl_ms: i64 = redis.pttl(&key).await.expect("a number");
    assert!((50_000..=60_000).contains(&ttl_ms), "{ttl_ms}");

    assert!(claim.done().await.expect("Redis answers"));
    let value: String = redis.get(&key).await.expect("a text");
    let members: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&value).expect("JSON");
    let processed_at = members["processed_at"].as_str().expect("a text");
    assert_eq!(value, format!(r#"{{"processed_at":"{processed_at}","status":"SUCCESS"}}"#));
    assert!(processed_at.ends_with('Z') && DateTime::parse_from_rfc3339(processed_at).is_ok(), "{processed_at}");
    let ttl_ms: i64 = redis.pttl(&key).await.expect("a number");
    assert!((86_390_000..=86_400_000).contains(&ttl_ms), "{ttl_ms}");
}

#[tokio::test]
async fn consumers_with_prefixes_of_their_own_do_not_meet() {
    let settings = RedisSettings::new(testbed::redis().await.url());
    let billing = open(RedisSettings { prefix: "billing:".to_owned(), ..settings.clone() });
    let stock = open(RedisSettings { prefix: "stock:".to_owned(), ..settings });
    let id = Uuid::now_v7();
    assert!(claim(&billing, id).await.done().await.expect("Redis answers"));
    assert!(claim(&stock, id).await.done().await.expect("Redis answers"));
}

#[tokio::test]
async fn a_claim_runs_out() {
    let (idempotency, id) = (short().await, Uuid::now_v7());
    let lost = claim(&idempotency, id).await;
    let next = claim_again(&idempotency, id).await;
    assert!(!lost.release().await.expect("Redis answers"), "it is another's by now");
    assert!(is_in_progress(&idempotency, id).await);
    assert!(next.done().await.expect("Redis answers"));
}

#[tokio::test]
async fn a_late_finisher_does_not_overwrite() {
    let (idempotency, id) = (short().await, Uuid::now_v7());
    let mut redis = connect(testbed::redis().await.url()).await;
    let late = claim(&idempotency, id).await;
    let unrivalled = claim(&idempotency, Uuid::now_v7()).await;
    let next = claim_again(&idempotency, id).await;
    let value: String = redis.get(format!("event:{id}")).await.expect("a text");
    assert!(!late.done().await.expect("Redis answers"));
    let still: String = redis.get(format!("event:{id}")).await.expect("a text");
    assert_eq!(value, still);
    assert!(next.done().await.expect("Redis answers"));
    assert!(unrivalled.done().await.expect("Redis answers"), "it ran out, but nobody else began");
}

#[tokio::test]
async fn a_late_finisher_does_not_change_when_it_was_done() {
    let (idempotency, id) = (short().await, Uuid::now_v7());
    let mut redis = connect(testbed::redis().await.url()).await;
    let late = claim(&idempotency, id).await;
    assert!(claim_again(&idempotency, id).await.done().await.expect("Redis answers"));
    let value: String = redis.get(format!("event:{id}")).await.expect("a text");
    assert!(!late.done().await.expect("Redis answers"));
    let still: String = redis.get(format!("event:{id}")).await.expect("a text");
    assert_eq!(value, still);
}

#[tokio::test]
async fn a_key_of_somebody_else_is_left_alone() {
    let (idempotency, id) = (shared().await, Uuid::now_v7());
    let mut redis = connect(testbed::redis().await.url()).await;
    let () = redis.set(format!("event:{id}"), "hello").await.expect("Redis answers");
    assert_eq!(idempotency.begin(id).await.expect_err("not ours").kind(), Kind::Corrupt);
    let id = Uuid::now_v7();
    let () = redis.lpush(format!("event:{id}"), "hello").await.expect("Redis answers");
    assert_eq!(idempotency.begin(id).await.expect_err("not ours").kind(), Kind::Corrupt);
}

/// Counts its effects, and says what it is told.
struct Effect {
    count: AtomicU32,
    answer: fn() -> Result<(), HandlerError>,
}

impl Effect {
    fn new(answer: fn() -> Result<(), HandlerError>) -> Self {
        Self { count: AtomicU32::new(0), answer }
    }
}

#[async_trait]
impl Handler<()> for &Effect {
    async fn handle(&self, _tx: &mut (), _event: &Event) -> Result<(), HandlerError> {
        self.count.fetch_add(1, Ordering::SeqCst);
        (self.answer)()
    }
}

/// A snooze, as far as a stranger can see.
fn is_snooze(error: &HandlerError) -> bool {
    format!("{error:?}").starts_with("Snooze")
}

#[tokio::test]
async fn a_wrapped_handler_applies_once() {
    let effect = Effect::new(|| Ok(()));
    let handler = Idempotent::new(shared().await, &effect);
    let event = event("k", "a");
    for _ in 0..3 {
        handler.handle(&mut (), &event).await.expect("applied, or applied before");
    }
    assert_eq!(effect.count.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_wrapped_handler_that_fails_is_tried_again() {
    let effect = Effect::new(|| Err(HandlerError::retry("no")));
    let handler = Idempotent::new(shared().await, &effect);
    let event = event("k", "a");
    for _ in 0..2 {
        let error = handler.handle(&mut (), &event).await.expect_err("it fails");
        assert!(!is_snooze(&error), "its own error is kept: {error:?}");
    }
    assert_eq!(effect.count.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn an_event_in_progress_elsewhere_pauses() {
    let (idempotency, event) = (shared().await, event("k", "a"));
    let elsewhere = claim(&idempotency, event.id()).await;
    let effect = Effect::new(|| Ok(()));
    let handler = Idempotent::new(idempotency, &effect);
    let error = handler.handle(&mut (), &event).await.expect_err("not yet");
    assert!(is_snooze(&error), "{error:?}");
    assert!(elsewhere.done().await.expect("Redis answers"));
    handler.handle(&mut (), &event).await.expect("done elsewhere");
    assert_eq!(effect.count.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_handler_that_is_stopped_keeps_its_claim_until_it_runs_out() {
    struct Endless;

    #[async_trait]
    impl Handler<()> for Endless {
        async fn handle(&self, _tx: &mut (), _event: &Event) -> Result<(), HandlerError> {
            std::future::pending().await
        }
    }

    let (idempotency, event) = (short().await, event("k", "a"));
    let handler = Idempotent::new(idempotency.clone(), Endless);
    tokio::time::timeout(SHORT / 3, handler.handle(&mut (), &event)).await.expect_err("it never ends");
    assert!(is_in_progress(&idempotency, event.id()).await);
    assert!(claim_again(&idempotency, event.id()).await.done().await.expect("Redis answers"));
}

mod own_servers {
    use postrider::doctor::Severity;
    use postrider_testkit::testbed::{Redis, Signal};

    use super::*;

    async fn private() -> (Redis, RedisIdempotency) {
        let server = Redis::start_private().await.expect("Redis starts");
        let settings = RedisSettings { timeout: Duration::from_millis(500), ..RedisSettings::new(server.url()) };
        let idempotency = open(settings);
        (server, idempotency)
    }

    #[tokio::test]
    async fn what_is_done_survives_a_kill() {
        let (mut server, idempotency) = private().await;
        let (done, begun) = (Uuid::now_v7(), Uuid::now_v7());
        assert!(claim(&idempotency, done).await.done().await.expect("Redis answers"));
        let claim = claim(&idempotency, begun).await;
        server.kill().await.expect("killed");
        server.restart().await.expect("Redis starts again");
        // The first call finds out that the connection is gone.
        assert_eq!(idempotency.begin(done).await.expect_err("a broken connection").kind(), Kind::Unavailable);
        assert!(is_done(&idempotency, done).await);
        assert!(is_in_progress(&idempotency, begun).await);
        assert!(claim.done().await.expect("Redis answers"));
        assert!(is_done(&idempotency, begun).await);
    }

    #[tokio::test]
    async fn done_is_written_after_a_short_outage() {
        let (mut server, idempotency) = private().await;
        let id = Uuid::now_v7();
        let claim = claim(&idempotency, id).await;
        server.kill().await.expect("killed");
        server.restart().await.expect("Redis starts again");
        assert!(claim.done().await.expect("the second try works"));
        assert!(is_done(&idempotency, id).await);
    }

    #[tokio::test]
    async fn while_redis_is_away_nothing_is_applied_or_lost() {
        let (mut server, idempotency) = private().await;
        let effect = Effect::new(|| Ok(()));
        let handler = Idempotent::new(idempotency.clone(), &effect);
        let event = event("k", "a");
        server.stop().await.expect("stopped");
        let error = idempotency.begin(event.id()).await.expect_err("Redis is away");
        assert_eq!(error.kind(), Kind::Unavailable);
        let error = handler.handle(&mut (), &event).await.expect_err("Redis is away");
        assert!(is_snooze(&error), "not counted as failed: {error:?}");
        assert_eq!(effect.count.load(Ordering::SeqCst), 0);
        server.restart().await.expect("Redis starts again");
        handler.handle(&mut (), &event).await.expect("applied");
        assert_eq!(effect.count.load(Ordering::SeqCst), 1);
        assert!(is_done(&idempotency, event.id()).await);
    }

    #[tokio::test]
    async fn an_effect_that_cannot_be_remembered_is_not_repeated_by_us() {
        struct Outage(std::sync::Mutex<Redis>);

        #[async_trait]
        impl Handler<()> for &Outage {
            async fn handle(&self, _tx: &mut (), _event: &Event) -> Result<(), HandlerError> {
                self.0.lock().expect("no panic").signal(Signal::Stop).map_err(HandlerError::retry)
            }
        }

        let (server, idempotency) = private().await;
        let outage = Outage(std::sync::Mutex::new(server));
        let handler = Idempotent::new(idempotency, &outage);
        handler.handle(&mut (), &event("k", "a")).await.expect("the effect has happened");
    }

    #[tokio::test]
    async fn a_redis_that_hangs_is_given_up_in_time() {
        let (mut server, idempotency) = private().await;
        let id = Uuid::now_v7();
        claim(&idempotency, id).await.release().await.expect("Redis answers");
        server.signal(Signal::Stop).expect("stopped");
        let asked = tokio::time::Instant::now();
        let begins = futures_util::future::join_all((0..20).map(|_| idempotency.begin(Uuid::now_v7()))).await;
        assert!(begins.iter().all(|begun| begun.as_ref().is_err_and(|error| error.kind() == Kind::Unavailable)));
        assert!(asked.elapsed() < Duration::from_secs(5), "one after the other: {:?}", asked.elapsed());
        server.signal(Signal::Cont).expect("goes on");
        assert!(claim(&idempotency, id).await.done().await.expect("Redis answers"));
    }

    #[tokio::test]
    async fn a_full_or_evicting_redis_is_found() {
        let (server, idempotency) = private().await;
        let mut redis = connect(server.url()).await;
        let severity = async |check: &str| {
            let findings = idempotency.inspect().await.expect("Redis answers");
            findings.into_iter().find(|finding| finding.check == check).expect(check).severity
        };
        assert!(idempotency.inspect().await.expect("answers").iter().all(|finding| finding.severity == Severity::Ok));

        let mut set = async |name: &str, value: &str| {
            redis::cmd("CONFIG").arg("SET").arg(name).arg(value).exec_async(&mut redis).await.expect("set");
        };
        set("maxmemory-policy", "allkeys-lru").await;
        assert_eq!(severity("redis.eviction").await, Severity::Warning);
        set("maxmemory", "100mb").await;
        assert_eq!(severity("redis.eviction").await, Severity::Error);
        set("appendonly", "no").await;
        assert_eq!(severity("redis.persistence").await, Severity::Warning);

        set("maxmemory-policy", "noeviction").await;
        set("maxmemory", "1").await;
        let error = idempotency.begin(Uuid::now_v7()).await.expect_err("memory is full");
        assert_eq!(error.kind(), Kind::Unavailable, "{error:?}");
        assert!(error.remedy().contains("maxmemory"));
    }

    #[tokio::test]
    async fn the_rights_of_the_guide_are_enough() {
        const GUIDE: &str = include_str!("../../../docs/guides/redis-idempotency.md");
        let (server, _) = private().await;
        let mut redis = connect(server.url()).await;
        let rights = GUIDE.split('`').find(|text| text.starts_with("~mailer:event:*")).expect("rights");
        let mut setuser = redis::cmd("ACL");
        setuser
            .arg("SETUSER")
            .arg("mailer")
            .arg("on")
            .arg(">secret")
            .arg(rights.split_whitespace().collect::<Vec<_>>());
        setuser.exec_async(&mut redis).await.expect("a user");
        let url = server.url().replace("redis://", "redis://mailer:secret@");
        let settings = RedisSettings::new(url);
        let mailer = open(RedisSettings { prefix: "mailer:".to_owned(), ..settings.clone() });
        assert!(claim(&mailer, Uuid::now_v7()).await.release().await.expect("Redis answers"));
        assert!(claim(&mailer, Uuid::now_v7()).await.done().await.expect("Redis answers"));
        assert!(mailer.inspect().await.expect("answers").iter().all(|finding| finding.severity == Severity::Ok));
        let error = open(settings).begin(Uuid::now_v7()).await.expect_err("other keys");
        assert_eq!(error.kind(), Kind::Denied, "{error:?}");
    }

    #[tokio::test]
    async fn a_corrected_password_works_without_a_restart() {
        let (server, _) = private().await;
        let mut redis = connect(server.url()).await;
        redis::cmd("CONFIG").arg("SET").arg("requirepass").arg("right").exec_async(&mut redis).await.expect("set");
        let url = server.url().replace("redis://", "redis://:wrong@");
        let idempotency = open(RedisSettings::new(url));
        let error = idempotency.begin(Uuid::now_v7()).await.expect_err("the password is wrong");
        assert_eq!(error.kind(), Kind::Denied, "{error:?}");
        assert!(!format!("{error:?} {:?}", error.causes()).contains("wrong"), "{error:?}");
        redis::cmd("CONFIG").arg("SET").arg("requirepass").arg("wrong").exec_async(&mut redis).await.expect("set");
        assert!(claim(&idempotency, Uuid::now_v7()).await.done().await.expect("Redis answers"));
    }
}
