//! The connection that events are published over: one channel in confirm mode, and a task that reads and writes.
//!
//! Consuming goes through lapin. Publishing has its own, because it is what a relay spends its time on: lapin gives every
//! message a future, hands it to a thread of its own and cannot tell which message was returned (docs/decisions/0010).
//!
//! What must hold:
//! - A message's delivery tag is its place on the channel, so frames are put into the buffer in the order of tags.
//! - A wire with messages that nobody waits for any longer sends nothing more and is replaced.
//! - A wire fails as a whole: an error of the channel or the connection answers everything that is open.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use amq_protocol::auth::Credentials;
use amq_protocol::frame::{AMQPFrame, ProtocolVersion};
use amq_protocol::protocol::{AMQPClass, AMQPError, basic, channel, confirm, connection, exchange};
use amq_protocol::tcp::AMQPUriTcpExt;
use amq_protocol::types::{AMQPValue, FieldTable};
use futures_util::io::{ReadHalf, WriteHalf};
use futures_util::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, FutureExt};
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::flights::{Answer, Flights, Landing};
use super::frame::{self, Frames, Route, invalid};
use super::settings::Address;
use crate::broker::cloudevents;
use crate::event::Event;

/// Shown in RabbitMQ's list of connections.
const NAME: &str = "postrider publish";
const CHANNEL: u16 = 1;
/// The frame size that we ask for; RabbitMQ's default. A larger one would only let a payload wait longer for others.
const FRAME_MAX: u32 = 128 * 1024;
/// How much may wait for the socket; a publisher with more waits too.
const UNSENT_BYTES_MAX: usize = 1024 * 1024;
/// How long the broker's answer to our goodbye is waited for.
const CLOSE_WAIT: Duration = Duration::from_secs(1);
const REPLY_SUCCESS: u16 = 200;

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// The exchange that is declared, or found, before anything is published.
pub(super) struct Exchange<'a> {
    pub name: &'a str,
    pub declare: bool,
}

/// Why a wire could not be opened: while doing what.
pub(super) enum Refusal {
    Connect(lapin::Error),
    Exchange(lapin::Error),
}

/// A connection while it lives.
pub(super) struct Wire {
    shared: Arc<Shared>,
    /// One batch is put into the buffer at a time.
    turn: tokio::sync::Mutex<()>,
    frame_max: usize,
}

struct Shared {
    state: Mutex<State>,
    /// There is something to send, or to stop for.
    unsent: Notify,
    /// The buffer went to the socket.
    sent: Notify,
    /// The wire is no longer needed.
    closing: CancellationToken,
}

#[derive(Default)]
struct State {
    unsent: Vec<u8>,
    flights: Flights,
    blocked: Option<String>,
    down: Option<lapin::Error>,
    /// Something was given up: no more is sent.
    is_stuck: bool,
}

impl Shared {
    /// The state is whole between any two statements that hold the lock, so what a panicking holder left is usable.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, down: lapin::Error) {
        let mut state = self.state();
        state.flights.fail(&down);
        state.blocked = None;
        state.down.get_or_insert(down);
        drop(state);
        self.sent.notify_waiters();
    }
}

/// A batch that is on its way.
pub(super) struct Ticket {
    first: u64,
    landing: oneshot::Receiver<Landing>,
}

