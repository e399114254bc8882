//! An event as an AMQP message, and back: CloudEvents 1.0, AMQP binding, binary mode.
//!
//! Attributes are headers with the prefix `cloudEvents:`; the producer's own headers stand beside them under their own
//! names. The AMQP properties repeat what brokers, tools and foreign consumers look at (message id, type, content type,
//! timestamp, correlation id), and `delivery_mode` 2 makes the message survive a restart.

use std::collections::BTreeMap;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use lapin::BasicProperties;
use lapin::message::Delivery as Received;
use lapin::types::{AMQPValue, FieldTable, ShortString};

use crate::broker::cloudevents::{self, Attribute, Decoder};
use crate::broker::{Delivery, Origin, RawMessage, Undecodable, topic};
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::inbox::without_nul;

/// The header that sharded consumers' queues are bound by: the event's hash, modulo [`crate::handler::SLOTS_MAX`].
pub(super) const SLOT_HEADER: &str = "postrider-slot";
/// Headers travel in one frame, and RabbitMQ's default frame has 128 KiB; the rest of the frame is the properties'.
const HEADERS_BYTES_MAX: usize = 96 * 1024;
/// What AMQP adds around a header: its length bytes and type.
const HEADER_OVERHEAD_BYTES: usize = 6;
/// A short string's length is one byte.
pub(super) const SHORT_BYTES_MAX: usize = 255;
/// Names that RabbitMQ itself acts on: as text they would close the channel, or reroute the message.
const RESERVED: [&str; 4] = ["CC", "BCC", "x-death", SLOT_HEADER];
/// The delivery mode that survives a restart of the broker.
pub(super) const PERSISTENT: u8 = 2;

/// Whether RabbitMQ can carry the event.
pub(super) fn check(event: &Event, payload_bytes_max: usize) -> Result<()> {
    if event.topic().len() > SHORT_BYTES_MAX {
        return Err(Error::new(
            Kind::Invalid,
            format!("the topic has {} bytes, a routing key at most {SHORT_BYTES_MAX}", event.topic().len()),
        ));
    }
    event.check_size(payload_bytes_max)?;
    if let Some(name) = event.headers().keys().find(|name| RESERVED.contains(&name.as_str())) {
        return Err(Error::new(
            Kind::Invalid,
            format!("the header name {name:?} has a meaning of its own on RabbitMQ"),
        )
        .with_remedy("choose another header name"));
    }
    if let Some(name) = event.headers().keys().find(|name| name.len() > SHORT_BYTES_MAX) {
        return Err(Error::new(
            Kind::Invalid,
            format!("a header name has {} bytes, too many for RabbitMQ", name.len()),
        ));
    }
    if headers_bytes_at_most(event) <= HEADERS_BYTES_MAX {
        return Ok(());
    }
    let bytes = headers_bytes(event);
    if bytes > HEADERS_BYTES_MAX {
        return Err(Error::new(
            Kind::TooLarge,
            format!("the headers have {bytes} bytes together, RabbitMQ's frame takes {HEADERS_BYTES_MAX}"),
        )
        .with_remedy("move what is large from the headers into the payload"));
    }
    Ok(())
}

/// More than the headers weigh, found without writing them.
fn headers_bytes_at_most(event: &Event) -> usize {
    /// The names of all attributes, and what is around them.
    const NAMES: usize = 512;
    let own = |(name, value): (&String, &String)| name.len() + value.len() + HEADER_OVERHEAD_BYTES;
    NAMES + cloudevents::bytes_at_most(event) + cloudevents::own_headers(event).map(own).sum::<usize>()
}

fn headers_bytes(event: &Event) -> usize {
    let mut bytes = 0;
    // The attributes are bounded by `Event::validate`, but counted all the same: the sum is what must fit.
    cloudevents::encode(event, |attribute, value| {
        bytes += amqp_name(attribute).len() + value.len() + HEADER_OVERHEAD_BYTES;
    });
    for (name, value) in cloudevents::own_headers(event) {
        bytes += name.len() + value.len() + HEADER_OVERHEAD_BYTES;
    }
    bytes
}

/// The header of an attribute.
pub(super) fn amqp_name(attribute: Attribute) -> &'static str {
    match attribute {
        Attribute::SpecVersion => "cloudEvents:specversion",
        Attribute::Id => "cloudEvents:id",
        Attribute::Source => "cloudEvents:source",
        Attribute::Type => "cloudEvents:type",
        Attribute::Time => "cloudEvents:time",
        Attribute::Subject => "cloudEvents:subject",
        Attribute::Tenant => "cloudEvents:tenant",
        Attribute::Correlation => "cloudEvents:correlationid",
        Attribute::Causation => "cloudEvents:causationid",
        Attribute::Key => "cloudEvents:partitionkey",
        Attribute::TraceParent => "cloudEvents:traceparent",
        Attribute::TraceState => "cloudEvents:tracestate",
        Attribute::DataRef => "cloudEvents:dataref",
        Attribute::DataSize => "cloudEvents:datasize",
        Attribute::DataHash => "cloudEvents:datahash",
    }
}

