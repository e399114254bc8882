//! What an operator chooses about Redis as a broker.

use std::fmt;
use std::time::Duration;

use redis::Client;

use crate::error::{Error, Kind, Result};
use crate::{event, redis_server};

/// The settings of [`super::RedisStreams`].
#[derive(Clone)]
pub struct RedisStreamSettings {
    /// `redis://user:password@host:port/db`, or `rediss://` for TLS.
    pub url: String,
    /// What all keys begin with, in braces: `{postrider}:07`. Two systems on one Redis need different ones.
    pub prefix: String,
    /// What a payload may weigh.
    pub payload_bytes_max: usize,
    /// How long to wait for a connection, and for each answer.
    pub publish_timeout: Duration,
    /// How long events are kept at least, for consumers to come. Longer, until every consumer that there is has done them.
    pub retention: Duration,
    /// How many messages a place for what is set aside keeps about; the store keeps all of them.
    pub places_entries_max: u32,
}

impl Default for RedisStreamSettings {
    fn default() -> Self {
        Self {
            url: "redis://127.0.0.1:6379/0".to_owned(),
            prefix: "postrider".to_owned(),
            payload_bytes_max: event::PAYLOAD_BYTES_MAX,
            publish_timeout: Duration::from_secs(10),
            // Redis keeps everything in memory.
            retention: Duration::from_secs(24 * 60 * 60),
            places_entries_max: 10_000,
        }
    }
}

impl RedisStreamSettings {
    /// The defaults with this address.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), ..Self::default() }
    }

    /// Checks everything that can be checked without Redis.
    pub(super) fn validate(&self) -> Result<Client> {
        let wrong = |what: String| Err(Error::new(Kind::Config, what));
        if self.prefix.is_empty() || self.prefix.len() > 200 || self.prefix.contains(['{', '}']) {
            return wrong(format!("the prefix {:?} must have 1 to 200 bytes without braces", self.prefix));
        }
        if self.publish_timeout < Duration::from_millis(1) {
            return wrong("publish_timeout must be longer than zero".to_owned());
        }
        if self.payload_bytes_max == 0 || self.places_entries_max == 0 {
            return wrong("payload_bytes_max and places_entries_max must be at least 1".to_owned());
        }
        redis_server::client(&self.url)
    }

    /// The stream of a shard. The braces keep all keys on one node of a cluster.
    pub(super) fn stream(&self, shard: u32) -> String {
        format!("{{{}}}:{shard:02}", self.prefix)
    }

    /// Who holds a consumer's shards, and how far they have read.
    pub(super) fn holders(&self, consumer: &str) -> String {
        format!("{{{}}}:consumer:{consumer}", self.prefix)
    }

    /// A stream for what is set aside.
    pub(super) fn place(&self, place: &str) -> String {
        format!("{{{}}}:place:{place}", self.prefix)
    }
}

/// Does not show the address, which may hold a password.
impl fmt::Debug for RedisStreamSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStreamSettings")
            .field("prefix", &self.prefix)
            .field("payload_bytes_max", &self.payload_bytes_max)
            .field("publish_timeout", &self.publish_timeout)
            .field("retention", &self.retention)
            .field("places_entries_max", &self.places_entries_max)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_setting_is_named_and_the_url_never_quoted() {
        let good = RedisStreamSettings::new("redis://shop:s3cret@redis.example/1");
        assert!(good.validate().is_ok());
        assert!(!format!("{good:?}").contains("s3cret"));
        assert_eq!(good.stream(7), "{postrider}:07");
        for bad in [
            RedisStreamSettings { url: "http://s3cret".to_owned(), ..good.clone() },
            RedisStreamSettings { prefix: "a}b".to_owned(), ..good.clone() },
            RedisStreamSettings { publish_timeout: Duration::ZERO, ..good.clone() },
            RedisStreamSettings { places_entries_max: 0, ..good },
        ] {
            let error = bad.validate().unwrap_err();
            assert_eq!(error.kind(), Kind::Config);
            assert!(!format!("{error:?}").contains("s3cret"));
        }
    }
}
