//! An event as a NATS message, and back: CloudEvents 1.0 in binary mode, attributes as `ce-` headers.
//!
//! The subject is `<prefix>.<shard>.<topic>`, the shard two digits, so that other programs can share the work by subject.
//! JetStream drops a second message with the same `Nats-Msg-Id` while its duplicate window lasts, and confirms it. So this
//! header says everything that makes an event another one: source and message id, or of a raw event, which has no source,
//! message id and content. Values of attributes are percent-encoded as in HTTP, because a NATS header is a line; the
//! producer's own headers travel as they are.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::str::FromStr;

use async_nats::header::{HeaderMap, HeaderName, HeaderValue};
use bytes::Bytes;

use super::settings::NatsSettings;
use crate::broker::cloudevents::{self, Attribute, Decoder};
use crate::broker::{RawMessage, Undecodable, topic};
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::inbox::without_nul;

/// What JetStream knows repetitions by.
const REPETITION_ID: &str = "Nats-Msg-Id";
/// The message id of a raw event, which has no attribute for it.
const MESSAGE_ID: &str = "message-id";
/// In front of CloudEvents attributes.
const ATTRIBUTE: &str = "ce-";
/// In front of what the server acts on.
const SERVERS_OWN: &str = "nats-";
const CONTENT_TYPE: &str = "content-type";
/// The message id of what was set aside: JetStream must not take it for a repetition.
const ASIDE_ID: &str = "postrider-message-id";

/// Whether NATS can carry the event. `bytes_max` is what the server takes, if that is known.
pub(super) fn check(event: &Event, settings: &NatsSettings, bytes_max: Option<usize>) -> Result<()> {
    check_words("topic", event.topic(), Kind::Invalid)?;
    event.check_size(settings.payload_bytes_max)?;
    let is_taken = |name: &&String| {
        let name = name.to_ascii_lowercase();
        let is_ours = if event.is_raw() { name == MESSAGE_ID } else { name.starts_with(ATTRIBUTE) };
        is_ours || name.starts_with(SERVERS_OWN)
    };
    if let Some(name) = event.headers().keys().find(is_taken) {
        return Err(Error::new(Kind::Invalid, format!("the header name {name:?} has a meaning of its own on NATS"))
            .with_remedy("choose a header name that does not begin with nats- or ce-, and is not message-id"));
    }
    let Some(bytes_max) = bytes_max else { return Ok(()) };
    if bytes_at_most(event) <= bytes_max {
        return Ok(());
    }
    let bytes = wire_bytes(&headers(event)) + event.payload().len();
    if bytes > bytes_max {
        return Err(Error::new(
            Kind::TooLarge,
            format!("the message has {bytes} bytes with its headers, NATS takes {bytes_max}"),
        )
        .with_remedy("send a smaller payload, or raise max_payload in the server's configuration"));
    }
    Ok(())
}

/// Whether the words of a subject are words for NATS.
pub(super) fn check_words(what: &str, text: &str, kind: Kind) -> Result<()> {
    let is_word = |word: &str| !word.is_empty() && !word.chars().any(|c| c.is_whitespace() || c.is_control());
    if text.split('.').all(is_word) && !text.contains(['*', '>']) {
        return Ok(());
    }
    Err(Error::new(kind, format!("the {what} {text:?} cannot be part of a NATS subject"))
        .with_remedy("use words with dots between them, without spaces, '*' or '>'"))
}

/// Where an event is published.
pub(super) fn subject(prefix: &str, event: &Event) -> String {
    format!("{prefix}.{:02}.{}", topic::shard(event), event.topic())
}

/// The topic of a subject. A publisher that knows no shards may leave them out.
pub(super) fn topic_of<'s>(prefix: &str, subject: &'s str) -> &'s str {
    let rest = subject.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('.')).unwrap_or(subject);
    match rest.split_once('.') {
        Some((shard, topic)) if shard.len() == 2 && shard.bytes().all(|b| b.is_ascii_digit()) => topic,
        _ => rest,
    }
}

