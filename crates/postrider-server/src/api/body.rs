//! The JSON body of `POST /api/v1/events`: one event or a list.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use postrider::event::JSON;
use postrider::{Error, Event, Kind};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use uuid::Uuid;

use super::Problem;
use super::events::Trace;

/// A request is one transaction; more events than this would hold it open for long.
const EVENTS_MAX: usize = 1000;

/// An event as a client writes it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EventBody {
    topic: String,
    r#type: String,
    key: Option<String>,
    payload: Box<RawValue>,
    id: Option<Uuid>,
    content_type: Option<String>,
    source: Option<String>,
    subject: Option<String>,
    tenant: Option<String>,
    correlation: Option<String>,
    causation: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    time: Option<DateTime<Utc>>,
}

/// The events of a body. An error names the place and the field; nothing was stored then.
pub fn read(body: &[u8], trace: &Trace) -> Result<Vec<Event>, Problem> {
    let is_list = body.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[');
    if !is_list {
        let event = parse::<EventBody>(body)?;
        return Ok(vec![build(event, trace, "")?]);
    }
    let list = parse::<Vec<EventBody>>(body)?;
    if list.is_empty() {
        return Err(Problem::bad_request("the list has no events").remedy("send at least one event"));
    }
    if list.len() > EVENTS_MAX {
        return Err(Problem::bad_request(format!("the list has {} events, the limit is {EVENTS_MAX}", list.len()))
            .remedy("send them in several requests"));
    }
    list.into_iter().enumerate().map(|(index, event)| build(event, trace, &format!("/{index}"))).collect()
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let parsed = serde_path_to_error::deserialize(&mut deserializer);
    let value = parsed.map_err(|error| {
        let pointer = pointer(error.path());
        let problem = Problem::bad_request(error.inner().to_string());
        let problem = if pointer.is_empty() { problem } else { problem.pointer(pointer) };
        problem.remedy(
            "send {\"topic\", \"type\", \"payload\"} and, if you like, key, id, content_type, source, subject, \
                        tenant, correlation, causation, headers, time; or a list of such objects",
        )
    })?;
    deserializer.end().map_err(|error| Problem::bad_request(error.to_string()))?;
    Ok(value)
}

/// The place of an error, as a JSON pointer.
pub(super) fn pointer(path: &serde_path_to_error::Path) -> String {
    use serde_path_to_error::Segment;
    let part = |segment: &Segment| match segment {
        Segment::Seq { index } => format!("/{index}"),
        Segment::Map { key } => format!("/{key}"),
        Segment::Enum { variant } => format!("/{variant}"),
        Segment::Unknown => String::new(),
    };
    path.iter().map(part).collect()
}

fn build(body: EventBody, trace: &Trace, place: &str) -> Result<Event, Problem> {
    let content_type = body.content_type.unwrap_or_else(|| JSON.to_owned());
    let mut builder = Event::builder(body.topic, body.r#type);
    builder = builder.payload(content_type.clone(), payload(&body.payload, &content_type, place)?);
    if let Some(id) = body.id {
        builder = builder.id(id);
    }
    if let Some(time) = body.time {
        builder = builder.time(time);
    }
    if let Some(key) = body.key {
        builder = builder.key(key);
    }
    if let Some(source) = body.source {
        builder = builder.source(source);
    }
    if let Some(subject) = body.subject {
        builder = builder.subject(subject);
    }
    if let Some(tenant) = body.tenant {
        builder = builder.tenant(tenant);
    }
    if let Some(correlation) = body.correlation {
        builder = builder.correlation(correlation);
    }
    if let Some(causation) = body.causation {
        builder = builder.causation(causation);
    }
    if let Some(parent) = &trace.parent {
        builder = builder.traceparent(parent.clone());
    }
    if let Some(state) = &trace.state {
        builder = builder.tracestate(state.clone());
    }
    for (name, value) in body.headers {
        builder = builder.header(name, value);
    }
    builder.build().map_err(|error| refused(&error, place))
}

/// A JSON payload travels byte by byte as it was sent. Another media type's payload must be a string, whose text it is.
fn payload(raw: &RawValue, content_type: &str, place: &str) -> Result<Vec<u8>, Problem> {
    let media = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if media == JSON || media.ends_with("+json") {
        return Ok(raw.get().as_bytes().to_vec());
    }
    match serde_json::from_str::<String>(raw.get()) {
        Ok(text) => Ok(text.into_bytes()),
        Err(_) => {
            let detail = format!("with the content_type {content_type} the payload must be a string");
            Err(Problem::bad_request(detail)
                .pointer(format!("{place}/payload"))
                .remedy("send the payload's text as a JSON string, or binary data as a CloudEvent in binary mode"))
        }
    }
}

/// The library names the field in its message; the pointer adds which event of a list it was.
fn refused(error: &Error, place: &str) -> Problem {
    let problem = Problem::from(error);
    let field = field(error);
    if place.is_empty() && field.is_empty() { problem } else { problem.pointer(format!("{place}{field}")) }
}

fn field(error: &Error) -> String {
    if error.kind() == Kind::TooLarge {
        return "/payload".to_owned();
    }
    let words =
        ["topic", "type", "key", "source", "subject", "tenant", "correlation", "causation", "content_type", "payload"];
    let message = error.message();
    let named = words.iter().find(|word| message.starts_with(&format!("the {word} ")));
    match named {
        Some(word) => format!("/{word}"),
        None if message.contains("header") => "/headers".to_owned(),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refuse(body: &str) -> String {
        format!("{:?}", read(body.as_bytes(), &Trace::default()).unwrap_err())
    }

    #[test]
    fn one_event_or_a_list() {
        let one = r#"{"topic":"a.b","type":"t","payload":{"z":1, "a":2}}"#;
        let events = read(one.as_bytes(), &Trace::default()).unwrap();
        assert_eq!(&events[0].payload()[..], br#"{"z":1, "a":2}"#, "a payload travels as it was sent");
        let list = format!("[{one},{one}]");
        assert_eq!(read(list.as_bytes(), &Trace::default()).unwrap().len(), 2);
        let text = br#"{"topic":"a","type":"t","content_type":"text/plain","payload":"h\u00e9"}"#;
        assert_eq!(&read(text, &Trace::default()).unwrap()[0].payload()[..], "hé".as_bytes());
    }

    #[test]
    fn mistakes_name_the_field() {
        let long = format!(r#"{{"topic":"a","type":"t","payload":1,"key":"{}"}}"#, "k".repeat(256));
        for (body, parts) in [
            (r#"{"topic":"","type":"t","payload":1}"#, vec!["the topic is empty", "/topic", "422"]),
            (&long, vec!["the key has 256 bytes", "/key"]),
            (r#"{"topik":"a"}"#, vec!["topik", "400"]),
            (r#"{"topic":"a","type":"t"}"#, vec!["payload"]),
            (r#"{"topic":1,"type":"t","payload":1}"#, vec!["/topic", "string"]),
            (r#"{"topic":"a","type":"t","payload":1,"id":"x"}"#, vec!["/id", "UUID"]),
            (r#"{"topic":"a","type":"t","payload":1,"time":"yesterday"}"#, vec!["/time"]),
            (r#"{"topic":"a","type":"t","payload":{]}"#, vec!["400"]),
            (r#"{"topic":"a","type":"t","payload":1} x"#, vec!["trailing"]),
            (r#"[{"topic":"a","type":"t","payload":1},{"topic":"","type":"t","payload":1}]"#, vec!["/1/topic"]),
            (r#"{"topic":"a","type":"t","payload":1,"headers":{"b d":"x"}}"#, vec!["/headers", "cannot be sent"]),
            (r#"{"topic":"a","type":"t","payload":1,"content_type":"text/plain"}"#, vec!["must be a string"]),
            ("[]", vec!["no events"]),
            ("", vec!["EOF"]),
        ] {
            let said = refuse(body);
            for part in parts {
                assert!(said.contains(part), "{part:?} is missing in {said}");
            }
        }
    }
}
