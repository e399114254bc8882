//! One connection to Redis, replaced when it breaks.

use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ConnectionAddr, ErrorKind, RedisError, RedisResult, ServerErrorKind};
use tokio::sync::Mutex;

use super::error::classify;
use crate::error::{Error, Result};

/// The connection is shared by all calls. A call is never repeated here: whoever made it knows whether it may be.
///
/// redis-rs has a connection manager, but it never connects again after an error other than of input and output, such as
/// a password that is corrected later.
pub(crate) struct Link {
    client: Client,
    config: AsyncConnectionConfig,
    state: Mutex<State>,
    /// What may be shown of the address.
    pub shown: String,
}

#[derive(Default)]
struct State {
    connection: Option<MultiplexedConnection>,
    /// Counts connections, so that a late failure on an old one does not end the new one.
    generation: u64,
    /// How the last attempt to connect failed, and when.
    failed: Option<(Instant, Error)>,
}

impl Link {
    pub fn new(client: Client, timeout: Duration) -> Self {
        let info = client.get_connection_info();
        let shown = match info.addr() {
            ConnectionAddr::Tcp(host, port) => format!("redis://{host}:{port}/{}", info.redis_settings().db()),
            ConnectionAddr::TcpTls { host, port, .. } => {
                format!("rediss://{host}:{port}/{}", info.redis_settings().db())
            }
            other => other.to_string(),
        };
        let config =
            AsyncConnectionConfig::new().set_connection_timeout(Some(timeout)).set_response_timeout(Some(timeout));
        Self { client, config, state: Mutex::default(), shown }
    }

    /// Whether secrets and values travel unencrypted to another machine.
    pub fn is_plaintext_over_network(&self) -> bool {
        match self.client.get_connection_info().addr() {
            ConnectionAddr::Tcp(host, _) => {
                let is_loopback = |address: std::net::IpAddr| address.is_loopback();
                host != "localhost" && !host.parse().is_ok_and(is_loopback)
            }
            _ => false,
        }
    }

    /// Makes one call. May be dropped half-way: the driver then ignores the answer.
    pub async fn call<T>(&self, call: impl AsyncFnOnce(&mut MultiplexedConnection) -> RedisResult<T>) -> Result<T> {
        let (mut connection, generation) = self.connection().await?;
        match call(&mut connection).await {
            Ok(value) => Ok(value),
            Err(error) => {
                // Also after a time-out: the other side may be gone without a word.
                if error.is_io_error() || error.is_unrecoverable_error() || is_demoted(&error) {
                    self.forget(generation).await;
                }
                Err(classify(&self.shown, error))
            }
        }
    }

    async fn forget(&self, generation: u64) {
        let mut state = self.state.lock().await;
        if state.generation == generation {
            state.connection = None;
        }
    }

    /// A connection of one's own, for commands that wait in Redis. Whoever has it bounds them.
    pub async fn dedicated(&self, response: Duration) -> Result<MultiplexedConnection> {
        let config = self.config.clone().set_response_timeout(Some(response));
        let connecting = self.client.get_multiplexed_async_connection_with_config(&config).await;
        connecting.map_err(|error| classify(&self.shown, error))
    }

    /// The error of a call over such a connection.
    pub fn failed(&self, error: redis::RedisError) -> Error {
        classify(&self.shown, error)
    }

    async fn connection(&self) -> Result<(MultiplexedConnection, u64)> {
        let asked = Instant::now();
        let mut state = self.state.lock().await;
        if let Some(connection) = &state.connection {
            return Ok((connection.clone(), state.generation));
        }
        // Those who waited while an attempt failed do not try one by one.
        if let Some((at, error)) = &state.failed
            && *at >= asked
        {
            return Err(error.duplicate());
        }
        match self.client.get_multiplexed_async_connection_with_config(&self.config).await {
            Ok(connection) => {
                state.generation += 1;
                state.failed = None;
                state.connection = Some(connection.clone());
                Ok((connection, state.generation))
            }
            Err(error) => {
                let error = classify(&self.shown, error);
                state.failed = Some((Instant::now(), error.duplicate()));
                Err(error)
            }
        }
    }
}

/// Whether the server was a primary and is none any more: the address may lead to another one by now.
pub(crate) fn is_demoted(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown))
}
