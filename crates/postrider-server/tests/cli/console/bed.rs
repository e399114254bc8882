//! The binary with a consumer over HTTP that fails until it is mended, tokens, and low thresholds for alerts.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;

use super::browser::Browser;
use crate::harness::{Answer, Daemon, Place, eventually};

/// How many events fail. A staged replay takes them in three steps: one, ten, one.
pub const EVENTS: usize = 12;

pub struct Bed {
    pub place: Place,
    pub daemon: Daemon,
    is_broken: Arc<AtomicBool>,
    operator: String,
    viewer: String,
}

impl Bed {
    /// Starts it all; events are not there yet.
    pub fn new() -> Self {
        Self::beside(&[])
    }

    /// The same beside consumers that work.
    fn beside(others: &[&str]) -> Self {
        let place = Place::new();
        let is_broken = Arc::new(AtomicBool::new(true));
        let port = service(is_broken.clone());
        let (operator, operator_section) = token(&place, "ops", "operator");
        let (viewer, viewer_section) = token(&place, "guest", "viewer");
        let consumer = |name: &str| {
            format!(
                "[[consumer]]\nname = \"{name}\"\nurl = \"http://127.0.0.1:{port}/{name}\"\nretries = 1\nbackoff_base_ms = 20\n"
            )
        };
        let consumers: String = others.iter().chain(&["billing"]).map(|name| consumer(name)).collect();
        place.write(
            "postrider.toml",
            &format!(
                // The breaker would keep events from a service that is broken, and they would never become dead letters.
                "[breaker]\nfailures = 1000\nwindow = 1000\ncalls_min = 1000\n[alerts]\ndead_letters = 5\nattempts_min = 100000\n\
                 {consumers}{operator_section}\n{viewer_section}\n"
            ),
        );
        let daemon = place.daemon(&[]).ready();
        Self { place, daemon, is_broken, operator, viewer }
    }

    /// Starts the binary again, where it was.
    pub fn again(&mut self, address: &str) {
        self.daemon = self.place.daemon(&[("POSTRIDER__HTTP__LISTEN", address)]).ready();
    }

    /// The same with [`EVENTS`] dead letters.
    pub fn failing() -> Self {
        Self::failing_beside(&[])
    }

    /// The same beside consumers that work.
    pub fn failing_beside(others: &[&str]) -> Self {
        let bed = Self::beside(others);
        for number in 0..EVENTS {
            bed.send(&format!("order-{}", number % 5), "order.paid", &json!({ "order": number, "note": "secret" }));
        }
        bed.wait_for_dead(EVENTS);
        bed
    }

    pub fn send(&self, key: &str, kind: &str, payload: &serde_json::Value) {
        let event = json!({ "topic": "orders.paid", "type": kind, "key": key, "payload": payload });
        let answer = self.ask("POST", "/api/v1/events", &event.to_string());
        assert!(answer.status < 300, "{}", answer.body);
    }

    /// As the operator.
    pub fn ask(&self, method: &str, path: &str, body: &str) -> Answer {
        let bearer = format!("Bearer {}", self.operator);
        self.daemon.request(method, path, &[("authorization", &bearer), ("content-type", "application/json")], body)
    }

    pub fn wait_for_dead(&self, count: usize) {
        eventually("dead letters", || {
            let listed = self.ask("GET", "/api/v1/dead-letters", "").json();
            (listed["items"].as_array()?.len() == count).then_some(())
        });
    }

    /// From now on the service takes everything.
    pub fn mend(&self) {
        self.is_broken.store(false, Ordering::SeqCst);
    }

    pub fn address(&self) -> String {
        format!("http://{}/", self.daemon.address())
    }

    /// A browser in which somebody has logged in and sees the overview.
    pub fn browser(&self, role: &str) -> Browser {
        let browser = Browser::start();
        browser.open(&self.address());
        browser.write("input[name=token]", if role == "viewer" { &self.viewer } else { &self.operator });
        browser.click("button", "Sign in");
        browser.sees("Targets");
        browser
    }
}

/// A token and its section of the configuration.
fn token(place: &Place, name: &str, role: &str) -> (String, String) {
    let made = place.run(&["token", "new", "--name", name, "--role", role, "--json"]).json();
    let text = |member: &str| made[member].as_str().unwrap().to_owned();
    (text("token"), format!("[[token]]\nname = \"{name}\"\nrole = \"{role}\"\nhash = \"{}\"", text("hash")))
}

/// A service that is broken or not; its port.
fn service(is_broken: Arc<AtomicBool>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let is_broken = is_broken.clone();
            std::thread::spawn(move || serve(stream, &is_broken));
        }
    });
    port
}

fn serve(mut stream: TcpStream, is_broken: &AtomicBool) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    loop {
        let (mut length, mut is_billing) = (0, false);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            if line.trim().is_empty() {
                break;
            }
            is_billing |= line.starts_with("POST /billing ");
            if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap_or(0);
            }
        }
        let mut body = vec![0; length];
        if reader.read_exact(&mut body).is_err() {
            return;
        }
        // What a service says is not to be believed.
        let said = "<img src=x onerror=\"window.pwned = 1\"> the ledger is closed";
        let answer = match is_billing && is_broken.load(Ordering::SeqCst) {
            true => {
                format!("HTTP/1.1 500 Oops\r\ncontent-type: text/plain\r\ncontent-length: {}\r\n\r\n{said}", said.len())
            }
            false => "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n".to_owned(),
        };
        if stream.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}