/// The header of an attribute.
fn nats_name(attribute: Attribute) -> &'static str {
    match attribute {
        Attribute::SpecVersion => "ce-specversion",
        Attribute::Id => "ce-id",
        Attribute::Source => "ce-source",
        Attribute::Type => "ce-type",
        Attribute::Time => "ce-time",
        Attribute::Subject => "ce-subject",
        Attribute::Tenant => "ce-tenant",
        Attribute::Correlation => "ce-correlationid",
        Attribute::Causation => "ce-causationid",
        Attribute::Key => "ce-partitionkey",
        Attribute::TraceParent => "ce-traceparent",
        Attribute::TraceState => "ce-tracestate",
        Attribute::DataRef => "ce-dataref",
        Attribute::DataSize => "ce-datasize",
        Attribute::DataHash => "ce-datahash",
    }
}

/// The headers of an event.
pub(super) fn headers(event: &Event) -> HeaderMap {
    let mut headers = HeaderMap::new();
    put(&mut headers, CONTENT_TYPE, event.content_type());
    for (name, value) in cloudevents::own_headers(event) {
        put(&mut headers, name, value);
    }
    cloudevents::encode(event, |attribute, value| {
        if let Ok(value) = HeaderValue::from_str(&escape(&value)) {
            headers.insert(HeaderName::from_static(nats_name(attribute)), value);
        }
    });
    if event.is_raw() {
        put(&mut headers, MESSAGE_ID, &event.message_id());
    }
    put(&mut headers, REPETITION_ID, &repetition_id(event));
    headers
}

/// The same for a repetition of the event, and for nothing else: what JetStream takes for one is lost.
fn repetition_id(event: &Event) -> String {
    // Without slashes, so that no two pairs become the same.
    let id = escape(&event.message_id()).replace('/', "%2F");
    if !event.is_raw() {
        return format!("{}/{id}", escape(event.source().unwrap_or(cloudevents::SOURCE_DEFAULT)));
    }
    match event.fingerprint() {
        Some(fingerprint) => format!("{id}/{fingerprint:016x}"),
        // A payload that is elsewhere: the event holds its hash.
        None => format!(
            "{id}/{}",
            event.headers().get(Attribute::DataHash.name()).map(|hash| escape(hash)).unwrap_or_default()
        ),
    }
}

/// The headers of an event that is set aside.
pub(super) fn aside_headers(event: &Event) -> HeaderMap {
    let mut aside = HeaderMap::new();
    for (name, values) in headers(event).iter() {
        let name: &str = name.as_ref();
        if !name.eq_ignore_ascii_case(REPETITION_ID) {
            values.iter().for_each(|value| put(&mut aside, name, value.as_str()));
        }
    }
    put(&mut aside, ASIDE_ID, &event.message_id());
    aside
}

/// The headers of a message that is no event and is set aside.
pub(super) fn raw_headers(raw: &RawMessage) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in &raw.headers {
        if !name.to_ascii_lowercase().starts_with(SERVERS_OWN) {
            put(&mut headers, name, value);
        }
    }
    headers
}

/// A header that no line can hold is left out; `Event::validate` lets none pass.
pub(super) fn put(headers: &mut HeaderMap, name: &str, value: &str) {
    if let (Ok(name), Ok(value)) = (HeaderName::from_str(name), HeaderValue::from_str(value)) {
        headers.insert(name, value);
    }
}

