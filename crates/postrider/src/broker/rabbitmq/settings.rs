//! What an operator chooses about RabbitMQ, and its address with the password kept apart.

use std::fmt;
use std::time::Duration;

use lapin::uri::AMQPUri;

use crate::error::{Error, Kind, Result};
use crate::event;

/// How a consumer's queue is kept by the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum QueueType {
    /// A durable queue on one node.
    #[default]
    Classic,
    /// Replicated over the nodes of a cluster.
    Quorum,
}

/// The settings of [`super::RabbitMq`].
#[derive(Clone)]
pub struct RabbitMqSettings {
    /// `amqp://user:password@host:port/vhost`, or `amqps://`. Without a vhost it is `/`.
    pub url: String,
    /// The topic exchange that events are published to.
    pub exchange: String,
    /// What a payload may weigh. Not more than the broker's own `max_message_size`.
    pub payload_bytes_max: usize,
    /// How long [`crate::broker::Broker::publish`] waits for its confirms.
    pub publish_timeout: Duration,
    /// How long to wait for a connection, and for each answer while declaring.
    pub connect_timeout: Duration,
    /// How often both sides show that they live; twice this without a sign and the connection is given up.
    pub heartbeat: Duration,
    /// Whether to declare the exchange and the queues. If not, they must be there.
    pub declare: bool,
    /// The type of the queues that are declared.
    pub queue_type: QueueType,
}

impl Default for RabbitMqSettings {
    fn default() -> Self {
        Self {
            url: "amqp://127.0.0.1:5672/%2f".to_owned(),
            exchange: "postrider".to_owned(),
            payload_bytes_max: event::PAYLOAD_BYTES_MAX,
            publish_timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(10),
            // A dead peer is noticed within 20 s, before the publish time-out.
            heartbeat: Duration::from_secs(10),
            declare: true,
            queue_type: QueueType::Classic,
        }
    }
}

impl RabbitMqSettings {
    /// The defaults with this address.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), ..Self::default() }
    }

    /// Checks everything that can be checked without the broker.
    pub(super) fn validate(&self) -> Result<Address> {
        let wrong = |what: String| Err(Error::new(Kind::Config, what));
        // The empty name is the broker's default exchange, which no queue can be bound to.
        if self.exchange.is_empty() || self.exchange.len() > 127 {
            return wrong(format!("the exchange name {:?} must have 1 to 127 bytes", self.exchange));
        }
        if self.publish_timeout.is_zero() || self.connect_timeout.is_zero() {
            return wrong("publish_timeout and connect_timeout must be longer than zero".to_owned());
        }
        if self.payload_bytes_max == 0 {
            return wrong("payload_bytes_max must be at least 1".to_owned());
        }
        Address::parse(self)
    }
}

/// Shows the address without the password.
impl fmt::Debug for RabbitMqSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let url = Address::parse(self).map_or_else(|_| "(unreadable)".to_owned(), |address| address.shown);
        f.debug_struct("RabbitMqSettings")
            .field("url", &url)
            .field("exchange", &self.exchange)
            .field("payload_bytes_max", &self.payload_bytes_max)
            .field("publish_timeout", &self.publish_timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("heartbeat", &self.heartbeat)
            .field("declare", &self.declare)
            .field("queue_type", &self.queue_type)
            .finish()
    }
}

/// A parsed URL. It has no `Debug`, because the URI inside holds the password.
#[derive(Clone)]
pub(super) struct Address {
    pub uri: AMQPUri,
    /// What may be shown: user, host, port and vhost.
    pub shown: String,
}

impl Address {
    fn parse(settings: &RabbitMqSettings) -> Result<Self> {
        // The parser's error may quote the URL and with it the password, so it is not kept.
        let mut uri: AMQPUri = settings.url.parse().map_err(|_| {
            Error::new(Kind::Config, "the RabbitMQ URL cannot be read")
                .with_remedy("write it as amqp://user:password@host:port/vhost, special characters percent-encoded")
        })?;
        // `amqp://host/` means the vhost with the empty name; nobody has one, everybody means `/`.
        if uri.vhost.is_empty() {
            uri.vhost = "/".to_owned();
        }
        if uri.query.heartbeat.is_none() {
            uri.query.heartbeat = Some(u16::try_from(settings.heartbeat.as_secs().max(1)).unwrap_or(u16::MAX));
        }
        if uri.query.connection_timeout.is_none() {
            uri.query.connection_timeout =
                Some(u64::try_from(settings.connect_timeout.as_millis()).unwrap_or(u64::MAX));
        }
        let shown = format!(
            "{}://{}@{}:{}/{}",
            uri.scheme,
            uri.authority.userinfo.username,
            uri.authority.host,
            uri.authority.port,
            if uri.vhost == "/" { "%2f" } else { &uri.vhost },
        );
        Ok(Self { uri, shown })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_password_is_never_shown() {
        let settings = RabbitMqSettings::new("amqp://shop:s3cret@mq.example:5673/prod");
        let address = settings.validate().unwrap();
        assert_eq!(address.shown, "amqp://shop@mq.example:5673/prod");
        assert!(!format!("{settings:?}").contains("s3cret"));
    }

    #[test]
    fn an_unreadable_url_is_a_setting_to_correct_and_is_not_quoted() {
        for url in ["amqp://shop:s3cret@host:port/", "mailto:s3cret", "http://s3cret/", ""] {
            let error = RabbitMqSettings::new(url).validate().err().unwrap();
            assert_eq!(error.kind(), Kind::Config, "{url}");
            assert!(!format!("{error:?}").contains("s3cret"));
        }
    }

    #[test]
    fn a_missing_vhost_means_the_default_one() {
        for url in ["amqp://h", "amqp://h/", "amqp://h/%2f"] {
            assert_eq!(RabbitMqSettings::new(url).validate().unwrap().uri.vhost, "/", "{url}");
        }
    }
}