/// The value of [`SLOT_HEADER`]. A signed long, because a headers binding compares type and value.
pub(super) fn slot_value(slot: u32) -> AMQPValue {
    AMQPValue::LongLongInt(i64::from(slot))
}

/// The number that [`SLOT_HEADER`] gives an event.
pub(super) fn slot(event: &Event) -> i64 {
    i64::from(topic::shard(event))
}

/// The properties of an event, for what is not published in bulk; `frame` writes the same bytes without building them.
pub(super) fn properties(event: &Event) -> BasicProperties {
    let mut headers = FieldTable::default();
    cloudevents::encode(event, |attribute, value| {
        headers.insert(amqp_name(attribute).into(), AMQPValue::LongString(value.into_owned().into()));
    });
    for (name, value) in cloudevents::own_headers(event) {
        if let Ok(name) = ShortString::try_new(name.as_str()) {
            headers.insert(name, AMQPValue::LongString(value.as_str().into()));
        }
    }
    let mut properties = BasicProperties::default().with_headers(headers).with_message_id(short(&event.message_id()));
    if fitting(event.content_type()).is_some() {
        properties = properties.with_content_type(short(event.content_type()));
    }
    if fitting(event.kind()).is_some() {
        properties = properties.with_type(short(event.kind()));
    }
    if let Some(correlation) = event.correlation().and_then(fitting) {
        properties = properties.with_correlation_id(short(correlation));
    }
    if let Ok(seconds) = u64::try_from(event.time().timestamp()) {
        properties = properties.with_timestamp(seconds);
    }
    properties
}

/// The properties of a message that is no event, as [`raw`] has read them.
pub(super) fn raw_properties(raw: &RawMessage) -> BasicProperties {
    let mut properties = BasicProperties::default();
    let mut headers = FieldTable::default();
    for (name, value) in &raw.headers {
        match (name.as_str(), fitting(value)) {
            ("content_type", Some(value)) => properties = properties.with_content_type(short(value)),
            ("message_id", Some(value)) => properties = properties.with_message_id(short(value)),
            ("correlation_id", Some(value)) => properties = properties.with_correlation_id(short(value)),
            ("type", Some(value)) => properties = properties.with_type(short(value)),
            ("app_id", Some(value)) => properties = properties.with_app_id(short(value)),
            (name, _) if !RESERVED.contains(&name) => {
                if let Ok(name) = ShortString::try_new(name) {
                    headers.insert(name, AMQPValue::LongString(value.as_str().into()));
                }
            }
            _ => {}
        }
    }
    properties.with_headers(headers)
}

/// A text that [`fitting`] has let pass.
fn short(text: &str) -> ShortString {
    ShortString::try_new(text).unwrap_or_default()
}

/// The text, if a short string can hold it.
pub(super) fn fitting(text: &str) -> Option<&str> {
    (text.len() <= SHORT_BYTES_MAX).then_some(text)
}

/// A received message.
pub(super) fn delivery(received: Received, queue: &str) -> Delivery {
    let origin = Origin {
        exchange: received.exchange.to_string(),
        topic: without_nul(received.routing_key.to_string()),
        queue: queue.to_owned(),
        offset: None,
        is_replayed: false,
    };
    let payload = Bytes::from(received.data);
    let event = event(received.routing_key, &received.properties, payload.clone());
    let event = event.map_err(|error| Undecodable { error, raw: raw(&received.properties, payload) });
    Delivery { tag: received.delivery_tag, is_redelivered: received.redelivered, event, origin }
}

fn raw(properties: &BasicProperties, payload: Bytes) -> RawMessage {
    let mut headers = BTreeMap::new();
    for (name, value) in properties.headers().iter().flatten() {
        if let Some(value) = as_text(value) {
            headers.insert(without_nul(name.to_string()), without_nul(value));
        }
    }
    let named = [
        ("content_type", properties.content_type()),
        ("message_id", properties.message_id()),
        ("correlation_id", properties.correlation_id()),
        ("type", properties.kind()),
        ("app_id", properties.app_id()),
    ];
    for (name, value) in named {
        if let Some(value) = value {
            headers.insert(name.to_owned(), without_nul(value.to_string()));
        }
    }
    RawMessage { headers, payload }
}

