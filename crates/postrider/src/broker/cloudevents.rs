//! The mapping between an [`Event`] and CloudEvents 1.0 in binary mode: attributes beside the payload.
//!
//! Pure, so that every broker shares it. A broker calls [`encode`] and puts each attribute where its protocol binding
//! says (`cloudEvents:id` on AMQP, `ce_id` on Kafka); on the way back it feeds a [`Decoder`] with whatever it received.
//!
//! What CloudEvents does not name travels as extension attributes: `tenant`, `correlationid`, `causationid`,
//! `partitionkey` (our key), `traceparent`, `tracestate`, and for a payload that is elsewhere (see [`crate::claim`])
//! `dataref`, `datasize`, `datahash`, which an [`Event`] keeps among its headers. The topic is the carrier's own (routing key, subject), and the
//! content type goes where the carrier keeps it.

use std::borrow::Cow;
use std::collections::BTreeMap;

use bytes::Bytes;
use chrono::{DateTime, SecondsFormat, SubsecRound, Utc};
use uuid::Uuid;

use crate::error::{Error, Kind, Result};
use crate::event::{
    Event, HEADER_NAME_BYTES_MAX, HEADER_VALUE_BYTES_MAX, HEADERS_MAX, KEY_BYTES_MAX, TEXT_BYTES_MAX, TOPIC_BYTES_MAX,
    Text, Wire, id_of_hash,
};

/// The version of the specification that we write.
pub const SPECVERSION: &str = "1.0";
/// CloudEvents wants a source on every event. An event without one says this, and is read back without one.
pub const SOURCE_DEFAULT: &str = "postrider";
/// The content type of a received message that declares none.
pub const CONTENT_TYPE_DEFAULT: &str = "application/octet-stream";

/// An attribute of the envelope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attribute {
    /// `specversion`, always [`SPECVERSION`].
    SpecVersion,
    /// `id`
    Id,
    /// `source`
    Source,
    /// `type`
    Type,
    /// `time`, RFC 3339 in UTC with microseconds.
    Time,
    /// `subject`
    Subject,
    /// `tenant`, an extension.
    Tenant,
    /// `correlationid`, an extension.
    Correlation,
    /// `causationid`, an extension.
    Causation,
    /// `partitionkey`, the extension that holds our key.
    Key,
    /// `traceparent`, the distributed tracing extension.
    TraceParent,
    /// `tracestate`, the distributed tracing extension.
    TraceState,
    /// `dataref`, the extension for a payload that is elsewhere; a header of the event.
    DataRef,
    /// `datasize`, an extension that goes with it.
    DataSize,
    /// `datahash`, an extension that goes with it.
    DataHash,
}

impl Attribute {
    /// Every attribute that we write or understand.
    pub const ALL: [Attribute; 15] = [
        Attribute::SpecVersion,
        Attribute::Id,
        Attribute::Source,
        Attribute::Type,
        Attribute::Time,
        Attribute::Subject,
        Attribute::Tenant,
        Attribute::Correlation,
        Attribute::Causation,
        Attribute::Key,
        Attribute::TraceParent,
        Attribute::TraceState,
        Attribute::DataRef,
        Attribute::DataSize,
        Attribute::DataHash,
    ];

    /// Those that an event keeps among its headers.
    const HEADERS: [Attribute; 3] = [Attribute::DataRef, Attribute::DataSize, Attribute::DataHash];

    /// The name in the specification, without a carrier's prefix.
    pub fn name(self) -> &'static str {
        match self {
            Attribute::SpecVersion => "specversion",
            Attribute::Id => "id",
            Attribute::Source => "source",
            Attribute::Type => "type",
            Attribute::Time => "time",
            Attribute::Subject => "subject",
            Attribute::Tenant => "tenant",
            Attribute::Correlation => "correlationid",
            Attribute::Causation => "causationid",
            Attribute::Key => "partitionkey",
            Attribute::TraceParent => "traceparent",
            Attribute::TraceState => "tracestate",
            Attribute::DataRef => "dataref",
            Attribute::DataSize => "datasize",
            Attribute::DataHash => "datahash",
        }
    }

    /// The attribute of that name, if we know it.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|attribute| attribute.name() == name)
    }
}

