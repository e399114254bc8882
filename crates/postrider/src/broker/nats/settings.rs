//! What an operator chooses about NATS, and its address with the password kept apart.

use std::fmt;
use std::time::Duration;

use async_nats::ServerAddr;

use super::message;
use crate::error::{Error, Kind, Result};
use crate::event;

/// The settings of [`super::Nats`].
#[derive(Clone)]
pub struct NatsSettings {
    /// `nats://user:password@host:port`, `nats://token@host:port`, or `tls://` for TLS; several servers of one cluster with
    /// commas between them.
    pub url: String,
    /// The contents of a credentials file (JWT and seed), where the server wants one.
    pub credentials: Option<String>,
    /// The stream that keeps the events. What is set aside is in `<stream>-places`.
    pub stream: String,
    /// The first part of every subject: `<prefix>.<shard>.<topic>`. What is set aside is under `<prefix>-places`.
    pub prefix: String,
    /// What a payload may weigh. The server's own `max_payload` (1 MiB by default) counts too, with all headers.
    pub payload_bytes_max: usize,
    /// How long [`crate::broker::Broker::publish`] waits for its answers.
    pub publish_timeout: Duration,
    /// How long to wait for a connection, and for each answer while declaring.
    pub connect_timeout: Duration,
    /// Whether to declare the streams. If not, they must be there.
    pub declare: bool,
    /// On how many servers of a cluster a declared stream is kept. 3 survives the loss of one.
    pub replicas: usize,
    /// How long events are kept at least, for consumers to come. Longer, until every durable consumer of the stream has done
    /// them. Then they are purged.
    pub retention: Duration,
}

impl Default for NatsSettings {
    fn default() -> Self {
        Self {
            url: "nats://127.0.0.1:4222".to_owned(),
            credentials: None,
            stream: "postrider".to_owned(),
            prefix: "postrider".to_owned(),
            payload_bytes_max: event::PAYLOAD_BYTES_MAX,
            publish_timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(10),
            declare: true,
            replicas: 1,
            retention: Duration::from_secs(7 * 24 * 60 * 60),
        }
    }
}

impl NatsSettings {
    /// The defaults with this address.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), ..Self::default() }
    }

    /// Checks everything that can be checked without the server.
    pub(super) fn validate(&self) -> Result<Address> {
        let wrong = |what: String| Err(Error::new(Kind::Config, what));
        let is_word =
            |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
        if !is_word(&self.stream) || self.stream.len() > 200 {
            return wrong(format!("the stream name {:?} must have 1 to 200 letters, digits, '-' or '_'", self.stream));
        }
        if !self.prefix.split('.').all(is_word) || self.prefix.len() > 200 {
            return wrong(format!(
                "the prefix {:?} must have 1 to 200 letters, digits, '-' or '_', with dots between words",
                self.prefix
            ));
        }
        if self.publish_timeout.is_zero() || self.connect_timeout.is_zero() {
            return wrong("publish_timeout and connect_timeout must be longer than zero".to_owned());
        }
        if self.payload_bytes_max == 0 {
            return wrong("payload_bytes_max must be at least 1".to_owned());
        }
        if !(1..=5).contains(&self.replicas) {
            return wrong("replicas must be 1 to 5".to_owned());
        }
        Address::parse(self)
    }

    /// The subjects of the events.
    pub(super) fn subjects(&self) -> String {
        format!("{}.>", self.prefix)
    }

    /// The stream for what is set aside.
    pub(super) fn places_stream(&self) -> String {
        format!("{}-places", self.stream)
    }

    /// The first part of its subjects.
    pub(super) fn places_prefix(&self) -> String {
        format!("{}-places", self.prefix)
    }
}

