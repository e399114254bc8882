//! A connection that is rebuilt when it is lost.
//!
//! lapin can recover connections by itself, but not from everything, and a publisher that waits for it cannot tell
//! recovery from a hang. So a [`Link`] never repairs: it opens a connection when one is asked for, hands it out while it
//! lives, and opens another one afterwards.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use lapin::options::ConfirmSelectOptions;
use lapin::{Channel, Connection, ConnectionProperties, Event};
use tokio::sync::OnceCell;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::error::classify;
use super::settings::Address;
use crate::error::{Error, Kind, Result};

/// An attempt whose handshake hangs is waited for by later callers; only after this long another one is begun, so that
/// a broker that accepts but does not answer costs one thread a minute at most.
const ATTEMPT_MAX: Duration = Duration::from_secs(60);

type Opened = lapin::Result<Connection>;

struct Attempt {
    task: AbortOnDropHandle<Opened>,
    began: Instant,
}

#[derive(Default)]
struct Attempts {
    running: Option<Attempt>,
    /// The last failure, so that callers who waited for the same attempt do not each repeat it.
    failed: Option<(Instant, Error)>,
}

/// One connection of an instance, for publishing or for consuming.
pub(super) struct Link {
    /// Shown in RabbitMQ's list of connections.
    name: &'static str,
    address: Address,
    timeout: Duration,
    current: Mutex<Option<Arc<Live>>>,
    attempts: tokio::sync::Mutex<Attempts>,
}

impl Link {
    pub fn new(name: &'static str, address: Address, timeout: Duration) -> Self {
        Self { name, address, timeout, current: Mutex::default(), attempts: tokio::sync::Mutex::default() }
    }

    /// The living connection, or a new one.
    pub async fn live(&self) -> Result<Arc<Live>> {
        if let Some(live) = self.peek() {
            return Ok(live);
        }
        let asked = Instant::now();
        let mut attempts = self.attempts.lock().await;
        if let Some(live) = self.peek() {
            return Ok(live);
        }
        if let Some((at, error)) = &attempts.failed
            && *at >= asked
        {
            return Err(error.duplicate());
        }
        match self.open(&mut attempts).await {
            Ok(connection) => {
                let live = Arc::new(Live::new(connection));
                attempts.failed = None;
                *lock(&self.current) = Some(live.clone());
                tracing::debug!(broker = %self.address.shown, connection = self.name, "connected");
                Ok(live)
            }
            Err(error) => {
                attempts.failed = Some((Instant::now(), error.duplicate()));
                Err(error)
            }
        }
    }

    /// The living connection, if there is one.
    pub fn peek(&self) -> Option<Arc<Live>> {
        let mut current = lock(&self.current);
        let live = current.as_ref().filter(|live| live.is_connected())?;
        if live.is_stuck() {
            retire(current.take()?);
            return None;
        }
        Some(live.clone())
    }

    async fn open(&self, attempts: &mut Attempts) -> Result<Connection> {
        let mut attempt = match attempts.running.take() {
            Some(attempt) if attempt.began.elapsed() < ATTEMPT_MAX => attempt,
            _ => self.begin(),
        };
        match tokio::time::timeout(self.timeout, &mut attempt.task).await {
            Ok(Ok(Ok(connection))) => Ok(connection),
            Ok(Ok(Err(error))) => Err(classify(error, "connect", &self.address.shown)),
            Ok(Err(error)) => {
                Err(Error::new(Kind::Other, "the task that connects to RabbitMQ ended").with_source(error))
            }
            Err(_) => {
                attempts.running = Some(attempt);
                Err(Error::new(
                    Kind::Unavailable,
                    format!("RabbitMQ at {} does not answer within {:?}", self.address.shown, self.timeout),
                ))
            }
        }
    }

    fn begin(&self) -> Attempt {
        let uri = self.address.uri.clone();
        let properties = ConnectionProperties::default()
            .with_client_property("product".into(), "Postrider".into())
            .with_client_property("version".into(), env!("CARGO_PKG_VERSION").into())
            .with_connection_name(self.name.into());
        let task = AbortOnDropHandle::new(tokio::spawn(Connection::connect_uri(uri, properties)));
        Attempt { task, began: Instant::now() }
    }
}

