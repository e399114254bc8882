//! The queues `<consumer>_error` and `<consumer>_skipped`, or the names that were configured: what a consumer could not
//! apply, with the reason in its headers.
//!
//! Reached through the default exchange: published to the topic exchange, a message would come to every consumer of its
//! topic again. The connection is one of its own, because RabbitMQ may block one that publishes, and consuming must go on.

use std::collections::HashSet;

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Confirmation};

use super::error::classify;
use super::link::Link;
use super::message::{self, PERSISTENT};
use super::settings::{Address, RabbitMqSettings};
use super::topology::Topology;
use crate::broker::Aside;
use crate::error::{Error, Kind, Result};
use crate::inbox::Body;

/// Shown in RabbitMQ's list of connections.
const NAME: &str = "postrider set aside";

pub(super) struct Places {
    address: Address,
    settings: RabbitMqSettings,
    link: Link,
    open: tokio::sync::Mutex<Option<Open>>,
}

struct Open {
    channel: Channel,
    /// Queues that are known to be there.
    known: HashSet<String>,
}

impl Places {
    pub fn new(address: Address, settings: RabbitMqSettings) -> Self {
        let link = Link::new(NAME, address.clone(), settings.connect_timeout);
        Self { address, settings, link, open: tokio::sync::Mutex::default() }
    }

    pub async fn set_aside(&self, aside: &Aside<'_>) -> Result<()> {
        let Some(queue) = aside.place_name() else { return Ok(()) };
        let mut guard = self.open.lock().await;
        // What fails leaves nothing behind: the next one begins anew.
        let mut open = match guard.take().filter(|open| open.channel.status().connected()) {
            Some(open) => open,
            None => self.open().await?,
        };
        if !open.known.contains(&queue) {
            let live = self.link.live().await?;
            let topology = Topology { live: &live, settings: &self.settings, shown: &self.address.shown };
            topology.place(&queue).await?;
            open.known.insert(queue.clone());
        }
        self.publish(&open.channel, &queue, aside).await?;
        *guard = Some(open);
        Ok(())
    }

    async fn open(&self) -> Result<Open> {
        let channel = self.link.live().await?.channel().await.map_err(|error| self.failed(error))?;
        channel.confirm_select(ConfirmSelectOptions::default()).await.map_err(|error| self.failed(error))?;
        Ok(Open { channel, known: HashSet::new() })
    }

    async fn publish(&self, channel: &Channel, queue: &str, aside: &Aside<'_>) -> Result<()> {
        let name = ShortString::try_new(queue)
            .map_err(|error| Error::new(Kind::Config, "the name of a place is too long").with_source(error))?;
        let options = BasicPublishOptions { mandatory: true, ..Default::default() };
        let confirm = channel
            .basic_publish(ShortString::default(), name, options, aside.message.payload(), properties(aside))
            .await
            .map_err(|error| self.failed(error))?;
        match confirm.await.map_err(|error| self.failed(error))? {
            Confirmation::Ack(None) => Ok(()),
            Confirmation::Ack(Some(_)) => {
                Err(Error::new(Kind::Missing, format!("the queue {queue:?} for what is set aside is gone")))
            }
            _ => {
                Err(Error::new(Kind::Unavailable, format!("RabbitMQ did not take a message into the queue {queue:?}")))
            }
        }
    }

    fn failed(&self, error: lapin::Error) -> Error {
        classify(error, "set a message aside", &self.address.shown)
    }
}

/// The message as it came, and the reason beside it.
fn properties(aside: &Aside<'_>) -> BasicProperties {
    let mut properties = match aside.message {
        Body::Event(event) => message::properties(event),
        Body::Raw(raw) => message::raw_properties(raw),
    };
    let mut headers: FieldTable = properties.headers().clone().unwrap_or_default();
    for (name, value) in aside.reason() {
        headers.insert(name.into(), AMQPValue::LongString(value.into()));
    }
    properties = properties.with_headers(headers).with_delivery_mode(PERSISTENT);
    properties
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broker::{AsideKind, Origin};
    use crate::event::Event;
    use crate::handler::Place;
    use crate::inbox::Failed;

    #[test]
    fn the_reason_stands_beside_the_event() {
        let event = Event::builder("orders.paid", "order.paid").key("o-1").payload("text/plain", "x").build().unwrap();
        let failed = Failed { error_type: "handler".into(), error: "é".repeat(5000), causes: vec!["disk".into()] };
        let origin = Origin {
            exchange: "postrider".into(),
            topic: "orders.paid".into(),
            queue: "c".into(),
            ..Origin::default()
        };
        let mut aside = Aside {
            consumer: "c",
            kind: AsideKind::Dead,
            place: &Place::Usual,
            message: Body::Event(&event),
            failed: &failed,
            attempts: 4,
            origin: Some(&origin),
        };
        assert_eq!(aside.place_name().as_deref(), Some("c_error"));
        let properties = properties(&aside);
        let back = message::event("orders.paid".into(), &properties, b"x".to_vec()).unwrap();
        assert_eq!((back.id(), back.kind(), back.key()), (event.id(), "order.paid", Some("o-1")));
        assert_eq!(back.headers()["postrider-error"].chars().count(), 4_000);
        assert_eq!(back.headers()["postrider-attempts"], "4");
        assert_eq!(back.headers()["postrider-causes"], "disk");

        aside.kind = AsideKind::Skipped;
        assert_eq!(aside.place_name().as_deref(), Some("c_skipped"));
        let named = Place::Named("analytics.errors".to_owned());
        aside.place = &named;
        assert_eq!(aside.place_name().as_deref(), Some("analytics.errors"));
        aside.place = &Place::Nowhere;
        assert_eq!(aside.place_name(), None);
    }
}
