//! An event as a Kafka record, and back: CloudEvents 1.0, Kafka binding, binary mode.
//!
//! Attributes are headers with the prefix `ce_`, the payload's type is the header `content-type`, and the producer's own
//! headers stand beside them. The record's key is the event's. The record's time is when it was published: Kafka's retention
//! counts from it, so an old event that is published late must not be born expired.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;
use chrono::DateTime;
use rdkafka::Message as _;
use rdkafka::message::{BorrowedMessage, Header, OwnedHeaders};

use crate::broker::cloudevents::{self, Decoder};
use crate::broker::{Delivery, Origin, RawMessage, Undecodable, topic};
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::inbox::without_nul;

/// The prefix of attributes.
const PREFIX: &str = "ce_";
/// The header with the payload's media type.
const CONTENT_TYPE: &str = "content-type";
/// The header with the id of a raw event.
const MESSAGE_ID: &str = "message-id";
/// Kafka's limit for the name of a topic.
const TOPIC_BYTES_MAX: usize = 249;

/// Whether Kafka takes this as the name of a topic.
pub(super) fn is_topic_name(name: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    !name.is_empty() && name.len() <= TOPIC_BYTES_MAX && name.bytes().all(is_letter) && name != "." && name != ".."
}

/// Whether Kafka can carry the event under this name.
pub(super) fn check(event: &Event, kafka_topic: &str, payload_bytes_max: usize) -> Result<()> {
    if !is_topic_name(kafka_topic) {
        return Err(Error::new(Kind::Invalid, format!("{kafka_topic:?} cannot be the name of a Kafka topic"))
            .with_remedy("use at most 249 letters, digits, '.', '_' or '-'"));
    }
    let is_taken = |name: &str| match event.is_raw() {
        true => name == MESSAGE_ID,
        false => name == MESSAGE_ID || name == CONTENT_TYPE || name.starts_with(PREFIX),
    };
    if let Some(name) = event.headers().keys().find(|name| is_taken(name)) {
        return Err(Error::new(Kind::Invalid, format!("the header name {name:?} has a meaning of its own on Kafka"))
            .with_remedy("choose another header name"));
    }
    event.check_size(payload_bytes_max)
}

/// The partition of an event. All of a key go to one, and a slot that has the partition has the key's held messages too.
pub(super) fn partition(event: &Event, partitions: u32) -> i32 {
    (topic::shard(event) % partitions.max(1)).cast_signed()
}

/// The headers of an event.
pub(super) fn headers(event: &Event) -> OwnedHeaders {
    let mut headers = Some(OwnedHeaders::new_with_capacity(16));
    // The client takes the list and gives it back with every header.
    let mut add = |name: &str, value: &str| {
        headers = headers.take().map(|headers| headers.insert(Header { key: name, value: Some(value) }));
    };
    if event.is_raw() {
        add(MESSAGE_ID, &event.message_id());
    } else {
        let mut name = PREFIX.to_owned();
        cloudevents::encode(event, |attribute, value| {
            name.truncate(PREFIX.len());
            name.push_str(attribute.name());
            add(&name, &value);
        });
        add(CONTENT_TYPE, event.content_type());
    }
    for (name, value) in cloudevents::own_headers(event) {
        add(name, value);
    }
    headers.unwrap_or_default()
}

/// The headers of a message that is no event.
pub(super) fn raw_headers(raw: &RawMessage) -> OwnedHeaders {
    raw.headers.iter().fold(OwnedHeaders::new(), |headers, (name, value)| {
        headers.insert(Header { key: name, value: Some(value.as_str()) })
    })
}

/// A received record, as one of `group`'s messages under `topic`. A record without an id has one by its place in the log,
/// which is always the same.
pub(super) fn delivery(record: &BorrowedMessage<'_>, topic: &str, group: String) -> Delivery {
    let payload = Bytes::copy_from_slice(record.payload().unwrap_or_default());
    let place = format!("{}/{}", record.topic(), record.partition());
    let millis = record.timestamp().to_millis();
    let id = format!("{place}/{}@{}", record.offset(), millis.unwrap_or_default());
    // The client panics on a header whose name is no text; a foreign producer's oddity must not stop the slot.
    let read = catch_unwind(AssertUnwindSafe(|| {
        let headers = record.headers().into_iter().flat_map(rdkafka::message::Headers::iter);
        let text = |value: &[u8]| std::str::from_utf8(value).ok().map(str::to_owned);
        headers.filter_map(|header| Some((header.key.to_owned(), text(header.value?)?))).collect::<BTreeMap<_, _>>()
    }));
    let (headers, event) = match read {
        Ok(headers) => {
            let event = decode(topic, &headers, record.key(), payload.clone(), millis, &id);
            (headers, event)
        }
        Err(_) => {
            let error = Error::new(Kind::Corrupt, format!("a record of {topic:?} has a header name that is no text"));
            (BTreeMap::new(), Err(error))
        }
    };
    let event = event.map_err(|error| {
        let headers = headers.into_iter().map(|(name, value)| (without_nul(name), without_nul(value))).collect();
        Undecodable { error, raw: RawMessage { headers, payload } }
    });
    let origin = Origin {
        exchange: place,
        topic: topic.to_owned(),
        queue: group,
        offset: Some(record.offset()),
        ..Origin::default()
    };
    Delivery { tag: 0, event, is_redelivered: false, origin }
}