/// Gives every attribute that the event has to `put`. The four mandatory ones always come; of a raw event none does.
pub fn encode<'e>(event: &'e Event, mut put: impl FnMut(Attribute, Cow<'e, str>)) {
    if event.is_raw() {
        return;
    }
    put(Attribute::SpecVersion, Cow::Borrowed(SPECVERSION));
    put(Attribute::Id, event.message_id());
    put(Attribute::Source, Cow::Borrowed(event.source.as_deref().unwrap_or(SOURCE_DEFAULT)));
    put(Attribute::Type, Cow::Borrowed(&event.kind));
    put(Attribute::Time, Cow::Owned(event.time.to_rfc3339_opts(SecondsFormat::Micros, true)));
    let optional = [
        (Attribute::Subject, &event.subject),
        (Attribute::Tenant, &event.tenant),
        (Attribute::Correlation, &event.correlation),
        (Attribute::Causation, &event.causation),
        (Attribute::Key, &event.key),
        (Attribute::TraceParent, &event.traceparent),
        (Attribute::TraceState, &event.tracestate),
    ];
    for (attribute, value) in optional {
        if let Some(value) = value {
            put(attribute, Cow::Borrowed(value));
        }
    }
    for attribute in Attribute::HEADERS {
        if let Some(value) = event.headers.get(attribute.name()) {
            put(attribute, Cow::Borrowed(value));
        }
    }
}

/// What the values that [`encode`] gives weigh, or a little more. Found without writing them.
pub fn bytes_at_most(event: &Event) -> usize {
    /// Version, id and time, when the id is a UUID.
    const FIXED: usize = 128;
    if event.is_raw() {
        return 0;
    }
    let id = event.wire.message_id.as_ref().map_or(0, String::len);
    let texts = [
        &event.source,
        &event.subject,
        &event.tenant,
        &event.correlation,
        &event.causation,
        &event.key,
        &event.traceparent,
        &event.tracestate,
    ];
    let texts: usize = texts.into_iter().flatten().map(|text| text.len()).sum();
    let references = Attribute::HEADERS.iter().filter_map(|attribute| event.headers.get(attribute.name()));
    FIXED + id + event.kind.len() + texts + references.map(String::len).sum::<usize>()
}

/// The producer's own headers, without those that [`encode`] gives as attributes.
pub fn own_headers(event: &Event) -> impl Iterator<Item = (&String, &String)> {
    event.headers.iter().filter(|(name, _)| !crate::claim::is_reference_header(name))
}

/// Builds an [`Event`] from a received message, ours or a foreign one.
///
/// CloudEvents attributes win over what the carrier itself says. What a foreign message lacks is filled in from the
/// carrier; only a message without any id is no event, because nothing could tell its repetition from a new one.
#[derive(Debug, Default)]
pub struct Decoder {
    topic: String,
    id: Option<String>,
    source: Option<String>,
    kind: Option<String>,
    time: Option<DateTime<Utc>>,
    subject: Option<String>,
    tenant: Option<String>,
    correlation: Option<String>,
    causation: Option<String>,
    key: Option<String>,
    traceparent: Option<String>,
    tracestate: Option<String>,
    content_type: Option<String>,
    headers: BTreeMap<String, String>,
}

impl Decoder {
    /// A message that arrived under `topic`.
    pub fn new(topic: impl Into<String>) -> Self {
        Self { topic: topic.into(), ..Self::default() }
    }

    /// A CloudEvents attribute, its carrier's prefix removed. One that we do not know is kept as a header.
    pub fn attribute(&mut self, name: &str, value: String) {
        let Some(attribute) = Attribute::of_name(name) else {
            return self.header(name, value);
        };
        let place = match attribute {
            Attribute::SpecVersion => return,
            Attribute::DataRef | Attribute::DataSize | Attribute::DataHash => return self.header(name, value),
            Attribute::Time => {
                if let Ok(time) = DateTime::parse_from_rfc3339(&value) {
                    self.time = Some(time.with_timezone(&Utc).trunc_subsecs(6));
                }
                return;
            }
            Attribute::Id => &mut self.id,
            Attribute::Source => &mut self.source,
            Attribute::Type => &mut self.kind,
            Attribute::Subject => &mut self.subject,
            Attribute::Tenant => &mut self.tenant,
            Attribute::Correlation => &mut self.correlation,
            Attribute::Causation => &mut self.causation,
            Attribute::Key => &mut self.key,
            Attribute::TraceParent => &mut self.traceparent,
            Attribute::TraceState => &mut self.tracestate,
        };
        *place = Some(value);
    }

    /// A header of the producer's own. One that could not be sent on is dropped: a foreign producer's oddity must not
    /// keep its message from being handled.
    pub fn header(&mut self, name: &str, value: String) {
        let is_sendable = !name.is_empty()
            && name.len() <= HEADER_NAME_BYTES_MAX
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
            && value.len() <= HEADER_VALUE_BYTES_MAX
            && !value.chars().any(char::is_control);
        if is_sendable && self.headers.len() < HEADERS_MAX {
            self.headers.insert(name.to_owned(), value);
        }
    }

    /// The carrier's message id, used when there is no CloudEvents id.
    pub fn carrier_id(&mut self, id: &str) {
        self.id.get_or_insert_with(|| id.to_owned());
    }

