//! `POST /api/v1/events`.

use serde_json::{Value, json};

use crate::harness::Place;

const EVENT: &str = r#"{"topic":"orders.created","type":"order.created","key":"o-1","payload":{"z":1, "a":2}}"#;

fn tail(place: &Place) -> Vec<Value> {
    let lines = place.run(&["tail", "--from-start", "--no-follow", "--payload", "--json"]).ok();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn one_event_a_list_and_a_cloudevent_are_stored() {
    let place = Place::new();
    let daemon = place.daemon(&[]).ready();

    let answer = daemon.post(EVENT);
    assert_eq!(answer.status, 202, "{}", answer.body);
    let id = answer.json()["ids"][0].clone();

    let answer = daemon.post(&format!("[{EVENT},{EVENT},{EVENT}]"));
    assert_eq!(answer.json()["ids"].as_array().unwrap().len(), 3);

    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let headers = [
        ("ce-specversion", "1.0"),
        ("ce-id", "A-1"),
        ("ce-source", "/shop"),
        ("ce-type", "order.paid"),
        ("ce-partitionkey", "o-1"),
        ("content-type", "text/plain"),
        ("traceparent", trace),
    ];
    let answer = daemon.request("POST", "/api/v1/events?topic=orders.paid", &headers, "hello");
    assert_eq!(answer.status, 202, "{}", answer.body);
    let again = daemon.request("POST", "/api/v1/events?topic=orders.paid", &headers, "hello");
    assert_eq!(answer.json(), again.json(), "the same source and id are the same event");

    let events = tail(&place);
    assert_eq!(events[0]["id"], id);
    assert_eq!(events[0]["payload"], json!({"z": 1, "a": 2}));
    let paid = events.iter().find(|event| event["type"] == "order.paid").unwrap();
    assert_eq!(paid["topic"], "orders.paid");
    assert_eq!(paid["key"], "o-1");
    assert_eq!(paid["source"], "/shop");
    assert_eq!(paid["payload"], "hello");
    assert_eq!(paid["traceparent"], trace);
}

#[test]
fn the_trace_of_a_request_is_carried_into_its_events() {
    let place = Place::new();
    let daemon = place.daemon(&[]).ready();
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let headers = [("content-type", "application/json"), ("traceparent", trace)];
    assert_eq!(daemon.request("POST", "/api/v1/events", &headers, EVENT).status, 202);
    assert_eq!(tail(&place)[0]["traceparent"], trace);
}

#[test]
fn mistakes_are_problems_that_name_the_field() {
    let place = Place::new();
    let daemon = place.daemon(&[("POSTRIDER__BROKER__PAYLOAD_BYTES_MAX", "1000")]).ready();
    let event = |change: &dyn Fn(&mut Value)| {
        let mut event: Value = serde_json::from_str(EVENT).unwrap();
        change(&mut event);
        event.to_string()
    };
    let refused = |body: &str, status: u16, parts: &[&str]| {
        let answer = daemon.post(body);
        assert_eq!(answer.status, status, "{}", answer.body);
        assert!(answer.head.contains("content-type: application/problem+json"), "{}", answer.head);
        let problem = answer.json();
        assert_eq!(problem["status"], status);
        assert!(problem["remedy"].as_str().is_some_and(|remedy| !remedy.is_empty()), "{problem}");
        for part in parts {
            assert!(answer.body.contains(part), "{part:?} is missing in {}", answer.body);
        }
    };
    refused("{", 400, &["EOF"]);
    refused("", 400, &["EOF"]);
    refused(&event(&|event| event["topik"] = "x".into()), 400, &["topik", "/topik"]);
    refused(&event(&|event| event["topic"] = 7.into()), 400, &["/topic"]);
    refused(&event(&|event| event["topic"] = "".into()), 422, &["the topic is empty", "/topic"]);
    refused(&event(&|event| event["key"] = "k".repeat(256).into()), 422, &["the key has 256 bytes", "/key"]);
    refused(&event(&|event| event["headers"] = json!({"a b": "c"})), 422, &["/headers"]);
    refused(&event(&|event| event["id"] = "7".into()), 400, &["/id"]);
    refused(&event(&|event| event["payload"] = "x".repeat(1001).into()), 413, &["broker.payload_bytes_max is 1000"]);
    let list = format!("[{EVENT},{}]", event(&|event| event["type"] = "".into()));
    refused(&list, 422, &["/1/type"]);
    refused(&format!("[{}]", vec![EVENT; 1001].join(",")), 400, &["the limit is 1000"]);
    refused(&format!("\"{}\"", "x".repeat(33 * 1024 * 1024)), 413, &["more than"]);
    assert_eq!(tail(&place).len(), 0, "nothing was stored, not even the good event of the list");
}

#[test]
fn other_media_types_paths_and_methods_are_told() {
    let place = Place::new();
    let daemon = place.daemon(&[]).ready();
    let status = |answer: crate::harness::Answer| answer.json()["status"].as_u64().unwrap();
    assert_eq!(status(daemon.request("POST", "/api/v1/events", &[("content-type", "text/plain")], EVENT)), 415);
    assert_eq!(status(daemon.request("POST", "/api/v1/events", &[], EVENT)), 415);
    let structured = [("content-type", "application/cloudevents+json")];
    assert_eq!(status(daemon.request("POST", "/api/v1/events", &structured, "{}")), 415);
    assert_eq!(status(daemon.get("/api/v1/events")), 405);
    assert_eq!(status(daemon.get("/nothing")), 404);
    let answer = daemon.request("POST", "/api/v1/events", &[("ce-id", "1")], "x");
    assert_eq!((answer.status, answer.json()["header"].as_str()), (400, Some("ce-specversion")));
}
