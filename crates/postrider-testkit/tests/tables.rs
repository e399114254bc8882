//! The commands for tables that services have: `adopt inspect`, `trigger`, and a route that is down.

#![allow(clippy::expect_used, clippy::panic, reason = "a test that cannot go on must panic")]

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use postrider_testkit::testbed;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row as _};

const CAMPUS: &str = include_str!("../../../examples/campus/schema.sql");
const PIM: &str = include_str!("../../../examples/pim/schema.sql");

struct Place {
    url: String,
    connection: PgConnection,
    folder: tempfile::TempDir,
}

/// What a command said.
struct Said {
    is_ok: bool,
    stdout: String,
    stderr: String,
}

impl Place {
    async fn new(schema: &str) -> Self {
        let url = testbed::postgres().await.database(&testbed::unique("tables")).await.expect("a database");
        let mut connection = PgConnection::connect(&url).await.expect("connects");
        sqlx::raw_sql(AssertSqlSafe(schema.to_owned())).execute(&mut connection).await.expect("the schema is made");
        let place = Self { url, connection, folder: tempfile::tempdir().expect("a folder") };
        assert!(place.run(&["migrate"]).is_ok);
        place
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let program = PathBuf::from(env!("CARGO_BIN_EXE_crash")).with_file_name("postrider");
        let mut command = Command::new(program);
        command.args(arguments).current_dir(self.folder.path()).stdin(Stdio::null());
        command.env("POSTRIDER__STORE__URL", &self.url).env("POSTRIDER__HTTP__LISTEN", "127.0.0.1:0");
        command
    }

