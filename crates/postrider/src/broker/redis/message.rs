//! An event as the fields of a stream's entry, and back.
//!
//! `topic`, `id` (the message id), `content_type`, `ce_<attribute>` for the envelope, `h_<name>` for the producer's own
//! headers, and `data`. A raw event has no `ce_` fields.

use std::collections::BTreeMap;

use bytes::Bytes;
use redis::Value;

use crate::broker::cloudevents::{self, Decoder};
use crate::broker::{RawMessage, Undecodable};
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::inbox::without_nul;

const TOPIC: &str = "topic";
const ID: &str = "id";
const CONTENT_TYPE: &str = "content_type";
const DATA: &str = "data";
const ATTRIBUTE: &str = "ce_";
const HEADER: &str = "h_";

/// The id of an entry: milliseconds and a number. They rise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EntryId(pub u64, pub u64);

impl EntryId {
    pub fn parse(text: &str) -> Option<Self> {
        let (ms, number) = text.split_once('-')?;
        Some(Self(ms.parse().ok()?, number.parse().ok()?))
    }
}

impl std::fmt::Display for EntryId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.0, self.1)
    }
}

/// An entry as it was read.
#[derive(Debug)]
pub(super) struct Entry {
    pub id: EntryId,
    fields: Vec<(String, Bytes)>,
}

/// Gives the fields of an event to `put`.
pub(super) fn fields(event: &Event, mut put: impl FnMut(&str, &[u8])) {
    put(TOPIC, event.topic().as_bytes());
    put(ID, event.message_id().as_bytes());
    put(CONTENT_TYPE, event.content_type().as_bytes());
    cloudevents::encode(event, |attribute, value| {
        put(&format!("{ATTRIBUTE}{}", attribute.name()), value.as_bytes());
    });
    for (name, value) in cloudevents::own_headers(event) {
        put(&format!("{HEADER}{name}"), value.as_bytes());
    }
    put(DATA, event.payload());
}

/// The fields of a message that is no event, as it came.
pub(super) fn raw_fields(raw: &RawMessage, mut put: impl FnMut(&str, &[u8])) {
    for (name, value) in &raw.headers {
        put(name, value.as_bytes());
    }
    put(DATA, &raw.payload);
}

/// The field of a header.
pub(super) fn header(name: &str) -> String {
    format!("{HEADER}{name}")
}

impl Entry {
    /// An entry out of Redis's answer: id, and names and values by turns.
    pub fn of(value: Value) -> Option<Self> {
        let Value::Array(items) = value else { return None };
        let [id, Value::Array(items)] = <[Value; 2]>::try_from(items).ok()? else { return None };
        let Value::BulkString(id) = id else { return None };
        let id = EntryId::parse(std::str::from_utf8(&id).ok()?)?;
        let mut fields = Vec::with_capacity(items.len() / 2);
        let mut items = items.into_iter();
        while let (Some(Value::BulkString(name)), Some(Value::BulkString(value))) = (items.next(), items.next()) {
            fields.push((String::from_utf8_lossy(&name).into_owned(), Bytes::from(value)));
        }
        Some(Self { id, fields })
    }

    /// What it weighs.
    pub fn bytes(&self) -> usize {
        self.fields.iter().map(|(name, value)| name.len() + value.len()).sum()
    }

    /// The topic, empty when it has none.
    pub fn topic(&self) -> String {
        let topic = self.fields.iter().find(|(name, _)| name == TOPIC);
        topic.map(|(_, value)| String::from_utf8_lossy(value).into_owned()).unwrap_or_default()
    }

