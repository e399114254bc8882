//! Who is let in over HTTP: tokens, sessions, and this machine alone.

use serde_json::{Value, json};

use crate::harness::{Answer, Daemon, Place};

/// A daemon with an operator, a viewer and a producer.
pub struct Guarded {
    pub daemon: Daemon,
    pub operator: String,
    pub viewer: String,
    pub producer: String,
    _place: Place,
}

/// Makes the tokens as an operator would, and writes them into the configuration.
pub fn write_tokens(place: &Place) -> [String; 3] {
    let mut config = String::new();
    let tokens = [("ops", "operator"), ("eye", "viewer"), ("shop", "producer")].map(|(name, role)| {
        let made = place.run(&["token", "new", "--name", name, "--role", role, "--json"]).json();
        let hash = made["hash"].as_str().unwrap();
        config.push_str(&format!("[[token]]\nname = \"{name}\"\nrole = \"{role}\"\nhash = \"{hash}\"\n"));
        made["token"].as_str().unwrap().to_owned()
    });
    place.write("postrider.toml", &config);
    tokens
}

impl Guarded {
    pub fn new() -> Self {
        let place = Place::migrated();
        let [operator, viewer, producer] = write_tokens(&place);
        let daemon = place.daemon(&[]).ready();
        Self { daemon, operator, viewer, producer, _place: place }
    }

    fn with(&self, token: &str, method: &str, path: &str, body: &str) -> Answer {
        let authorization = format!("Bearer {token}");
        let headers = [("authorization", authorization.as_str()), ("content-type", "application/json")];
        self.daemon.request(method, path, &headers, body)
    }

    /// Logs in and returns the cookie and the CSRF token.
    fn log_in(&self, token: &str) -> (String, String) {
        let answer = self.daemon.post_to("/api/v1/session", &json!({ "token": token }).to_string());
        assert_eq!(answer.status, 200, "{}", answer.body);
        let line = answer.head.lines().find(|line| line.starts_with("set-cookie: ")).unwrap();
        for part in ["httponly", "samesite=strict", "path=/", "max-age=43200"] {
            assert!(line.contains(part), "{part} is missing in {line}");
        }
        let cookie = line.trim_start_matches("set-cookie: ").split(';').next().unwrap().to_owned();
        (cookie, answer.json()["csrf"].as_str().unwrap().to_owned())
    }
}

#[track_caller]
pub fn refused(answer: &Answer, status: u16, kind: &str) {
    assert_eq!(answer.status, status, "{}", answer.body);
    assert!(answer.head.contains("content-type: application/problem+json"), "{}", answer.head);
    let problem = answer.json();
    assert_eq!(problem["type"], format!("urn:postrider:problem:{kind}"), "{}", answer.body);
    assert!(problem["remedy"].as_str().is_some_and(|remedy| !remedy.is_empty()), "{}", answer.body);
}

const SILENCE: &str = r#"{"rule":"stale","for_secs":60,"reason":"a test"}"#;
const EVENT: &str = r#"{"topic":"a.b","type":"t","payload":1}"#;

