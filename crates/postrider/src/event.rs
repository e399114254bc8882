//! The event: an immutable envelope around a payload.
//!
//! [`Event`] is what the outbox stores, the relay carries and a handler receives. Services in Rust usually do not build
//! one by hand: they implement [`Payload`] for their own serde type and call [`Event::of`].

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use bytes::Bytes;
use chrono::{DateTime, SubsecRound, Utc};
use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

/// A short text of the envelope: up to 23 bytes stand in place, longer ones are shared by all who have them.
pub use smol_str::SmolStr as Text;

use crate::broker::cloudevents;
use crate::error::{Error, Kind, Result};

/// AMQP carries routing keys as short strings, and Kafka topic names end at 249; 255 is the widest limit that the
/// first of them allows.
pub const TOPIC_BYTES_MAX: usize = 255;
/// A key names an aggregate, so it is short; the bound keeps indexes and headers small.
pub const KEY_BYTES_MAX: usize = 255;
/// The other short texts of the envelope (type, source, subject, tenant, correlation, causation).
pub const TEXT_BYTES_MAX: usize = 1024;
/// Header names travel as AMQP short strings with a prefix of ours.
pub const HEADER_NAME_BYTES_MAX: usize = 128;
/// Header values travel inside one AMQP header frame, together with all others.
pub const HEADER_VALUE_BYTES_MAX: usize = 8 * 1024;
/// More headers than this is a payload in disguise.
pub const HEADERS_MAX: usize = 64;
/// What a payload may weigh unless the destination says less. RabbitMQ's own default is 128 MiB; an event is a
/// message, not a file.
pub const PAYLOAD_BYTES_MAX: usize = 16 * 1024 * 1024;

/// The content type of JSON, and the default.
pub const JSON: &str = "application/json";

/// A serde type that travels as an event.
///
/// ```
/// use postrider::{Event, Payload};
///
/// #[derive(serde::Serialize, serde::Deserialize)]
/// struct OrderCreated { order: String, total: u64 }
///
/// impl Payload for OrderCreated {
///     const TYPE: &'static str = "order.created";
///     const TOPIC: &'static str = "orders.created";
///     fn key(&self) -> Option<String> { Some(self.order.clone()) }
/// }
///
/// let event = Event::of(&OrderCreated { order: "o-1".into(), total: 120 })?;
/// assert_eq!(event.kind(), "order.created");
/// assert_eq!(event.decode::<OrderCreated>()?.total, 120);
/// # Ok::<(), postrider::Error>(())
/// ```
pub trait Payload: Serialize + DeserializeOwned {
    /// The type that consumers choose a handler by, `order.created`.
    const TYPE: &'static str;
    /// Where it is published unless the caller says otherwise.
    const TOPIC: &'static str;

    /// The aggregate whose events must stay in order; `None` for an event that has no order.
    fn key(&self) -> Option<String>;
}

/// An immutable event. Two events with the same id are the same event.
#[derive(Clone, PartialEq)]
pub struct Event {
    pub(crate) id: Uuid,
    pub(crate) topic: Text,
    pub(crate) key: Option<Text>,
    pub(crate) kind: Text,
    pub(crate) time: DateTime<Utc>,
    pub(crate) source: Option<Text>,
    pub(crate) subject: Option<Text>,
    pub(crate) tenant: Option<Text>,
    pub(crate) correlation: Option<Text>,
    pub(crate) causation: Option<Text>,
    pub(crate) traceparent: Option<Text>,
    pub(crate) tracestate: Option<Text>,
    pub(crate) content_type: Text,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) payload: Bytes,
    pub(crate) wire: Wire,
}

/// What is special about an event on its way to a broker. Not stored: sources that need it set it anew.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Wire {
    /// The message id when it is not the event's UUID.
    pub message_id: Option<String>,
    /// Whether payload, headers and message id travel without the envelope.
    pub is_raw: bool,
}

/// An event without its payload, as JSON: how stores keep held messages and dead letters.
#[derive(Serialize, serde::Deserialize)]
struct Envelope {
    id: Uuid,
    topic: Text,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key: Option<Text>,
    #[serde(rename = "type")]
    kind: Text,
    time: DateTime<Utc>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    source: Option<Text>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    subject: Option<Text>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tenant: Option<Text>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    correlation: Option<Text>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    causation: Option<Text>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    traceparent: Option<Text>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tracestate: Option<Text>,
    content_type: Text,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    headers: BTreeMap<String, String>,
}

/// A UUID (version 8) of a hash, for what has no id of its own.
pub(crate) fn id_of_hash(hash: u128) -> Uuid {
    uuid::Builder::from_custom_bytes(hash.to_be_bytes()).into_uuid()
}

