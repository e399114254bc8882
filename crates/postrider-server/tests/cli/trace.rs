//! One trace from the producer through relay and consumer to the service, in a collector.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use serde_json::Value;

use crate::harness::{Place, eventually};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PRODUCER: &str = "b7ad6b7169203331";

/// A request: its path, headers and body.
type Got = (String, Vec<String>, String);

/// Listens, keeps every request and answers 200.
fn listen() -> (u16, Arc<Mutex<Vec<Got>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (port, got) = (listener.local_addr().unwrap().port(), Arc::new(Mutex::new(Vec::new())));
    let kept = got.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let kept = kept.clone();
            std::thread::spawn(move || serve(stream, &kept));
        }
    });
    (port, got)
}

fn serve(mut stream: TcpStream, kept: &Mutex<Vec<Got>>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    loop {
        let mut head = Vec::new();
        for line in reader.by_ref().lines().map_while(Result::ok).take_while(|line| !line.is_empty()) {
            head.push(line.to_lowercase());
        }
        let Some(path) = head.first().and_then(|line| line.split(' ').nth(1)).map(str::to_owned) else { return };
        let length = head.iter().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok()).unwrap_or(0);
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        kept.lock().unwrap().push((path, head, String::from_utf8(body).unwrap()));
        if stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").is_err() {
            return;
        }
    }
}

fn spans(got: &Mutex<Vec<Got>>) -> Vec<Value> {
    let mut spans = Vec::new();
    for (path, head, body) in got.lock().unwrap().iter() {
        assert_eq!(path, "/v1/traces");
        assert!(head.contains(&"authorization: bearer s3cret".to_owned()), "{head:?}");
        let body: Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["resourceSpans"][0]["resource"]["attributes"][0]["value"]["stringValue"], "shop");
        spans.extend(body["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().unwrap().iter().cloned());
    }
    spans
}

fn attribute<'a>(span: &'a Value, name: &str) -> Option<&'a str> {
    let found = span["attributes"].as_array()?.iter().find(|attribute| attribute["key"] == name)?;
    found["value"]["stringValue"].as_str()
}

#[test]
fn a_trace_joins_producer_relay_handler_and_service() {
    let ((collector, traced), (service, called)) = (listen(), listen());
    let place = Place::new();
    let config = format!(
        "[log]\nservice = \"shop\"\n[trace]\nurl = \"http://127.0.0.1:{collector}\"\nauthorization = \"Bearer s3cret\"\n\
         [[consumer]]\nname = \"billing\"\nurl = \"http://127.0.0.1:{service}/events\"\n"
    );
    place.write("postrider.toml", &config);
    let mut daemon = place.daemon(&[]).ready();
    let post = |flags: &str, payload: &str| {
        let traceparent = format!("00-{TRACE}-{PRODUCER}-{flags}");
        let headers =
            [("content-type", "application/json"), ("traceparent", traceparent.as_str()), ("tracestate", "v=1")];
        let event = format!(r#"{{"topic":"orders.paid","type":"order.paid","key":"o-1","payload":"{payload}"}}"#);
        assert_eq!(daemon.request("POST", "/api/v1/events", &headers, &event).status, 202);
    };
    // The one that nobody records comes first, so that it is through when the other is.
    post("00", "unsampled");
    post("01", "s3cret");
    eventually("both deliveries", || (called.lock().unwrap().len() == 2).then_some(()));
    daemon.signal("TERM");
    assert_eq!(daemon.ended().code(), Some(0));

    let spans = spans(&traced);
    assert_eq!(spans.len(), 2, "{spans:?}");
    let named = |name: &str| spans.iter().find(|span| span["name"] == name).expect("a span");
    let (publish, process) = (named("publish orders.paid"), named("process orders.paid"));
    assert!(spans.iter().all(|span| span["traceId"] == TRACE && span["traceState"] == "v=1"));
    assert_eq!((&publish["parentSpanId"], &publish["kind"]), (&PRODUCER.into(), &4.into()));
    assert_eq!((&process["parentSpanId"], &process["kind"]), (&publish["spanId"], &5.into()));
    assert_eq!(attribute(publish, "postrider.destination"), Some("default"));
    assert_eq!(attribute(publish, "postrider.outcome"), Some("published"));
    assert_eq!(attribute(process, "messaging.consumer.group.name"), Some("billing"));
    assert_eq!(attribute(process, "postrider.outcome"), Some("applied"));
    let called = called.lock().unwrap();
    let parents: Vec<&str> = called
        .iter()
        .filter_map(|(_, head, _)| head.iter().find_map(|line| line.strip_prefix("traceparent: ")))
        .collect();
    let below = format!("00-{TRACE}-{}-01", process["spanId"].as_str().unwrap());
    let untouched = format!("00-{TRACE}-{PRODUCER}-00");
    assert_eq!(parents, [untouched.as_str(), below.as_str()], "the service goes on from the handler's span");
    assert!(traced.lock().unwrap().iter().all(|(_, _, body)| !body.contains("s3cret")), "no payload is in a span");
}

#[test]
fn a_collector_that_is_away_holds_nothing_up() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let place = Place::new();
    place.write("postrider.toml", &format!("[trace]\nurl = \"http://127.0.0.1:{free}\"\n"));
    let mut daemon = place.daemon(&[]).ready();
    let traceparent = format!("00-{TRACE}-{PRODUCER}-01");
    let headers = [("content-type", "application/json"), ("traceparent", traceparent.as_str())];
    let body = r#"{"topic":"orders.paid","type":"order.paid","payload":1}"#;
    for _ in 0..3 {
        assert_eq!(daemon.request("POST", "/api/v1/events", &headers, body).status, 202);
    }
    eventually("three published events", || (daemon.metric("postrider_published_total") == 3.0).then_some(()));
    let told = daemon.logged("traces cannot be sent and are dropped");
    assert_eq!((&told["level"], &told["error_type"]), (&"WARN".into(), &"unavailable".into()));
    eventually("three dropped spans", || {
        (daemon.metric("postrider_spans_total{outcome=\"dropped\"}") == 3.0).then_some(())
    });
    daemon.signal("TERM");
    assert_eq!(daemon.ended().code(), Some(0));
}
