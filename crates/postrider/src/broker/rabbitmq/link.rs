//! A connection for consuming or for setting aside, rebuilt when it is lost.
//!
//! lapin can recover connections by itself, but not from everything, and whoever waits for it cannot tell recovery from
//! a hang. So a [`Link`] never repairs: it opens a connection when one is asked for, hands it out while it
//! lives, and opens another one afterwards.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lapin::{Channel, Connection, ConnectionProperties};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::error::{classify, unanswered};
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

/// A connection of an instance for anything but publishing events.
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
                let live = Arc::new(Live { connection });
                attempts.failed = None;
                *lock(&self.current) = Some(live.clone());
                tracing::debug!(broker = %self.address.shown, name = self.name, "connected");
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
        lock(&self.current).as_ref().filter(|live| live.is_connected()).cloned()
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
                Err(unanswered(&self.address.shown, self.timeout))
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

/// A connection while it lives.
pub(super) struct Live {
    connection: Connection,
}

impl Live {
    pub fn is_connected(&self) -> bool {
        self.connection.status().connected()
    }

    pub fn heartbeat(&self) -> Duration {
        Duration::from_secs(u64::from(self.connection.configuration().heartbeat()))
    }

    pub async fn channel(&self) -> lapin::Result<Channel> {
        self.connection.create_channel().await
    }
}

/// The locks of this module guard single assignments, so what a panicking holder left is whole.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