    fn run(&self, arguments: &[&str]) -> Said {
        let output = self.command(arguments).output().expect("`make test` builds postrider first");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
        Said { is_ok: output.status.success(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    fn config(&self, text: &str) {
        std::fs::write(self.folder.path().join("postrider.toml"), text).expect("written");
    }

    async fn sql(&mut self, sql: &str) {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut self.connection).await.expect("runs");
    }

    /// Rows of one column of text.
    async fn texts(&mut self, sql: &str) -> Vec<String> {
        let rows = sqlx::query(AssertSqlSafe(sql.to_owned())).fetch_all(&mut self.connection).await.expect("answers");
        rows.iter().map(|row| row.get::<Option<String>, _>(0).unwrap_or_else(|| "null".to_owned())).collect()
    }

    async fn until(&mut self, sql: &str, wanted: &str) {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let found = self.texts(sql).await.join(" ");
            if found == wanted {
                return;
            }
            assert!(Instant::now() < deadline, "{sql}: {found}, not {wanted}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn inspect_writes_a_mapping_that_works() {
    let mut place = Place::new(CAMPUS).await;
    let said = place.run(&["adopt", "inspect", "outbox_events"]);
    assert!(said.is_ok, "{}", said.stderr);
    for part in [
        "table = \"outbox_events\"",
        "key = \"aggregate_id\"",
        "topic = \"{routing_key}\"",
        "status_failed = \"failed\"",
    ] {
        assert!(said.stdout.contains(part), "{part} is missing in\n{}", said.stdout);
    }
    assert!(said.stderr.contains("CREATE INDEX CONCURRENTLY \"outbox_events_unpublished\""), "{}", said.stderr);
    place.config(&said.stdout);
    let doctor = place.run(&["doctor", "--json"]);
    assert!(doctor.is_ok, "{}{}", doctor.stdout, doctor.stderr);
    assert!(doctor.stdout.contains("outbox.outbox_events"), "{}", doctor.stdout);

    place.sql("INSERT INTO outbox_events (routing_key, aggregate_type, aggregate_id, payload) VALUES ('a.b', 't', 'k', '{}')").await;
    let _running = Running(place.command(&["run"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("runs"));
    place.until("SELECT status FROM outbox_events", "published").await;
    place.until("SELECT topic FROM postrider.message", "a.b").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_a_mapping_is_said() {
    let place = Place::new(PIM).await;
    let said = place.run(&["adopt", "inspect", "outbox_event"]);
    assert!(!said.is_ok && said.stderr.contains("there is no table outbox_event"), "{}", said.stderr);
    let said = place.run(&["adopt", "inspect", "a.b.c"]);
    assert!(!said.is_ok && said.stderr.contains("more than a schema and a table"), "{}", said.stderr);

    let good = place.run(&["adopt", "inspect", "outbox_events"]).stdout;
    place.config(
        &good
            .replace("payload = \"payload\"", "payload = \"body\"")
            .replace("time = \"created_at\"", "time = \"event_type\""),
    );
    let said = place.run(&["doctor", "--json"]);
    assert!(!said.is_ok, "{}", said.stdout);
    assert!(
        said.stdout.contains("has no such column") && said.stdout.contains("is of type character varying"),
        "{}",
        said.stdout
    );
    let said = place.run(&["run"]);
    assert!(!said.is_ok && said.stderr.contains("payload = \\\"body\\\""), "{}", said.stderr);

    place.config("[[outbox]]\ntable = \"outbox_events\"\nid = \"id\"\npayload = \"payload\"\ntopic = \"{a\"\npublished = \"published\"\n");
    let said = place.run(&["doctor"]);
    assert!(!said.is_ok && said.stderr.contains("outbox.1.topic has a { without a }"), "{}", said.stderr);
    place.config(&format!("{good}\n{good}"));
    let said = place.run(&["doctor"]);
    assert!(!said.is_ok && said.stderr.contains("outbox.2.table is adopted already"), "{}", said.stderr);
}

const USERS: &str = "CREATE SCHEMA app; CREATE TABLE app.\"Users\" (id int PRIMARY KEY, email text, \"org id\" text, version int, plan text, extra json)";
const TRIGGER: [&str; 12] = [
    "trigger",
    "add",
    "app.Users",
    "--entity",
    "USER",
    "--tenant",
    "org id",
    "--version",
    "version",
    "--column",
    "plan",
    "--topic=users.changed",
];

#[tokio::test(flavor = "multi_thread")]
async fn changes_become_events_without_personal_data() {
    let mut place = Place::new(USERS).await;
    let said = place.run(&TRIGGER);
    assert!(said.is_ok, "{}", said.stderr);
    assert!(place.run(&TRIGGER).is_ok, "once more replaces it");
    place.sql("INSERT INTO app.\"Users\" VALUES (7, 'a@b.example', 'org-1', 1, 'free', '{}')").await;
    place.sql("UPDATE app.\"Users\" SET email = 'c@d.example', version = 2").await;
    place.sql("UPDATE app.\"Users\" SET email = email").await;
    place.sql("BEGIN; UPDATE app.\"Users\" SET version = 3; ROLLBACK").await;
    place.sql("UPDATE app.\"Users\" SET id = 8").await;
    place.sql("DELETE FROM app.\"Users\"").await;
    let rows = place
        .texts(
            "SELECT concat_ws(' ', topic, key, type, subject, tenant, payload::text) FROM postrider.outbox ORDER BY id",
        )
        .await;
    let wanted = [
        r#"users.changed USER:7 user.insert 7 org-1 {"entity" : {"type" : "USER", "id" : "7"}, "action" : "INSERT", "version" : 1, "columns" : {"plan" : "free"}}"#,
        r#"users.changed USER:7 user.update 7 org-1 {"entity" : {"type" : "USER", "id" : "7"}, "action" : "UPDATE", "version" : 2, "columns" : {"plan" : "free"}}"#,
        r#"users.changed USER:7 user.delete 7 org-1 {"entity" : {"type" : "USER", "id" : "7"}, "action" : "DELETE", "version" : 2, "columns" : {"plan" : "free"}}"#,
        r#"users.changed USER:8 user.insert 8 org-1 {"entity" : {"type" : "USER", "id" : "8"}, "action" : "INSERT", "version" : 2, "columns" : {"plan" : "free"}}"#,
        r#"users.changed USER:8 user.delete 8 org-1 {"entity" : {"type" : "USER", "id" : "8"}, "action" : "DELETE", "version" : 2, "columns" : {"plan" : "free"}}"#,
    ];
    assert_eq!(rows, wanted);
    assert!(!rows.join("").contains("example"), "an address was copied");

    let list = place.run(&["trigger", "list", "--json"]).stdout;
    assert!(list.contains("app.Users") && list.contains("\"USER\""), "{list}");
    assert!(place.run(&["trigger", "remove", "app.Users"]).is_ok);
    place.sql("INSERT INTO app.\"Users\" VALUES (9, 'a@b.example', 'org-1', 1, 'free', '{}')").await;
    assert_eq!(place.texts("SELECT count(*)::text FROM postrider.outbox").await, ["5"]);
    let said = place.run(&["trigger", "remove", "app.Users"]);
    assert!(!said.is_ok && said.stderr.contains("has no such trigger"), "{}", said.stderr);
}

/// A service's user needs no rights on our tables, and a trigger is printed for people who apply it by themselves.
#[tokio::test(flavor = "multi_thread")]
async fn a_printed_trigger_works_for_a_user_without_rights() {
    let mut place = Place::new(USERS).await;
    let mut print = TRIGGER.to_vec();
    print[1] = "print";
    let said = place.run(&print);
    assert!(said.is_ok, "{}", said.stderr);
    let role = testbed::unique("app").replace('-', "_");
    place.sql(&said.stdout).await;
    place.sql(&format!("CREATE ROLE {role}; GRANT USAGE ON SCHEMA app TO {role}; GRANT ALL ON app.\"Users\" TO {role}; SET ROLE {role}")).await;
    place.sql("INSERT INTO app.\"Users\" VALUES (7, 'a@b.example', 'org-1', 1, 'free', '{}')").await;
    place.sql("RESET ROLE").await;
    assert_eq!(place.texts("SELECT key FROM postrider.outbox").await, ["USER:7"]);
    place.sql(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trigger_that_does_not_fit_is_refused() {
    let place = Place::new(USERS).await;
    for (arguments, part) in [
        (&["trigger", "add", "nothing", "--entity", "USER"][..], "there is no table nothing"),
        (&["trigger", "add", "app.Users", "--entity", "A B"], "the entity \"A B\" cannot be used"),
        (&["trigger", "add", "app.Users", "--entity", "USER", "--tenant", "org"], "--tenant \"org\""),
        (&["trigger", "add", "app.Users", "--entity", "USER", "--version", "email"], "not a whole number"),
    ] {
        let said = place.run(arguments);
        assert!(!said.is_ok && said.stderr.contains(part), "{part}: {}", said.stderr);
    }
}

/// One destination is down; the other's events flow, and its own come when it is back.
#[tokio::test(flavor = "multi_thread")]
async fn a_route_that_is_down_delays_only_its_own_events() {
    let mut place = Place::new("").await;
    let vhost = testbed::rabbitmq().await.vhost(&testbed::unique("routes")).await.expect("a virtual host");
    let port = testbed::free_port().expect("a port");
    let config = |url: &str| {
        format!(
            "[[route]]\nname = \"audit\"\ntopics = [\"audit.#\"]\nurl = \"{url}\"\n[relay]\nlease_ms = 1000\n[breaker]\nopen_ms = 500\n"
        )
    };
    place.config(&config(&format!("amqp://127.0.0.1:{port}/%2f")));
    let running = Running(place.command(&["run"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("runs"));
    for (topic, key) in [("audit.login", "a"), ("orders.made", "o")] {
        assert!(place.run(&["send", topic, "t", "--key", key, "--payload", "{}"]).is_ok);
    }
    let status = "SELECT destination || ' ' || topic || ' ' || status FROM postrider.outbox_status ORDER BY 1";
    place
        .until(
            &format!("SELECT string_agg(s.t, ', ') FROM ({status}) s(t)"),
            "audit audit.login pending, default orders.made published",
        )
        .await;
    let said = place.run(&["status"]).stdout;
    assert!(said.contains("audit") && said.contains("embedded"), "{said}");

    drop(running);
    place.config(&config(&vhost));
    let spec = postrider::ConsumerSpec::new("audit", &["audit.#"]);
    let lease = postrider::lease::Lease { group: "consumer/audit".into(), slot: 0, owner: "test".into(), epoch: 1 };
    let broker = postrider::broker::rabbitmq::RabbitMq::new(postrider::broker::rabbitmq::RabbitMqSettings::new(vhost))
        .expect("valid");
    let mut audit = postrider::broker::Broker::subscribe(&broker, &spec, &lease).await.expect("subscribes");
    let _running = Running(place.command(&["run"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("runs"));
    let delivery = audit.next().await.expect("the event comes");
    assert_eq!(delivery.event.expect("an event").topic(), "audit.login");
    place
        .until(
            &format!("SELECT string_agg(s.t, ', ') FROM ({status}) s(t)"),
            "audit audit.login published, default orders.made published",
        )
        .await;
}