/// Shows the address without the password.
impl fmt::Debug for NatsSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let url = Address::parse(self).map_or_else(|_| "(unreadable)".to_owned(), |address| address.shown);
        f.debug_struct("NatsSettings")
            .field("url", &url)
            .field("stream", &self.stream)
            .field("prefix", &self.prefix)
            .field("payload_bytes_max", &self.payload_bytes_max)
            .field("publish_timeout", &self.publish_timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("declare", &self.declare)
            .field("replicas", &self.replicas)
            .field("retention", &self.retention)
            .finish_non_exhaustive()
    }
}

/// A parsed URL. It has no `Debug`, because the addresses inside hold the password.
#[derive(Clone)]
pub(super) struct Address {
    pub servers: Vec<ServerAddr>,
    pub credentials: Option<String>,
    /// User and password, or a token alone. The driver does not look for them in the address.
    pub login: Option<(String, Option<String>)>,
    /// What may be shown: scheme, host and port.
    pub shown: String,
    /// Whether what is sent can be read on its way to another machine.
    pub is_plaintext_over_network: bool,
}

impl Address {
    fn parse(settings: &NatsSettings) -> Result<Self> {
        // The parser's error may quote the URL and with it the password, so it is not kept.
        let unreadable = || {
            Error::new(Kind::Config, "the NATS URL cannot be read")
                .with_remedy("write it as nats://user:password@host:port, special characters percent-encoded")
        };
        let servers: Vec<ServerAddr> = settings
            .url
            .split(',')
            .map(|server| server.trim().parse().map_err(|_| unreadable()))
            .collect::<Result<_>>()?;
        let show = |server: &ServerAddr| {
            let scheme = if server.tls_required() { "tls" } else { "nats" };
            format!("{scheme}://{}:{}", server.host(), server.port())
        };
        let is_local = |host: &str| {
            host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
        };
        if servers.iter().any(|server| server.tls_required()) {
            // The driver takes the process's default. Without one, or with several to choose from, it would panic; an
            // error here means that there is one by now.
            let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        }
        let login = servers
            .iter()
            .find_map(|server| Some((message::unescape(server.username()?), server.password().map(message::unescape))));
        Ok(Self {
            login,
            shown: servers.iter().map(show).collect::<Vec<_>>().join(","),
            is_plaintext_over_network: servers.iter().any(|server| !server.tls_required() && !is_local(server.host())),
            servers,
            credentials: settings.credentials.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_password_is_never_shown() {
        let settings = NatsSettings::new("nats://shop:s3cret@nats.example:4223,tls://other.example");
        let address = settings.validate().unwrap();
        assert_eq!(address.shown, "nats://nats.example:4223,tls://other.example:4222");
        assert_eq!(address.login, Some(("shop".to_owned(), Some("s3cret".to_owned()))));
        assert!(address.is_plaintext_over_network);
        assert!(!format!("{settings:?}").contains("s3cret"));
    }

    #[test]
    fn a_login_is_read_from_the_address() {
        let login = |url: &str| NatsSettings::new(url).validate().unwrap().login;
        assert_eq!(login("nats://h"), None);
        assert_eq!(login("nats://h,nats://a%40b:c%2Fd@i"), Some(("a@b".to_owned(), Some("c/d".to_owned()))));
        assert_eq!(login("nats://token@h"), Some(("token".to_owned(), None)));
    }

    #[test]
    fn a_wrong_setting_is_named_and_the_url_never_quoted() {
        let good = NatsSettings::new("nats://shop:s3cret@127.0.0.1");
        assert!(good.validate().is_ok());
        for bad in [
            NatsSettings { url: "nats://s3cret@:x".to_owned(), ..good.clone() },
            NatsSettings { stream: "a.b".to_owned(), ..good.clone() },
            NatsSettings { prefix: "a..b".to_owned(), ..good.clone() },
            NatsSettings { prefix: "a.>".to_owned(), ..good.clone() },
            NatsSettings { replicas: 0, ..good.clone() },
            NatsSettings { publish_timeout: Duration::ZERO, ..good },
        ] {
            let error = bad.validate().err().unwrap();
            assert_eq!(error.kind(), Kind::Config);
            assert!(!format!("{error:?}").contains("s3cret"));
        }
    }
}
