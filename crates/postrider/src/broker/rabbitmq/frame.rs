//! AMQP frames. What is rare goes through `amq-protocol`; a published event is written here, straight into the buffer
//! that goes to the socket: built from that crate's types it would cost some thirty allocations.

use std::io;

use amq_protocol::frame::{AMQPFrame, GenError, WriteContext, gen_frame, parse_frame};
use bytes::BytesMut;
use futures_util::{AsyncRead, AsyncReadExt};

use super::message::{self, PERSISTENT, SHORT_BYTES_MAX, SLOT_HEADER, amqp_name, fitting};
use crate::broker::cloudevents;
use crate::event::Event;

/// A frame around its payload: type, channel and size before, one byte after.
const HEAD_BYTES: usize = 7;
const AROUND_BYTES: usize = HEAD_BYTES + 1;
const END: u8 = 0xCE;
const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;
const CLASS_BASIC: u16 = 60;
const BASIC_PUBLISH: u16 = 40;
const MANDATORY: u8 = 1;
/// How much room a read makes at least.
const READ_BYTES: usize = 16 * 1024;

/// The presence bits of the properties, in the order in which their values follow.
mod flag {
    pub const CONTENT_TYPE: u16 = 1 << 15;
    pub const HEADERS: u16 = 1 << 13;
    pub const DELIVERY_MODE: u16 = 1 << 12;
    pub const CORRELATION_ID: u16 = 1 << 10;
    pub const MESSAGE_ID: u16 = 1 << 7;
    pub const TIMESTAMP: u16 = 1 << 6;
    pub const TYPE: u16 = 1 << 5;
}

/// Any frame.
pub(super) fn put(out: &mut Vec<u8>, frame: &AMQPFrame) -> Result<(), GenError> {
    let (written, _) = gen_frame(frame)(WriteContext::from(std::mem::take(out)))?.into_inner();
    *out = written;
    Ok(())
}

/// Where an event goes. Exchange and routing key have at most [`SHORT_BYTES_MAX`] bytes.
#[derive(Clone, Copy)]
pub(super) struct Route<'a> {
    pub channel: u16,
    pub exchange: &'a str,
    pub routing_key: &'a str,
    /// The largest frame that the broker takes.
    pub frame_max: usize,
}

/// The frames that publish an event: persistent and mandatory.
pub(super) fn put_publish(out: &mut Vec<u8>, route: Route<'_>, event: &Event) {
    framed(out, METHOD, route.channel, |out| {
        out.extend_from_slice(&CLASS_BASIC.to_be_bytes());
        out.extend_from_slice(&BASIC_PUBLISH.to_be_bytes());
        out.extend_from_slice(&[0, 0]);
        put_short(out, route.exchange);
        put_short(out, route.routing_key);
        out.push(MANDATORY);
    });
    framed(out, HEADER, route.channel, |out| {
        out.extend_from_slice(&CLASS_BASIC.to_be_bytes());
        out.extend_from_slice(&[0, 0]);
        out.extend_from_slice(&(event.payload().len() as u64).to_be_bytes());
        put_properties(out, event);
    });
    for part in event.payload().chunks(route.frame_max - AROUND_BYTES) {
        framed(out, BODY, route.channel, |out| out.extend_from_slice(part));
    }
}

/// A text too long for a short string is left to its header.
fn put_properties(out: &mut Vec<u8>, event: &Event) {
    let content_type = fitting(event.content_type());
    let correlation = event.correlation().and_then(fitting);
    let kind = fitting(event.kind());
    let mut flags = flag::HEADERS | flag::DELIVERY_MODE | flag::MESSAGE_ID | flag::TIMESTAMP;
    for (flag, value) in [(flag::CONTENT_TYPE, content_type), (flag::CORRELATION_ID, correlation), (flag::TYPE, kind)] {
        if value.is_some() {
            flags |= flag;
        }
    }
    out.extend_from_slice(&flags.to_be_bytes());
    if let Some(content_type) = content_type {
        put_short(out, content_type);
    }
    sized(out, |out| put_headers(out, event));
    out.push(PERSISTENT);
    if let Some(correlation) = correlation {
        put_short(out, correlation);
    }
    match &event.wire.message_id {
        Some(id) => put_short(out, id),
        None => put_short(out, event.id().hyphenated().encode_lower(&mut uuid::Uuid::encode_buffer())),
    }
    out.extend_from_slice(&u64::try_from(event.time().timestamp()).unwrap_or_default().to_be_bytes());
    if let Some(kind) = kind {
        put_short(out, kind);
    }
}

fn put_headers(out: &mut Vec<u8>, event: &Event) {
    cloudevents::encode(event, |attribute, value| put_header(out, amqp_name(attribute), &value));
    // `message::check` refuses longer names; a name that came past it is left out instead of breaking the frame.
    for (name, value) in cloudevents::own_headers(event).filter(|(name, _)| name.len() <= SHORT_BYTES_MAX) {
        put_header(out, name, value);
    }
    put_short(out, SLOT_HEADER);
    out.push(b'l');
    out.extend_from_slice(&message::slot(event).to_be_bytes());
}

fn put_header(out: &mut Vec<u8>, name: &str, value: &str) {
    put_short(out, name);
    out.push(b'S');
    sized(out, |out| out.extend_from_slice(value.as_bytes()));
}

fn put_short(out: &mut Vec<u8>, text: &str) {
    debug_assert!(text.len() <= SHORT_BYTES_MAX, "{text:?} is no short string");
    out.push(text.len() as u8);
    out.extend_from_slice(text.as_bytes());
}