impl Wire {
    /// Connects, logs in, declares the exchange and starts the task.
    pub async fn open(address: &Address, exchange: Exchange<'_>) -> Result<Self, Refusal> {
        let opened = Handshake::open(address).await.map_err(Refusal::Connect)?;
        let Opened { mut shake, heartbeat } = opened;
        shake.declare(exchange).await.map_err(Refusal::Exchange)?;
        shake.confirms().await.map_err(Refusal::Connect)?;

        let frame_max = shake.frames.frame_max;
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            unsent: Notify::new(),
            sent: Notify::new(),
            closing: CancellationToken::new(),
        });
        let work = Work { shared: shared.clone(), heartbeat };
        tokio::spawn(work.run(shake.frames, shake.writer).boxed());
        Ok(Self { shared, turn: tokio::sync::Mutex::default(), frame_max })
    }

    /// Why the broker reads nothing from this connection at the moment.
    pub fn blocked(&self) -> Option<String> {
        self.shared.state().blocked.clone()
    }

    /// Whether a batch may be sent over it. While the broker blocks the connection, silence is no sign of a fault, and
    /// the connection is kept because it will tell when the block ends.
    pub fn is_usable(&self) -> bool {
        let state = self.shared.state();
        state.down.is_none() && (!state.is_stuck || state.blocked.is_some())
    }

    /// Puts a batch on its way. May be dropped half-way: what was not put into the buffer is not sent.
    pub async fn send(&self, exchange: &str, batch: &[Arc<Event>]) -> lapin::Result<Ticket> {
        let _turn = self.turn.lock().await;
        let mut ticket = None;
        let mut rest = batch;
        loop {
            let sent = self.shared.sent.notified();
            {
                let state = &mut *self.shared.state();
                if let Some(down) = &state.down {
                    return Err(down.clone());
                }
                if state.is_stuck {
                    return Err(io::Error::new(io::ErrorKind::TimedOut, "earlier messages were not confirmed").into());
                }
                if ticket.is_none() {
                    let (first, landing) = state.flights.begin(batch.len());
                    ticket = Some(Ticket { first, landing });
                }
                while let [event, later @ ..] = rest
                    && state.unsent.len() < UNSENT_BYTES_MAX
                {
                    let (channel, routing_key) = (CHANNEL, event.topic());
                    let route = Route { channel, exchange, routing_key, frame_max: self.frame_max };
                    frame::put_publish(&mut state.unsent, route, event);
                    state.flights.sent(flight(event));
                    rest = later;
                }
                if rest.is_empty() {
                    state.flights.all_sent();
                }
            }
            self.shared.unsent.notify_one();
            match ticket.take_if(|_| rest.is_empty()) {
                Some(ticket) => return Ok(ticket),
                None => sent.await,
            }
        }
    }

    /// Waits until everything is answered, or the connection is lost.
    pub async fn land(&self, ticket: &mut Ticket) -> Landing {
        match (&mut ticket.landing).await {
            Ok(landing) => landing,
            // The sender is dropped unused only with the wire's state.
            Err(_) => Landing { answers: Vec::new(), down: Some(io::Error::from(io::ErrorKind::BrokenPipe).into()) },
        }
    }

    /// Nobody waits any longer: what is known of the batch, in order. Nothing more is sent over this wire.
    pub fn give_up(&self, ticket: Option<Ticket>) -> Vec<Answer> {
        let mut state = self.shared.state();
        state.is_stuck = true;
        state.unsent = Vec::new();
        let answers = ticket.map(|ticket| state.flights.give_up(ticket.first)).unwrap_or_default();
        drop(state);
        self.shared.unsent.notify_one();
        answers
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.shared.closing.cancel();
        self.shared.unsent.notify_one();
    }
}

/// What the wire's task does.
struct Work {
    shared: Arc<Shared>,
    heartbeat: Duration,
}

impl Work {
    async fn run(self, mut frames: Frames<ReadHalf<Box<dyn Stream>>>, mut writer: WriteHalf<Box<dyn Stream>>) {
        let result = tokio::select! {
            result = self.read(&mut frames) => result,
            result = self.write(&mut writer) => result,
            () = self.closed() => Ok(()),
        };
        let down = result.err().unwrap_or_else(|| io::Error::from(io::ErrorKind::NotConnected).into());
        self.shared.fail(down);
    }

    /// Nobody needs the wire any longer, and it had its time to say goodbye.
    async fn closed(&self) {
        self.shared.closing.cancelled().await;
        if !self.shared.state().is_stuck {
            tokio::time::sleep(CLOSE_WAIT).await;
        }
    }

