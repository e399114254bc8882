//! What an operator chooses about Kafka, and its address with the password kept apart.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::message::is_topic_name;
use crate::error::{Error, Kind, Result};

/// Properties that Postrider sets itself, because its promises depend on them.
const OWN: [&str; 20] = [
    "acks",
    "allow.auto.create.topics",
    "auto.offset.reset",
    "bootstrap.servers",
    "delivery.timeout.ms",
    "enable.auto.commit",
    "enable.auto.offset.store",
    "enable.gapless.guarantee",
    "enable.idempotence",
    "enable.partition.eof",
    "group.id",
    "group.instance.id",
    "max.in.flight",
    "max.in.flight.requests.per.connection",
    "message.max.bytes",
    "message.timeout.ms",
    "metadata.broker.list",
    "partitioner",
    "request.required.acks",
    "transactional.id",
];

/// The settings of [`super::Kafka`].
#[derive(Clone)]
pub struct KafkaSettings {
    /// `kafka://host:port`, with more brokers after commas: `kafka://a:9092,b:9092`. With `user:password@` in front of the
    /// first one the client says who it is (SASL PLAIN). The scheme may be left out.
    pub url: String,
    /// Put in front of the names of topics and groups, for a cluster that several systems share. Consumers see only topics
    /// that begin with it.
    pub prefix: String,
    /// What a payload may weigh. Kafka's own limit is for the whole record, 1,048,588 bytes unless the broker
    /// (`message.max.bytes`) or the topic (`max.message.bytes`) says otherwise.
    pub payload_bytes_max: usize,
    /// How long [`crate::broker::Broker::publish`] waits for its confirms.
    pub publish_timeout: Duration,
    /// How long to wait for each answer about topics, offsets and settings.
    pub answer_timeout: Duration,
    /// How often topics are looked at: for new ones that a consumer wants, and for a changed number of partitions.
    pub refresh: Duration,
    /// Whether to create topics that are missing: those that events are published to, those that consumers name without a
    /// wildcard, and those for dead letters. If not, an event without a topic is unroutable.
    pub declare: bool,
    /// The partitions of a topic that is created. A consumer's slots must divide it. Events are spread over 32 shards, so
    /// more than [`crate::handler::SLOTS_MAX`] partitions stay empty, and a divisor of that is filled evenly.
    pub partitions: u16,
    /// The copies of a topic that is created. From 3 on, two of them must have an event before it counts as published
    /// (`min.insync.replicas`).
    pub replication: u16,
    /// How long a created topic keeps what was set aside (`retention.ms`).
    pub places_retention: Duration,
    /// Further properties of librdkafka (`security.protocol`, `ssl.ca.location`, `compression.type` …). Those that the
    /// promises depend on are refused. TLS and SCRAM need a librdkafka that is built with it: add `rdkafka` with the
    /// feature `ssl` to your own dependencies.
    pub properties: BTreeMap<String, String>,
}

impl Default for KafkaSettings {
    fn default() -> Self {
        Self {
            url: "kafka://127.0.0.1:9092".to_owned(),
            prefix: String::new(),
            // Leaves room for headers below Kafka's own default.
            payload_bytes_max: 1_000_000,
            publish_timeout: Duration::from_secs(30),
            answer_timeout: Duration::from_secs(10),
            refresh: Duration::from_secs(30),
            declare: true,
            partitions: 16,
            replication: 3,
            places_retention: Duration::from_secs(14 * 24 * 3600),
            properties: BTreeMap::new(),
        }
    }
}

impl KafkaSettings {
    /// The defaults with this address.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), ..Self::default() }
    }

    /// Checks everything that can be checked without the broker.
    pub(super) fn validate(&self) -> Result<Address> {
        let wrong = |what: String| Err(Error::new(Kind::Config, what));
        if !self.prefix.is_empty() && (!is_topic_name(&self.prefix) || self.prefix.len() > 100) {
            return wrong(format!(
                "the prefix {:?} must have at most 100 letters, digits, '.', '_' or '-'",
                self.prefix
            ));
        }
        // Below a second librdkafka's own clock is too coarse to say in time what became of a message.
        if self.publish_timeout < Duration::from_secs(1) {
            return wrong("publish_timeout must be at least 1 s".to_owned());
        }
        if self.answer_timeout.is_zero() || self.refresh.is_zero() {
            return wrong("answer_timeout and refresh must be longer than zero".to_owned());
        }
        if self.payload_bytes_max == 0 || self.payload_bytes_max > crate::event::PAYLOAD_BYTES_MAX {
            return wrong(format!("payload_bytes_max must be 1 to {}", crate::event::PAYLOAD_BYTES_MAX));
        }
        if self.partitions == 0 || self.replication == 0 {
            return wrong("partitions and replication must be at least 1".to_owned());
        }
        if let Some(name) = self.properties.keys().find(|name| OWN.contains(&name.as_str())) {
            return Err(Error::new(Kind::Config, format!("the property {name:?} is Postrider's own to set"))
                .with_remedy("remove it from the properties"));
        }
        Address::parse(&self.url)
    }

    /// The name on Kafka of a topic.
    pub(super) fn kafka_topic(&self, topic: &str) -> String {
        format!("{}{topic}", self.prefix)
    }

    /// The topic of a name on Kafka, if it is one of ours.
    pub(super) fn topic<'t>(&self, kafka_topic: &'t str) -> Option<&'t str> {
        kafka_topic.strip_prefix(self.prefix.as_str()).filter(|topic| !topic.is_empty())
    }
}