    /// The event, or why it is none.
    #[expect(clippy::result_large_err, reason = "a delivery holds the same")]
    pub fn event(self) -> Result<Event, Undecodable> {
        let topic = self.topic();
        if topic.is_empty() {
            let error = Error::new(Kind::Corrupt, "an entry of a stream has no topic")
                .with_remedy("let the producer write the fields topic, id and data");
            return Err(Undecodable { error, raw: self.raw() });
        }
        let mut decoder = Decoder::new(topic);
        let mut payload = Bytes::new();
        for (name, value) in &self.fields {
            if name == DATA {
                payload = value.clone();
                continue;
            }
            // What is no text has no place in an envelope.
            let Ok(value) = std::str::from_utf8(value) else { continue };
            match name.as_str() {
                TOPIC => {}
                ID => decoder.carrier_id(value),
                CONTENT_TYPE => decoder.content_type(value),
                name => match (name.strip_prefix(ATTRIBUTE), name.strip_prefix(HEADER)) {
                    (Some(attribute), _) => decoder.attribute(attribute, value.to_owned()),
                    (None, own) => decoder.header(own.unwrap_or(name), value.to_owned()),
                },
            }
        }
        decoder.finish(payload).map_err(|error| Undecodable { error, raw: self.raw() })
    }

    fn raw(&self) -> RawMessage {
        let mut headers = BTreeMap::new();
        let mut payload = Bytes::new();
        for (name, value) in &self.fields {
            match name == DATA {
                true => payload = value.clone(),
                false => {
                    let value = String::from_utf8_lossy(value).into_owned();
                    headers.insert(without_nul(name.clone()), without_nul(value));
                }
            }
        }
        RawMessage { headers, payload }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(fields: Vec<(&str, &[u8])>) -> Entry {
        let text = |bytes: &[u8]| Value::BulkString(bytes.to_vec());
        let fields = fields.into_iter().flat_map(|(name, value)| [text(name.as_bytes()), text(value)]).collect();
        Entry::of(Value::Array(vec![text(b"17-3"), Value::Array(fields)])).unwrap()
    }

    fn travel(event: &Event) -> Entry {
        let mut written: Vec<(String, Vec<u8>)> = Vec::new();
        fields(event, |name, value| written.push((name.to_owned(), value.to_vec())));
        entry(written.iter().map(|(name, value)| (name.as_str(), value.as_slice())).collect())
    }

    #[test]
    fn an_event_comes_back_as_it_was() {
        let builder = Event::builder("a.b", "k").key("ü").tenant("t").header("x-y", " z ");
        let event = builder.payload("image/png", vec![0u8, 255]).build().unwrap();
        let entry = travel(&event);
        assert_eq!((entry.id, entry.topic()), (EntryId(17, 3), "a.b".to_owned()));
        assert_eq!(entry.event().unwrap(), event);
    }

    #[test]
    fn a_raw_event_has_its_own_headers_and_its_id() {
        let builder = Event::builder("a", "k").message_id("outbox-17").header("x", "y").raw();
        let event = builder.payload("text/plain", "p").build().unwrap();
        let entry = travel(&event);
        assert!(!entry.fields.iter().any(|(name, _)| name.starts_with(ATTRIBUTE)));
        let back = entry.event().unwrap();
        assert_eq!((back.id(), back.headers(), back.payload()), (event.id(), event.headers(), event.payload()));
    }

    #[test]
    fn an_entry_of_somebody_else_is_kept_as_it_came() {
        let undecodable = entry(vec![("a", b"b"), ("data", b"x")]).event().unwrap_err();
        assert_eq!(undecodable.error.kind(), Kind::Corrupt);
        assert_eq!((undecodable.raw.headers["a"].as_str(), undecodable.raw.payload.len()), ("b", 1));
        let event = entry(vec![("topic", b"t"), ("id", b"m-1"), ("shop", b"s"), ("bad", b"\xff")]).event().unwrap();
        assert_eq!((event.topic(), event.headers().len(), &event.headers()["shop"]), ("t", 1, &"s".to_owned()));
    }

    #[test]
    fn ids_are_compared_as_numbers() {
        let id = |text| EntryId::parse(text).unwrap();
        assert!(id("9-10") > id("9-9") && id("10-0") > id("9-99"));
        assert_eq!(id("17-3").to_string(), "17-3");
        assert_eq!((EntryId::parse("x"), EntryId::parse("1-")), (None, None));
    }
}