/// The event of a received message, or why it is none.
#[expect(clippy::result_large_err, reason = "a delivery holds the same")]
pub(super) fn decode(topic: &str, headers: &HeaderMap, payload: Bytes) -> Result<Event, Undecodable> {
    let mut decoder = Decoder::new(topic);
    // Beside an attribute that says the id, `message-id` is a header as any other.
    let has_id = headers.iter().any(|(name, _)| AsRef::<str>::as_ref(name).eq_ignore_ascii_case("ce-id"));
    let (mut message_id, mut repetition_id) = (None, None);
    for (name, values) in headers.iter() {
        let Some(value) = values.last().map(HeaderValue::as_str) else { continue };
        let own: &str = name.as_ref();
        let name = own.to_ascii_lowercase();
        if let Some(attribute) = name.strip_prefix(ATTRIBUTE) {
            decoder.attribute(attribute, unescape(value));
        } else if name.eq_ignore_ascii_case(REPETITION_ID) {
            repetition_id = Some(value);
        } else if name == MESSAGE_ID && !has_id {
            message_id = Some(value);
        } else if name == CONTENT_TYPE {
            decoder.content_type(value);
        } else if !name.starts_with(SERVERS_OWN) {
            decoder.header(own, value.to_owned());
        }
    }
    if let Some(id) = message_id.or(repetition_id) {
        decoder.carrier_id(id);
    }
    decoder.finish(payload.clone()).map_err(|error| Undecodable { error, raw: raw(headers, payload) })
}

fn raw(headers: &HeaderMap, payload: Bytes) -> RawMessage {
    let mut texts = BTreeMap::new();
    for (name, values) in headers.iter() {
        if let Some(value) = values.last() {
            texts.insert(without_nul(AsRef::<str>::as_ref(name).to_owned()), without_nul(value.as_str().to_owned()));
        }
    }
    RawMessage { headers: texts, payload }
}

/// More than the message can weigh, found without building it.
fn bytes_at_most(event: &Event) -> usize {
    /// Names of attributes, the id twice, version, time, shard.
    const REST: usize = 2048;
    // A byte becomes three at most; the source stands in two headers.
    let attributes = 6 * cloudevents::bytes_at_most(event);
    let mut bytes = REST + attributes + event.payload().len() + event.content_type().len();
    for (name, value) in event.headers() {
        bytes += name.len() + 3 * value.len() + 8;
    }
    bytes
}

/// What headers weigh on the wire.
fn wire_bytes(headers: &HeaderMap) -> usize {
    let lines = headers.iter().flat_map(|(name, values)| values.iter().map(move |value| (name, value)));
    let lines: usize = lines.map(|(name, value)| AsRef::<str>::as_ref(name).len() + value.as_str().len() + 4).sum();
    "NATS/1.0\r\n\r\n".len() + lines
}