#[test]
fn a_token_does_what_its_role_may() {
    let guarded = Guarded::new();
    let daemon = &guarded.daemon;
    for path in ["/healthz", "/readyz", "/api/v1/openapi.json", "/api/v1/session"] {
        assert_eq!(daemon.get(path).status, 200, "{path}");
    }
    for path in ["/metrics", "/api/v1/overview", "/api/v1/audit", "/api/v1/dead-letters/1/payload"] {
        let answer = daemon.get(path);
        refused(&answer, 401, "unauthorized");
        assert!(answer.head.contains("www-authenticate: bearer"), "{}", answer.head);
        refused(&guarded.with("prt_wrong", "GET", path, ""), 401, "unauthorized");
    }
    let (operator, viewer, producer) = (&guarded.operator, &guarded.viewer, &guarded.producer);
    for (token, method, path, body, status) in [
        (viewer, "GET", "/metrics", "", 200),
        (viewer, "GET", "/api/v1/overview", "", 200),
        (viewer, "GET", "/api/v1/dead-letters/1", "", 404),
        (viewer, "GET", "/api/v1/dead-letters/1/payload", "", 403),
        (viewer, "POST", "/api/v1/silences", SILENCE, 403),
        (viewer, "DELETE", "/api/v1/silences/1", "", 403),
        (viewer, "POST", "/api/v1/integrity", "", 403),
        (viewer, "POST", "/api/v1/dead-letters/replays", r#"{"all":true}"#, 403),
        (viewer, "POST", "/api/v1/dead-letters/discards", r#"{"all":true,"reason":"x"}"#, 403),
        (viewer, "POST", "/api/v1/events", EVENT, 403),
        (producer, "POST", "/api/v1/events", EVENT, 202),
        (producer, "GET", "/api/v1/overview", "", 403),
        (producer, "GET", "/metrics", "", 403),
        (operator, "POST", "/api/v1/events", EVENT, 202),
        (operator, "POST", "/api/v1/silences", SILENCE, 201),
        (operator, "GET", "/api/v1/dead-letters/1/payload", "", 404),
    ] {
        let answer = guarded.with(token, method, path, body);
        assert_eq!(answer.status, status, "{method} {path}: {}", answer.body);
        if status == 403 {
            refused(&answer, 403, "forbidden");
        }
    }
    let audit = guarded.with(viewer, "GET", "/api/v1/audit", "").json();
    assert_eq!(audit["items"][0]["actor"], "token:ops", "{audit}");
    assert_eq!(audit["items"][0]["action"], "silence", "{audit}");
}

#[test]
fn a_browser_logs_in_acts_and_logs_out() {
    let guarded = Guarded::new();
    let daemon = &guarded.daemon;
    let before = daemon.get("/api/v1/session").json();
    assert_eq!((&before["needs_login"], &before["role"], &before["csrf"]), (&json!(true), &Value::Null, &Value::Null));
    refused(&daemon.post_to("/api/v1/session", r#"{"token":"prt_wrong"}"#), 401, "unauthorized");
    let (cookie, csrf) = guarded.log_in(&guarded.operator);
    let ask = |method: &str, path: &str, more: &[(&str, &str)], body: &str| {
        let headers = [&[("cookie", cookie.as_str()), ("content-type", "application/json")], more].concat();
        daemon.request(method, path, &headers, body)
    };
    let session = ask("GET", "/api/v1/session", &[], "").json();
    assert_eq!(
        (&session["name"], &session["role"], &session["csrf"]),
        (&json!("ops"), &json!("operator"), &json!(csrf))
    );
    assert_eq!(ask("GET", "/api/v1/overview", &[], "").status, 200);

    refused(&ask("POST", "/api/v1/silences", &[], SILENCE), 403, "csrf");
    refused(&ask("POST", "/api/v1/silences", &[("x-postrider-csrf", "0000")], SILENCE), 403, "csrf");
    let with = [("x-postrider-csrf", csrf.as_str())];
    let other = [with[0], ("sec-fetch-site", "cross-site")];
    refused(&ask("POST", "/api/v1/silences", &other, SILENCE), 403, "cross_site");
    assert_eq!(ask("POST", "/api/v1/silences", &with, SILENCE).status, 201);

    assert_eq!(ask("DELETE", "/api/v1/session", &[], "").status, 403);
    let out = ask("DELETE", "/api/v1/session", &with, "");
    assert!(out.status == 204 && out.head.contains("max-age=0"), "{}", out.head);
    let stale = ask("GET", "/api/v1/overview", &[], "");
    refused(&stale, 401, "unauthorized");
    assert!(stale.head.contains("set-cookie: postrider_session=;"), "{}", stale.head);

    let audit = guarded.with(&guarded.viewer, "GET", "/api/v1/audit", "");
    let lines: Vec<Value> = audit.json()["items"].as_array().unwrap().iter().rev().cloned().collect();
    let said: Vec<(&str, &str)> =
        lines.iter().map(|line| (line["action"].as_str().unwrap(), line["actor"].as_str().unwrap())).collect();
    let ops = "token:ops";
    assert_eq!(said, [("login_failed", "unknown"), ("login", ops), ("silence", ops), ("logout", ops)]);
    let log = format!("{:?}{}", daemon.log(), audit.body);
    assert!(!log.contains("prt_") && !log.contains(&csrf) && !log.contains(&cookie), "{log}");
}

#[test]
fn forged_sessions_are_refused_and_forgotten() {
    let guarded = Guarded::new();
    let (cookie, csrf) = guarded.log_in(&guarded.viewer);
    let (body, signature) = cookie.rsplit_once('.').unwrap();
    let zeros = "0".repeat(64);
    for forged in [
        format!("{body}.{zeros}"),
        cookie.replace("=eye.", "=ops."),
        format!("{body}x.{signature}"),
        "postrider_session=".to_owned(),
        "postrider_session=a.b.c.d".to_owned(),
        format!("postrider_session={}", "x".repeat(400)),
    ] {
        let answer = guarded.daemon.request("GET", "/api/v1/overview", &[("cookie", &forged)], "");
        refused(&answer, 401, "unauthorized");
        assert!(answer.head.contains("max-age=0"), "{forged}: {}", answer.head);
    }
    // A viewer's session is no operator's, with its CSRF token or without.
    let headers = [("cookie", cookie.as_str()), ("x-postrider-csrf", &csrf), ("content-type", "application/json")];
    refused(&guarded.daemon.request("POST", "/api/v1/silences", &headers, SILENCE), 403, "forbidden");
    refused(&guarded.daemon.request("GET", "/api/v1/dead-letters/1/payload", &headers, ""), 403, "forbidden");
}

#[test]
fn wrong_tokens_are_counted() {
    let guarded = Guarded::new();
    let wrong = json!({ "token": "prt_guess" }).to_string();
    let shop = json!({ "token": guarded.producer }).to_string();
    refused(&guarded.daemon.post_to("/api/v1/session", &shop), 403, "forbidden");
    for _ in 0..9 {
        refused(&guarded.daemon.post_to("/api/v1/session", &wrong), 401, "unauthorized");
    }
    let answer = guarded.daemon.post_to("/api/v1/session", &wrong);
    refused(&answer, 429, "too_many");
    assert!(answer.head.contains("retry-after: "), "{}", answer.head);
    assert_eq!(guarded.with(&guarded.viewer, "GET", "/api/v1/overview", "").status, 200, "programs go on");
    let audit = guarded.with(&guarded.viewer, "GET", "/api/v1/audit", "").json();
    assert_eq!(audit["items"].as_array().unwrap().len(), 10, "what was not looked at is not written down");
    assert_eq!((&audit["items"][9]["actor"], &audit["items"][0]["actor"]), (&json!("token:shop"), &json!("unknown")));
    for (body, status) in [("{}", 400), ("", 400), (r#"{"token":1}"#, 400), (r#"{"token":"a","more":1}"#, 400)] {
        assert_eq!(guarded.daemon.post_to("/api/v1/session", body).status, status, "{body}");
    }
    let large = json!({ "token": "x".repeat(5000) }).to_string();
    refused(&guarded.daemon.post_to("/api/v1/session", &large), 413, "too_large");
    let plain = [("content-type", "text/plain")];
    refused(&guarded.daemon.request("POST", "/api/v1/session", &plain, &wrong), 415, "media_type");
    assert_eq!(guarded.daemon.post_to("/api/v1/session", &shop).status, 429);
    let right = json!({ "token": guarded.viewer }).to_string();
    assert_eq!(guarded.daemon.post_to("/api/v1/session", &right).status, 200, "nobody is locked out by guesses");
}

#[test]
fn without_tokens_this_machine_is_trusted_and_other_sites_are_not() {
    let place = Place::migrated();
    let daemon = place.daemon(&[]).ready();
    let session = daemon.get("/api/v1/session").json();
    assert_eq!((&session["needs_login"], &session["name"]), (&json!(false), &json!("local")));
    let ask = |headers: &[(&str, &str)]| daemon.request_as("evil.example:7070", "GET", "/api/v1/overview", headers, "");
    refused(&ask(&[]), 403, "host");
    assert_eq!(daemon.request_as("evil.example", "GET", "/healthz", &[], "").status, 200);
    assert_eq!(daemon.get("/api/v1/overview").status, 200);
    refused(&daemon.request("GET", "/api/v1/overview", &[("x-forwarded-for", "203.0.113.9")], ""), 403, "proxied");
    for headers in [("origin", "https://evil.example"), ("origin", "null"), ("sec-fetch-site", "cross-site")] {
        let json = ("content-type", "application/json");
        refused(&daemon.request("POST", "/api/v1/silences", &[json, headers], SILENCE), 403, "cross_site");
        refused(&daemon.request("POST", "/api/v1/events", &[json, headers], EVENT), 403, "cross_site");
    }
}

#[test]
fn without_tokens_another_address_answers_nobody() {
    let place = Place::migrated();
    let daemon = place.daemon(&[("POSTRIDER__HTTP__LISTEN", "0.0.0.0:0")]).ready();
    assert_eq!(daemon.get("/healthz").status, 200);
    for path in ["/metrics", "/api/v1/overview", "/api/v1/dead-letters", "/api/v1/events/stream"] {
        let answer = daemon.get(path);
        refused(&answer, 401, "unauthorized");
        assert!(answer.body.contains("postrider token new"), "{}", answer.body);
    }
    refused(&daemon.post(EVENT), 401, "unauthorized");
    let session = daemon.get("/api/v1/session").json();
    assert_eq!((&session["is_locked"], &session["role"]), (&json!(true), &Value::Null));
    let warned = daemon.logged("no token is configured");
    assert_eq!(warned["level"], "WARN", "{warned}");
}

#[test]
fn every_answer_has_its_headers() {
    let guarded = Guarded::new();
    let daemon = &guarded.daemon;
    let answers = [
        daemon.get("/healthz"),
        daemon.get("/api/v1/overview"),
        daemon.get("/nothing"),
        daemon.request("PATCH", "/api/v1/overview", &[], ""),
        guarded.with(&guarded.viewer, "GET", "/api/v1/overview", ""),
    ];
    for answer in answers {
        for header in [
            "content-security-policy: default-src 'none'; script-src 'self';",
            "frame-ancestors 'none'",
            "x-content-type-options: nosniff",
            "referrer-policy: no-referrer",
            "cross-origin-opener-policy: same-origin",
            "permissions-policy: ",
            "cache-control: no-store",
        ] {
            assert!(answer.head.contains(header), "{header} is missing in {}", answer.head);
        }
        assert!(!answer.head.contains("access-control-allow"), "{}", answer.head);
    }
}

#[test]
fn a_token_is_made_for_the_configuration() {
    let place = Place::migrated();
    let ran = place.run(&["token", "new", "--name", "ops", "--role", "operator"]);
    let token = ran.stderr.split_whitespace().find(|word| word.starts_with("prt_")).unwrap().to_owned();
    let section = ran.ok();
    assert!(!section.contains(&token) && section.starts_with("[[token]]\nname = \"ops\""), "{section}");
    place.write("postrider.toml", &section);
    let daemon = place.daemon(&[]).ready();
    let authorization = [("authorization", format!("bearer {token}"))];
    let headers: Vec<(&str, &str)> = authorization.iter().map(|(name, value)| (*name, value.as_str())).collect();
    assert_eq!(daemon.request("GET", "/api/v1/overview", &headers, "").status, 200);

    place.run(&["token", "new", "--name", "a b", "--role", "viewer"]).fails(2, &["letters, digits"]);
    place.run(&["token", "new", "--name", "a", "--role", "admin"]).fails(2, &["viewer", "operator", "producer"]);
    place.write("postrider.toml", "[[token]]\nname = \"a\"\nrole = \"viewer\"\nhash = \"prt_secret\"\n");
    let said = place.run(&["status"]).fails(1, &["token.1.hash is a token, not its hash"]);
    assert!(!said.contains("prt_secret"), "{said}");
}