    async fn write(&self, writer: &mut WriteHalf<Box<dyn Stream>>) -> lapin::Result<()> {
        let mut sending = Vec::new();
        loop {
            let (is_stuck, is_closing) = {
                let mut state = self.shared.state();
                sending.clear();
                // A large message is not worth keeping its room.
                sending.shrink_to(2 * UNSENT_BYTES_MAX);
                std::mem::swap(&mut state.unsent, &mut sending);
                (state.is_stuck, self.shared.closing.is_cancelled())
            };
            if !sending.is_empty() {
                writer.write_all(&sending).await?;
                writer.flush().await?;
                self.shared.sent.notify_waiters();
                continue;
            }
            if is_closing {
                // What was put into the buffer last may be half of a message.
                if is_stuck {
                    return Ok(());
                }
                frame::put(&mut sending, &goodbye()).map_err(|_| invalid("a goodbye that cannot be written"))?;
                writer.write_all(&sending).await?;
                writer.flush().await?;
                // The answer, or the end of the stream, is the reader's to see.
                return std::future::pending().await;
            }
            let next_beat = async {
                match self.heartbeat.is_zero() || is_stuck {
                    true => std::future::pending().await,
                    false => tokio::time::sleep(self.heartbeat / 2).await,
                }
            };
            tokio::select! {
                () = self.shared.unsent.notified() => {}
                () = next_beat => {
                    let mut state = self.shared.state();
                    // Between messages only: what is in the buffer shows that we live, too.
                    if state.unsent.is_empty() && !state.is_stuck {
                        frame::put(&mut state.unsent, &AMQPFrame::Heartbeat)
                            .map_err(|_| invalid("a heartbeat that cannot be written"))?;
                    }
                }
            }
        }
    }

    async fn read(&self, frames: &mut Frames<ReadHalf<Box<dyn Stream>>>) -> lapin::Result<()> {
        let mut is_returning = false;
        loop {
            let frame = match self.heartbeat.is_zero() {
                true => frames.next().await?,
                // Not dropped to go on: a connection that is silent for so long is given up.
                false => tokio::time::timeout(self.heartbeat * 2, frames.next())
                    .await
                    .map_err(|_| lapin::Error::from(lapin::ErrorKind::MissingHeartbeatError))??,
            };
            match frame {
                AMQPFrame::Method(_, AMQPClass::Basic(method)) => match method {
                    basic::AMQPMethod::Ack(ack) => {
                        self.shared.state().flights.answered(ack.delivery_tag, ack.multiple, true);
                    }
                    basic::AMQPMethod::Nack(nack) => {
                        self.shared.state().flights.answered(nack.delivery_tag, nack.multiple, false);
                    }
                    basic::AMQPMethod::Return(_) => is_returning = true,
                    _ => return Err(invalid("the server sent what only consumers get")),
                },
                AMQPFrame::Header(_, header) if is_returning => {
                    is_returning = false;
                    self.returned(header.properties.message_id().as_ref().map(|id| id.as_str()))?;
                }
                // The body of a returned message: we have it.
                AMQPFrame::Body(..) | AMQPFrame::Heartbeat => {}
                AMQPFrame::Method(_, AMQPClass::Connection(connection::AMQPMethod::Blocked(blocked))) => {
                    let reason = blocked.reason.to_string();
                    tracing::warn!(reason, "RabbitMQ blocks publishers");
                    self.shared.state().blocked = Some(reason);
                }
                AMQPFrame::Method(_, AMQPClass::Connection(connection::AMQPMethod::Unblocked(_))) => {
                    tracing::info!("RabbitMQ lets publishers go on");
                    self.shared.state().blocked = None;
                }
                AMQPFrame::Method(_, AMQPClass::Connection(connection::AMQPMethod::CloseOk(_))) => return Ok(()),
                other => return Err(closed(&other).unwrap_or_else(|| invalid("the server sent an unexpected frame"))),
            }
        }
    }