/// Shows the address without the password, and of the properties only the names.
impl fmt::Debug for KafkaSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let url = Address::parse(&self.url).map_or_else(|_| "(unreadable)".to_owned(), |address| address.shown);
        f.debug_struct("KafkaSettings")
            .field("url", &url)
            .field("prefix", &self.prefix)
            .field("payload_bytes_max", &self.payload_bytes_max)
            .field("publish_timeout", &self.publish_timeout)
            .field("answer_timeout", &self.answer_timeout)
            .field("refresh", &self.refresh)
            .field("declare", &self.declare)
            .field("partitions", &self.partitions)
            .field("replication", &self.replication)
            .field("places_retention", &self.places_retention)
            .field("properties", &self.properties.keys().collect::<Vec<_>>())
            .finish()
    }
}

/// A parsed URL. It has no `Debug`, because it holds the password.
#[derive(Clone)]
pub(super) struct Address {
    /// What librdkafka wants: `host:port,host:port`.
    pub servers: String,
    pub login: Option<(String, String)>,
    /// What may be shown.
    pub shown: String,
}

impl Address {
    fn parse(url: &str) -> Result<Self> {
        // The URL may hold a password, so it is not repeated.
        let unreadable = || {
            Error::new(Kind::Config, "the Kafka URL cannot be read").with_remedy(
                "write it as kafka://user:password@host:port,host:port, special characters percent-encoded",
            )
        };
        let rest = match url.split_once("://") {
            Some(("kafka", rest)) => rest,
            Some(_) => return Err(unreadable()),
            None => url,
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (login, servers) = match rest.rsplit_once('@') {
            Some((login, servers)) => {
                let (user, password) = login.split_once(':').ok_or_else(unreadable)?;
                let login = decode(user).zip(decode(password)).ok_or_else(unreadable)?;
                (Some(login), servers)
            }
            None => (None, rest),
        };
        let is_server = |server: &str| {
            let Some((host, port)) = server.rsplit_once(':') else { return false };
            !host.is_empty()
                && port.parse::<u16>().is_ok_and(|port| port > 0)
                && !host.contains(|c: char| c == '/' || c.is_whitespace())
        };
        if !servers.split(',').all(is_server) {
            return Err(unreadable());
        }
        Ok(Self { servers: servers.to_owned(), login, shown: format!("kafka://{servers}") })
    }
}

/// The text behind a percent-encoding.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digit = |byte: u8| char::from(byte).to_digit(16);
        let (high, low) = (digit(rest.next()?)?, digit(rest.next()?)?);
        bytes.push(u8::try_from(high * 16 + low).ok()?);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_password_is_never_shown() {
        let mut settings = KafkaSettings::new("kafka://shop:s3%40cret@a.example:9092,b.example:9093");
        settings.properties.insert("sasl.password".to_owned(), "0ther".to_owned());
        let address = settings.validate().unwrap();
        assert_eq!(address.login, Some(("shop".to_owned(), "s3@cret".to_owned())));
        assert_eq!(address.servers, "a.example:9092,b.example:9093");
        assert_eq!(address.shown, "kafka://a.example:9092,b.example:9093");
        let shown = format!("{settings:?}");
        assert!(!shown.contains("cret") && !shown.contains("0ther"), "{shown}");
    }

    #[test]
    fn an_unreadable_url_is_a_setting_to_correct_and_is_not_quoted() {
        for url in ["", "kafka://s3cret", "amqp://s3cret:1", "kafka://s3cret@h:1", "h:0", "kafka://a:1,,b:2", "h:port"]
        {
            let error = KafkaSettings::new(url).validate().err().unwrap();
            assert_eq!(error.kind(), Kind::Config, "{url}");
            assert!(!format!("{error:?}").contains("s3cret"));
        }
        assert_eq!(KafkaSettings::new("h:9092").validate().unwrap().servers, "h:9092");
    }

    #[test]
    fn what_the_promises_depend_on_cannot_be_changed() {
        for name in OWN {
            let mut settings = KafkaSettings::default();
            settings.properties.insert(name.to_owned(), "x".to_owned());
            assert_eq!(settings.validate().err().unwrap().kind(), Kind::Config, "{name}");
        }
    }
}
