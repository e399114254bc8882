//! `/api/v1` beside a consumer that fails: what it answers, compared with its description, and what it makes of mistakes.

use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use crate::access::refused;
use crate::dead::{Bed, EVENTS};
use crate::harness::{Answer, Daemon, Place, eventually};
use crate::schema::Description;

/// Blocking calls, in a place where the consumer of the test goes on.
fn blocking<T>(call: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(call)
}

fn description(daemon: &Daemon) -> Description {
    Description(daemon.get("/api/v1/openapi.json").json())
}

/// Asks, and compares the answer with its description.
#[track_caller]
fn ask(daemon: &Daemon, described: &Description, method: &str, path: &str, asked: &str, body: &str) -> Answer {
    let headers: &[(&str, &str)] = if body.is_empty() { &[] } else { &[("content-type", "application/json")] };
    let answer = daemon.request(method, asked, headers, body);
    if let Some(schema) = described.answer(method, path, answer.status) {
        let mistakes = described.mistakes(schema, &answer.json());
        assert!(mistakes.is_empty(), "{method} {asked}: {mistakes:#?}\n{}", answer.body);
    }
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_as_described() {
    let bed = Bed::new().await;
    let daemon = blocking(|| bed.place.daemon(&[]).ready());
    let described = description(&daemon);
    let ask = |method: &str, path: &str, asked: &str, body: &str, status: u16| {
        let answer = blocking(|| ask(&daemon, &described, method, path, asked, body));
        assert_eq!(answer.status, status, "{method} {asked}: {}", answer.body);
        answer
    };
    // Something to see: an event that is relayed, a silence, a report, replays, and the pulse of the consumer.
    ask("POST", "/api/v1/events", "/api/v1/events", r#"{"topic":"a","type":"t","payload":1}"#, 202);
    // The consumer takes it too. It must fail like the others, which it does only as long as the book is closed.
    bed.wait_for_dead(EVENTS + 1).await;
    let silence = r#"{"rule":"stale","subject":"relay/default","for_secs":60,"reason":"a test"}"#;
    let made = ask("POST", "/api/v1/silences", "/api/v1/silences", silence, 201);
    assert!(made.head.contains("location: /api/v1/silences/1"), "{}", made.head);
    let report = ask("POST", "/api/v1/integrity", "/api/v1/integrity", "", 202).json()["id"].clone();
    ask("GET", "/api/v1/dead-letters/{id}/payload", "/api/v1/dead-letters/1/payload", "", 200);
    let dry = r#"{"all":true,"dry_run":true}"#;
    ask("POST", "/api/v1/dead-letters/replays", "/api/v1/dead-letters/replays", dry, 200);
    bed.is_broken.store(false, Ordering::SeqCst);
    let some = r#"{"ids":[1,2,3]}"#;
    let replay = ask("POST", "/api/v1/dead-letters/replays", "/api/v1/dead-letters/replays", some, 202).json();
    let replay = format!("/api/v1/dead-letters/replays/{}", replay["id"].as_str().unwrap());
    let path = "/api/v1/dead-letters/replays/{id}";
    let done = blocking(|| {
        eventually("the replay", || Some(daemon.get(&replay).json()).filter(|replay| replay["state"] != "running"))
    });
    let fields = ["state", "applied", "expected", "actor"].map(|name| done[name].clone());
    assert_eq!(fields, [json!("done"), json!(3), json!(3), json!("local")]);
    ask("GET", path, &replay, "", 200);
    ask("DELETE", path, &replay, "", 200);
    let discard = r#"{"ids":[4],"reason":"a test"}"#;
    ask("POST", "/api/v1/dead-letters/discards", "/api/v1/dead-letters/discards", discard, 200);
    let report = format!("/api/v1/integrity/{report}");
    let ended = |report: &Value| report["ended_at"].is_string();
    blocking(|| eventually("the report", || Some(daemon.get(&report).json()).filter(ended)));
    blocking(|| {
        let is_counted = |overview: &Value| overview["summary"]["all"]["dead"].as_u64() == Some(EVENTS as u64 + 1);
        eventually("the counts", || Some(daemon.get("/api/v1/overview").json()).filter(is_counted))
    });

    for (path, asked) in [
        ("/api/v1/overview", "/api/v1/overview?window=hour"),
        ("/api/v1/overview", "/api/v1/overview?window=day"),
        ("/api/v1/outbox", "/api/v1/outbox"),
        ("/api/v1/outbox/{name}/parked", "/api/v1/outbox/default/parked?after=0&limit=10"),
        ("/api/v1/consumers", "/api/v1/consumers"),
        ("/api/v1/instances", "/api/v1/instances"),
        ("/api/v1/errors", "/api/v1/errors"),
        ("/api/v1/errors", "/api/v1/errors?window=day"),
        ("/api/v1/errors", "/api/v1/errors?window=month"),
        ("/api/v1/status", "/api/v1/status"),
        ("/api/v1/health", "/api/v1/health"),
        ("/api/v1/alerts", "/api/v1/alerts?state=all&limit=10"),
        ("/api/v1/silences", "/api/v1/silences"),
        ("/api/v1/integrity", "/api/v1/integrity?limit=1"),
        ("/api/v1/integrity/{id}", &report),
        ("/api/v1/audit", "/api/v1/audit?limit=3"),
        ("/api/v1/session", "/api/v1/session"),
        ("/api/v1/dead-letters", "/api/v1/dead-letters?consumer=billing&limit=10"),
        ("/api/v1/dead-letters/stats", "/api/v1/dead-letters/stats"),
        ("/api/v1/dead-letters/{id}", "/api/v1/dead-letters/5"),
        ("/api/v1/dead-letters/replays", "/api/v1/dead-letters/replays"),
    ] {
        ask("GET", path, asked, "", 200);
    }
    let overview = blocking(|| daemon.get("/api/v1/overview").json());
    let consumer = &overview["consumers"][0];
    assert_eq!(consumer["name"], "billing", "{overview}");
    // Three were replayed, one was discarded.
    assert_eq!(consumer["dead"], EVENTS + 1 - 4, "{overview}");
    assert_eq!((&consumer["instances"], &consumer["slots"][0]["slot"]), (&json!(1), &json!(0)), "{overview}");
    assert_eq!(overview["outboxes"][0]["backlog"]["pending"], 0, "{overview}");
    assert_eq!(overview["outboxes"][0]["lanes"].as_array().unwrap().len(), 1, "{overview}");
    let errors = blocking(|| daemon.get("/api/v1/errors").json());
    assert_eq!(errors["by_group"][0]["group"], "consumer/billing", "{errors}");
    // The audit pages on, newest first.
    let first = blocking(|| daemon.get("/api/v1/audit?limit=2").json());
    let second = blocking(|| daemon.get(&format!("/api/v1/audit?limit=2&before={}", first["next"])).json());
    let ids = |page: &Value| -> Vec<i64> {
        page["items"].as_array().unwrap().iter().map(|line| line["id"].as_i64().unwrap()).collect()
    };
    assert!(ids(&first)[1] > ids(&second)[0] && ids(&second)[0] > ids(&second)[1], "{first} {second}");
    ask("DELETE", "/api/v1/silences/{id}", "/api/v1/silences/1", "", 204);
    ask("DELETE", "/api/v1/silences/{id}", "/api/v1/silences/1", "", 404);
    bed.stop().await;
}

#[test]
fn mistakes_are_problems_with_a_remedy() {
    let place = Place::migrated();
    let daemon = place.daemon(&[]).ready();
    let described = description(&daemon);
    let long = "k".repeat(10_000);
    let gets = [
        ("/api/v1/overview", "/api/v1/overview?window=week".to_owned(), 400),
        ("/api/v1/overview", "/api/v1/overview?window=month".to_owned(), 400),
        ("/api/v1/overview", "/api/v1/overview?windw=day".to_owned(), 400),
        ("/api/v1/errors", "/api/v1/errors?window=%3Cscript%3E".to_owned(), 400),
        ("/api/v1/alerts", "/api/v1/alerts?state='%20OR%201=1".to_owned(), 400),
        ("/api/v1/alerts", "/api/v1/alerts?before=x".to_owned(), 400),
        ("/api/v1/alerts", "/api/v1/alerts?limit=1001".to_owned(), 400),
        ("/api/v1/audit", "/api/v1/audit?limit=0".to_owned(), 400),
        ("/api/v1/audit", format!("/api/v1/audit?{long}=1"), 400),
        ("/api/v1/integrity", "/api/v1/integrity?before=99999999999999999999".to_owned(), 400),
        ("/api/v1/consumers", "/api/v1/consumers?name=a".to_owned(), 400),
        ("/api/v1/dead-letters", "/api/v1/dead-letters?key=%00".to_owned(), 400),
        ("/api/v1/dead-letters", "/api/v1/dead-letters?limit=1&limit=2".to_owned(), 400),
        ("/api/v1/outbox/{name}/parked", "/api/v1/outbox/nothing/parked".to_owned(), 404),
        ("/api/v1/outbox/{name}/parked", "/api/v1/outbox/%ff/parked".to_owned(), 404),
        ("/api/v1/outbox/{name}/parked", format!("/api/v1/outbox/{long}/parked"), 404),
        ("/api/v1/outbox/{name}/parked", "/api/v1/outbox/default/parked?after=x".to_owned(), 400),
        ("/api/v1/integrity/{id}", "/api/v1/integrity/999".to_owned(), 404),
        ("/api/v1/integrity/{id}", "/api/v1/integrity/x".to_owned(), 404),
        ("/api/v1/integrity/{id}", "/api/v1/integrity/99999999999999999999".to_owned(), 404),
        ("/api/v1/dead-letters/{id}", "/api/v1/dead-letters/%3Cscript%3E".to_owned(), 404),
    ];
    for (path, asked, status) in gets {
        let answer = ask(&daemon, &described, "GET", path, &asked, "");
        refused(&answer, status, if status == 404 { "not_found" } else { "bad_request" });
        assert!(answer.body.len() < 1500, "{}", answer.body);
    }
    // Odd filters find nothing, and nothing more.
    for value in
        ["';DROP%20TABLE%20dead_letter;--", "%3Cscript%3Ealert(1)%3C/script%3E", "%22%27%5C", &long, "%F0%9F%92%A3"]
    {
        for name in ["consumer", "type", "error", "key", "tenant"] {
            let answer = daemon.get(&format!("/api/v1/dead-letters?{name}={value}"));
            assert_eq!((answer.status, answer.json()), (200, json!({"items": [], "next": null})), "{name}={value}");
        }
    }
    for (body, pointer) in [
        (r#"{"for_secs":60}"#.to_owned(), Value::Null),
        (r#"{"for_secs":60,"reason":" "}"#.to_owned(), json!("/reason")),
        (r#"{"for_secs":0,"reason":"x"}"#.to_owned(), json!("/for_secs")),
        (r#"{"for_secs":"1h","reason":"x"}"#.to_owned(), json!("/for_secs")),
        (r#"{"for_secs":60,"reason":"x","rule":"a\u0000"}"#.to_owned(), json!("/rule")),
        (json!({"for_secs": 60, "reason": "x", "subject": long}).to_string(), json!("/subject")),
        (json!({"for_secs": 60, "reason": long}).to_string(), json!("/reason")),
        ("[".to_owned(), Value::Null),
    ] {
        let answer = ask(&daemon, &described, "POST", "/api/v1/silences", "/api/v1/silences", &body);
        refused(&answer, 400, "bad_request");
        let pointer_said = answer.json()["pointer"].clone();
        assert!(pointer.is_null() || pointer_said == pointer, "{}", answer.body);
    }
    let silences = [
        ("DELETE", "/api/v1/silences/{id}", "/api/v1/silences/x"),
        ("DELETE", "/api/v1/silences/{id}", "/api/v1/silences/9"),
    ];
    for (method, path, asked) in silences {
        refused(&ask(&daemon, &described, method, path, asked, ""), 404, "not_found");
    }
    refused(&daemon.request("POST", "/api/v1/silences", &[("content-type", "text/plain")], "{}"), 415, "media_type");
    refused(
        &ask(&daemon, &described, "POST", "/api/v1/integrity", "/api/v1/integrity", r#"{"now":1}"#),
        400,
        "bad_request",
    );
    refused(&daemon.get("/api/v1/nothing"), 404, "not_found");
    refused(&daemon.get(&format!("/{long}")), 404, "not_found");
    refused(&daemon.request("PUT", "/api/v1/silences", &[], ""), 405, "method_not_allowed");
    refused(
        &daemon.request("POST", "/api/v1/events?topik=a", &[("content-type", "application/json")], "{}"),
        400,
        "bad_request",
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn two_operators_at_once_do_it_once() {
    let bed = Bed::new().await;
    let daemon = blocking(|| bed.place.daemon(&[]).ready());
    let both = |method: &'static str, path: &str, body: &str| -> Vec<Answer> {
        let headers = [("content-type", "application/json")];
        std::thread::scope(|scope| {
            let calls: Vec<_> = (0..2).map(|_| scope.spawn(|| daemon.request(method, path, &headers, body))).collect();
            calls.into_iter().map(|call| call.join().unwrap()).collect()
        })
    };
    // Whoever comes second finds nothing left, or is told that one of the numbers is gone.
    let discards = blocking(|| both("POST", "/api/v1/dead-letters/discards", r#"{"ids":[1,2,3],"reason":"a test"}"#));
    let discarded: u64 = discards.iter().filter_map(|answer| answer.json()["discarded"].as_u64()).sum();
    assert_eq!(discarded, 3, "{:?}", discards.iter().map(|answer| &answer.body).collect::<Vec<_>>());
    assert!(discards.iter().all(|answer| [200, 404].contains(&answer.status)));

    blocking(|| daemon.post_to("/api/v1/silences", r#"{"for_secs":60,"reason":"a test"}"#));
    let ended = blocking(|| both("DELETE", "/api/v1/silences/1", ""));
    let mut statuses: Vec<u16> = ended.iter().map(|answer| answer.status).collect();
    statuses.sort_unstable();
    assert_eq!(statuses, [204, 404]);

    bed.is_broken.store(false, Ordering::SeqCst);
    let ids: Vec<usize> = (4..=EVENTS).collect();
    let replays =
        blocking(|| both("POST", "/api/v1/dead-letters/replays", &json!({"ids": ids, "rate": 10_000}).to_string()));
    let began: Vec<String> =
        replays.iter().filter_map(|answer| answer.json()["id"].as_str().map(str::to_owned)).collect();
    let total: u64 = began
        .iter()
        .map(|id| {
            let path = format!("/api/v1/dead-letters/replays/{id}");
            let is_over = |replay: &Value| replay["state"] != "running";
            let replay = blocking(|| eventually("the end", || Some(daemon.get(&path).json()).filter(is_over)));
            assert_eq!(replay["failed"], 0, "{replay}");
            replay["applied"].as_u64().unwrap()
        })
        .sum();
    assert!(total >= (EVENTS - 3) as u64, "{total}");
    assert_eq!((bed.count("effect").await, bed.count("dead_letter WHERE state = 'dead'").await), (EVENTS - 3, 0));

    let checks = blocking(|| both("POST", "/api/v1/integrity", ""));
    assert!(checks.iter().any(|answer| answer.status == 202));
    assert!(checks.iter().all(|answer| [202, 409].contains(&answer.status)), "one at a time");
    bed.stop().await;
}