    fn returned(&self, id: Option<&str>) -> lapin::Result<()> {
        let mut state = self.shared.state();
        let is_found = id.is_some_and(|id| state.flights.returned(cloudevents::id_of("", id)));
        // One that was given up need not be known. Any other would make the ack of one of ours a lie.
        match is_found || state.is_stuck {
            true => Ok(()),
            false => Err(invalid("the server returned a message that was not sent")),
        }
    }
}

/// What a message is known by while it is under way.
fn flight(event: &Event) -> Uuid {
    event.wire.message_id.as_deref().map_or(event.id(), |id| cloudevents::id_of("", id))
}

/// The broker's reason, if the frame closes the channel or the connection.
fn closed(frame: &AMQPFrame) -> Option<lapin::Error> {
    let (code, text) = match frame {
        AMQPFrame::Method(_, AMQPClass::Connection(connection::AMQPMethod::Close(close))) => {
            (close.reply_code, close.reply_text.clone())
        }
        AMQPFrame::Method(_, AMQPClass::Channel(channel::AMQPMethod::Close(close))) => {
            (close.reply_code, close.reply_text.clone())
        }
        _ => return None,
    };
    let error = AMQPError::from_id(code, text.clone()).map(lapin::ErrorKind::ProtocolError);
    Some(match error {
        Some(error) => error.into(),
        None => io::Error::new(io::ErrorKind::ConnectionAborted, format!("{code} {text}")).into(),
    })
}

fn goodbye() -> AMQPFrame {
    let close =
        connection::Close { reply_code: REPLY_SUCCESS, reply_text: "stopped".into(), class_id: 0, method_id: 0 };
    AMQPFrame::Method(0, AMQPClass::Connection(connection::AMQPMethod::Close(close)))
}

/// A connection that is being set up: question and answer, one after the other.
struct Handshake {
    frames: Frames<ReadHalf<Box<dyn Stream>>>,
    writer: WriteHalf<Box<dyn Stream>>,
}

struct Opened {
    shake: Handshake,
    heartbeat: Duration,
}

impl Handshake {
    async fn open(address: &Address) -> lapin::Result<Opened> {
        let uri = &address.uri;
        let stream = uri.connect_async(&lapin::runtime::default_runtime()?).await?;
        let stream: Box<dyn Stream> = Box::new(stream);
        let (reader, writer) = stream.split();
        let mut shake = Handshake { frames: Frames::new(reader, FRAME_MAX as usize), writer };

        shake.say(AMQPFrame::ProtocolHeader(ProtocolVersion::amqp_0_9_1())).await?;
        let connection::AMQPMethod::Start(_) = shake.hear_connection().await? else {
            return Err(invalid("the server did not begin with connection.start"));
        };
        let mechanism = uri.query.auth_mechanism.unwrap_or_default();
        let start_ok = connection::StartOk {
            client_properties: client_properties(),
            mechanism: mechanism.name().into(),
            response: Credentials::from(uri.authority.userinfo.clone()).sasl_auth_string(mechanism),
            locale: "en_US".into(),
        };
        shake.say_connection(connection::AMQPMethod::StartOk(start_ok)).await?;
        let tune = match shake.hear_connection().await? {
            connection::AMQPMethod::Tune(tune) => tune,
            connection::AMQPMethod::Secure(_) => {
                return Err(invalid("the server asks for a login with several steps, which is not supported"));
            }
            _ => return Err(invalid("the server did not answer the login")),
        };
        // 0 means no limit; for the heartbeat it means none.
        let frame_max = [FRAME_MAX, tune.frame_max, uri.query.frame_max.unwrap_or(0)];
        let frame_max = frame_max.into_iter().filter(|&bytes| bytes > 0).min().unwrap_or(FRAME_MAX);
        let wanted = uri.query.heartbeat.unwrap_or(0);
        let heartbeat = if tune.heartbeat == 0 { wanted } else { wanted.min(tune.heartbeat) };
        let tune_ok = connection::TuneOk { channel_max: CHANNEL, frame_max, heartbeat };
        shake.say_connection(connection::AMQPMethod::TuneOk(tune_ok)).await?;
        let open = connection::Open { virtual_host: uri.vhost.as_str().into() };
        shake.say_connection(connection::AMQPMethod::Open(open)).await?;
        let connection::AMQPMethod::OpenOk(_) = shake.hear_connection().await? else {
            return Err(invalid("the server did not open the vhost"));
        };
        shake.frames.frame_max = frame_max as usize;
        shake.call(AMQPClass::Channel(channel::AMQPMethod::Open(channel::Open {}))).await?;
        Ok(Opened { shake, heartbeat: Duration::from_secs(u64::from(heartbeat)) })
    }