/// Shows no payload and no header value, so that an event may stand in a log line.
impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event")
            .field("id", &self.id)
            .field("topic", &self.topic)
            .field("type", &self.kind)
            .field("payload_bytes", &self.payload.len())
            .finish_non_exhaustive()
    }
}

impl Event {
    /// An event of a typed payload, with its topic, type and key.
    pub fn of<P: Payload>(payload: &P) -> Result<Event> {
        let mut builder = Event::builder(P::TOPIC, P::TYPE).json(payload)?;
        if let Some(key) = payload.key() {
            builder = builder.key(key);
        }
        builder.build()
    }

    /// Everything but the payload, as JSON.
    pub(crate) fn envelope(&self) -> Result<String> {
        let envelope = Envelope {
            id: self.id,
            topic: self.topic.clone(),
            key: self.key.clone(),
            kind: self.kind.clone(),
            time: self.time,
            source: self.source.clone(),
            subject: self.subject.clone(),
            tenant: self.tenant.clone(),
            correlation: self.correlation.clone(),
            causation: self.causation.clone(),
            traceparent: self.traceparent.clone(),
            tracestate: self.tracestate.clone(),
            content_type: self.content_type.clone(),
            headers: self.headers.clone(),
        };
        serde_json::to_string(&envelope)
            .map_err(|error| Error::new(Kind::Other, "the envelope cannot be written").with_source(error))
    }

    /// The event of an envelope and a payload.
    pub(crate) fn of_envelope(envelope: &str, payload: impl Into<Bytes>) -> Result<Event> {
        let Envelope {
            id,
            topic,
            key,
            kind,
            time,
            source,
            subject,
            tenant,
            correlation,
            causation,
            traceparent,
            tracestate,
            content_type,
            headers,
        } = serde_json::from_str(envelope)
            .map_err(|error| Error::new(Kind::Corrupt, "a stored envelope cannot be read").with_source(error))?;
        let payload = payload.into();
        Ok(Event {
            id,
            topic,
            key,
            kind,
            time,
            source,
            subject,
            tenant,
            correlation,
            causation,
            traceparent,
            tracestate,
            content_type,
            headers,
            payload,
            wire: Wire::default(),
        })
    }

    /// A number that differs, but for chance, when type or payload differ. None while the payload is elsewhere: it is not
    /// known then, and must not look like another one.
    pub(crate) fn fingerprint(&self) -> Option<i64> {
        let hash = || crate::broker::topic::fnv64(self.kind.bytes().chain([0]).chain(self.payload.iter().copied()));
        (!crate::claim::is_claimed(self)).then(|| hash().cast_signed())
    }

    /// Whether an inbox row with this fingerprint may be of this event.
    #[allow(dead_code)] // unused when no store is on
    pub(crate) fn may_be(&self, fingerprint: Option<i64>) -> bool {
        // Rows from before fingerprints were kept have none.
        fingerprint.zip(self.fingerprint()).is_none_or(|(theirs, ours)| theirs == ours)
    }

    /// Starts an event from its topic and type.
    pub fn builder(topic: impl Into<String>, kind: impl Into<String>) -> EventBuilder {
        EventBuilder {
            event: Event {
                id: Uuid::now_v7(),
                topic: Text::from(topic.into()),
                key: None,
                kind: Text::from(kind.into()),
                // Databases keep microseconds; what is read back must equal what was written.
                time: Utc::now().trunc_subsecs(6),
                source: None,
                subject: None,
                tenant: None,
                correlation: None,
                causation: None,
                traceparent: None,
                tracestate: None,
                content_type: Text::new_static(JSON),
                headers: BTreeMap::new(),
                payload: Bytes::new(),
                wire: Wire::default(),
            },
        }
    }

    /// Starts an event that follows from this one: same correlation (or this id), tenant and trace, this id as cause.
    pub fn follow(&self, topic: impl Into<String>, kind: impl Into<String>) -> EventBuilder {
        let mut builder = Event::builder(topic, kind);
        builder.event.correlation = Some(self.correlation.clone().unwrap_or_else(|| self.id.to_string().into()));
        builder.event.causation = Some(self.id.to_string().into());
        builder.event.tenant = self.tenant.clone();
        builder.event.traceparent = self.traceparent.clone();
        builder.event.tracestate = self.tracestate.clone();
        builder
    }

    /// Starts a copy of this event that keeps its id.
    pub fn rebuild(self) -> EventBuilder {
        EventBuilder { event: self }
    }

