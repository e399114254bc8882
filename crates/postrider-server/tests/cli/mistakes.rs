//! Bad input: each gives one message that names the thing and the remedy.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;

use crate::harness::{Place, finish};

#[test]
fn wrong_usage_is_exit_code_2() {
    let place = Place::migrated();
    place.run(&["send"]).fails(2, &["TOPIC"]);
    place.run(&["sned"]).fails(2, &["send"]);
    place.run(&["send", "a", "b", "--header", "x"]).fails(2, &["NAME=VALUE"]);
    place.run(&["send", "a", "b", "--payload", "1", "--file", "x"]).fails(2, &["--file"]);
    place.run(&["send", "a", "b", "--id", "7"]).fails(2, &["--id"]);
}

#[test]
fn a_misspelt_config_key_is_shown_with_its_place_and_a_suggestion() {
    let place = Place::new();
    place.write("postrider.toml", "[relay]\npol_ms = 100\n");
    for command in ["run", "migrate", "status", "doctor"] {
        place.run(&[command]).fails(1, &["relay.pol_ms", "postrider.toml:2:1", "did you mean poll_ms?"]);
    }
    assert!(!place.path("postrider.db").exists(), "nothing was begun");
}

#[test]
fn a_wrong_type_and_a_value_out_of_range_are_shown() {
    let place = Place::new();
    place.write("other.toml", "[relay]\npoll_ms = \"fast\"\nlanes = 1000\n");
    let parts = ["relay.poll_ms must be a whole number", "other.toml:2:11", "relay.lanes must be between 1 and 64"];
    place.run(&["--config", "other.toml", "status"]).fails(1, &parts);
    place.run_with(&["status"], &[("POSTRIDER_CONFIG", "other.toml")]).fails(1, &parts);
    place.run(&["-c", "none.toml", "status"]).fails(1, &["none.toml cannot be read", "postrider init"]);
}

#[test]
fn unknown_settings_in_the_environment_are_mistakes_too() {
    let place = Place::new();
    let said = place.run_with(&["status"], &[("POSTRIDER__RELAY__LANE", "2")]);
    said.fails(1, &["POSTRIDER__RELAY__LANE", "did you mean POSTRIDER__RELAY__LANES?"]);
}

#[test]
fn passwords_are_never_printed() {
    let place = Place::migrated();
    let url = "amqp://shop:topsecret@127.0.0.1:1/x";
    for command in [&["doctor"][..], &["doctor", "--json"], &["status"], &["status", "--json"]] {
        let ran = place.run_with(command, &[("POSTRIDER__BROKER__URL", url)]);
        assert!(!ran.stdout.contains("topsecret") && !ran.stderr.contains("topsecret"), "{command:?}");
    }
    place.write("postrider.toml", "[store]\nurl = \"postgres://shop:topsecret@h:port/x\"\n[relay]\nx = 1\n");
    let said = place.run(&["status"]).fails(1, &["relay.x"]);
    assert!(!said.contains("topsecret"), "{said}");
    place.write("postrider.toml", "[store]\nurl = \"oracle://shop:topsecret@h/x\"\n");
    let said = place.run(&["status"]).fails(1, &["store.url must begin with", "oracle://shop:"]);
    assert!(!said.contains("topsecret"), "{said}");
}

#[test]
fn an_unset_password_variable_is_named() {
    let place = Place::new();
    place.write("postrider.toml", "[store]\nurl = \"postgres://shop:${NO_SUCH_PASSWORD}@h/x\"\n");
    place.run(&["status"]).fails(1, &["NO_SUCH_PASSWORD is not set", "postrider.toml:2:7"]);
}

#[test]
fn a_missing_database_is_not_created_by_looking() {
    let place = Place::new();
    for command in [&["send", "a", "b"][..], &["tail"], &["status"]] {
        place.run(command).fails(1, &["there is no database ./postrider.db", "remedy"]);
    }
    assert!(!place.path("postrider.db").exists());
}

#[tokio::test]
async fn a_database_without_tables_asks_for_migrate() {
    let place = Place::new();
    let store = postrider::store::sqlite::SqliteStore::open(&place.path("postrider.db")).await.unwrap();
    postrider::store::Store::close(&store).await;
    place.run(&["send", "a", "b"]).fails(1, &["no Postrider tables", "postrider migrate"]);
    place.run(&["doctor"]).ok_or_error("postrider migrate");
}

#[tokio::test]
async fn a_newer_schema_is_refused_everywhere() {
    let place = Place::migrated();
    let store = postrider::store::sqlite::SqliteStore::open(&place.path("postrider.db")).await.unwrap();
    sqlx::query("INSERT INTO postrider_migration (version, name) VALUES (99, 'future')")
        .execute(store.writer())
        .await
        .unwrap();
    postrider::store::Store::close(&store).await;
    for command in [&["migrate"][..], &["run"], &["send", "a", "b"], &["status"]] {
        place.run(command).fails(1, &["schema version 99", "at least as new"]);
    }
}

#[test]
fn a_file_that_is_no_database_is_named() {
    let place = Place::new();
    place.write("postrider.db", "this is a letter to my grandmother, not a database\n");
    place.run(&["status"]).fails(1, &["not an SQLite database", "remedy"]);
    place
        .run_with(&["run"], &[("POSTRIDER__STORE__URL", "sqlite:none/x.db")])
        .fails(1, &["the directory none does not exist"]);
}

#[test]
fn a_read_only_database_says_so() {
    let place = Place::migrated();
    for (name, mode) in [("postrider.db", 0o444), ("", 0o777)] {
        std::fs::set_permissions(place.path(name), std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let mut command = place.command(&["send", "a", "b"]);
    if is_root() {
        // Root may write everything; nobody may not.
        command.uid(65534);
    }
    finish(&mut command, None).fails(1, &["is read-only", "make the file and its directory writable"]);
}

fn is_root() -> bool {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::os::unix::fs::MetadataExt::uid(&file.path().metadata().unwrap()) == 0
}

#[test]
fn bad_events_are_refused_with_the_reason() {
    let place = Place::migrated();
    let key = "k".repeat(256);
    for (args, part) in [
        (&["send", "", "t"][..], "the topic is empty"),
        (&["send", "a", ""], "the type is empty"),
        (&["send", "a", "t", "--key", &key], "the key has 256 bytes, the limit is 255"),
        (&["send", "a", "t", "--payload", "{"], "not valid JSON"),
        (&["send", "a", "t", "--header", "b d=1"], "cannot be sent"),
        (&["send", "a", "t", "--header", "b=1\n2"], "cannot be sent"),
        (&["send", "a", "t", "--file", "none"], "the payload none cannot be read"),
    ] {
        place.run(args).fails(1, &[part, "remedy"]);
    }
    let heavy =
        place.run_with(&["send", "a", "t", "--payload", "[1,2,3]"], &[("POSTRIDER__BROKER__PAYLOAD_BYTES_MAX", "5")]);
    heavy.fails(1, &["the payload has 7 bytes, broker.payload_bytes_max is 5"]);
    assert_eq!(place.run(&["status", "--json"]).json()["backlog"]["pending"], 0, "nothing was stored");
}

impl crate::harness::Ran {
    /// Doctor's exit code is 1 for errors; what it says is in its table.
    #[track_caller]
    fn ok_or_error(self, part: &str) {
        assert_eq!(self.code, 1);
        assert!(self.stdout.contains(part), "{}", self.stdout);
    }
}