/// As the HTTP binding of CloudEvents asks: what is not printable ASCII, spaces, quotes and percent signs.
fn escape(value: &str) -> Cow<'_, str> {
    let is_plain = |byte: u8| matches!(byte, 0x21 | 0x23 | 0x24 | 0x26..=0x7e);
    if value.bytes().all(is_plain) {
        return Cow::Borrowed(value);
    }
    let mut escaped = String::with_capacity(value.len());
    for byte in value.bytes() {
        match is_plain(byte) {
            true => escaped.push(char::from(byte)),
            false => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    Cow::Owned(escaped)
}

/// The other way. A text that was not escaped, or not to UTF-8, stays as it is.
pub(super) fn unescape(value: &str) -> String {
    if !value.contains('%') {
        return value.to_owned();
    }
    let bytes = value.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let digits = value.get(at + 1..at + 3).filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
        match (bytes[at], digits.and_then(|digits| u8::from_str_radix(digits, 16).ok())) {
            (b'%', Some(byte)) => {
                plain.push(byte);
                at += 3;
            }
            (byte, _) => {
                plain.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8(plain).unwrap_or_else(|_| value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::EventBuilder;

    fn build(builder: EventBuilder) -> Event {
        builder.payload("text/plain", "12345").build().unwrap()
    }

    #[test]
    fn an_event_comes_back_as_it_was() {
        let event = build(Event::builder("a.b", "k").key(" ü%20\"x ").subject("%").header("x-y", "grüße 100%"));
        let subject = subject("p.q", &event);
        assert_eq!(subject, format!("p.q.{:02}.a.b", topic::shard(&event)));
        assert_eq!(decode(topic_of("p.q", &subject), &headers(&event), event.payload().clone()).unwrap(), event);
    }

    #[test]
    fn a_raw_event_has_its_own_headers_and_its_id() {
        let event = build(Event::builder("a.b", "k").key("x").message_id("outbox-17").header("x-y", "z").raw());
        let headers = headers(&event);
        assert_eq!(headers.len(), 4, "{headers:?}");
        let back = decode("a.b", &headers, event.payload().clone()).unwrap();
        assert_eq!((back.id(), back.key(), &back.headers()["x-y"]), (event.id(), None, &"z".to_owned()));
    }

    #[test]
    fn only_a_repetition_has_the_same_repetition_id() {
        let of = |source: &str, id: &str, payload: &'static str| {
            let event = Event::builder("a", "k").source(source).message_id(id).payload("text/plain", payload);
            (repetition_id(&event.clone().build().unwrap()), repetition_id(&event.raw().build().unwrap()))
        };
        let (enveloped, raw) = of("s", "1", "x");
        assert_eq!(of("s", "1", "x"), (enveloped.clone(), raw.clone()));
        assert_ne!(of("t", "1", "x").0, enveloped);
        assert_ne!(of("s", "2", "x").0, enveloped);
        assert_ne!(of("s", "1", "y").1, raw);
        assert_ne!(of("s", "2", "x").1, raw);
        assert_ne!(of("s/1", "2", "x").0, of("s", "1/2", "x").0);
    }

    #[test]
    fn a_message_id_of_the_producers_own_stays_a_header() {
        let event = build(Event::builder("a.b", "k").header("message-id", "mine"));
        assert_eq!(decode("a.b", &headers(&event), event.payload().clone()).unwrap(), event);
    }

    #[test]
    fn subjects_of_others_have_a_topic_too() {
        for (subject, topic) in [("p.07.a.b", "a.b"), ("p.a.b", "a.b"), ("p.123.a", "123.a"), ("p.07", "07")] {
            assert_eq!(topic_of("p", subject), topic, "{subject}");
        }
    }

    #[test]
    fn what_nats_cannot_carry_is_refused() {
        let settings = NatsSettings { payload_bytes_max: 5, ..NatsSettings::default() };
        for topic in ["a b", "a.*", "a.>", "a..b", ".a", "a.", "a\u{a0}b"] {
            let error = check(&build(Event::builder(topic, "k")), &settings, None).unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid, "{topic}");
        }
        let good = build(Event::builder("a.b", "k"));
        assert!(check(&good, &settings, Some(10_000)).is_ok());
        assert_eq!(check(&good, &settings, Some(100)).unwrap_err().kind(), Kind::TooLarge);
        let small = NatsSettings { payload_bytes_max: 4, ..settings.clone() };
        assert_eq!(check(&good, &small, None).unwrap_err().kind(), Kind::TooLarge);
        for header in ["Nats-Rollup", "ce-id"] {
            let event = build(Event::builder("a", "k").header(header, "x"));
            assert_eq!(check(&event, &settings, None).unwrap_err().kind(), Kind::Invalid, "{header}");
        }
        let raw = build(Event::builder("a", "k").header("Message-ID", "x").raw());
        assert_eq!(check(&raw, &settings, None).unwrap_err().kind(), Kind::Invalid);
    }

    #[test]
    fn a_message_without_an_id_is_kept_as_it_came() {
        let mut headers = HeaderMap::new();
        put(&mut headers, "x-shop", "s-1");
        let undecodable = decode("a", &headers, Bytes::from_static(b"x")).unwrap_err();
        assert_eq!(undecodable.error.kind(), Kind::Corrupt);
        assert_eq!((undecodable.raw.headers["x-shop"].as_str(), undecodable.raw.payload.len()), ("s-1", 1));
        put(&mut headers, "Nats-Msg-Id", "m-1");
        assert_eq!(decode("a", &headers, Bytes::new()).unwrap().headers().len(), 1);
    }
}