    /// The id: a UUIDv7 unless the producer chose one. It is the message id on every broker and the inbox's key.
    pub fn id(&self) -> Uuid {
        self.id
    }
    /// The message id on every broker: the id, unless the producer has one that is no UUID.
    pub fn message_id(&self) -> Cow<'_, str> {
        match &self.wire.message_id {
            Some(id) => Cow::Borrowed(id),
            None => Cow::Owned(self.id.to_string()),
        }
    }
    /// Whether it travels raw: payload, headers of its own and message id, without the envelope.
    pub fn is_raw(&self) -> bool {
        self.wire.is_raw
    }
    /// Where it is published: routing key on RabbitMQ, topic elsewhere.
    pub fn topic(&self) -> &str {
        &self.topic
    }
    /// The aggregate whose events stay in order.
    pub fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }
    /// The type, as in CloudEvents' `type`.
    pub fn kind(&self) -> &str {
        &self.kind
    }
    /// When it was created, by the producer's clock. Never an order.
    pub fn time(&self) -> DateTime<Utc> {
        self.time
    }
    /// The system it comes from.
    pub fn source(&self) -> Option<&str> {
        self.source.as_deref()
    }
    /// What it is about, within the source.
    pub fn subject(&self) -> Option<&str> {
        self.subject.as_deref()
    }
    /// The tenant it belongs to.
    pub fn tenant(&self) -> Option<&str> {
        self.tenant.as_deref()
    }
    /// What joins all events of one business process.
    pub fn correlation(&self) -> Option<&str> {
        self.correlation.as_deref()
    }
    /// The id of the event or command that caused it.
    pub fn causation(&self) -> Option<&str> {
        self.causation.as_deref()
    }
    /// W3C trace context.
    pub fn traceparent(&self) -> Option<&str> {
        self.traceparent.as_deref()
    }
    /// W3C trace state.
    pub fn tracestate(&self) -> Option<&str> {
        self.tracestate.as_deref()
    }
    /// The payload's media type.
    pub fn content_type(&self) -> &str {
        &self.content_type
    }
    /// Headers of the producer's own.
    pub fn headers(&self) -> &BTreeMap<String, String> {
        &self.headers
    }
    /// The payload as it travels.
    pub fn payload(&self) -> &Bytes {
        &self.payload
    }

    /// Whether the payload is declared to be JSON.
    pub fn is_json(&self) -> bool {
        is_json(&self.content_type)
    }

    /// The payload as a serde type.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_slice(&self.payload).map_err(|error| {
            // serde's message quotes values of the payload; only the place is safe to show.
            Error::new(
                Kind::Corrupt,
                format!(
                    "event {} of type {} does not decode (line {}, column {})",
                    self.id,
                    self.kind,
                    error.line(),
                    error.column()
                ),
            )
        })
    }

    /// Checks the payload against a limit.
    pub(crate) fn check_size(&self, bytes_max: usize) -> Result<()> {
        if self.payload.len() <= bytes_max {
            return Ok(());
        }
        Err(Error::new(
            Kind::TooLarge,
            format!("the payload has {} bytes, the limit is {bytes_max}", self.payload.len()),
        ))
    }

    /// Checks every rule that an event must keep before it may enter an outbox.
    pub fn validate(&self) -> Result<()> {
        check_text("topic", &self.topic, TOPIC_BYTES_MAX)?;
        check_text("type", &self.kind, TEXT_BYTES_MAX)?;
        if let Some(key) = &self.key {
            check_text("key", key, KEY_BYTES_MAX)?;
        }
        let optional = [
            ("source", &self.source),
            ("subject", &self.subject),
            ("tenant", &self.tenant),
            ("correlation", &self.correlation),
            ("causation", &self.causation),
            ("traceparent", &self.traceparent),
            ("tracestate", &self.tracestate),
        ];
        for (name, value) in optional {
            if let Some(value) = value {
                check_text(name, value, TEXT_BYTES_MAX)?;
            }
        }
        check_text("content_type", &self.content_type, KEY_BYTES_MAX)?;
        check_headers(&self.headers)?;
        self.check_size(PAYLOAD_BYTES_MAX)?;
        if self.is_json() {
            serde_json::from_slice::<serde::de::IgnoredAny>(&self.payload).map_err(|error| {
                Error::new(
                    Kind::Invalid,
                    format!(
                        "the payload is declared as {} but is not valid JSON (line {}, column {})",
                        self.content_type,
                        error.line(),
                        error.column()
                    ),
                )
                .with_remedy("send valid JSON, or declare the payload's real content type")
            })?;
        }
        Ok(())
    }
}

pub(crate) fn is_json(content_type: &str) -> bool {
    let media = content_type.split(';').next().unwrap_or_default().trim();
    media.eq_ignore_ascii_case(JSON) || media.to_ascii_lowercase().ends_with("+json")
}