/// Takes a record apart. Without any I/O.
fn decode(
    topic: &str,
    headers: &BTreeMap<String, String>,
    key: Option<&[u8]>,
    payload: Bytes,
    millis: Option<i64>,
    place: &str,
) -> Result<Event> {
    let mut decoder = Decoder::new(topic);
    // The record's key is the event's, unless the envelope says otherwise.
    if let Some(key) = key.and_then(|key| std::str::from_utf8(key).ok()) {
        decoder.attribute("partitionkey", key.to_owned());
    }
    for (name, value) in headers {
        if let Some(attribute) = name.strip_prefix(PREFIX) {
            decoder.attribute(attribute, value.clone());
        } else if name.eq_ignore_ascii_case(CONTENT_TYPE) {
            decoder.content_type(value);
        } else if name != MESSAGE_ID {
            decoder.header(name, value.clone());
        }
    }
    let id = headers.get(MESSAGE_ID).filter(|id| !id.is_empty());
    decoder.carrier_id(id.map_or(place, String::as_str));
    if let Some(time) = millis.and_then(DateTime::from_timestamp_millis) {
        decoder.carrier_time(time);
    }
    decoder.finish(payload)
}

#[cfg(test)]
mod tests {
    use rdkafka::message::Headers as _;

    use super::*;

    fn travel(event: &Event) -> Event {
        let headers = headers(event);
        let texts = headers
            .iter()
            .map(|header| (header.key.to_owned(), String::from_utf8(header.value.unwrap().to_vec()).unwrap()));
        let key = event.key().map(str::as_bytes);
        decode(event.topic(), &texts.collect(), key, event.payload().clone(), None, "t/0/0@0").unwrap()
    }

    #[test]
    fn an_event_comes_back_as_it_was() {
        let event = Event::builder("orders.paid", "order.paid")
            .key("o-1 ü")
            .source("shop")
            .header("region", "eu")
            .payload("text/plain", "x")
            .build()
            .unwrap();
        assert_eq!(travel(&event), event);
    }

    #[test]
    fn a_raw_event_has_its_headers_and_its_id_only() {
        let mut event = Event::builder("t", "k").header("a", "b").payload("text/plain", "x").build().unwrap();
        event.wire = crate::event::Wire { message_id: Some("outbox-7".to_owned()), is_raw: true };
        let headers = headers(&event);
        let names: Vec<_> = headers.iter().map(|header| header.key).collect();
        assert_eq!(names, ["message-id", "a"]);
        assert_eq!(travel(&event).id(), cloudevents::id_of("", "outbox-7"));
    }

    #[test]
    fn a_foreign_record_is_an_event() {
        let decode = |headers: &[(&str, &str)], place: &str| {
            let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            decode("a.b", &headers, Some(b"k"), Bytes::from_static(b"x"), Some(1_700_000_000_000), place).unwrap()
        };
        let event = decode(&[("tries", "3"), ("Content-Type", "text/plain")], "a.b/0/7@1");
        assert_eq!((event.kind(), event.key(), event.content_type()), ("a.b", Some("k"), "text/plain"));
        assert_eq!((event.headers()["tries"].as_str(), event.time().timestamp()), ("3", 1_700_000_000));
        assert_eq!(event.id(), decode(&[], "a.b/0/7@1").id(), "its place is its id");
        assert_ne!(event.id(), decode(&[], "a.b/0/8@1").id());
        assert_eq!(decode(&[("ce_partitionkey", "other")], "p").key(), Some("other"));
    }

    #[test]
    fn what_would_be_misread_is_refused() {
        for name in ["ce_id", "content-type", "message-id"] {
            let event = Event::builder("t", "k").header(name, "x").payload("text/plain", "x").build().unwrap();
            assert_eq!(check(&event, "t", 10).unwrap_err().kind(), Kind::Invalid, "{name}");
        }
        let event = Event::builder("t", "k").payload("text/plain", "12345").build().unwrap();
        assert!(check(&event, "t", 5).is_ok());
        assert_eq!(check(&event, "t", 4).unwrap_err().kind(), Kind::TooLarge);
        for name in ["", "a b", "..", "ü", &"x".repeat(250)] {
            assert_eq!(check(&event, name, 5).unwrap_err().kind(), Kind::Invalid, "{name}");
        }
    }

    #[test]
    fn a_key_is_in_the_slot_that_has_its_held_messages() {
        for n in 0..200 {
            let event = Event::builder("t", "k").key(n.to_string()).payload("text/plain", "x").build().unwrap();
            for (partitions, slots) in [(6, 3), (16, 4), (12, 12), (5, 5), (64, 32)] {
                assert_eq!(partition(&event, partitions).cast_unsigned() % slots, topic::shard(&event) % slots);
            }
        }
    }
}
