//! The topics `<topic>.dlq` and `<topic>.skipped`, or the names that were configured: what a consumer could not apply, with
//! the reason in its headers.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use rdkafka::message::{Header, OwnedHeaders};

use super::cluster::Cluster;
use super::message;
use super::publisher::{Publisher, Record};
use super::settings::KafkaSettings;
use crate::broker::{Aside, AsideKind, topic};
use crate::error::{Error, Kind, Result};
use crate::handler::Place;
use crate::inbox::Body;

/// What the name of a topic for dead letters ends with.
pub(super) const DEAD: &str = ".dlq";
/// The same for what nobody handles.
pub(super) const SKIPPED: &str = ".skipped";
/// Longer texts do not help, and a record is bounded.
const TEXT_CHARS_MAX: usize = 4_000;

pub(super) struct Places {
    settings: KafkaSettings,
    cluster: Arc<Cluster>,
    /// Topics that are known to be there.
    known: Mutex<HashSet<String>>,
}

impl Places {
    pub fn new(settings: &KafkaSettings, cluster: Arc<Cluster>) -> Self {
        Self { settings: settings.clone(), cluster, known: Mutex::default() }
    }

    pub async fn set_aside(&self, publisher: &Publisher, aside: &Aside<'_>) -> Result<()> {
        let Some(name) = topic_of(aside) else { return Ok(()) };
        let name = self.settings.kafka_topic(&name);
        if !message::is_topic_name(&name) {
            return Err(Error::new(Kind::Invalid, format!("{name:?} cannot be the name of a Kafka topic")));
        }
        self.declare(&name).await?;
        let partitions = self.cluster.partitions(&name).await.map_err(|error| match error.kind() {
            // It is the place that is missing; the message has done nothing wrong.
            Kind::Unroutable => {
                Error::new(Kind::Missing, format!("the topic {name:?} for what is set aside does not exist"))
            }
            _ => error,
        })?;
        let (partition, key) = match aside.message {
            Body::Event(event) => (message::partition(event, partitions), event.key()),
            Body::Raw(raw) => {
                let shard = topic::hash(raw.id().as_bytes()) % crate::handler::SLOTS_MAX;
                ((shard % partitions).cast_signed(), None)
            }
        };
        let payload = aside.message.payload();
        let record = Record { topic: &name, partition, key, payload, headers: headers(aside) };
        publisher.publish_record(record).await
    }

    /// Creates the topic with its retention, once.
    async fn declare(&self, name: &str) -> Result<()> {
        let is_known = || self.known.lock().unwrap_or_else(PoisonError::into_inner).contains(name);
        if !self.settings.declare || is_known() {
            return Ok(());
        }
        let is_there = self.cluster.look(Some(name)).await?.topics.iter().any(|topic| topic.name == name);
        if !is_there {
            let retention = self.settings.places_retention.as_millis().to_string();
            self.cluster.declare(name, &[("retention.ms", &retention), ("cleanup.policy", "delete")]).await?;
        }
        self.known.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
        Ok(())
    }
}

fn topic_of(aside: &Aside<'_>) -> Option<String> {
    let ending = match (aside.place, aside.kind) {
        (Place::Nowhere, _) => return None,
        (Place::Named(name), _) => return Some(name.clone()),
        (Place::Usual, AsideKind::Dead) => DEAD,
        (Place::Usual, AsideKind::Skipped) => SKIPPED,
    };
    let topic = match (aside.origin, aside.message) {
        (Some(origin), _) if !origin.topic.is_empty() => origin.topic.as_str(),
        (_, Body::Event(event)) => event.topic(),
        (_, Body::Raw(_)) => aside.consumer,
    };
    Some(format!("{topic}{ending}"))
}

/// The message as it came, and the reason beside it.
fn headers(aside: &Aside<'_>) -> OwnedHeaders {
    let mut headers = match aside.message {
        Body::Event(event) => message::headers(event),
        Body::Raw(raw) => message::raw_headers(raw),
    };
    let reason = if aside.kind == AsideKind::Dead { "dead" } else { "skipped" };
    let attempts = aside.attempts.to_string();
    let causes = aside.failed.causes.join("; ");
    let mut put = |name: &str, value: &str| {
        let value: String = value.chars().take(TEXT_CHARS_MAX).collect();
        let written = std::mem::replace(&mut headers, OwnedHeaders::new_with_capacity(0));
        headers = written.insert(Header { key: name, value: Some(&value) });
    };
    put("postrider-consumer", aside.consumer);
    put("postrider-reason", reason);
    put("postrider-error-type", &aside.failed.error_type);
    put("postrider-error", &aside.failed.error);
    if !causes.is_empty() {
        put("postrider-causes", &causes);
    }
    put("postrider-attempts", &attempts);
    if let Some(origin) = aside.origin {
        put("postrider-topic", &origin.topic);
        put("postrider-partition", &origin.exchange);
        if let Some(offset) = origin.offset {
            put("postrider-offset", &offset.to_string());
        }
        put("postrider-group", &origin.queue);
    }
    headers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broker::Origin;
    use crate::event::Event;
    use crate::inbox::Failed;
    use rdkafka::message::Headers as _;

    #[test]
    fn the_reason_stands_beside_the_event() {
        let event = Event::builder("orders.paid", "order.paid").key("o-1").payload("text/plain", "x").build().unwrap();
        let failed = Failed { error_type: "handler".into(), error: "é".repeat(5000), causes: vec!["disk".into()] };
        let origin = Origin {
            exchange: "orders.paid/3".into(),
            topic: "orders.paid".into(),
            queue: "c".into(),
            offset: Some(7),
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
        assert_eq!(topic_of(&aside).as_deref(), Some("orders.paid.dlq"));
        let headers = headers(&aside);
        let value = |name: &str| {
            let header = headers.iter().find(|header| header.key == name).unwrap();
            String::from_utf8(header.value.unwrap().to_vec()).unwrap()
        };
        assert_eq!(value("ce_id"), event.id().to_string());
        assert_eq!(value("postrider-error").chars().count(), TEXT_CHARS_MAX);
        assert_eq!((value("postrider-attempts"), value("postrider-offset")), ("4".to_owned(), "7".to_owned()));

        aside.kind = AsideKind::Skipped;
        assert_eq!(topic_of(&aside).as_deref(), Some("orders.paid.skipped"));
        let named = Place::Named("analytics.errors".to_owned());
        aside.place = &named;
        assert_eq!(topic_of(&aside).as_deref(), Some("analytics.errors"));
        aside.place = &Place::Nowhere;
        assert_eq!(topic_of(&aside), None);
    }
}