    async fn declare(&mut self, exchange: Exchange<'_>) -> lapin::Result<()> {
        let declare = exchange::Declare {
            exchange: exchange.name.into(),
            kind: "topic".into(),
            passive: !exchange.declare,
            durable: true,
            auto_delete: false,
            internal: false,
            nowait: false,
            arguments: FieldTable::default(),
        };
        self.call(AMQPClass::Exchange(exchange::AMQPMethod::Declare(declare))).await
    }

    async fn confirms(&mut self) -> lapin::Result<()> {
        let select = confirm::Select { nowait: false };
        self.call(AMQPClass::Confirm(confirm::AMQPMethod::Select(select))).await
    }

    /// A method on our channel. Any answer on the channel that does not close it is the one that was asked for.
    async fn call(&mut self, method: AMQPClass) -> lapin::Result<()> {
        self.say(AMQPFrame::Method(CHANNEL, method)).await?;
        loop {
            match self.frames.next().await? {
                AMQPFrame::Heartbeat => {}
                frame => match closed(&frame) {
                    Some(error) => return Err(error),
                    None if frame.channel_id() == CHANNEL => return Ok(()),
                    // connection.blocked: it comes again when something is published.
                    None => {}
                },
            }
        }
    }

    async fn say_connection(&mut self, method: connection::AMQPMethod) -> lapin::Result<()> {
        self.say(AMQPFrame::Method(0, AMQPClass::Connection(method))).await
    }

    async fn say(&mut self, frame: AMQPFrame) -> lapin::Result<()> {
        let mut out = Vec::new();
        frame::put(&mut out, &frame).map_err(|error| io::Error::other(error.to_string()))?;
        self.writer.write_all(&out).await?;
        Ok(self.writer.flush().await?)
    }

    async fn hear_connection(&mut self) -> lapin::Result<connection::AMQPMethod> {
        loop {
            let frame = self.frames.next().await?;
            if let Some(error) = closed(&frame) {
                return Err(error);
            }
            match frame {
                AMQPFrame::Heartbeat => {}
                AMQPFrame::Method(0, AMQPClass::Connection(method)) => return Ok(method),
                _ => return Err(invalid("the server sent an unexpected frame")),
            }
        }
    }
}

fn client_properties() -> FieldTable {
    let mut capabilities = FieldTable::default();
    for capability in ["publisher_confirms", "connection.blocked", "basic.nack", "authentication_failure_close"] {
        capabilities.insert(capability.into(), AMQPValue::Boolean(true));
    }
    let mut properties = FieldTable::default();
    for (name, value) in [
        ("product", "Postrider"),
        ("version", env!("CARGO_PKG_VERSION")),
        ("platform", "Rust"),
        ("connection_name", NAME),
    ] {
        properties.insert(name.into(), AMQPValue::LongString(value.into()));
    }
    properties.insert("capabilities".into(), AMQPValue::FieldTable(capabilities));
    properties
}