    /// The carrier's message type, used when there is no CloudEvents type.
    pub fn carrier_type(&mut self, kind: &str) {
        self.kind.get_or_insert_with(|| kind.to_owned());
    }

    /// The carrier's timestamp, used when there is no CloudEvents time.
    pub fn carrier_time(&mut self, time: DateTime<Utc>) {
        self.time.get_or_insert(time);
    }

    /// The carrier's correlation id, used when there is no such attribute.
    pub fn carrier_correlation(&mut self, correlation: &str) {
        self.correlation.get_or_insert_with(|| correlation.to_owned());
    }

    /// The payload's media type, which every carrier keeps outside of the attributes.
    pub fn content_type(&mut self, content_type: &str) {
        self.content_type = Some(content_type.to_owned());
    }

    /// The event.
    pub fn finish(self, payload: impl Into<Bytes>) -> Result<Event> {
        let Some(id) = self.id.as_deref().filter(|id| !id.is_empty()) else {
            return Err(Error::new(Kind::Corrupt, format!("a message under {:?} has no id", self.topic)).with_remedy(
                "let the producer set a CloudEvents id or the broker's message id, so that repetitions can be told apart",
            ));
        };
        if self.topic.len() > TOPIC_BYTES_MAX {
            let bytes = self.topic.len();
            return Err(Error::new(
                Kind::Corrupt,
                format!("a message has a topic of {bytes} bytes, at most {TOPIC_BYTES_MAX} can be kept"),
            )
            .with_remedy("let the producer use a shorter topic"));
        }
        let id = id_of(self.source.as_deref().unwrap_or_default(), id);
        let topic = Text::from(crate::inbox::without_nul(self.topic));
        let kind = text(self.kind, TEXT_BYTES_MAX).unwrap_or_else(|| topic.clone());
        Ok(Event {
            id,
            kind,
            topic,
            key: text(self.key, KEY_BYTES_MAX),
            time: self.time.unwrap_or_else(|| Utc::now().trunc_subsecs(6)),
            source: text(self.source, TEXT_BYTES_MAX).filter(|source| source != SOURCE_DEFAULT),
            subject: text(self.subject, TEXT_BYTES_MAX),
            tenant: text(self.tenant, TEXT_BYTES_MAX),
            correlation: text(self.correlation, TEXT_BYTES_MAX),
            causation: text(self.causation, TEXT_BYTES_MAX),
            traceparent: text(self.traceparent, TEXT_BYTES_MAX),
            tracestate: text(self.tracestate, TEXT_BYTES_MAX),
            content_type: text(self.content_type, KEY_BYTES_MAX).unwrap_or(Text::new_static(CONTENT_TYPE_DEFAULT)),
            headers: self.headers,
            payload: payload.into(),
            wire: Wire::default(),
        })
    }
}

/// A text that keeps the rules of [`Event::validate`], or none: a store could not hold it.
fn text(value: Option<String>, bytes_max: usize) -> Option<Text> {
    let is_kept =
        |value: &String| !value.is_empty() && value.len() <= bytes_max && !value.chars().any(char::is_control);
    value.filter(is_kept).map(Text::from)
}

