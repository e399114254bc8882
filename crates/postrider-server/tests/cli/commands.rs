//! Commands that end by themselves.

use serde_json::{Value, json};

use crate::harness::Place;

#[test]
fn init_writes_a_config_that_changes_nothing() {
    let place = Place::new();
    assert_eq!(place.run(&["init"]).ok(), "postrider.toml\n");
    let text = std::fs::read_to_string(place.path("postrider.toml")).unwrap();
    assert!(text.contains("#poll_ms = 100"));
    place.run(&["doctor"]).ok();
    assert_eq!(place.run(&["init", "-"]).ok().trim_end(), text.trim_end());
}

#[test]
fn init_does_not_overwrite_unless_forced() {
    let place = Place::new();
    place.write("postrider.toml", "[relay]\npoll_ms = 654\n");
    place.run(&["init"]).fails(1, &["postrider.toml exists already", "--force"]);
    assert!(std::fs::read_to_string(place.path("postrider.toml")).unwrap().contains("654"));
    place.run(&["init", "--force"]).ok();
    assert!(!std::fs::read_to_string(place.path("postrider.toml")).unwrap().contains("654"));
}

#[test]
fn migrate_twice_is_harmless() {
    let place = Place::new();
    let first = place.run(&["migrate", "--json"]).json();
    assert_eq!(first["applied"][0]["version"], 1);
    let second = place.run(&["migrate", "--json"]).json();
    assert_eq!(second["applied"], json!([]));
    assert_eq!(second["schema"], first["schema"]);
}

#[tokio::test]
async fn printed_migrations_work_by_hand() {
    let place = Place::new();
    let script = place.run(&["migrate", "--print"]).ok();
    assert!(!place.path("postrider.db").exists(), "printing needs no database");
    let store = postrider::store::sqlite::SqliteStore::open(&place.path("postrider.db")).await.unwrap();
    sqlx::raw_sql(sqlx::AssertSqlSafe(script)).execute(store.writer()).await.unwrap();
    place.run(&["status"]).ok();
    assert_eq!(place.run(&["migrate", "--json"]).json()["applied"], json!([]));
}

#[test]
fn printed_migrations_for_postgresql_need_no_server() {
    let place = Place::new();
    let script =
        place.run_with(&["migrate", "--print"], &[("POSTRIDER__STORE__URL", "postgres://nobody@127.0.0.1:1/x")]).ok();
    assert!(script.contains("INSERT INTO postrider.migration (version, name) VALUES (1,"), "{script}");
}

#[test]
fn what_is_sent_is_seen() {
    let place = Place::migrated();
    let id = place
        .run(&["send", "orders.created", "order.created", "--key", "o-1", "--payload", r#"{"n":1}"#, "-H", "a=b"])
        .ok();
    let second = place.run(&["send", "ticks", "tick", "--json"]).json()["id"].clone();

    let lines = place.run(&["tail", "--from-start", "--limit", "2", "--payload", "--json"]).ok();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines[0]["id"], id.trim());
    assert_eq!(lines[0]["topic"], "orders.created");
    assert_eq!(lines[0]["type"], "order.created");
    assert_eq!(lines[0]["key"], "o-1");
    assert_eq!(lines[0]["payload"], json!({"n": 1}));
    assert_eq!(lines[0]["headers"], json!({"a": "b"}));
    assert_eq!(lines[1]["id"], second);
    assert_eq!(lines[1]["payload"], json!({}));

    let status = place.run(&["status", "--json"]).json();
    assert_eq!(status["backlog"]["pending"], 2);
    assert_eq!(status["outboxes"][0]["broker"], "embedded");
    assert!(place.run(&["status"]).ok().contains("PENDING"));
}

#[test]
fn tail_hides_payloads_and_filters_topics() {
    let place = Place::migrated();
    place.run(&["send", "orders.created", "t", "--payload", r#"{"secret":1}"#]).ok();
    place.run(&["send", "orders.eu.created", "t"]).ok();
    place.run(&["send", "ticks", "t"]).ok();
    let all = place.run(&["tail", "--from-start", "--no-follow"]).ok();
    assert_eq!(all.lines().count(), 3);
    assert!(!all.contains("secret"));
    assert!(!place.run(&["tail", "--from-start", "--no-follow", "--json"]).ok().contains("secret"));
    assert_eq!(place.run(&["tail", "--from-start", "--no-follow", "--topic", "orders.#"]).ok().lines().count(), 2);
    assert_eq!(place.run(&["tail", "--from-start", "--no-follow", "--topic", "orders.*"]).ok().lines().count(), 1);
    assert_eq!(place.run(&["tail", "--no-follow"]).ok(), "", "without --from-start only what comes");
}

#[test]
fn payloads_come_from_files_and_stdin() {
    let place = Place::migrated();
    place.write("body.txt", "grüße");
    place.run(&["send", "a", "t", "--file", "body.txt", "--content-type", "text/plain"]).ok();
    place.run_fed(&["send", "a", "t", "--file", "-"], "{\"n\":\n 2}").ok();
    let lines = place.run(&["tail", "--from-start", "--limit", "2", "--payload", "--json"]).ok();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines[0]["payload"], "grüße");
    assert_eq!(lines[1]["payload"], json!({"n": 2}));
}

#[test]
fn doctor_reports_everything_with_a_severity() {
    let place = Place::migrated();
    let findings = place.run(&["doctor", "--json"]).json();
    let findings = findings.as_array().unwrap();
    let check =
        |name: &str| findings.iter().find(|finding| finding["check"] == name).unwrap_or_else(|| panic!("{name}"));
    for name in ["config", "store", "broker"] {
        assert_eq!(check(name)["severity"], "ok", "{name}");
    }
    assert!(place.run(&["doctor"]).ok().contains("OK"));
}

#[test]
fn doctor_finds_that_redis_is_away() {
    let place = Place::migrated();
    // Nobody listens on port 1.
    let ran = place.run_with(&["doctor", "--json"], &[("POSTRIDER__REDIS__URL", "redis://shop:s3cret@127.0.0.1:1/0")]);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(!ran.stdout.contains("s3cret") && !ran.stderr.contains("s3cret"));
    let findings: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    let finding = findings.as_array().unwrap().iter().find(|finding| finding["check"] == "redis").unwrap();
    assert_eq!(finding["severity"], "error");
    assert!(finding["message"].as_str().unwrap().contains("redis://127.0.0.1:1/0 cannot be reached"), "{finding}");
}

#[test]
fn doctor_warns_of_an_open_port() {
    let place = Place::migrated();
    let findings = place.run_with(&["doctor", "--json"], &[("POSTRIDER__HTTP__LISTEN", "0.0.0.0:7070")]).json();
    let finding = findings.as_array().unwrap().iter().find(|finding| finding["check"] == "config.http.listen").unwrap();
    assert_eq!(finding["severity"], "warning");
}

#[test]
fn every_command_explains_itself_with_examples() {
    let place = Place::new();
    for command in ["demo", "init", "migrate", "run", "send", "tail", "status", "doctor"] {
        let help = place.run(&[command, "--help"]).ok();
        assert!(help.contains("Examples:\n  "), "{command}: {help}");
    }
    assert!(place.run(&["--version"]).ok().starts_with("postrider "));
}
