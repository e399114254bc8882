//! The examples of adopted tables, run as their README says: made and filled by plain SQL, relayed, consumed.

#![allow(clippy::expect_used, clippy::panic, reason = "a test that cannot go on must panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use postrider_testkit::testbed;

/// Something that listens: message ids and bodies.
struct Sink {
    port: u16,
    got: Arc<Mutex<Vec<(String, String)>>>,
}

impl Sink {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let (port, got) = (listener.local_addr().expect("an address").port(), Arc::new(Mutex::new(Vec::new())));
        let kept = got.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let kept = kept.clone();
                std::thread::spawn(move || serve(stream, &kept));
            }
        });
        Self { port, got }
    }

    /// Waits for that many events.
    fn wait(&self, count: usize) -> Vec<(String, String)> {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let got = self.got.lock().expect("not poisoned").clone();
            if got.len() >= count {
                return got;
            }
            assert!(Instant::now() < until, "only {got:?} came");
            std::thread::park_timeout(Duration::from_millis(50));
        }
    }
}

fn serve(mut stream: TcpStream, got: &Mutex<Vec<(String, String)>>) {
    let mut reader = BufReader::new(stream.try_clone().expect("a clone"));
    loop {
        let (mut line, mut id, mut length) = (String::new(), String::new(), 0);
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        loop {
            let mut header = String::new();
            if reader.read_line(&mut header).unwrap_or(0) == 0 || header.trim().is_empty() {
                break;
            }
            let (name, value) = header.trim().split_once(": ").unwrap_or_default();
            match name.to_lowercase().as_str() {
                "ce-id" => id = value.to_owned(),
                "content-length" => length = value.parse().expect("a number"),
                _ => {}
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).expect("the body");
        got.lock().expect("not poisoned").push((id, String::from_utf8(body).expect("text")));
        let _ = stream.write_all(b"HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n");
    }
}

fn folder(example: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(example)
}

fn psql(url: &str, file: &Path) {
    let output =
        Command::new("psql").args([url, "-v", "ON_ERROR_STOP=1", "-q", "-f"]).arg(file).output().expect("psql runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A `postrider` that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn postrider(example: &str, environment: &[(&str, &str)], arguments: &[&str]) -> Command {
    let program = PathBuf::from(env!("CARGO_BIN_EXE_crash")).with_file_name("postrider");
    let mut command = Command::new(program);
    command.args(arguments).current_dir(folder(example)).envs(environment.iter().copied()).stdin(Stdio::null());
    command
}

/// Runs an example; returns what the consumer got and what a query then says.
async fn run(example: &str, events: usize, left: &str) -> Vec<(String, String)> {
    let database = testbed::postgres().await.database(&testbed::unique(example)).await.expect("a database");
    let vhost = testbed::rabbitmq().await.vhost(&testbed::unique(example)).await.expect("a virtual host");
    let sink = Sink::start();
    psql(&database, &folder(example).join("schema.sql"));
    let port = sink.port.to_string();
    let environment = [
        ("DATABASE_URL", database.as_str()),
        ("BROKER_URL", vhost.as_str()),
        ("PORT", port.as_str()),
        ("POSTRIDER__HTTP__LISTEN", "127.0.0.1:0"),
    ];
    let log = tempfile::NamedTempFile::new().expect("a file");
    let running = postrider(example, &environment, &["run", "--migrate"])
        .stderr(log.reopen().expect("a file"))
        .stdout(Stdio::null())
        .spawn()
        .expect("`make test` builds postrider first");
    let _running = Running(running);
    psql(&database, &folder(example).join("events.sql"));
    let got = tokio::task::spawn_blocking(move || sink.wait(events)).await;
    let got = got.unwrap_or_else(|_| panic!("{}", std::fs::read_to_string(log.path()).unwrap_or_default()));
    let mut connection = <sqlx::PgConnection as sqlx::Connection>::connect(&database).await.expect("connects");
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let found: i64 =
            sqlx::query_scalar(sqlx::AssertSqlSafe(left.to_owned())).fetch_one(&mut connection).await.expect("answers");
        if found == 0 {
            break;
        }
        assert!(Instant::now() < until, "{found} rows are not marked");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let status = postrider(example, &environment, &["status", "--json"]).output().expect("runs");
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).expect("JSON");
    assert_eq!((&status["backlog"]["pending"], &status["backlog"]["failed"]), (&0.into(), &0.into()), "{status}");
    let doctor = postrider(example, &environment, &["doctor", "--json"]).output().expect("runs");
    assert!(doctor.status.success(), "{}", String::from_utf8_lossy(&doctor.stdout));
    got
}

#[tokio::test(flavor = "multi_thread")]
async fn the_shop() {
    let left = r#"SELECT count(*) FROM "OutboxMessages" WHERE "ProcessedOnUtc" IS NULL"#;
    let got = run("shop", 2, left).await;
    assert_eq!(got.len(), 2, "{got:?}");
    assert!(got.iter().any(|(_, body)| body.contains("\"total\": 120")), "{got:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_campus() {
    let got = run("campus", 2, "SELECT count(*) FROM outbox_events WHERE status <> 'published'").await;
    let students: Vec<bool> = got.iter().map(|(_, body)| body.contains("s-1")).collect();
    assert_eq!(students, [true, false], "in the order of the course");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_product_service() {
    let got = run("pim", 2, "SELECT count(*) FROM outbox_events WHERE NOT published").await;
    assert!(got.iter().any(|(id, _)| id == "9d2f0c44-0000-4000-8000-000000000002"), "{got:?}");
}

/// Courses of the long run, and how many changes each has.
const COURSES: i64 = 40;
const CHANGES: i64 = 50;

/// Two instances relay the campus's table while one after the other is killed: between publishing and marking, too, because
/// that is where an instance is most of the time. Everything arrives, and of each course in its order.
#[tokio::test(flavor = "multi_thread")]
async fn the_campus_survives_kills() {
    let database = testbed::postgres().await.database(&testbed::unique("campus")).await.expect("a database");
    let vhost = testbed::rabbitmq().await.vhost(&testbed::unique("campus")).await.expect("a virtual host");
    let sink = Sink::start();
    psql(&database, &folder("campus").join("schema.sql"));
    let port = sink.port.to_string();
    let environment = [
        ("DATABASE_URL", database.as_str()),
        ("BROKER_URL", vhost.as_str()),
        ("PORT", port.as_str()),
        ("POSTRIDER__HTTP__LISTEN", "127.0.0.1:0"),
        // Small looks: there are more moments to die in.
        ("POSTRIDER__RELAY__PAGE", "10"),
    ];
    let start = |command: &[&str]| {
        let mut command = postrider("campus", &environment, command);
        Running(command.stderr(Stdio::null()).stdout(Stdio::null()).spawn().expect("`make test` builds postrider"))
    };
    assert!(start(&["migrate"]).0.wait().expect("ends").success());
    let mut connection = <sqlx::PgConnection as sqlx::Connection>::connect(&database).await.expect("connects");
    let mut instances = [start(&["run"]), start(&["run"])];
    for round in 0..CHANGES {
        sqlx::query(
            "INSERT INTO outbox_events (routing_key, aggregate_type, aggregate_id, payload) \
             SELECT 'course.changed', 'course', 'c-' || c, json_build_object('course', c, 'change', $1::bigint) \
             FROM generate_series(1, $2) c",
        )
        .bind(round)
        .bind(COURSES)
        .execute(&mut connection)
        .await
        .expect("inserted");
        tokio::time::sleep(Duration::from_millis(40)).await;
        if round % 5 == 4 {
            let place = (round / 5 % 2) as usize;
            instances[place].0.kill().expect("killed");
            instances[place].0.wait().expect("ended");
            instances[place] = start(&["run"]);
        }
    }
    let got = tokio::task::spawn_blocking(move || {
        let all = usize::try_from(COURSES * CHANGES).expect("fits");
        let until = Instant::now() + Duration::from_secs(90);
        loop {
            let got = sink.got.lock().expect("not poisoned").clone();
            let ids: BTreeSet<&String> = got.iter().map(|(id, _)| id).collect();
            if ids.len() >= all {
                return got;
            }
            assert!(Instant::now() < until, "{} of {all} events came", ids.len());
            std::thread::park_timeout(Duration::from_millis(100));
        }
    });
    let got = got.await.expect("all came");
    // A service that is posted to may get an event again, when the instance dies before it has written down that it was
    // taken; the first time counts.
    let (mut seen, mut last) = (BTreeSet::new(), BTreeMap::new());
    for (id, body) in &got {
        if seen.insert(id) {
            let body: serde_json::Value = serde_json::from_str(body).expect("JSON");
            let (course, change) = (body["course"].as_i64(), body["change"].as_i64().expect("a number"));
            let before = last.insert(course, change).unwrap_or(-1);
            assert_eq!(before + 1, change, "course {course:?}");
        }
    }
    println!("{} events came, {} again", seen.len(), got.len() - seen.len());
    assert_eq!(seen.len(), usize::try_from(COURSES * CHANGES).expect("fits"));
    let until = Instant::now() + Duration::from_secs(20);
    while sqlx::query_scalar::<_, i64>("SELECT count(*) FROM outbox_events WHERE status <> 'published'")
        .fetch_one(&mut connection)
        .await
        .expect("answers")
        > 0
    {
        assert!(Instant::now() < until, "rows are not marked");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
