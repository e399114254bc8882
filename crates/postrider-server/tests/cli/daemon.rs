//! `postrider run`.

use std::net::TcpListener;

use crate::harness::{Place, eventually};

const EVENT: &str = r#"{"topic":"orders.created","type":"order.created","key":"o-1","payload":{"secret":1}}"#;

#[test]
fn run_with_nothing_at_hand_relays_events() {
    let place = Place::new();
    let mut daemon = place.daemon(&[]).ready();
    assert_eq!(daemon.get("/healthz").status, 200);
    assert_eq!(daemon.post(EVENT).status, 202);
    place.run(&["send", "ticks", "tick"]).ok();
    eventually("two published events", || (daemon.metric("postrider_published_total") == 2.0).then_some(()));
    eventually("an empty backlog", || {
        (place.run(&["status", "--json"]).json()["backlog"]["pending"] == 0).then_some(())
    });
    let status = place.run(&["status", "--json"]).json();
    assert_eq!(status["leases"][0]["group"], "relay/default");
    assert!(status["leases"][0]["owner"].is_string());

    daemon.signal("TERM");
    assert_eq!(daemon.ended().code(), Some(0));
    daemon.logged("stopped");
    let status = place.run(&["status", "--json"]).json();
    assert!(status["leases"][0]["owner"].is_null(), "the lane was given back: {status}");
}

#[test]
fn log_lines_are_json_without_payloads() {
    let place = Place::new();
    let mut daemon = place.daemon(&[("RUST_LOG", "trace"), ("POSTRIDER__LOG__SERVICE", "shop")]).ready();
    assert_eq!(daemon.post(EVENT).status, 202);
    eventually("a published event", || (daemon.metric("postrider_published_total") == 1.0).then_some(()));
    daemon.signal("INT");
    assert_eq!(daemon.ended().code(), Some(0));
    for line in daemon.log() {
        assert!(line["timestamp"].is_string() && line["level"].is_string() && line["message"].is_string(), "{line}");
        assert_eq!(line["service"], "shop");
        assert!(!line.to_string().contains("secret"), "{line}");
    }
}

#[test]
fn a_taken_port_ends_the_start() {
    let place = Place::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let ran = place.run_with(&["run"], &[("POSTRIDER__HTTP__LISTEN", &address)]);
    ran.fails(1, &[&format!("HTTP cannot listen on {address}"), "http.listen"]);
}

#[test]
fn an_unreachable_store_is_waited_for() {
    let place = Place::new();
    let url = "postgres://shop:topsecret@127.0.0.1:1/shop";
    let mut daemon = place.daemon(&[("POSTRIDER__STORE__URL", url)]);
    assert_eq!(daemon.get("/healthz").status, 200);
    let answer = daemon.get("/readyz");
    assert_eq!(answer.status, 503);
    assert!(answer.head.contains("application/problem+json") && answer.head.contains("retry-after"), "{}", answer.head);
    assert!(answer.json()["reasons"]["store"]["kind"].is_string());
    assert!(!answer.body.contains("127.0.0.1") && !answer.body.contains("shop"), "{}", answer.body);
    assert_eq!(daemon.post(EVENT).status, 503);

    let line = daemon.logged("the store cannot be reached");
    assert_eq!(line["error_type"], "unavailable");
    assert!(line["context"]["remedy"].is_string());
    daemon.signal("TERM");
    assert_eq!(daemon.ended().code(), Some(0));
    assert!(daemon.log().iter().all(|line| !line.to_string().contains("topsecret")));
}

#[test]
fn an_unreachable_broker_leaves_events_in_the_outbox() {
    let place = Place::new();
    let mut daemon = place.daemon(&[("POSTRIDER__BROKER__URL", "amqp://shop:topsecret@127.0.0.1:1/x")]).ready();
    assert_eq!(daemon.post(EVENT).status, 202);
    daemon.logged("publishing failed");
    assert_eq!(place.run(&["status", "--json"]).json()["backlog"]["pending"], 1);
    daemon.signal("TERM");
    assert_eq!(daemon.ended().code(), Some(0));
    assert!(daemon.log().iter().all(|line| !line.to_string().contains("topsecret")));
}

#[test]
fn a_second_instance_stands_by_and_takes_over() {
    let place = Place::new();
    let first = place.daemon(&[]).ready();
    first.logged("lease taken");
    let second = place.daemon(&[]).ready();
    assert_eq!(first.post(EVENT).status, 202);
    eventually("a published event", || (first.metric("postrider_published_total") == 1.0).then_some(()));
    first.signal("KILL");
    assert_eq!(second.post(EVENT).status, 202);
    eventually("takeover", || (second.metric("postrider_published_total") >= 1.0).then_some(()));
}

#[test]
fn a_disabled_relay_publishes_nothing() {
    let place = Place::new();
    let daemon = place.daemon(&[("POSTRIDER__RELAY__ENABLED", "false")]).ready();
    assert_eq!(daemon.post(EVENT).status, 202);
    let leases = place.run(&["status", "--json"]).json()["leases"].to_string();
    assert!(!leases.contains("relay/"), "{leases}");
}

#[test]
fn stale_events_raise_the_alert() {
    let place = Place::new();
    place.run(&["migrate"]).ok();
    place.run(&["send", "a", "t"]).ok();
    // One second later the event is stale; the backlog is read at the start and every ten seconds.
    let environment = [("POSTRIDER__RELAY__ENABLED", "false"), ("POSTRIDER__RELAY__STALE_AFTER_S", "1")];
    let daemon = place.daemon(&environment).ready();
    let line = daemon.logged("alert firing");
    assert_eq!((&line["error_type"], &line["context"]["rule"]), (&"alert".into(), &"stale".into()));
    assert_eq!(line["level"], "ERROR");
    eventually("the metric", || (daemon.metric("postrider_alert_stale") == 1.0).then_some(()));
}
