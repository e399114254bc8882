//! Log lines keep the schema of docs/reference/log.schema.json, whatever happens.

use std::io::{Read, Write};
use std::net::TcpListener;

use serde_json::{Map, Value};

use crate::harness::{Place, eventually};

const SCHEMA: &str = include_str!("../../../../docs/reference/log.schema.json");

/// Checks a value against a schema. It knows the words that ours uses, and refuses every other.
fn check(schema: &Value, value: &Value, place: &str) -> Result<(), String> {
    for (word, wanted) in schema.as_object().ok_or("a schema is an object")? {
        let is_kept = match word.as_str() {
            "$schema" | "title" | "description" => true,
            "type" => match wanted {
                Value::Array(types) => types.iter().any(|wanted| is_a(value, wanted)),
                wanted => is_a(value, wanted),
            },
            "enum" => wanted.as_array().is_some_and(|values| values.contains(value)),
            "format" => wanted == "date-time" && value.as_str().is_some_and(is_time),
            "minLength" => value.as_str().map(|text| text.chars().count() as u64) >= wanted.as_u64(),
            "maxLength" => value.as_str().map(|text| text.chars().count() as u64) <= wanted.as_u64(),
            "minItems" => value.as_array().map(|items| items.len() as u64) >= wanted.as_u64(),
            "required" => {
                let names = wanted.as_array().ok_or("required is a list")?;
                names.iter().all(|name| name.as_str().is_some_and(|name| value.get(name).is_some()))
            }
            "items" => {
                for item in value.as_array().into_iter().flatten() {
                    check(wanted, item, &format!("{place}[]"))?;
                }
                true
            }
            "properties" | "additionalProperties" => true,
            word => return Err(format!("this check does not know {word:?}")),
        };
        if !is_kept {
            return Err(format!("{place} does not keep {word}: {wanted}"));
        }
    }
    let none = Map::new();
    let known = schema["properties"].as_object().unwrap_or(&none);
    for (name, field) in value.as_object().into_iter().flatten() {
        let place = format!("{place}.{name}");
        match (known.get(name), schema.get("additionalProperties")) {
            (Some(schema), _) | (None, Some(schema @ Value::Object(_))) => check(schema, field, &place)?,
            (None, Some(Value::Bool(false))) => return Err(format!("{place} is not in the schema")),
            (None, _) => {}
        }
    }
    Ok(())
}

fn is_a(value: &Value, wanted: &Value) -> bool {
    let is = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    wanted == is
}

fn is_time(text: &str) -> bool {
    text.ends_with('Z') && chrono::DateTime::parse_from_rfc3339(text).is_ok()
}

#[track_caller]
fn check_all(lines: &[Value], at_least: usize) {
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    assert!(lines.len() >= at_least, "{} lines", lines.len());
    for line in lines {
        check(&schema, line, "line").unwrap_or_else(|error| panic!("{error}: {line}"));
        let is_trouble = matches!(line["level"].as_str(), Some("ERROR"));
        assert!(!is_trouble || line["error_type"].is_string(), "an error without its type: {line}");
    }
}

#[test]
fn the_check_finds_what_breaks_the_schema() {
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    let good = serde_json::json!({"timestamp": "2026-11-15T22:38:45.838973Z", "level": "WARN", "service": "s",
        "message": "m", "error_type": "other", "causes": ["c"], "context": {"target": "t", "n": 1}});
    check(&schema, &good, "line").unwrap();
    for (field, bad) in [
        ("timestamp", serde_json::json!("yesterday")),
        ("timestamp", Value::Null),
        ("level", "FATAL".into()),
        ("service", "".into()),
        ("error_type", "x".repeat(201).into()),
        ("causes", serde_json::json!([])),
        ("causes", serde_json::json!([1])),
        ("context", serde_json::json!({"target": "t", "nested": {}})),
        ("context", serde_json::json!({})),
        ("payload", "p".into()),
    ] {
        let mut line = good.clone();
        line[field] = bad;
        assert!(check(&schema, &line, "line").is_err(), "{line}");
    }
}

#[test]
fn every_line_of_an_outage_keeps_the_schema() {
    // Nobody listens there.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let place = Place::new();
    place.write(
        "postrider.toml",
        &format!(
            "[broker]\nurl = \"amqp://127.0.0.1:{free}\"\n[breaker]\nfailures = 2\n\
             [[consumer]]\nname = \"billing\"\nurl = \"http://127.0.0.1:{free}/\"\n"
        ),
    );
    let mut daemon = place.daemon(&[("POSTRIDER__LOG__LEVEL", "debug")]);
    let event = r#"{"topic":"orders.created","type":"order.created","key":"o-1","payload":{"secret":1}}"#;
    eventually("a stored event", || (daemon.post(event).status == 202).then_some(()));
    assert_eq!(daemon.post("{").status, 400);
    let stopped = daemon.logged("publishing stopped: the breaker is open");
    assert_eq!(stopped["error_type"], "unavailable");
    assert!(stopped["context"]["remedy"].is_string(), "{stopped}");
    daemon.logged("subscription ended");
    daemon.signal("TERM");
    daemon.ended();
    check_all(&daemon.log(), 10);
    assert!(daemon.log().iter().all(|line| !line.to_string().contains("secret")));
}

#[test]
fn every_line_of_a_handler_that_fails_keeps_the_schema() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let _ = stream.read(&mut [0; 4096]);
            let body = "<script>\u{1b}[31m secret \"quoted\"\n\u{0}";
            let head = format!("HTTP/1.1 422 no\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
            let _ = stream.write_all(format!("{head}{body}").as_bytes());
        }
    });
    let place = Place::new();
    let consumer = format!("[[consumer]]\nname = \"billing\"\nurl = \"http://127.0.0.1:{port}/\"\n");
    place.write("postrider.toml", &consumer);
    let mut daemon = place.daemon(&[]).ready();
    assert_eq!(daemon.post(r#"{"topic":"a","type":"t","key":"k","payload":1}"#).status, 202);
    let dead = daemon.logged("a message is given up");
    assert_eq!((&dead["error_type"], &dead["context"]["consumer"]), (&"http_422".into(), &"billing".into()));
    daemon.signal("TERM");
    daemon.ended();
    check_all(&daemon.log(), 5);
    assert!(daemon.log().iter().all(|line| !line.to_string().contains("secret")), "no answer's body is in the log");
}

#[test]
fn the_format_can_be_chosen_for_one_start() {
    let place = Place::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let listen = [("POSTRIDER__HTTP__LISTEN", address.as_str()), ("POSTRIDER__LOG__FORMAT", "pretty")];
    let plain = place.run_with(&["run"], &listen).fails(1, &["cannot listen"]);
    assert!(plain.lines().all(|line| serde_json::from_str::<Map<String, Value>>(line).is_err()), "{plain}");
    let json = place.run_with(&["run", "--log-format", "json"], &listen).fails(1, &["cannot listen"]);
    let lines: Vec<Value> = json.lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect();
    check_all(&lines, 1);
    place.run(&["run", "--log-format", "yaml"]).fails(2, &["yaml", "auto", "json", "pretty"]);
}
