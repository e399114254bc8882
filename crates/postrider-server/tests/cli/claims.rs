//! `[claim_check]`: large payloads in a folder.

use std::fs;

use crate::harness::{Place, eventually};

const CONFIG: &str = "[broker]\npayload_bytes_max = 1000\n[claim_check]\nurl = \"file:./claims\"\nabove_bytes = 1000\n";

#[test]
fn large_payloads_are_stored_and_published() {
    let place = Place::new();
    place.write("postrider.toml", CONFIG);
    fs::create_dir(place.path("claims")).unwrap();
    let daemon = place.daemon(&[]).ready();
    let payload = format!("\"{}\"", "x".repeat(5_000));
    place.write("large.json", &payload);
    let id = place.run(&["send", "orders.created", "order.created", "--file", "large.json"]).ok();
    let body = format!(r#"{{"topic":"orders.created","type":"order.created","payload":{payload}}}"#);
    assert_eq!(daemon.post(&body).status, 202, "HTTP takes it too");
    eventually("two published events", || (daemon.metric("postrider_published_total") == 2.0).then_some(()));
    assert_eq!(daemon.metric("postrider_claims_stored_total"), 2.0);
    let day = fs::read_dir(place.path("claims")).unwrap().next().unwrap().unwrap().path();
    assert_eq!(fs::read_to_string(day.join(id.trim())).unwrap(), payload);
}

#[test]
fn a_missing_folder_holds_large_events_up_until_it_is_there() {
    let place = Place::new();
    place.write("postrider.toml", CONFIG);
    let daemon = place.daemon(&[("POSTRIDER__BREAKER__OPEN_MS", "200")]).ready();
    daemon.logged("the claim storage cannot be used");
    place.write("large.json", &format!("\"{}\"", "x".repeat(5_000)));
    place.run(&["send", "orders.created", "order.created", "--file", "large.json"]).ok();
    daemon.logged("publishing failed, trying again");
    fs::create_dir(place.path("claims")).unwrap();
    eventually("a published event", || (daemon.metric("postrider_published_total") == 1.0).then_some(()));
}

#[test]
fn doctor_stores_reads_and_deletes() {
    let place = Place::migrated();
    place.write("postrider.toml", CONFIG);
    let said = place.run(&["doctor", "--json"]);
    assert_eq!(said.code, 1);
    assert!(said.stdout.contains("claim_check") && said.stdout.contains("create the folder"), "{}", said.stdout);

    fs::create_dir(place.path("claims")).unwrap();
    let said = place.run(&["doctor", "--json"]).ok();
    assert!(said.contains("file://./claims stores, reads and deletes"), "{said}");
    assert_eq!(fs::read_dir(place.path("claims")).unwrap().count(), 0, "nothing is left");
}

#[test]
fn a_key_in_the_config_is_never_shown() {
    let place = Place::new();
    place.write(
        "postrider.toml",
        "[claim_check]\nurl = \"ftp://x\"\naccess_key = 1\nsecret_key = \"topsecret\" # s\nx = 1\n",
    );
    let said = place.run(&["status"]).fails(1, &["claim_check.url must begin with", "claim_check.access_key must be"]);
    assert!(!said.contains("topsecret"), "{said}");
}

#[test]
fn doctor_names_a_bucket_that_is_away() {
    let place = Place::migrated();
    let config =
        "[claim_check]\nurl = \"s3://claims/shop\"\nendpoint = \"http://127.0.0.1:1\"\naccess_key = \"AKID\"\n";
    place.write("postrider.toml", &format!("{config}secret_key = \"${{KEY}}\"\n"));
    let said = place.run_with(&["doctor", "--json"], &[("KEY", "topsecret")]);
    assert_eq!(said.code, 1);
    assert!(said.stdout.contains("s3://claims/shop") && said.stdout.contains("cannot be reached"), "{}", said.stdout);
    for text in [&said.stdout, &said.stderr] {
        assert!(!text.contains("topsecret") && !text.contains("AKID"), "{text}");
    }
}
