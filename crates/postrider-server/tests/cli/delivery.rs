//! Delivery over HTTP: services that work, services that do not, and the example in Python.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;

use crate::harness::{Daemon, Place, eventually};

/// One request as a service got it.
#[derive(Debug, Clone)]
struct Got {
    path: String,
    headers: HashMap<String, String>,
    body: String,
}

/// A service whose answers depend on the path.
struct Service {
    port: u16,
    got: Arc<Mutex<Vec<Got>>>,
}

impl Service {
    fn start() -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").unwrap())
    }

    fn on(listener: TcpListener) -> Self {
        let (port, got) = (listener.local_addr().unwrap().port(), Arc::new(Mutex::new(Vec::new())));
        let seen = got.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let seen = seen.clone();
                std::thread::spawn(move || serve(stream, &seen));
            }
        });
        Self { port, got }
    }

    fn got(&self, path: &str) -> Vec<Got> {
        self.got.lock().unwrap().iter().filter(|got| got.path == path).cloned().collect()
    }

    /// A consumer of everything at this path, quick to try again.
    fn consumer(&self, path: &str, more: &str) -> String {
        let (port, name) = (self.port, path.trim_start_matches('/'));
        format!(
            "[[consumer]]\nname = \"{name}\"\nurl = \"http://127.0.0.1:{port}{path}\"\ntimeout_ms = 500\nretries = 2\n\
             backoff_base_ms = 20\n{more}\n"
        )
    }
}

