//! Alerts of the real binary: who is told, what silences do, and which targets are refused.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::harness::{Daemon, Place, eventually};

/// A receiver of webhooks: the head and the body of every request. The first `failing` are answered with 500.
struct Hook {
    port: u16,
    got: Arc<Mutex<Vec<(String, Value)>>>,
}

impl Hook {
    fn start(failing: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, got) = (listener.local_addr().unwrap().port(), Arc::new(Mutex::new(Vec::new())));
        let kept = got.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let kept = kept.clone();
                std::thread::spawn(move || take(stream, failing, &kept));
            }
        });
        Self { port, got }
    }

    fn sink(&self, name: &str, kind: &str) -> String {
        let port = self.port;
        format!(
            "[[sink]]\nname = \"{name}\"\nkind = \"{kind}\"\nurl = \"http://127.0.0.1:{port}/{name}\"\nallow_private = true\n"
        )
    }

    fn got(&self) -> Vec<(String, Value)> {
        self.got.lock().unwrap().clone()
    }

    /// Waits for the first message of a rule in a state.
    #[track_caller]
    fn told(&self, rule: &str, state: &str) -> (String, Value) {
        let is_it = |(_, body): &(String, Value)| body["rule"] == rule && body["state"] == state;
        // A look every five seconds, and what is over lingers.
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(found) = self.got().into_iter().find(is_it) {
                return found;
            }
            assert!(Instant::now() < until, "{rule} {state} did not come: {:?}", self.got());
            std::thread::park_timeout(Duration::from_millis(50));
        }
    }
}

fn take(mut stream: TcpStream, failing: usize, kept: &Mutex<Vec<(String, Value)>>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    loop {
        let (mut head, mut length) = (String::new(), 0);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            if line.trim().is_empty() {
                break;
            }
            let line = line.to_lowercase();
            if let Some(value) = line.strip_prefix("content-length: ") {
                length = value.trim().parse().unwrap();
            }
            head.push_str(&line);
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let count = {
            let mut kept = kept.lock().unwrap();
            kept.push((head, serde_json::from_slice(&body).unwrap()));
            kept.len()
        };
        let answer = if count <= failing { "500 Oops" } else { "204 No Content" };
        stream.write_all(format!("HTTP/1.1 {answer}\r\ncontent-length: 0\r\n\r\n").as_bytes()).unwrap();
    }
}

/// A mail server that takes everything; returns what it got.
fn mail_server() -> (u16, Arc<Mutex<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (port, got) = (listener.local_addr().unwrap().port(), Arc::new(Mutex::new(String::new())));
    let kept = got.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let (mut reader, mut stream) = (BufReader::new(stream.try_clone().unwrap()), stream);
            let mut is_data = false;
            stream.write_all(b"220 mail.test ESMTP\r\n").unwrap();
            loop {
                let mut line = String::new();
                if reader.read_line(&mut line).unwrap_or(0) == 0 {
                    break;
                }
                kept.lock().unwrap().push_str(&line);
                let answer = match (is_data, line.trim_end()) {
                    (true, ".") => {
                        is_data = false;
                        "250 taken\r\n"
                    }
                    (true, _) => "",
                    (false, "DATA") => {
                        is_data = true;
                        "354 go on\r\n"
                    }
                    (false, _) => "250 fine\r\n",
                };
                if stream.write_all(answer.as_bytes()).is_err() {
                    break;
                }
            }
        }
    });
    (port, got)
}

/// An event that nobody relays is stale after a second.
const STALE: &[(&str, &str)] = &[("POSTRIDER__RELAY__ENABLED", "false"), ("POSTRIDER__RELAY__STALE_AFTER_S", "1")];

