//! Publishes batches over a [`Wire`], which is opened when it is needed and replaced when it was lost.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::time::Instant;

use super::error::{classify, explain, size_limit, unanswered};
use super::flights::{Answer, Landing};
use super::settings::{Address, RabbitMqSettings};
use super::wire::{Exchange, Refusal, Wire};
use crate::error::{Error, Kind, Result};
use crate::event::Event;

pub(super) struct Publisher {
    address: Address,
    settings: RabbitMqSettings,
    current: Mutex<Option<Arc<Wire>>>,
    /// Held while a wire is opened. The last failure is kept, so that those who waited for it do not each repeat it.
    opening: tokio::sync::Mutex<Option<(Instant, Error)>>,
}

impl Publisher {
    pub fn new(address: Address, settings: RabbitMqSettings) -> Self {
        Self { address, settings, current: Mutex::default(), opening: tokio::sync::Mutex::default() }
    }

    /// Why the broker asks publishers to stop at the moment.
    pub fn blocked(&self) -> Option<String> {
        self.peek()?.blocked()
    }

    /// One result per event.
    pub async fn publish(&self, batch: &[Arc<Event>]) -> Result<Vec<Result<()>>> {
        let until = Instant::now() + self.settings.publish_timeout;
        let wire = tokio::time::timeout_at(until, self.wire()).await.map_err(|_| self.silent(None))??;
        if let Some(reason) = wire.blocked() {
            return Err(self.blocks(&reason));
        }

        let mut ticket = None;
        let crossing = async {
            let ticket = ticket.insert(wire.send(&self.settings.exchange, batch).await?);
            lapin::Result::Ok(wire.land(ticket).await)
        };
        let landing = match tokio::time::timeout_at(until, crossing).await {
            Ok(Ok(landing)) => landing,
            Ok(Err(down)) => Landing { answers: Vec::new(), down: Some(down) },
            Err(_) => {
                let blocked = wire.blocked();
                let answers = wire.give_up(ticket);
                return Ok(self.results(batch, &answers, |_| self.silent(blocked.as_deref())));
            }
        };
        let Landing { answers, down } = landing;
        Ok(self.results(batch, &answers, |event| match &down {
            Some(down) => self.failed(event, down),
            None => Error::new(Kind::Other, "RabbitMQ gave no answer"),
        }))
    }

    /// `open` makes the error of a message that nothing was heard of.
    fn results(&self, batch: &[Arc<Event>], answers: &[Answer], open: impl Fn(&Event) -> Error) -> Vec<Result<()>> {
        let answers = answers.iter().copied().chain(std::iter::repeat(Answer::Open));
        let results = batch.iter().zip(answers).map(|(event, answer)| match answer {
            Answer::Acked => Ok(()),
            Answer::Open => Err(open(event)),
            Answer::Nacked => Err(Error::new(
                Kind::Refused,
                format!(
                    "RabbitMQ refused an event for exchange {:?} with routing key {:?}",
                    self.settings.exchange,
                    event.topic()
                ),
            )),
            Answer::Returned | Answer::Unroutable => Err(Error::new(
                Kind::Unroutable,
                format!(
                    "no queue is bound to the exchange {:?} for the routing key {:?}",
                    self.settings.exchange,
                    event.topic()
                ),
            )),
        });
        results.collect()
    }

    fn failed(&self, event: &Event, down: &lapin::Error) -> Error {
        match size_limit(down) {
            // The broker closes the channel over one large message; only that one is to blame.
            Some(limit) if event.payload().len() > limit => Error::new(
                Kind::TooLarge,
                format!("the payload has {} bytes, RabbitMQ takes {limit}", event.payload().len()),
            ),
            Some(_) => Error::new(Kind::Unavailable, "another message of the batch was too large for RabbitMQ"),
            None => {
                let doing = format!("publish to the exchange {:?}", self.settings.exchange);
                classify(down.clone(), doing, &self.address.shown)
            }
        }
    }

    /// The error of events whose confirm did not come in time.
    fn silent(&self, blocked: Option<&str>) -> Error {
        let (shown, timeout) = (&self.address.shown, self.settings.publish_timeout);
        match blocked {
            Some(reason) => self.blocks(reason),
            None => Error::new(Kind::Unavailable, format!("RabbitMQ at {shown} did not confirm within {timeout:?}")),
        }
    }

    /// The error while the broker stops all publishers.
    fn blocks(&self, reason: &str) -> Error {
        let shown = &self.address.shown;
        Error::new(Kind::Unavailable, format!("RabbitMQ at {shown} blocks publishers: {reason}")).with_remedy(
            "free the broker's memory or disk (rabbitmqctl status shows the alarm); publishing goes on by itself",
        )
    }

    fn peek(&self) -> Option<Arc<Wire>> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        current.take_if(|wire| !wire.is_usable());
        current.clone()
    }

    /// The living wire, or a new one.
    async fn wire(&self) -> Result<Arc<Wire>> {
        if let Some(wire) = self.peek() {
            return Ok(wire);
        }
        let asked = Instant::now();
        let mut last_failure = self.opening.lock().await;
        if let Some(wire) = self.peek() {
            return Ok(wire);
        }
        if let Some((at, error)) = &*last_failure
            && *at >= asked
        {
            return Err(error.duplicate());
        }
        match self.open().await {
            Ok(wire) => {
                let wire = Arc::new(wire);
                *last_failure = None;
                *self.current.lock().unwrap_or_else(PoisonError::into_inner) = Some(wire.clone());
                tracing::debug!(broker = %self.address.shown, "connected for publishing");
                Ok(wire)
            }
            Err(error) => {
                *last_failure = Some((Instant::now(), error.duplicate()));
                Err(error)
            }
        }
    }

    async fn open(&self) -> Result<Wire> {
        let (settings, shown) = (&self.settings, &self.address.shown);
        let exchange = Exchange { name: &settings.exchange, declare: settings.declare };
        let opening = Wire::open(&self.address, exchange);
        match tokio::time::timeout(settings.connect_timeout, opening).await {
            Ok(Ok(wire)) => Ok(wire),
            Ok(Err(Refusal::Connect(error))) => Err(classify(error, "connect", shown)),
            Ok(Err(Refusal::Exchange(error))) => {
                let doing = if settings.declare { "declare" } else { "find" };
                Err(explain(error, format!("{doing} the exchange {:?}", settings.exchange), shown, settings))
            }
            Err(_) => Err(unanswered(shown, settings.connect_timeout)),
        }
    }
}
