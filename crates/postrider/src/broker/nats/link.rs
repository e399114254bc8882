//! One connection to NATS. The driver connects again by itself whenever it was lost.

use std::sync::{Arc, Mutex as SyncMutex, PoisonError};
use std::time::{Duration, Instant};

use async_nats::connection::State;
use async_nats::jetstream::Context;
use async_nats::jetstream::context::ContextBuilder;
use async_nats::{Client, ConnectOptions, Event, ServerError};
use tokio::sync::Mutex;

use super::error::of_connect;
use super::settings::Address;
use crate::error::{Error, Kind, Result};

/// Answers to publishes that may be on their way at once; more wait for their turn.
const ANSWERS_MAX: usize = 8_192;

/// A missing answer is put down to a complaint that is not older than this. Requests wait for [`Link::timeout`] at most.
const COMPLAINT_LASTS: Duration = Duration::from_secs(60);

/// What the server has complained of, and when. It does so beside the answer that does not come.
type Complaint = Arc<SyncMutex<Option<(Instant, String)>>>;

pub(super) struct Link {
    /// Shown in the server's list of connections.
    name: &'static str,
    address: Arc<Address>,
    timeout: Duration,
    live: Mutex<Option<Live>>,
    complaint: Complaint,
}

/// A connection that was made once. Cheap to clone.
#[derive(Clone)]
pub(super) struct Live {
    pub client: Client,
    pub jetstream: Context,
}

impl Link {
    pub fn new(name: &'static str, address: Arc<Address>, timeout: Duration) -> Self {
        Self { name, address, timeout, live: Mutex::default(), complaint: Complaint::default() }
    }

    /// The connection. An error at once while it is lost: what is sent meanwhile would only wait in memory.
    pub async fn live(&self) -> Result<Live> {
        let mut live = self.live.lock().await;
        let live = match &*live {
            Some(live) => live.clone(),
            None => live.insert(self.connect().await?).clone(),
        };
        match live.client.connection_state() {
            State::Disconnected => Err(self.away()),
            _ => Ok(live),
        }
    }

    async fn connect(&self) -> Result<Live> {
        let complaint = self.complaint.clone();
        let mut options = ConnectOptions::new()
            .event_callback(move |event| {
                if let Event::ServerError(ServerError::Other(text)) = event
                    && text.to_ascii_lowercase().contains("permissions violation")
                {
                    *complaint.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), text));
                }
                std::future::ready(())
            })
            .name(self.name)
            .connection_timeout(self.timeout)
            .request_timeout(Some(self.timeout))
            // A dead peer is noticed within 20 s, before the publish time-out.
            .ping_interval(Duration::from_secs(10));
        match &self.address.login {
            Some((user, Some(password))) => options = options.user_and_password(user.clone(), password.clone()),
            Some((token, None)) => options = options.token(token.clone()),
            None => {}
        }
        if let Some(credentials) = &self.address.credentials {
            options = options.credentials(credentials).map_err(|_| {
                Error::new(Kind::Config, "the NATS credentials cannot be read")
                    .with_remedy("give the whole contents of the credentials file")
            })?;
        }
        let connecting = options.connect(self.address.servers.clone());
        let client = match tokio::time::timeout(self.timeout, connecting).await {
            Ok(client) => client.map_err(|error| of_connect(error, self.shown()))?,
            Err(_) => return Err(self.away()),
        };
        let jetstream = ContextBuilder::new()
            .timeout(self.timeout)
            .ack_timeout(self.timeout)
            .max_ack_inflight(ANSWERS_MAX)
            .backpressure_on_inflight(true)
            .build(client.clone());
        Ok(Live { client, jetstream })
    }

    /// The error, or the complaint that explains it: who lacks a right gets no answer.
    pub fn explain(&self, error: Error) -> Error {
        let complaint = self.complaint.lock().unwrap_or_else(PoisonError::into_inner);
        match &*complaint {
            Some((at, text)) if error.kind() == Kind::Unavailable && at.elapsed() < COMPLAINT_LASTS => {
                Error::new(Kind::Denied, format!("NATS at {} does not let this user do it: {text}", self.shown()))
                    .with_remedy("grant the right that is named; the guide lists them all")
            }
            _ => error,
        }
    }

    fn away(&self) -> Error {
        Error::new(Kind::Unavailable, format!("NATS at {} cannot be reached", self.shown()))
    }

    pub fn shown(&self) -> &str {
        &self.address.shown
    }

    pub fn is_plaintext_over_network(&self) -> bool {
        self.address.is_plaintext_over_network
    }
}