fn send(place: &Place) {
    place.run(&["send", "a", "t", "--key", "secret-key", "--payload", r#"{"secret":"payload"}"#]).ok();
}

#[test]
fn everybody_is_told_once_and_again_when_it_is_over() {
    let (hook, chat) = (Hook::start(0), Hook::start(0));
    let (mail_port, mails) = mail_server();
    // A mail server that takes the connection and never says a word.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mail = |name: &str, port: u16| {
        format!(
            "[[sink]]\nname = \"{name}\"\nkind = \"smtp\"\nhost = \"127.0.0.1\"\nport = {port}\ntls = \"none\"\n\
             from = \"postrider@shop.example\"\nto = [\"ops@shop.example\", \"lead@shop.example\"]\n"
        )
    };
    let place = Place::migrated();
    let secret = "secret = \"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\"\nauthorization = \"Bearer t\"\n";
    let config = [
        "[alerts]\nurl = \"https://postrider.example/\"\nlatency_s = 3600\n".to_owned(),
        mail("hanging", silent.local_addr().unwrap().port()),
        mail("mail", mail_port),
        hook.sink("hook", "webhook") + secret,
        chat.sink("chat", "slack"),
    ];
    place.write("postrider.toml", &config.join(""));
    send(&place);
    let first = place.daemon(STALE).ready();
    // A second instance tells nothing twice.
    let second = place.daemon(STALE).ready();

    let (head, body) = hook.told("stale", "firing");
    assert_eq!((&body["subject"], &body["urgency"]), (&"relay/default".into(), &"critical".into()));
    assert!(body["summary"].as_str().unwrap().contains("an event has waited for"), "{body}");
    assert!(body["remedy"].as_str().unwrap().contains("postrider status"), "{body}");
    assert_eq!(body["url"], "https://postrider.example/#/alerts");
    assert!(body["resolved_at"].is_null() && body["alert"].is_number(), "{body}");
    let id = body["id"].as_str().unwrap();
    for part in ["post /hook http/1.1", "authorization: bearer t", "webhook-signature: v1,", "webhook-timestamp: "] {
        assert!(head.contains(part), "{part} is missing in {head}");
    }
    assert!(head.contains(&format!("webhook-id: {id}")) && head.contains(&format!("idempotency-key: {id}")), "{head}");
    let text = eventually("the chat", || chat.got().first().map(|(_, body)| body["text"].as_str().unwrap().to_owned()));
    assert!(text.starts_with("*[CRITICAL] stale relay/default*\n"), "{text}");
    eventually("the mail", || mails.lock().unwrap().contains("\r\n.\r\n").then_some(()));
    let mail = mails.lock().unwrap().clone();
    for part in ["RCPT TO:<ops@shop.example>", "RCPT TO:<lead@shop.example>", "Subject: [CRITICAL] stale relay/default"]
    {
        assert!(mail.contains(part), "{part} is missing in {mail}");
    }
    // The one that hangs is given up after ten seconds and tried again; it has delayed nobody.
    let line = eventually("the failure", || {
        let logs = [first.log(), second.log()].concat();
        logs.into_iter().find(|line| line["message"] == "an alert was not told, trying again")
    });
    assert_eq!(line["context"]["sink"], "hanging");
    let listed = place.run(&["alerts", "list", "--json"]).json();
    assert_eq!((listed["alerts"].as_array().unwrap().len(), &listed["alerts"][0]["rule"]), (1, &"stale".into()));
    let shown = place.run(&["alerts", "list"]).ok();
    assert!(shown.contains("critical") && shown.contains("relay/default"), "{shown}");

    // The one that watches dies; another goes on where it was, and tells nothing again.
    let is_watching = |daemon: &Daemon| daemon.log().iter().any(|line| line["message"] == "this instance watches");
    let (dead, heir) = if is_watching(&first) { (&first, &second) } else { (&second, &first) };
    dead.signal("KILL");
    heir.logged("this instance watches");

    // Somebody relays: it is over.
    let third = place.daemon(&[]).ready();
    let (_, over) = hook.told("stale", "resolved");
    assert_eq!(over["alert"], body["alert"]);
    assert_ne!(over["id"], body["id"]);
    eventually("the chat", || {
        chat.got().iter().find(|(_, body)| body["text"].to_string().contains("RESOLVED")).cloned()
    });
    assert_eq!(hook.got().len(), 2, "told more than once: {:?}", hook.got());
    let everything = format!("{:?}{:?}{mail}{:?}{:?}", hook.got(), chat.got(), first.log(), third.log());
    assert!(!everything.contains("secret-key") && !everything.contains("\"payload\""), "{everything}");
    assert_eq!(place.run(&["alerts", "list"]).ok().trim(), "nothing is wrong");
    assert_eq!(place.run(&["alerts", "list", "--all", "--json"]).json()["alerts"].as_array().unwrap().len(), 1);
}

#[test]
fn a_sink_that_fails_is_tried_again() {
    let hook = Hook::start(1);
    let place = Place::migrated();
    place.write("postrider.toml", &hook.sink("hook", "webhook"));
    send(&place);
    let daemon = place.daemon(STALE).ready();
    let got = eventually("the second try", || Some(hook.got()).filter(|got| got.len() >= 2));
    assert_eq!((&got[0].1["id"], &got[0].1["alert"]), (&got[1].1["id"], &got[1].1["alert"]), "the same message");
    let line = daemon.logged("an alert was not told, trying again");
    assert_eq!(line["error_type"], "unavailable");
}

#[test]
fn sinks_can_be_tried_without_an_alert() {
    let (hook, place) = (Hook::start(0), Place::new());
    place.run(&["alerts", "test"]).fails(1, &["there is no [[sink]]"]);
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let away = format!("[[sink]]\nname = \"away\"\nurl = \"http://127.0.0.1:{nobody}/\"\nallow_private = true\n");
    place.write("postrider.toml", &(hook.sink("hook", "webhook") + &away));
    let ran = place.run(&["alerts", "test"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (1, "hook: told\naway: not told\n"), "{}", ran.stderr);
    assert!(ran.stderr.contains("cannot be reached"), "{}", ran.stderr);
    assert_eq!(hook.got()[0].1["rule"], "test");
}

#[test]
fn silenced_alerts_are_told_to_nobody_until_the_silence_ends() {
    let hook = Hook::start(0);
    let place = Place::migrated();
    place.write("postrider.toml", &hook.sink("hook", "webhook"));
    let arguments = ["alerts", "silence", "--rule", "stale", "--for", "1h", "--reason", "moving", "--json"];
    let id = place.run(&arguments).json()["id"].to_string();
    send(&place);
    let daemon = place.daemon(STALE).ready();
    let line = daemon.logged("alert firing");
    assert!(line["context"]["summary"].as_str().unwrap().contains("an event has waited for"), "{line}");
    assert_eq!((&line["level"], &line["context"]["silenced"]), (&"INFO".into(), &true.into()));
    let listed = place.run(&["alerts", "list", "--json"]).json();
    assert_eq!((&listed["alerts"][0]["silenced"], &listed["silences"][0]["rule"]), (&true.into(), &"stale".into()));
    assert!(hook.got().is_empty(), "{:?}", hook.got());
    assert!(place.run(&["alerts", "unsilence", &id]).ok().contains("has ended"));
    hook.told("stale", "firing");
    place.run(&["alerts", "unsilence", &id]).fails(1, &["there is no silence", "postrider alerts list"]);
}

#[test]
fn mistakes_in_silences_are_named() {
    let place = Place::migrated();
    let silence = |more: &[&str]| place.run(&[&["alerts", "silence", "--reason", "x"], more].concat());
    silence(&["--rule", "braker_open", "--for", "1h"])
        .fails(1, &["no rule \"braker_open\"", "did you mean breaker_open?"]);
    silence(&["--rule", "store_unreachable", "--for", "1h"]).fails(1, &["cannot be silenced"]);
    silence(&["--rule", "stale", "--for", "1 hour"]).fails(2, &["such as 2h"]);
    silence(&["--rule", "stale", "--for", "31d"]).fails(2, &["at most 30d"]);
    silence(&["--for", "1h"]).fails(2, &["--rule"]);
    place.run(&["alerts", "silence", "--rule", "stale", "--for", "1h", "--reason", " "]).fails(1, &["reason is empty"]);
    place.run(&["alerts", "unsilence", "99"]).fails(1, &["there is no silence 99"]);
}

#[test]
fn webhooks_to_private_addresses_are_refused() {
    let place = Place::new();
    let private = [
        "http://127.0.0.1/hook",
        "http://localhost/hook",
        "http://169.254.169.254/latest/meta-data",
        "http://[::ffff:127.0.0.1]/hook",
        "http://[::1]/hook",
        "http://2130706433/hook",
        "http://0x7f.1/hook",
        "http://10.0.0.1/hook",
        "http://[fd00:ec2::254]/hook",
    ];
    for url in private {
        for kind in ["webhook", "slack"] {
            place.write("postrider.toml", &format!("[[sink]]\nname = \"a\"\nkind = \"{kind}\"\nurl = \"{url}\"\n"));
            place.run(&["run"]).fails(1, &["sink.1.url leads to this machine or a private network", "allow_private"]);
        }
    }
    place.write("postrider.toml", "[[sink]]\nname = \"a\"\nurl = \"ftp://x/\"\n");
    place.run(&["run"]).fails(1, &["sink.1.url is no address"]);
}

#[test]
fn the_check_finds_what_was_planted_and_nothing_else() {
    let hook = Hook::start(0);
    let place = Place::migrated();
    let clean = place.run(&["check", "--json"]).json();
    assert_eq!((&clean["errors"], &clean["warnings"]), (&0.into(), &0.into()), "{clean}");
    assert!(clean["checks"].as_u64().unwrap() >= 5, "{clean}");

    let query = |name: &str, sql: &str| format!("[[check_sql]]\nname = \"{name}\"\nsql = \"{sql}\"\n");
    let config = [
        hook.sink("hook", "webhook"),
        query("negative", "SELECT 7 AS order_id, -1 AS total UNION ALL SELECT 8, -2;") + "remedy = \"refund it\"\n",
        query("fine", "SELECT 1 WHERE 1 = 2"),
        query("wrong", "SELEC 1"),
        query("writes", "DELETE FROM outbox RETURNING 1"),
        query("odd", "SELECT 1 AS a") + "severity = \"warning\"\n",
    ];
    place.write("postrider.toml", &config.join(""));
    let ran = place.run(&["check"]);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    for part in [
        "error: sql.negative: order_id=7, total=-1\n  remedy: refund it",
        "error: sql.negative: order_id=8, total=-2",
        "error: sql.wrong: the query cannot be run",
        "error: sql.writes: ",
        "warning: sql.odd: a=1",
    ] {
        assert!(ran.stdout.contains(part), "{part:?} is missing in {}", ran.stdout);
    }
    assert!(!ran.stdout.contains("sql.fine"), "{}", ran.stdout);
    let listed = place.run(&["check", "--list", "--json"]).json();
    assert_eq!(
        (listed.as_array().unwrap().len(), &listed[0]["errors"], &listed[0]["warnings"]),
        (2, &4.into(), &1.into())
    );
    let id = listed[0]["id"].to_string();
    let shown = place.run(&["check", "--report", &id, "--json"]);
    assert_eq!(shown.code, 1);
    assert!(shown.stdout.contains("refund it"), "{}", shown.stdout);
    place.run(&["check", "--report", "999"]).fails(1, &["there is no report 999", "--list"]);

    // The report is an alert until a clean one.
    let _daemon = place.daemon(&[]).ready();
    let (_, told) = hook.told("integrity", "firing");
    assert!(told["remedy"].as_str().unwrap().contains(&format!("postrider check --report {id}")), "{told}");
    place.write("postrider.toml", &hook.sink("hook", "webhook"));
    place.run(&["check"]).ok();
    hook.told("integrity", "resolved");
}

/// Two instances, and a time that comes while they run.
#[test]
fn the_daily_check_runs_once_across_instances() {
    let place = Place::new();
    // At least two seconds ahead, so that both instances are up before.
    let at = chrono::Utc::now() + Duration::from_secs(62);
    let at = at.format("%H:%M").to_string();
    let environment = [("POSTRIDER__CHECK__AT", at.as_str())];
    let (first, second) = (place.daemon(&environment).ready(), place.daemon(&environment).ready());
    let until = Instant::now() + Duration::from_secs(100);
    let scheduled = || {
        let listed = place.run(&["check", "--list", "--json"]).json();
        let reports = listed.as_array().unwrap().clone();
        reports.into_iter().filter(|report| report["actor"] == "schedule").collect::<Vec<_>>()
    };
    while scheduled().iter().all(|report| report["ended_at"].is_null()) {
        assert!(Instant::now() < until, "no check was run: {:?}", first.log());
        std::thread::park_timeout(Duration::from_millis(500));
    }
    // The one that did not run it takes the watch over at once.
    let (runner, other) = match first.log().iter().any(|line| line["message"] == "this instance watches") {
        true => (first, second),
        false => (second, first),
    };
    runner.signal("TERM");
    other.logged("this instance watches");
    let reports = scheduled();
    assert_eq!(reports.len(), 1, "{reports:?}");
    assert_eq!(reports[0]["errors"], 0, "{reports:?}");
}

#[test]
fn mistakes_in_the_settings_of_check_and_sinks_are_named() {
    let place = Place::new();
    let says = |config: &str, parts: &[&str]| {
        place.write("postrider.toml", config);
        place.run(&["status"]).fails(1, parts);
    };
    says("[check]\nat = \"2 o'clock\"\n", &["check.at must be a time of day such as \"02:00\""]);
    says("[check]\ntime_zone = \"Asia/Saigonn\"\n", &["check.time_zone names no time zone that this system knows"]);
    says("[check]\ntime_zone = \"../../etc/passwd\"\n", &["check.time_zone must be a time zone such as"]);
    says("[[check_sql]]\nname = \"a\"\n", &["check_sql.1.sql is missing"]);
    says("[alerts]\nerror_rate = 2.0\n", &["alerts.error_rate must be above 0 and at most 1"]);
    says(
        "[[sink]]\nkind = \"pager\"\nname = \"a\"\n",
        &["sink.1.kind must be one of \"webhook\", \"slack\", \"smtp\""],
    );
    says("[[sink]]\nname = \"a\"\nkind = \"smtp\"\nhost = \"mx\"\nfrom = \"a@b\"\n", &["sink.1.to is missing"]);
    says(
        "[[sink]]\nname = \"a\"\nkind = \"smtp\"\nhost = \"mx\"\nfrom = \"Ops <a@b>\"\nto = [\"x\"]\n",
        &["sink.1.from must be an address", "sink.1.to must be an address"],
    );
    let plain =
        "[[sink]]\nname = \"a\"\nkind = \"smtp\"\nhost = \"mx\"\ntls = \"none\"\nuser = \"u\"\nfrom = \"a@b\"\n";
    says(&format!("{plain}to = [\"c@d\"]\n"), &["would send the password unprotected"]);
}

/// A server with TLS, ended with this value.
struct TlsServer(std::process::Child);

impl Drop for TlsServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_certificate_that_ends_soon_is_told() {
    let place = Place::new();
    let openssl = |arguments: &[&str]| {
        let mut command = std::process::Command::new("openssl");
        command.args(arguments).current_dir(place.path("")).stdin(std::process::Stdio::null());
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        command
    };
    let make = [
        "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key", "-out", "cert", "-days", "5", "-subj",
        "/CN=x",
    ];
    assert!(openssl(&make).status().expect("openssl runs").success());
    let port = {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        free.local_addr().unwrap().port().to_string()
    };
    let serve = ["s_server", "-accept", &format!("127.0.0.1:{port}"), "-cert", "cert", "-key", "key", "-quiet"];
    let _server = TlsServer(openssl(&serve).spawn().unwrap());
    eventually("the server", || TcpStream::connect(format!("127.0.0.1:{port}")).ok());
    let consumer = format!("[[consumer]]\nname = \"billing\"\nurl = \"https://127.0.0.1:{port}/events\"\n");
    place.write("postrider.toml", &consumer);
    let daemon = place.daemon(&[]).ready();
    let line = daemon.logged("alert firing");
    assert!(line["context"]["summary"].as_str().unwrap().contains("its certificate ends in"), "{line}");
    assert_eq!((&line["level"], &line["context"]["rule"]), (&"WARN".into(), &"certificate".into()));
    assert_eq!(line["context"]["subject"], format!("127.0.0.1:{port}"));
}
