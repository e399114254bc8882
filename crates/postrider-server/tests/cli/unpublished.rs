//! Events that the relay could not publish are dead letters too.

use serde_json::{Value, json};

use crate::harness::{Daemon, Place, eventually};

const TIGHT: [(&str, &str); 1] = [("POSTRIDER__BROKER__PAYLOAD_BYTES_MAX", "1000")];

/// An event that is too large for the relay, and one behind it.
fn send(place: &Place) {
    let large = format!("\"{}\"", "x".repeat(2000));
    place.run(&["send", "orders.paid", "order.paid", "--key", "o-1", "--payload", &large]).ok();
    place.run(&["send", "orders.paid", "order.paid", "--key", "o-1", "--payload", "1"]).ok();
}

#[track_caller]
fn failed(daemon: &Daemon) -> Value {
    let look = || daemon.get("/api/v1/dead-letters?stage=relay").json()["items"].get(0).cloned();
    eventually("a dead letter of the relay", look)
}

#[track_caller]
fn wait_for_backlog(place: &Place, retrying: u64, waiting: u64, failed: u64) {
    let wanted = [json!(0), json!(retrying), json!(waiting), json!(failed)];
    eventually("the backlog", || {
        let backlog = place.run(&["status", "--json"]).json()["backlog"].clone();
        (["pending", "retrying", "waiting", "failed"].map(|name| backlog[name].clone()) == wanted).then_some(())
    });
}

#[test]
fn an_event_that_failed_is_replayed_when_its_cause_is_gone() {
    let place = Place::migrated();
    send(&place);
    let mut daemon = place.daemon(&TIGHT).ready();
    let letter = failed(&daemon);
    assert_eq!((&letter["consumer"], &letter["error_type"]), (&json!("relay/default"), &json!("too_large")));
    wait_for_backlog(&place, 0, 1, 1);
    // Not mended yet.
    place.run(&["dead", "replay", "--stage", "relay"]).fails(1, &["failed again"]);
    assert_eq!(failed(&daemon)["attempts"], 2);
    wait_for_backlog(&place, 0, 1, 1);
    daemon.signal("TERM");
    daemon.ended();

    let _daemon = place.daemon(&[]).ready();
    let replayed = place.run(&["dead", "replay", "--stage", "relay", "--json"]).json();
    assert_eq!((&replayed["applied"], &replayed["failed"]), (&json!(1), &json!(0)));
    wait_for_backlog(&place, 0, 0, 0);
    assert_eq!(place.run(&["dead", "list", "--json"]).json(), json!([]));
}

#[test]
fn an_event_that_is_discarded_frees_its_key() {
    let place = Place::migrated();
    send(&place);
    let daemon = place.daemon(&TIGHT).ready();
    let id = failed(&daemon)["id"].clone();
    wait_for_backlog(&place, 0, 1, 1);
    let body = json!({"ids": [id], "reason": "a test"}).to_string();
    assert_eq!(daemon.post_to("/api/v1/dead-letters/discards", &body).json(), json!({"discarded": 1}));
    wait_for_backlog(&place, 0, 0, 0);
    eventually("publishing", || (daemon.metric("postrider_published_total") == 1.0).then_some(()));
    let stats = place.run(&["dead", "stats", "--json"]).json();
    assert_eq!((&stats[0]["stage"], &stats[0]["state"]), (&json!("relay"), &json!("discarded")));
}