fn framed(out: &mut Vec<u8>, kind: u8, channel: u16, payload: impl FnOnce(&mut Vec<u8>)) {
    out.push(kind);
    out.extend_from_slice(&channel.to_be_bytes());
    sized(out, payload);
    out.push(END);
}

/// What `write` writes, with its length before it.
fn sized(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    let at = out.len();
    out.extend_from_slice(&[0; 4]);
    write(out);
    let length = (out.len() - at - 4) as u32;
    out[at..at + 4].copy_from_slice(&length.to_be_bytes());
}

/// Reads frames from a stream.
pub(super) struct Frames<R> {
    stream: R,
    buffer: BytesMut,
    pub frame_max: usize,
}

impl<R: AsyncRead + Unpin> Frames<R> {
    pub fn new(stream: R, frame_max: usize) -> Self {
        Self { stream, buffer: BytesMut::new(), frame_max }
    }

    /// The next frame; waits for it. Must not be dropped while it waits, or what came of the next read is lost.
    pub async fn next(&mut self) -> lapin::Result<AMQPFrame> {
        loop {
            if let Some(frame) = self.parse()? {
                return Ok(frame);
            }
            self.fill().await?;
        }
    }

    fn parse(&mut self) -> lapin::Result<Option<AMQPFrame>> {
        let Some(head) = self.buffer.first_chunk::<HEAD_BYTES>() else { return Ok(None) };
        // A broker of another version answers with its own protocol header and closes.
        if head.starts_with(b"AMQP") {
            return Err(invalid("the server speaks another version of AMQP"));
        }
        let size = u32::from_be_bytes([head[3], head[4], head[5], head[6]]) as usize + AROUND_BYTES;
        if size > self.frame_max {
            return Err(invalid("the server sent a frame larger than agreed"));
        }
        if self.buffer.len() < size {
            return Ok(None);
        }
        let bytes = self.buffer.split_to(size);
        match parse_frame(&bytes[..]) {
            Ok((_, frame)) => Ok(Some(frame)),
            Err(_) => Err(invalid("the server sent a frame that is none")),
        }
    }

    async fn fill(&mut self) -> lapin::Result<()> {
        let filled = self.buffer.len();
        self.buffer.resize(filled + READ_BYTES, 0);
        let read = self.stream.read(&mut self.buffer[filled..]).await;
        self.buffer.truncate(filled + *read.as_ref().unwrap_or(&0));
        match read? {
            0 => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            _ => Ok(()),
        }
    }
}

pub(super) fn invalid(why: &'static str) -> lapin::Error {
    io::Error::new(io::ErrorKind::InvalidData, why).into()
}

#[cfg(test)]
mod tests {
    use amq_protocol::protocol::AMQPClass;
    use amq_protocol::protocol::basic::AMQPMethod;

    use super::*;

    /// What the broker would read.
    async fn frames(bytes: &[u8], frame_max: usize) -> Vec<AMQPFrame> {
        let mut frames = Frames::new(bytes, frame_max);
        let mut all = Vec::new();
        while let Ok(frame) = frames.next().await {
            all.push(frame);
        }
        assert!(frames.buffer.is_empty());
        all
    }

    fn route(frame_max: usize) -> Route<'static> {
        Route { channel: 1, exchange: "postrider", routing_key: "orders.created", frame_max }
    }

    async fn travel(event: &Event) -> Event {
        let mut out = Vec::new();
        put_publish(&mut out, route(4096), event);
        let mut properties = None;
        let mut payload = Vec::new();
        for frame in frames(&out, 4096).await {
            match frame {
                AMQPFrame::Method(1, AMQPClass::Basic(AMQPMethod::Publish(publish))) => {
                    assert_eq!(
                        (publish.exchange.as_str(), publish.routing_key.as_str()),
                        ("postrider", "orders.created")
                    );
                    assert!(publish.mandatory && !publish.immediate);
                }
                AMQPFrame::Header(1, header) => {
                    assert_eq!(header.body_size as usize, event.payload().len());
                    assert_eq!(*header.properties.delivery_mode(), Some(PERSISTENT));
                    properties = Some(header.properties);
                }
                AMQPFrame::Body(1, part) => payload.extend(part),
                other => panic!("unexpected {other}"),
            }
        }
        message::event(event.topic().into(), &properties.unwrap(), payload).unwrap()
    }

    #[tokio::test]
    async fn an_event_comes_back_as_it_was() {
        let event = Event::builder("orders.created", "order.created")
            .key("ö-1")
            .source("shop")
            .correlation("c".repeat(1000))
            .header("region", "eu")
            .payload("text/plain", "x")
            .build()
            .unwrap();
        assert_eq!(travel(&event).await, event);
    }

    #[tokio::test]
    async fn a_type_longer_than_a_short_string_still_travels() {
        let event = Event::builder("t", "k".repeat(1024)).payload("text/plain", "x").build().unwrap();
        assert_eq!(travel(&event).await, event);
    }

    #[tokio::test]
    async fn a_payload_is_split_over_frames_and_may_be_empty() {
        for bytes in [0, 1, 4088, 4089, 8176, 100_000] {
            let event = Event::builder("t", "k").payload("text/plain", "x".repeat(bytes)).build().unwrap();
            assert_eq!(travel(&event).await, event, "{bytes}");
        }
    }

    #[tokio::test]
    async fn a_frame_larger_than_agreed_ends_the_reading() {
        let mut out = Vec::new();
        let event = Event::builder("t", "k").payload("text/plain", "x".repeat(8192)).build().unwrap();
        put_publish(&mut out, route(16_384), &event);
        let mut frames = Frames::new(&out[..], 4096);
        assert!(frames.next().await.is_ok() && frames.next().await.is_ok());
        assert!(frames.next().await.is_err());
    }
}
