//! `/api/v1/events/stream`: what the console sees as it happens.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::access::write_tokens;
use crate::dead::{Bed, EVENTS};
use crate::harness::{Daemon, Place, SOON};
use crate::schema::Description;

/// An open stream.
struct Stream {
    lines: BufReader<TcpStream>,
}

impl Stream {
    fn open(daemon: &Daemon, headers: &str) -> Self {
        let mut stream = TcpStream::connect(daemon.address()).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let head = format!("GET /api/v1/events/stream HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        Self { lines: BufReader::new(stream) }
    }

    /// The next line; none at the end.
    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        match self.lines.read_line(&mut line) {
            Ok(0) | Err(_) => None,
            Ok(_) => Some(line.trim_end().to_owned()),
        }
    }

    fn status(&mut self) -> u16 {
        self.line().unwrap().split(' ').nth(1).unwrap().parse().unwrap()
    }

    /// The data of the next event of this name.
    #[track_caller]
    fn event(&mut self, name: &str) -> Value {
        let until = Instant::now() + SOON;
        while Instant::now() < until {
            let line = self.line().expect("the stream goes on");
            if line == format!("event: {name}") {
                let data = self.line().unwrap();
                return serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            }
        }
        panic!("the event {name} did not come");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stream_tells_what_changes() {
    let bed = Bed::new().await;
    let mut daemon = tokio::task::block_in_place(|| bed.place.daemon(&[]).ready());
    tokio::task::block_in_place(|| {
        let described = Description(daemon.get("/api/v1/openapi.json").json());
        let check = |name: &str, value: &Value| {
            let mistakes = described.mistakes(described.named(name), value);
            assert!(mistakes.is_empty(), "{mistakes:#?}");
        };
        let mut stream = Stream::open(&daemon, "");
        assert_eq!(stream.status(), 200);
        let overview = stream.event("overview");
        check("OverviewFast", &overview);
        assert_eq!(overview["consumers"][0]["dead"], EVENTS, "{overview}");
        check("AlertItems", &stream.event("alerts"));
        bed.is_broken.store(false, Ordering::SeqCst);
        let replay = daemon.post_to("/api/v1/dead-letters/replays", r#"{"all":true,"rate":100}"#).json();
        let mut told = Vec::new();
        while told.last().is_none_or(|last: &Value| last["state"] == "running") {
            let event = stream.event("replay");
            check("Replay", &event);
            assert_eq!(event["id"], replay["id"]);
            told.push(event);
        }
        let last = told.last().unwrap();
        assert_eq!(
            (&last["state"], &last["applied"], &last["expected"]),
            (&json!("done"), &json!(EVENTS), &json!(EVENTS))
        );
        assert!(told.len() >= 3, "a bar that moves: {told:?}");
        let overview = stream.event("overview");
        check("OverviewFast", &overview);

        // A stop ends streams at once; they do not delay it.
        let began = Instant::now();
        daemon.signal("TERM");
        while stream.line().is_some() {}
        assert!(daemon.ended().success());
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    });
    bed.stop().await;
}

#[test]
fn streams_are_bounded_and_guarded() {
    let place = Place::migrated();
    let [_, viewer, producer] = write_tokens(&place);
    let daemon = place.daemon(&[]).ready();
    assert_eq!(Stream::open(&daemon, "").status(), 401);
    assert_eq!(Stream::open(&daemon, &format!("authorization: Bearer {producer}\r\n")).status(), 403);
    let authorization = format!("authorization: Bearer {viewer}\r\n");
    let mut open: Vec<Stream> = (0..8).map(|_| Stream::open(&daemon, &authorization)).collect();
    assert!(open.iter_mut().all(|stream| stream.status() == 200));
    assert_eq!(Stream::open(&daemon, &authorization).status(), 503);
    open.pop();
    // The server notices that a client is gone when it writes to it, within two seconds.
    crate::harness::eventually("room", || (Stream::open(&daemon, &authorization).status() == 200).then_some(()));

    // A session's stream ends with the session.
    let login = daemon.post_to("/api/v1/session", &json!({ "token": viewer }).to_string());
    let cookie = login.head.lines().find_map(|line| line.strip_prefix("set-cookie: ")).unwrap();
    let cookie = cookie.split(';').next().unwrap().to_owned();
    drop(open);
    let mut stream = crate::harness::eventually("room", || {
        let mut stream = Stream::open(&daemon, &format!("cookie: {cookie}\r\n"));
        (stream.status() == 200).then_some(stream)
    });
    stream.event("overview");
    let csrf = login.json()["csrf"].as_str().unwrap().to_owned();
    let out = daemon.request("DELETE", "/api/v1/session", &[("cookie", &cookie), ("x-postrider-csrf", &csrf)], "");
    assert_eq!(out.status, 204, "{}", out.body);
    while stream.line().is_some() {}
}
