//! CloudEvents 1.0 in HTTP's binary mode: attributes as `ce-*` headers, the payload as body.

use axum::body::Bytes;
use axum::http::{HeaderMap, header};
use chrono::{DateTime, Utc};
use postrider::broker::cloudevents::{Attribute, CONTENT_TYPE_DEFAULT, Decoder, SPECVERSION};
use postrider::{Event, EventBuilder};
use uuid::Uuid;

use super::Problem;
use super::events::Trace;

const PREFIX: &str = "ce-";

/// Whether the request is a CloudEvent in binary mode. Only `ce-specversion` says so, but one of the others alone is a
/// CloudEvent that forgot it, and deserves to hear that.
pub fn is_binary_mode(headers: &HeaderMap) -> bool {
    headers.keys().any(|name| name.as_str().starts_with(PREFIX))
}

/// The event of a request. `topic` is the one in the query; a `ce-topic` header wins. Without either, the type is it.
pub fn read(headers: &HeaderMap, topic: Option<&str>, payload: Bytes) -> Result<Event, Problem> {
    match attribute(headers, "specversion")?.as_deref() {
        Some(SPECVERSION) => {}
        Some(other) => return Err(wrong("ce-specversion", &format!("is {other:?}; this is {SPECVERSION}"))),
        None => return Err(wrong("ce-specversion", "is missing")),
    }
    let mandatory =
        |name: &'static str| attribute(headers, name)?.ok_or_else(|| wrong(&format!("{PREFIX}{name}"), "is missing"));
    let (id, source, kind) = (mandatory("id")?, mandatory("source")?, mandatory("type")?);
    let topic = match (attribute(headers, "topic")?, topic) {
        (Some(topic), _) => topic,
        (None, Some(topic)) => topic.to_owned(),
        (None, None) => kind.clone(),
    };
    let content_type =
        headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or(CONTENT_TYPE_DEFAULT);
    let mut builder =
        Event::builder(topic, kind).id(stable_id(&source, &id)?).source(source).payload(content_type, payload);
    let trace = Trace::of(headers);
    if let Some(parent) = trace.parent {
        builder = builder.traceparent(parent);
    }
    if let Some(state) = trace.state {
        builder = builder.tracestate(state);
    }
    for name in headers.keys().filter_map(|name| name.as_str().strip_prefix(PREFIX)) {
        if let Some(value) = attribute(headers, name)? {
            builder = put(builder, name, value)?;
        }
    }
    builder.build().map_err(|error| Problem::from(&error))
}

fn put(builder: EventBuilder, name: &str, value: String) -> Result<EventBuilder, Problem> {
    Ok(match Attribute::of_name(name) {
        Some(Attribute::SpecVersion | Attribute::Id | Attribute::Source | Attribute::Type) => builder,
        Some(Attribute::Time) => match DateTime::parse_from_rfc3339(&value) {
            Ok(time) => builder.time(time.with_timezone(&Utc)),
            Err(_) => return Err(wrong("ce-time", "is not a time as in RFC 3339")),
        },
        Some(Attribute::Subject) => builder.subject(value),
        Some(Attribute::Tenant) => builder.tenant(value),
        Some(Attribute::Correlation) => builder.correlation(value),
        Some(Attribute::Causation) => builder.causation(value),
        Some(Attribute::Key) => builder.key(value),
        Some(Attribute::TraceParent) => builder.traceparent(value),
        Some(Attribute::TraceState) => builder.tracestate(value),
        None if name == "topic" => builder,
        // An extension of the producer's own travels on as a header.
        Some(Attribute::DataRef | Attribute::DataSize | Attribute::DataHash) | None => builder.header(name, value),
    })
}

/// A UUID as it is; another id becomes, with its source, always the same UUID, as for messages from brokers.
fn stable_id(source: &str, id: &str) -> Result<Uuid, Problem> {
    if let Ok(id) = Uuid::try_parse(id) {
        return Ok(id);
    }
    let mut decoder = Decoder::new("http");
    decoder.attribute(Attribute::Id.name(), id.to_owned());
    decoder.attribute(Attribute::Source.name(), source.to_owned());
    decoder.finish(Bytes::new()).map(|event| event.id()).map_err(|_| wrong("ce-id", "is empty"))
}

/// A header's value, percent-decoded as the HTTP binding asks.
fn attribute(headers: &HeaderMap, name: &str) -> Result<Option<String>, Problem> {
    let full = format!("{PREFIX}{name}");
    let Some(value) = headers.get(&full) else { return Ok(None) };
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let [first, tail @ ..] = rest {
        let digits = tail.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) if *first == b'%' => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8(bytes).map(Some).map_err(|_| wrong(&full, "is not UTF-8 text"))
}

fn wrong(name: &str, what: &str) -> Problem {
    Problem::bad_request(format!("the header {name} {what}"))
        .with("header", &name)
        .remedy("send a CloudEvent 1.0 in binary mode: ce-specversion, ce-id, ce-source, ce-type as headers")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    const BARE: [(&str, &str); 4] =
        [("ce-specversion", "1.0"), ("ce-id", "42"), ("ce-source", "/shop"), ("ce-type", "order.created")];

    #[test]
    fn attributes_become_the_envelope() {
        let mut pairs = BARE.to_vec();
        pairs.extend([
            ("ce-partitionkey", "o%201"),
            ("ce-region", "eu"),
            ("ce-time", "2026-01-02T03:04:05Z"),
            ("content-type", "text/plain"),
            ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ]);
        let event = read(&headers(&pairs), Some("orders.created"), "hello".into()).unwrap();
        assert_eq!(event.topic(), "orders.created");
        assert_eq!(event.key(), Some("o 1"));
        assert_eq!(event.source(), Some("/shop"));
        assert_eq!(event.headers().get("region").map(String::as_str), Some("eu"));
        assert_eq!(event.content_type(), "text/plain");
        assert!(event.traceparent().is_some());
        let again = read(&headers(&pairs), None, "hello".into()).unwrap();
        assert_eq!(again.id(), event.id(), "the same source and id are the same event");
        assert_eq!(again.topic(), "order.created");
    }

    #[test]
    fn what_is_missing_is_named() {
        for missing in 0..BARE.len() {
            let mut pairs = BARE.to_vec();
            let (name, _) = pairs.remove(missing);
            let said = format!("{:?}", read(&headers(&pairs), None, Bytes::new()).unwrap_err());
            assert!(said.contains(name), "{said}");
        }
        let mut pairs = BARE.to_vec();
        pairs.push(("content-type", "application/json"));
        let said = format!("{:?}", read(&headers(&pairs), None, "{".into()).unwrap_err());
        assert!(said.contains("not valid JSON"), "{said}");
    }
}