/// The UUID of a message id. One that is no UUID gives one (version 8) that is always the same for one source and id:
/// CloudEvents calls that pair the event's identity.
pub(crate) fn id_of(source: &str, id: &str) -> Uuid {
    if let Ok(id) = Uuid::try_parse(id) {
        return id;
    }
    // FNV-1a, 128 bits: stable, and wide enough that chance does not make two ids meet.
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    for byte in source.bytes().chain([0]).chain(id.bytes()) {
        hash ^= u128::from(byte);
        hash = hash.wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
    }
    id_of_hash(hash)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::EventBuilder;

    fn full() -> Event {
        Event::builder("orders.created", "order.created")
            .key("o-1")
            .source("shop")
            .subject("order o-1")
            .tenant("acme")
            .correlation("c-1")
            .causation("c-0")
            .traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
            .tracestate("a=b")
            .header("region", "eu")
            .header("dataref", "2023-11-14/x")
            .json(&serde_json::json!({"order": "o-1"}))
            .and_then(EventBuilder::build)
            .unwrap()
    }

    fn travel(event: &Event) -> Event {
        let mut decoder = Decoder::new(event.topic());
        encode(event, |attribute, value| decoder.attribute(attribute.name(), value.into_owned()));
        for (name, value) in own_headers(event) {
            decoder.header(name, value.clone());
        }
        decoder.content_type(event.content_type());
        decoder.finish(event.payload().clone()).unwrap()
    }

    #[test]
    fn a_full_event_comes_back_as_it_was() {
        let event = full();
        assert_eq!(travel(&event), event);
    }

    #[test]
    fn a_bare_event_comes_back_as_it_was() {
        let event = Event::builder("a", "b").payload("text/plain", "x").build().unwrap();
        assert_eq!(travel(&event), event);
        assert_eq!(travel(&event).source(), None);
    }

    #[test]
    fn mandatory_attributes_are_always_there() {
        let event = Event::builder("a", "b").payload("text/plain", "x").build().unwrap();
        let mut names = Vec::new();
        encode(&event, |attribute, value| {
            assert!(!value.is_empty());
            names.push(attribute.name());
        });
        assert_eq!(names, ["specversion", "id", "source", "type", "time"]);
    }

    #[test]
    fn attributes_weigh_at_most_what_is_said() {
        let bytes = |event: &Event| {
            let mut bytes = 0;
            encode(event, |_, value| bytes += value.len());
            bytes
        };
        let small = Event::builder("t", "t").payload("text/plain", "x").build().unwrap();
        let far = DateTime::<Utc>::MAX_UTC;
        let large = Event::builder("t", "t".repeat(200))
            .key("k".repeat(200))
            .source("s".repeat(900))
            .tenant("t".repeat(900))
            .header(Attribute::DataRef.name(), "file:///".repeat(50))
            .time(far)
            .payload("text/plain", "x")
            .build()
            .unwrap();
        for event in [small, large] {
            let (is, at_most) = (bytes(&event), bytes_at_most(&event));
            assert!(is <= at_most && at_most <= is + 128, "{is} {at_most}");
        }
    }

    #[test]
    fn names_of_attributes_are_understood_again() {
        for attribute in Attribute::ALL {
            assert_eq!(Attribute::of_name(attribute.name()), Some(attribute));
        }
        assert_eq!(Attribute::of_name("other"), None);
    }

    #[test]
    fn a_foreign_id_gives_one_stable_uuid() {
        let decode = |source: &str, id: &str| {
            let mut decoder = Decoder::new("t");
            decoder.attribute("source", source.to_owned());
            decoder.attribute("id", id.to_owned());
            decoder.finish(Bytes::new()).unwrap().id()
        };
        assert_eq!(decode("s", "1234"), decode("s", "1234"));
        assert_ne!(decode("s", "1234"), decode("s", "1235"));
        assert_ne!(decode("s", "1234"), decode("r", "1234"));
        assert_ne!(decode("sa", "b"), decode("s", "ab"));
        // Stored in inboxes: another value would let old messages in again.
        assert_eq!(decode("", "x").get_version_num(), 8);
    }

    #[test]
    fn a_foreign_message_is_filled_in_from_its_carrier() {
        let mut decoder = Decoder::new("legacy.orders");
        decoder.carrier_id("m-1");
        decoder.header("bad name", "x".to_owned());
        decoder.header("ok", "line\nbreak".to_owned());
        decoder.header("fine", "yes".to_owned());
        let event = decoder.finish("payload").unwrap();
        assert_eq!(event.kind(), "legacy.orders");
        assert_eq!(event.content_type(), CONTENT_TYPE_DEFAULT);
        assert_eq!(event.headers().len(), 1);
        assert!(event.validate().is_ok());
    }

    #[test]
    fn attributes_win_over_the_carrier() {
        let mut decoder = Decoder::new("t");
        decoder.attribute("id", "018f0000-0000-7000-8000-000000000001".to_owned());
        decoder.attribute("type", "a".to_owned());
        decoder.carrier_id("018f0000-0000-7000-8000-000000000002");
        decoder.carrier_type("b");
        let event = decoder.finish(Bytes::new()).unwrap();
        assert_eq!(event.id().to_string(), "018f0000-0000-7000-8000-000000000001");
        assert_eq!(event.kind(), "a");
    }

    #[test]
    fn a_message_without_an_id_is_no_event() {
        let error = Decoder::new("t").finish(Bytes::new()).unwrap_err();
        assert_eq!(error.kind(), Kind::Corrupt);
    }

    #[test]
    fn a_topic_that_no_store_can_keep_is_no_events() {
        let finish = |bytes: usize| {
            let mut decoder = Decoder::new("t".repeat(bytes));
            decoder.carrier_id("1");
            decoder.finish(Bytes::new())
        };
        assert!(finish(TOPIC_BYTES_MAX).is_ok());
        assert_eq!(finish(TOPIC_BYTES_MAX + 1).unwrap_err().kind(), Kind::Corrupt);
    }

    #[test]
    fn an_unknown_extension_becomes_a_header() {
        let mut decoder = Decoder::new("t");
        decoder.carrier_id("1");
        decoder.attribute("dataschema", "urn:x".to_owned());
        assert_eq!(
            decoder.finish(Bytes::new()).unwrap().headers().get("dataschema").map(String::as_str),
            Some("urn:x")
        );
    }
}
