//! `/api/v1/dead-letters` beside a consumer that runs.

use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use crate::dead::{Bed, EVENTS};
use crate::harness::{Answer, Daemon, eventually};

const LETTERS: &str = "/api/v1/dead-letters";

/// Blocking calls, in a place where the consumer of the test goes on.
fn blocking<T>(call: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(call)
}

fn get(daemon: &Daemon, path: &str) -> Answer {
    blocking(|| daemon.get(&format!("{LETTERS}{path}")))
}

fn post(daemon: &Daemon, path: &str, body: &Value) -> Answer {
    blocking(|| daemon.post_to(&format!("{LETTERS}{path}"), &body.to_string()))
}

/// Begins a replay and returns its path.
#[track_caller]
fn replay(daemon: &Daemon, body: &Value) -> String {
    let answer = post(daemon, "/replays", body);
    assert_eq!(answer.status, 202, "{}", answer.body);
    let path = format!("/replays/{}", answer.json()["id"].as_str().unwrap());
    assert!(answer.head.contains(&format!("location: {LETTERS}{path}")), "{}", answer.head);
    path
}

/// Waits until a replay is in this state.
#[track_caller]
fn replayed(daemon: &Daemon, path: &str, state: &str) -> Value {
    let look = || Some(daemon.get(&format!("{LETTERS}{path}")).json()).filter(|replay| replay["state"] == state);
    blocking(|| eventually(state, look))
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_listed_shown_and_discarded() {
    let bed = Bed::new().await;
    let daemon = blocking(|| bed.place.daemon(&[]).ready());
    let first = get(&daemon, "?consumer=billing&stage=consumer&limit=40").json();
    assert_eq!(first["items"].as_array().unwrap().len(), 40);
    let second = get(&daemon, &format!("?consumer=billing&limit=40&after={}", first["next"])).json();
    assert_eq!((second["items"].as_array().unwrap().len(), &second["next"]), (EVENTS - 40, &Value::Null));
    assert_eq!(get(&daemon, "?key=o-1&type=order.paid&error=&tenant=").json()["items"].as_array().unwrap().len(), 9);
    assert_eq!(get(&daemon, "?stage=relay").json(), json!({"items": [], "next": null}));

    let shown = get(&daemon, "/1");
    assert_eq!(shown.json()["error"], "the book is closed");
    assert!(!shown.body.contains("secret") && shown.json()["payload_bytes"].as_u64() > Some(0), "{}", shown.body);
    let actor = [("x-postrider-actor", "alice")];
    let payload = blocking(|| daemon.request("GET", &format!("{LETTERS}/1/payload"), &actor, ""));
    assert!(payload.body.starts_with(r#"{"secret":"#), "{}", payload.body);
    for header in ["content-type: application/octet-stream", "content-disposition: attachment", "nosniff"] {
        assert!(payload.head.contains(header), "{header} is missing in {}", payload.head);
    }
    assert_eq!(bed.count("audit WHERE action = 'payload' AND actor = 'local:alice'").await, 1);

    let discarded = post(&daemon, "/discards", &json!({"ids": [1], "reason": "a test"}));
    assert_eq!(discarded.json(), json!({"discarded": 1}));
    let stats = get(&daemon, "/stats").json();
    assert_eq!((&stats["items"][0]["state"], &stats["items"][0]["count"]), (&json!("dead"), &json!(EVENTS - 1)));
    assert_eq!(bed.count("audit WHERE action = 'discard' AND actor = 'local'").await, 1);
    bed.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_over_http_stops_and_goes_on() {
    let bed = Bed::new().await;
    let daemon = blocking(|| bed.place.daemon(&[]).ready());
    let dry = post(&daemon, "/replays", &json!({"all": true, "dry_run": true}));
    assert_eq!((dry.status, dry.json()["items"].as_array().unwrap().len()), (200, EVENTS));
    // Still broken: the first stage fails, and the other events are left alone.
    let path = replay(&daemon, &json!({"all": true}));
    let stopped = replayed(&daemon, &path, "stopped");
    let fields = ["total", "applied", "failed", "stopped"].map(|name| stopped[name].clone());
    assert_eq!(fields, [json!(1), json!(0), json!(1), json!("half_failed")]);
    bed.wait_for_dead(EVENTS).await;

    bed.is_broken.store(false, Ordering::SeqCst);
    let path = replay(&daemon, &json!({"consumer": "billing", "rate": 1000}));
    let done = replayed(&daemon, &path, "done");
    let fields = ["total", "applied", "failed", "stopped"].map(|name| done[name].clone());
    assert_eq!(fields, [json!(EVENTS), json!(EVENTS), json!(0), Value::Null]);
    assert_eq!((bed.count("effect").await, bed.count("dead_letter").await), (EVENTS, 0));
    let metric = |outcome| format!("postrider_replayed_total{{consumer=\"billing\",outcome=\"{outcome}\"}}");
    let counted = blocking(|| (daemon.metric(&metric("applied")), daemon.metric(&metric("failed"))));
    assert_eq!(counted, (EVENTS as f64, 1.0));
    bed.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_and_a_stop_take_back_what_was_not_begun() {
    let bed = Bed::new().await;
    bed.stop().await;
    let mut daemon = blocking(|| bed.place.daemon(&[]).ready());
    let path = replay(&daemon, &json!({"all": true}));
    let replaying = "dead_letter WHERE state = 'replaying'";
    while bed.count(replaying).await != 1 {
        tokio::task::yield_now().await;
    }
    let cancelled = blocking(|| daemon.request("DELETE", &format!("{LETTERS}{path}"), &[], ""));
    assert_eq!(cancelled.status, 202, "{}", cancelled.body);
    let cancelled = replayed(&daemon, &path, "stopped");
    let fields = ["total", "failed", "recalled", "open", "stopped"].map(|name| cancelled[name].clone());
    assert_eq!(fields, [json!(1), json!(0), json!(1), json!(0), json!("cancelled")]);
    assert_eq!(blocking(|| daemon.request("DELETE", &format!("{LETTERS}{path}"), &[], "")).status, 200);

    replay(&daemon, &json!({"ids": [1, 2]}));
    while bed.count(replaying).await != 1 {
        tokio::task::yield_now().await;
    }
    for id in 3..10 {
        replay(&daemon, &json!({"ids": [id]}));
    }
    let many = post(&daemon, "/replays", &json!({"all": true}));
    assert_eq!((many.status, many.json()["detail"].as_str()), (429, Some("8 replays are running")));
    let ended = blocking(|| {
        daemon.signal("TERM");
        daemon.ended()
    });
    assert!(ended.success());
    assert_eq!(bed.count("dead_letter WHERE state = 'dead'").await, EVENTS);
}

#[tokio::test(flavor = "multi_thread")]
async fn mistakes_at_the_desk_are_problems() {
    let bed = Bed::new().await;
    let daemon = blocking(|| bed.place.daemon(&[]).ready());
    let refused = |answer: Answer, status: u16, parts: &[&str]| {
        assert_eq!(answer.status, status, "{}", answer.body);
        assert!(answer.head.contains("content-type: application/problem+json"), "{}", answer.head);
        assert!(answer.json()["remedy"].as_str().is_some_and(|remedy| !remedy.is_empty()), "{}", answer.body);
        for part in parts {
            assert!(answer.body.contains(part), "{part:?} is missing in {}", answer.body);
        }
    };
    for (query, part) in [("?limit=0", "limit"), ("?since=x", "since"), ("?what=1", "what"), ("?stage=x", "stage")] {
        refused(get(&daemon, query), 400, &["parameter", part]);
    }
    for path in ["/999", "/x", "/%ff", "/999/payload", "/replays/x", "/replays/01a1e152-1bc3-75e1-bcc0-5b2f333bab1c"] {
        refused(get(&daemon, path), 404, &["there is no"]);
    }
    for (path, body, status, parts) in [
        ("/replays", json!({}), 400, vec!["no dead letter is named", "all"]),
        ("/replays", json!({"reason": "x", "all": true}), 400, vec!["/reason"]),
        ("/replays", json!({"ids": [1, 999]}), 404, vec!["/ids/1"]),
        ("/replays", json!({"all": true, "rate": 0}), 400, vec!["/rate"]),
        ("/replays", json!({"all": true, "dry_run": "yes"}), 400, vec!["/dry_run"]),
        ("/replays", json!({"ids": "1"}), 400, vec!["/ids"]),
        ("/replays", json!({"until": "tomorrow"}), 400, vec!["/until"]),
        ("/discards", json!({"ids": [1]}), 400, vec!["/reason"]),
        ("/discards", json!({"ids": [1], "reason": " "}), 400, vec!["/reason"]),
        ("/discards", json!({"reason": "x"}), 400, vec!["no dead letter is named"]),
    ] {
        refused(post(&daemon, path, &body), status, &parts);
    }
    for path in ["/replays", "/discards"] {
        let plain = [("content-type", "text/plain")];
        let answer = blocking(|| daemon.request("POST", &format!("{LETTERS}{path}"), &plain, r#"{"all":true}"#));
        refused(answer, 415, &["application/json"]);
    }
    refused(get(&daemon, "/discards"), 405, &["GET"]);
    bed.wait_for_dead(EVENTS).await;
    bed.stop().await;
}