fn check_text(name: &str, value: &str, bytes_max: usize) -> Result<()> {
    let invalid = |what: String| Err(Error::new(Kind::Invalid, what));
    if value.is_empty() {
        return invalid(format!("the {name} is empty"));
    }
    if value.len() > bytes_max {
        return invalid(format!("the {name} has {} bytes, the limit is {bytes_max}", value.len()));
    }
    // PostgreSQL's text cannot hold NUL, and control characters break header lines on other carriers.
    if let Some(bad) = value.chars().find(|c| c.is_control()) {
        return invalid(format!("the {name} contains the control character U+{:04X}", bad as u32));
    }
    Ok(())
}

fn check_headers(headers: &BTreeMap<String, String>) -> Result<()> {
    if headers.len() > HEADERS_MAX {
        return Err(Error::new(Kind::Invalid, format!("{} headers, the limit is {HEADERS_MAX}", headers.len())));
    }
    for (name, value) in headers {
        let is_sendable = !name.is_empty()
            && name.len() <= HEADER_NAME_BYTES_MAX
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
        if !is_sendable {
            return Err(Error::new(Kind::Invalid, format!("the header name {name:?} cannot be sent"))
                .with_remedy("use 1 to 128 letters, digits, '-', '_' or '.' as header name"));
        }
        if name.to_ascii_lowercase().starts_with("cloudevents") {
            return Err(Error::new(Kind::Invalid, format!("the header name {name:?} is taken by CloudEvents"))
                .with_remedy("choose a header name that does not begin with cloudEvents"));
        }
        if value.len() > HEADER_VALUE_BYTES_MAX || value.chars().any(char::is_control) {
            return Err(Error::new(Kind::Invalid, format!("the value of header {name:?} cannot be sent")).with_remedy(
                format!("use at most {HEADER_VALUE_BYTES_MAX} bytes of text without control characters"),
            ));
        }
    }
    Ok(())
}

/// Builds an [`Event`]; [`EventBuilder::build`] validates it.
#[derive(Debug, Clone)]
#[must_use]
pub struct EventBuilder {
    event: Event,
}

macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident),*) => {$(
        $(#[$doc])*
        pub fn $name(mut self, $name: impl Into<String>) -> Self {
            self.event.$name = Some(Text::from($name.into()));
            self
        }
    )*};
}

impl EventBuilder {
    setters! {
        /// The aggregate whose events stay in order.
        key,
        /// The system it comes from.
        source,
        /// What it is about.
        subject,
        /// The tenant it belongs to.
        tenant,
        /// What joins all events of one business process.
        correlation,
        /// The id of what caused it.
        causation,
        /// W3C trace context.
        traceparent,
        /// W3C trace state.
        tracestate
    }

    /// Chooses the id; for producers that have one already.
    pub fn id(mut self, id: Uuid) -> Self {
        self.event.id = id;
        self
    }

    /// Chooses a message id that need not be a UUID, such as `outbox-17`. The event's id is then the one that a consumer
    /// derives from it and the source.
    pub fn message_id(mut self, message_id: impl Into<String>) -> Self {
        self.event.wire.message_id = Some(message_id.into());
        self
    }

    /// Lets payload, headers and message id travel without the envelope, for consumers that expect nothing else.
    pub fn raw(mut self) -> Self {
        self.event.wire.is_raw = true;
        self
    }

    /// Chooses the creation time.
    pub fn time(mut self, time: DateTime<Utc>) -> Self {
        self.event.time = time.trunc_subsecs(6);
        self
    }

    /// A header of the producer's own.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.event.headers.insert(name.into(), value.into());
        self
    }

    /// A payload that serde writes as JSON.
    pub fn json<T: Serialize + ?Sized>(mut self, payload: &T) -> Result<Self> {
        let bytes = serde_json::to_vec(payload)
            .map_err(|error| Error::new(Kind::Invalid, "the payload cannot be written as JSON").with_source(error))?;
        self.event.payload = bytes.into();
        self.event.content_type = Text::new_static(JSON);
        Ok(self)
    }

    /// A payload of any media type.
    pub fn payload(mut self, content_type: impl Into<String>, payload: impl Into<Bytes>) -> Self {
        self.event.content_type = Text::from(content_type.into());
        self.event.payload = payload.into();
        self
    }

    /// The event, when it keeps all rules.
    pub fn build(mut self) -> Result<Event> {
        if let Some(message_id) = &self.event.wire.message_id {
            check_text("message id", message_id, KEY_BYTES_MAX)?;
            let source = match self.event.wire.is_raw {
                true => "",
                false => self.event.source.as_deref().unwrap_or(cloudevents::SOURCE_DEFAULT),
            };
            self.event.id = cloudevents::id_of(source, message_id);
        }
        self.event.validate()?;
        Ok(self.event)
    }

    /// The event as a store or broker gave it to us; its rules were checked when it was written, or are checked by
    /// the relay before it is published.
    #[allow(dead_code)] // unused when no backend feature is on
    pub(crate) fn build_unchecked(self) -> Event {
        self.event
    }
}
