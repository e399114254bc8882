use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::super::{Answer, BudgetSettings, HttpSettings, Request, Supplied, Verdict};
use super::script::Act::{Break, Flood, Hang, Say, SayAfter};
use super::script::{Script, client, client_with};
use crate::error::{Error, Kind, Result};
use crate::relay::BreakerState;

const SECOND: Duration = Duration::from_secs(1);
const URL: &str = "https://user:s3cret@api.example/s3cret?token=s3cret";

fn get() -> Request {
    Request::get(URL).unwrap()
}

fn status(result: Result<Answer>) -> u16 {
    result.unwrap().status().as_u16()
}

#[tokio::test(start_paused = true)]
async fn a_failure_that_passes_is_not_seen_by_the_caller() {
    for act in [Say(500), Say(503), Say(429), Break] {
        let script = Script::new(&[act.clone(), act.clone(), act.clone(), Say(200)]);
        assert_eq!(status(client(&script).send(&get()).await), 200, "{act:?}");
        assert_eq!(script.waits(), [1, 2, 4], "{act:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn after_three_retries_the_call_fails_with_the_last_error() {
    let script = Script::new(&[Break, Break, Break, Say(502)]);
    let error = client(&script).send(&get()).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable);
    assert_eq!(error.message(), "tried 4 times: GET to api.example:443: the destination answered 502");
    assert_eq!(script.tries(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_destination_that_never_answers_ends_in_time() {
    let script = Script::new(&[Hang]);
    let start = Instant::now();
    let error = client(&script).send(&get()).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable);
    assert_eq!(error.message(), "tried 4 times: GET to api.example:443: no whole answer within 30s");
    let took = start.elapsed();
    assert!((127 * SECOND..130 * SECOND).contains(&took), "four times 30 s, and 7 s and jitter between: {took:?}");
}

#[tokio::test(start_paused = true)]
async fn answers_below_500_are_handed_back_at_once() {
    for code in [200, 204, 301, 304, 307, 400, 401, 403, 404, 408, 409, 425, 451] {
        let script = Script::new(&[Say(code), Say(200)]);
        assert_eq!(status(client(&script).send(&get()).await), code);
        assert_eq!(script.tries(), 1, "{code}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_wait_that_the_destination_asks_for_is_kept() {
    for code in [429, 503] {
        let script = Script::new(&[SayAfter(code, 17 * SECOND), SayAfter(code, Duration::ZERO), Say(200)]);
        assert_eq!(status(client(&script).send(&get()).await), 200);
        assert_eq!(script.waits(), [17, 0], "{code}");
    }
    let script = Script::new(&[SayAfter(500, 17 * SECOND), Say(200)]);
    client(&script).send(&get()).await.unwrap();
    assert_eq!(script.waits(), [1], "other statuses do not choose");
}

#[tokio::test(start_paused = true)]
async fn a_post_is_sent_once_unless_it_has_an_idempotency_key() {
    for act in [Say(500), Say(429), Break, Hang] {
        let script = Script::new(&[act.clone(), Say(200)]);
        let post = Request::post(URL).unwrap();
        let error = client(&script).send(&post).await.unwrap_err();
        assert_eq!((error.kind(), script.tries()), (Kind::Unavailable, 1), "{act:?}");
        assert!(error.message().starts_with("POST to "), "{error}");

        let script = Script::new(&[act, Say(200)]);
        let post = post.header("idempotency-key", "k-1").unwrap();
        assert_eq!(status(client(&script).send(&post).await), 200);
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_is_too_large_is_neither_tried_again_nor_a_failure_of_the_destination() {
    let script = Script::new(&[Flood]);
    let client = client(&script);
    for _ in 0..10 {
        assert_eq!(client.send(&get()).await.unwrap_err().kind(), Kind::TooLarge);
    }
    assert_eq!(script.tries(), 10);
    assert_eq!(client.breaker("api.example:443"), Some(BreakerState::Closed));
}

#[tokio::test(start_paused = true)]
async fn the_breaker_refuses_at_once_and_lets_one_probe_through() {
    let script = Script::new(&[Say(500)]);
    let client = client(&script);
    for _ in 0..5 {
        assert_eq!(status(client.send_once(&get()).await), 500);
    }
    let start = Instant::now();
    let error = client.send(&get()).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable);
    assert_eq!(error.message(), "the breaker of api.example:443 is open, it will be probed in 60 s");
    assert_eq!(error.causes(), ["GET to api.example:443: the destination answered 500"]);
    let trouble = client.trouble("api.example:443");
    assert_eq!(trouble.as_deref(), Some("GET to api.example:443: the destination answered 500"));
    assert_eq!((script.tries(), start.elapsed()), (5, Duration::ZERO));
    assert_eq!(client.send_once(&get()).await.unwrap_err().kind(), Kind::Unavailable);

    let other = Request::get("https://other.example/").unwrap();
    assert_eq!(status(client.send_once(&other).await), 500, "another destination is not concerned");

    tokio::time::sleep(60 * SECOND).await;
    script.goes_on(&[Hang]);
    let probe = tokio::spawn({
        let client = client.clone();
        async move { client.send(&get()).await }
    });
    tokio::task::yield_now().await;
    let error = client.send(&get()).await.unwrap_err();
    assert_eq!(error.message(), "the breaker of api.example:443 is open, it is being probed now");
    assert_eq!(client.trouble("api.example:443"), trouble, "a probe is no end");
    assert!(probe.await.unwrap().is_err());
    assert_eq!(script.tries(), 7, "a bad probe is not tried again");

    tokio::time::sleep(60 * SECOND).await;
    script.goes_on(&[Say(404)]);
    assert_eq!(status(client.send(&get()).await), 404);
    assert_eq!(client.breaker("api.example:443"), Some(BreakerState::Closed), "a 4xx proves that it is there");
}

#[tokio::test(start_paused = true)]
async fn a_call_whose_failure_opens_the_breaker_is_not_tried_again() {
    let script = Script::new(&[Break]);
    let client = client(&script);
    client.send(&get()).await.unwrap_err();
    let start = Instant::now();
    let error = client.send(&get()).await.unwrap_err();
    assert_eq!((script.tries(), start.elapsed()), (5, Duration::ZERO));
    assert_eq!(error.message(), "GET to api.example:443: the destination cannot be reached");
}

#[tokio::test(start_paused = true)]
async fn rejections_never_open_the_breaker() {
    let script = Script::new(&[Say(400), Say(401), Say(404), Say(429)]);
    let client = client(&script);
    for _ in 0..50 {
        client.send_once(&get()).await.unwrap();
    }
    assert_eq!(script.tries(), 50);
}

#[tokio::test(start_paused = true)]
async fn when_the_budget_is_spent_calls_fail_with_their_first_error() {
    let budget = BudgetSettings { refill: Duration::ZERO, ..BudgetSettings::default() };
    // 429 keeps the breaker closed, so that the budget alone decides.
    let script = Script::new(&[Say(429)]);
    let client = client_with(HttpSettings { budget, ..HttpSettings::default() }, &script);
    for _ in 0..1000 {
        client.send(&get()).await.unwrap_err();
    }
    let retries = script.tries() - 1000;
    assert!((205..=210).contains(&retries), "a fifth of the calls and ten in reserve, not 3000: {retries}");
}

#[tokio::test(start_paused = true)]
async fn calls_that_the_breaker_refuses_earn_no_retries() {
    let budget = BudgetSettings { percent: 50, reserve: 1, refill: Duration::ZERO };
    let script = Script::new(&[Break]);
    let client = client_with(HttpSettings { budget, ..HttpSettings::default() }, &script);
    // Two tries, one, two: then the breaker is open and the budget is spent.
    for _ in 0..20 {
        client.send(&get()).await.unwrap_err();
    }
    assert_eq!(script.tries(), 5);

    tokio::time::sleep(60 * SECOND).await;
    script.goes_on(&[Say(429)]);
    client.send(&get()).await.unwrap_err();
    assert_eq!(script.tries(), 6, "half a retry is none");
    client.send(&get()).await.unwrap_err();
    assert_eq!(script.tries(), 8);
}

#[tokio::test(start_paused = true)]
async fn a_single_try_is_never_repeated_and_has_a_verdict() {
    let cases = [
        (Say(200), Verdict::Done),
        (Say(422), Verdict::Rejected),
        (Say(302), Verdict::Retry { after: None }),
        (Say(500), Verdict::Retry { after: None }),
        (SayAfter(429, 9 * SECOND), Verdict::Retry { after: Some(9 * SECOND) }),
        (SayAfter(503, 9 * SECOND), Verdict::Retry { after: Some(9 * SECOND) }),
    ];
    for (act, verdict) in cases {
        let script = Script::new(&[act.clone(), Say(200)]);
        assert_eq!(client(&script).send_once(&get()).await.unwrap().verdict(), verdict, "{act:?}");
        assert_eq!(script.tries(), 1);
    }
    for act in [Break, Hang] {
        let script = Script::new(&[act, Say(200)]);
        assert_eq!(client(&script).send_once(&get()).await.unwrap_err().kind(), Kind::Unavailable);
        assert_eq!(script.tries(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn the_last_good_answer_takes_the_place_of_an_error_until_it_is_too_old() {
    let script = Script::new(&[Say(200), Say(500)]);
    let client = client(&script);
    let fresh = client.send_or(&get(), |_| None).await.unwrap();
    assert_eq!((fresh.origin(), &fresh.body()[..]), ("fresh", &b"try 1"[..]));

    let cached = client.send_or(&get(), |_| Some("default".into())).await.unwrap();
    assert_eq!((cached.origin(), &cached.body()[..]), ("cached", &b"try 1"[..]));
    let Supplied::Cached { age, .. } = cached else { panic!("{cached:?}") };
    assert!((7 * SECOND..10 * SECOND).contains(&age), "{age:?}");

    tokio::time::sleep(300 * SECOND).await;
    let default = client.send_or(&get(), |_| Some("default".into())).await.unwrap();
    assert_eq!((default.origin(), &default.body()[..]), ("default", &b"default"[..]));
    assert_eq!(client.send_or(&get(), |_| None).await.unwrap_err().kind(), Kind::Unavailable);
}

#[tokio::test(start_paused = true)]
async fn the_cache_also_serves_while_the_breaker_is_open() {
    let script = Script::new(&[Say(200), Break]);
    let client = client(&script);
    client.send_or(&get(), |_| None).await.unwrap();
    for _ in 0..20 {
        assert_eq!(client.send_or(&get(), |_| None).await.unwrap().origin(), "cached");
    }
    assert!(script.tries() <= 6, "{}", script.tries());
}

#[tokio::test(start_paused = true)]
async fn nothing_takes_the_place_of_a_rejection_and_the_default_sees_the_error() {
    let script = Script::new(&[Say(200), Say(403), Flood]);
    let client = client(&script);
    client.send_or(&get(), |_| None).await.unwrap();
    let rejected = client.send_or(&get(), |_| Some("default".into())).await.unwrap();
    assert_eq!(rejected.origin(), "fresh");
    let Supplied::Fresh(answer) = rejected else { panic!("{rejected:?}") };
    assert_eq!(answer.accept().unwrap_err().kind(), Kind::Denied);

    let only_outages = |error: &Error| (error.kind() == Kind::Unavailable).then(|| Bytes::from_static(b"default"));
    assert_eq!(client.send_or(&get(), only_outages).await.unwrap_err().kind(), Kind::TooLarge);
}

#[tokio::test(start_paused = true)]
async fn nothing_of_the_request_or_the_answer_is_shown() {
    for act in [Say(500), Say(401), Break, Hang, Flood] {
        let script = Script::new(&[act]);
        let client = client(&script);
        let request = get().header("authorization", "Bearer s3cret").unwrap();
        for _ in 0..3 {
            let shown = match client.send(&request).await {
                Ok(answer) => format!("{answer:?} {:?}", answer.clone().accept().unwrap_err()),
                Err(error) => format!("{error:?} {error} {:?} {}", error.causes(), error.remedy()),
            };
            assert!(!shown.contains("s3cret") && !shown.contains("token") && !shown.contains("try 1"), "{shown}");
        }
    }
}
