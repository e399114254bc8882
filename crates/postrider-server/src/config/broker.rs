//! `[broker]`, and the brokers of `[[route]]`.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use postrider::Route;
use postrider::broker::topic::TopicFilter;
use postrider::event::PAYLOAD_BYTES_MAX;

use super::settings::Settings;
use super::{BrokerUrl, Config, DESTINATION};

/// `[broker]`
#[derive(Clone)]
#[allow(dead_code)] // some are for brokers that are not built in by default
pub struct BrokerConfig {
    /// Which broker.
    pub url: BrokerUrl,
    /// The topic exchange on RabbitMQ.
    pub exchange: String,
    /// The stream on NATS, and what streams on Redis begin with.
    pub stream: String,
    /// Whether what is missing is declared.
    pub declare: bool,
    /// The type of queues that we declare.
    pub queue_type: QueueType,
    /// Partitions of a topic that we declare on Kafka.
    pub partitions: u16,
    /// Copies of what we declare on Kafka and NATS.
    pub replicas: u16,
    /// Further properties of librdkafka.
    pub properties: BTreeMap<String, String>,
    /// The largest payload that the destination accepts.
    pub payload_bytes_max: usize,
    /// How long to wait for confirms.
    pub publish_timeout: Duration,
}

/// Of the properties only the names: a value may be a password.
impl fmt::Debug for BrokerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let properties: Vec<&String> = self.properties.keys().collect();
        f.debug_struct("BrokerConfig").field("url", &self.url).field("properties", &properties).finish_non_exhaustive()
    }
}

/// The type of a RabbitMQ queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueType {
    /// Replicated.
    Quorum,
    /// On one node.
    Classic,
}

/// A `[[route]]`: topics that go to a broker of their own.
#[derive(Debug, Clone)]
pub struct RouteConfig {
    /// Names the destination.
    pub name: String,
    /// Topic patterns.
    pub topics: Vec<String>,
    /// Where they go.
    pub broker: BrokerConfig,
}

impl Config {
    /// All destinations with their topics: each `[[route]]` gets what those before it do not, `[broker]` the rest.
    pub fn destinations(&self) -> Vec<(Route, &BrokerConfig)> {
        let mut taken: Vec<String> = Vec::new();
        let mut destinations = Vec::new();
        for route in &self.routes {
            let topics = TopicFilter::new(route.topics.iter().cloned(), taken.iter().cloned());
            destinations.push((Route { destination: route.name.clone(), topics }, &route.broker));
            taken.extend(route.topics.iter().cloned());
        }
        let topics = TopicFilter::new(["#".to_owned()], taken);
        destinations.push((Route { destination: DESTINATION.to_owned(), topics }, &self.broker));
        destinations
    }

    /// Where events go, for the store.
    pub fn destination_routes(&self) -> Vec<Route> {
        self.destinations().into_iter().map(|(route, _)| route).collect()
    }
}

/// Reads the broker whose keys begin with `prefix`.
pub fn read(settings: &mut Settings, prefix: &str) -> Option<BrokerConfig> {
    let key = |name: &str| format!("{prefix}.{name}");
    let url = settings.parsed(&key("url"), |url| match url {
        "" => Err("is missing; write the broker's address, such as \"amqp://host:5672/%2f\"".to_owned()),
        url => BrokerUrl::parse(url),
    });
    let exchange = settings.parsed(&key("exchange"), |name| match name {
        "" => Err("is empty; RabbitMQ's default exchange cannot route by topic"),
        long if long.len() > 127 => Err("has more than 127 bytes"),
        reserved if reserved.starts_with("amq.") && reserved != "amq.topic" => {
            Err("begins with \"amq.\", which RabbitMQ reserves")
        }
        name => Ok(name.to_owned()),
    });
    let stream = settings.parsed(&key("stream"), |name| match name {
        name if (1..=100).contains(&name.len())
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b)) =>
        {
            Ok(name.to_owned())
        }
        _ => Err("must have 1 to 100 letters, digits, '-' or '_'"),
    });
    let queue_type =
        settings.choice(&key("queue_type"), &[("quorum", QueueType::Quorum), ("classic", QueueType::Classic)]);
    let payload_bytes_max = settings.integer(&key("payload_bytes_max"), 1..=PAYLOAD_BYTES_MAX as u64);
    let publish_timeout = settings.millis(&key("publish_timeout_ms"), 100..=600_000);
    let partitions = settings.count(&key("partitions"), 1..=1_000) as u16;
    let replicas = settings.count(&key("replicas"), 1..=5) as u16;
    let mut properties = BTreeMap::new();
    for text in settings.texts(&key("properties")) {
        match text.split_once('=') {
            Some((name, value)) => {
                properties.insert(name.trim().to_owned(), value.trim().to_owned());
            }
            // The text may hold a password.
            None => settings.complain(&key("properties"), "must hold texts such as \"name=value\"", None),
        }
    }
    Some(BrokerConfig {
        url: url?,
        exchange: exchange?,
        stream: stream?,
        declare: settings.flag(&key("declare")),
        queue_type: queue_type?,
        partitions,
        replicas,
        properties,
        payload_bytes_max: usize::try_from(payload_bytes_max).unwrap_or(PAYLOAD_BYTES_MAX),
        publish_timeout,
    })
}

/// Every `[[route]]`.
pub fn routes(settings: &mut Settings) -> Vec<RouteConfig> {
    let mut routes: Vec<RouteConfig> = Vec::new();
    for n in 1..=settings.items("route") {
        let prefix = format!("route.{n}");
        let key = |name: &str| format!("{prefix}.{name}");
        let taken: Vec<String> =
            routes.iter().map(|route| route.name.clone()).chain([DESTINATION.to_owned()]).collect();
        let name = settings.parsed(&key("name"), |name| match name {
            "" => Err("is missing"),
            name if taken.iter().any(|taken| taken == name) => Err("is taken; \"default\" is [broker]"),
            name if super::is_name(name) => Ok(name.to_owned()),
            _ => Err("must have 1 to 60 letters, digits, '-' or '_'"),
        });
        let topics = settings.texts(&key("topics"));
        if topics.is_empty() || topics.iter().any(String::is_empty) {
            settings.complain(&key("topics"), "must name topics, such as [\"orders.#\"]", None);
        }
        let Some(broker) = read(settings, &prefix) else { continue };
        if broker.url == BrokerUrl::Embedded {
            settings.complain(&key("url"), "must be a broker of its own; the embedded one can only be [broker]", None);
        }
        if let Some(name) = name {
            routes.push(RouteConfig { name, topics, broker });
        }
    }
    routes
}