fn serve(stream: TcpStream, seen: &Mutex<Vec<Got>>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut stream = stream;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
        let mut headers = HashMap::new();
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 || line.trim().is_empty() {
                break;
            }
            let (name, value) = line.trim().split_once(": ").unwrap_or_default();
            headers.insert(name.to_lowercase(), value.to_owned());
        }
        let length = headers.get("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
        let mut body = vec![0; length];
        if reader.read_exact(&mut body).is_err() {
            return;
        }
        let body = String::from_utf8(body).unwrap();
        let times = {
            let mut seen = seen.lock().unwrap();
            seen.push(Got { path: path.clone(), headers, body });
            seen.iter().filter(|got| got.path == path).count()
        };
        let answer = match path.as_str() {
            "/gone" => "HTTP/1.1 410 Gone\r\ncontent-length: 0\r\n\r\n",
            "/broken" => "HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n",
            "/moved" => "HTTP/1.1 302 Found\r\nlocation: /ok\r\ncontent-length: 0\r\n\r\n",
            "/busy" if times == 1 => "HTTP/1.1 429 Slow down\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n",
            "/garbage" => "SMTP ready, {\"<script>\r\n\r\n",
            // 200, but what it promised never comes.
            "/slow" => "HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nabc",
            "/never" => "",
            _ => "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n<garbage>",
        };
        if stream.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

/// The dead letters of a consumer: the type of the error and how often it was tried.
fn dead(place: &Place, consumer: &str) -> Vec<(String, i64)> {
    let listed = place.run_with(&["dead", "list", "--consumer", consumer, "--json"], &[("TOKEN", "t-1")]).json();
    let read =
        |letter: &Value| (letter["error_type"].as_str().unwrap().to_owned(), letter["attempts"].as_i64().unwrap());
    listed.as_array().unwrap().iter().map(read).collect()
}

fn send(daemon: &Daemon, key: &str) {
    let body = format!(r#"{{"topic":"orders.paid","type":"order.paid","key":"{key}","payload":{{"order":"{key}"}}}}"#);
    assert_eq!(daemon.post(&body).status, 202);
}

#[test]
fn each_service_gets_its_events_and_hurts_only_itself() {
    let service = Service::start();
    let place = Place::new();
    let secret = "secret = \"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\"\nauthorization = \"Bearer ${TOKEN}\"";
    let paths = ["/gone", "/broken", "/moved", "/busy", "/garbage", "/slow", "/never"];
    let mut config = service.consumer("/ok", secret);
    for path in paths {
        config.push_str(&service.consumer(path, ""));
    }
    config.push_str(&service.consumer("/elsewhere", "topics = [\"invoices.*\"]"));
    place.write("postrider.toml", &config);
    let daemon = place.daemon(&[("TOKEN", "t-1")]).ready();
    send(&daemon, "o-1");

    let first = eventually("the event", || service.got("/ok").first().cloned());
    assert_eq!(first.body, r#"{"order":"o-1"}"#);
    let header = |name: &str| first.headers.get(name).map(String::as_str).unwrap_or_default();
    assert_eq!((header("ce-type"), header("ce-partitionkey")), ("order.paid", "o-1"));
    assert_eq!(header("content-type"), "application/json");
    assert_eq!(header("authorization"), "Bearer t-1");
    assert_eq!(header("idempotency-key"), header("ce-id"));
    assert_eq!(header("webhook-id"), header("ce-id"));
    assert!(header("webhook-signature").starts_with("v1,"), "{first:?}");

    let expected = [
        ("gone", "http_410", 1),
        ("broken", "http_500", 3),
        ("moved", "http_302", 3),
        ("garbage", "http_network", 3),
        ("slow", "http_timeout", 3),
        ("never", "http_timeout", 3),
    ];
    for (consumer, error, attempts) in expected {
        let letters = eventually(consumer, || Some(dead(&place, consumer)).filter(|letters| !letters.is_empty()));
        assert_eq!(letters, [(error.to_owned(), attempts)], "{consumer}");
    }
    eventually("the second try", || (service.got("/busy").len() == 2).then_some(()));
    std::thread::park_timeout(Duration::from_millis(300));
    assert_eq!(dead(&place, "busy"), []);
    assert_eq!((service.got("/ok").len(), service.got("/busy").len()), (1, 2), "and no redirect was followed");
    assert_eq!(service.got("/elsewhere").len(), 0, "another topic");
    assert!(!format!("{:?}", daemon.log()).contains("t-1"), "secrets stay out of the log");
}

#[test]
fn events_wait_for_a_service_that_is_away() {
    // A port that nobody listens on.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let place = Place::new();
    let consumer = format!(
        "[breaker]\nopen_ms = 600\n[[consumer]]\nname = \"away\"\nurl = \"http://127.0.0.1:{port}/\"\n\
         timeout_ms = 500\nretries = 5\n"
    );
    place.write("postrider.toml", &consumer);
    let doctor = place.run(&["doctor"]);
    assert!(doctor.stdout.contains("away cannot be reached at 127.0.0.1"), "{}", doctor.stdout);
    let mut daemon = place.daemon(&[]).ready();
    for n in 0..40 {
        send(&daemon, &format!("o-{n}"));
    }
    let line = daemon.logged("cannot apply an event");
    assert!(line.to_string().contains("the breaker of 127.0.0.1"), "{line}");
    // Killed in the middle: what was not confirmed comes again.
    daemon.signal("KILL");
    daemon.ended();
    let service = Service::on(TcpListener::bind(("127.0.0.1", port)).unwrap());
    let mut daemon = place.daemon(&[]).ready();
    eventually("all events", || (service.got("/").len() >= 40).then_some(()));
    daemon.signal("TERM");
    assert!(daemon.ended().success());
    let ids = |got: Vec<Got>| got.iter().map(|got| got.headers["idempotency-key"].clone()).collect::<Vec<_>>();
    let mut ids = ids(service.got("/"));
    assert_eq!(ids.len(), 40, "none was given twice");
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 40);
    assert_eq!(dead(&place, "away"), []);
}

/// Ends the process when the test does.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_service_in_python_consumes_and_produces() {
    let example = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/http-service");
    let place = Place::new();
    for file in ["service.py", "postrider.toml"] {
        std::fs::copy(example.join(file), place.path(file)).unwrap();
    }
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let mut python = Command::new("python3");
    python.arg("service.py").env("PORT", &port).current_dir(place.path("")).stderr(Stdio::null());
    let _service = Running(python.spawn().expect("python3, which `make setup` looks for"));
    eventually("the service", || TcpStream::connect(format!("127.0.0.1:{port}")).ok());
    let daemon = place.daemon(&[("PORT", port.as_str())]).ready();
    for n in 0..20 {
        let body = format!(
            r#"{{"topic":"orders.placed","type":"order.placed","key":"o-{n}","payload":{{"order":"o-{n}","total":{n}}}}}"#
        );
        assert_eq!(daemon.post(&body).status, 202);
    }
    let invoices = eventually("the invoices", || {
        let tail = place.run_with(
            &["tail", "--from-start", "--topic", "invoices.#", "--payload", "--json", "--limit", "20"],
            &[("PORT", port.as_str())],
        );
        let lines: Vec<Value> = tail.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        (lines.len() == 20).then_some(lines)
    });
    let mut orders: Vec<&str> = invoices.iter().map(|line| line["payload"]["order"].as_str().unwrap()).collect();
    orders.sort_unstable();
    orders.dedup();
    assert_eq!(orders.len(), 20);
}