/// The event that a message carries.
pub(super) fn event(
    routing_key: ShortString,
    properties: &BasicProperties,
    payload: impl Into<Bytes>,
) -> Result<Event> {
    let mut decoder = Decoder::new(routing_key);
    for (name, value) in properties.headers().iter().flatten() {
        let Some(value) = as_text(value) else { continue };
        let name = name.as_str();
        // The binding allows both prefixes; JMS cannot carry the colon.
        if let Some(attribute) = name.strip_prefix("cloudEvents:").or_else(|| name.strip_prefix("cloudEvents_")) {
            decoder.attribute(attribute, value);
        } else if name != SLOT_HEADER {
            decoder.header(name, value);
        }
    }
    if let Some(id) = properties.message_id() {
        decoder.carrier_id(id.as_str());
    }
    if let Some(kind) = properties.kind() {
        decoder.carrier_type(kind.as_str());
    }
    if let Some(content_type) = properties.content_type() {
        decoder.content_type(content_type.as_str());
    }
    if let Some(correlation) = properties.correlation_id() {
        decoder.carrier_correlation(correlation.as_str());
    }
    let seconds = properties.timestamp().and_then(|seconds| i64::try_from(seconds).ok());
    if let Some(time) = seconds.and_then(|seconds| DateTime::<Utc>::from_timestamp(seconds, 0)) {
        decoder.carrier_time(time);
    }
    decoder.finish(payload)
}

/// A scalar as text. Tables and arrays (`x-death`) have no place in an event.
fn as_text(value: &AMQPValue) -> Option<String> {
    match value {
        AMQPValue::LongString(text) => std::str::from_utf8(text.as_bytes()).ok().map(str::to_owned),
        AMQPValue::ShortString(text) => Some(text.to_string()),
        AMQPValue::Boolean(value) => Some(value.to_string()),
        AMQPValue::ShortShortInt(value) => Some(value.to_string()),
        AMQPValue::ShortShortUInt(value) => Some(value.to_string()),
        AMQPValue::ShortInt(value) => Some(value.to_string()),
        AMQPValue::ShortUInt(value) => Some(value.to_string()),
        AMQPValue::LongInt(value) => Some(value.to_string()),
        AMQPValue::LongUInt(value) => Some(value.to_string()),
        AMQPValue::LongLongInt(value) => Some(value.to_string()),
        AMQPValue::Float(value) => Some(value.to_string()),
        AMQPValue::Double(value) => Some(value.to_string()),
        AMQPValue::Timestamp(seconds) => i64::try_from(*seconds)
            .ok()
            .and_then(|seconds| DateTime::<Utc>::from_timestamp(seconds, 0))
            .map(|time| time.to_rfc3339()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_that_rabbitmq_acts_on_are_refused() {
        for name in RESERVED {
            let event = Event::builder("t", "k").header(name, "x").payload("text/plain", "x").build().unwrap();
            assert_eq!(check(&event, 10).unwrap_err().kind(), Kind::Invalid, "{name}");
        }
    }

    #[test]
    fn headers_larger_than_a_frame_are_refused() {
        let mut builder = Event::builder("t", "k").payload("text/plain", "x");
        for n in 0..16 {
            builder = builder.header(format!("h{n}"), "x".repeat(8000));
        }
        assert_eq!(check(&builder.build().unwrap(), 10).unwrap_err().kind(), Kind::TooLarge);
    }

    #[test]
    fn a_payload_over_the_limit_is_refused() {
        let event = Event::builder("t", "k").payload("text/plain", "12345").build().unwrap();
        assert!(check(&event, 5).is_ok());
        assert_eq!(check(&event, 4).unwrap_err().kind(), Kind::TooLarge);
    }

    #[test]
    fn a_foreign_message_is_an_event_if_it_has_an_id() {
        let mut headers = FieldTable::default();
        headers.insert("cloudEvents_subject".into(), AMQPValue::LongString("s".into()));
        headers.insert("tries".into(), AMQPValue::LongInt(3));
        headers.insert("x-death".into(), AMQPValue::FieldTable(FieldTable::default()));
        let bare = BasicProperties::default().with_headers(headers).with_timestamp(1_700_000_000);
        assert_eq!(super::event("a.b".into(), &bare, Vec::new()).unwrap_err().kind(), Kind::Corrupt);

        let event = super::event("a.b".into(), &bare.with_message_id("m-1".into()), b"x".to_vec()).unwrap();
        assert_eq!((event.topic(), event.kind(), event.subject()), ("a.b", "a.b", Some("s")));
        assert_eq!(event.headers().len(), 1);
        assert_eq!(event.headers()["tries"], "3");
        assert_eq!(event.time().timestamp(), 1_700_000_000);
    }
}