/// Closes a connection that did not answer, in a while: closing waits for the peer's answer without a limit and stops
/// the heartbeat that would notice its death, so the heartbeat gets its chance first.
fn retire(live: Arc<Live>) {
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
    runtime.spawn(async move {
        tokio::time::sleep(live.heartbeat() * 3).await;
        drop(live);
    });
}

/// A connection while it lives.
pub(super) struct Live {
    connection: Connection,
    blocked: Arc<Mutex<Option<String>>>,
    /// Confirm channels that nobody publishes on at the moment.
    idle: Mutex<Vec<Channel>>,
    /// Channels with messages that were not answered. They stay open as long as the connection: lapin may still hold
    /// frames of theirs, and would send them under the same number on another channel.
    stuck: Mutex<Vec<Channel>>,
    /// Set once the exchange was found or declared over this connection.
    pub exchange: OnceCell<()>,
    _watch: AbortOnDropHandle<()>,
}

impl Live {
    fn new(connection: Connection) -> Self {
        let blocked = Arc::new(Mutex::new(None));
        let mut events = Box::pin(connection.events_listener());
        let seen = blocked.clone();
        let watch = tokio::spawn(async move {
            while let Some(event) = events.next().await {
                match event {
                    Event::ConnectionBlocked(reason) => {
                        tracing::warn!(reason, "RabbitMQ blocks publishers");
                        *lock(&seen) = Some(reason);
                    }
                    Event::ConnectionUnblocked => {
                        tracing::info!("RabbitMQ lets publishers go on");
                        *lock(&seen) = None;
                    }
                    _ => {}
                }
            }
        });
        Self {
            connection,
            blocked,
            idle: Mutex::default(),
            stuck: Mutex::default(),
            exchange: OnceCell::new(),
            _watch: AbortOnDropHandle::new(watch),
        }
    }

    pub fn is_connected(&self) -> bool {
        self.connection.status().connected()
    }

    /// Why the broker reads nothing from this connection at the moment.
    pub fn blocked(&self) -> Option<String> {
        lock(&self.blocked).clone()
    }

    pub fn heartbeat(&self) -> Duration {
        Duration::from_secs(u64::from(self.connection.configuration().heartbeat()))
    }

    pub async fn channel(&self) -> lapin::Result<Channel> {
        self.connection.create_channel().await
    }

    /// Whether the connection should be replaced. While the broker blocks it, silence is no sign of a fault, and the
    /// connection is kept because it will tell when the block ends.
    fn is_stuck(&self) -> bool {
        !lock(&self.stuck).is_empty() && self.blocked().is_none()
    }

    /// A confirm channel for the caller alone.
    pub async fn lend(self: &Arc<Self>) -> lapin::Result<Lent> {
        while let Some(channel) = self.pop_idle() {
            if channel.status().connected() {
                return Ok(Lent { channel, live: self.clone(), is_clean: false });
            }
        }
        let channel = self.channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(Lent { channel, live: self.clone(), is_clean: false })
    }

    fn pop_idle(&self) -> Option<Channel> {
        lock(&self.idle).pop()
    }
}

/// A confirm channel that one caller publishes on. When it is dropped before it was said to be clean, its connection
/// is not used for further publishing.
pub(super) struct Lent {
    channel: Channel,
    live: Arc<Live>,
    is_clean: bool,
}

impl Lent {
    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Why the broker reads nothing from the channel's connection at the moment.
    pub fn blocked(&self) -> Option<String> {
        self.live.blocked()
    }

    /// Gives the channel back; everything that was sent on it was answered.
    pub fn give_back(mut self) {
        self.is_clean = true;
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let place = if self.is_clean { &self.live.idle } else { &self.live.stuck };
        lock(place).push(self.channel.clone());
    }
}

/// The locks of this module guard single assignments, so what a panicking holder left is whole.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
