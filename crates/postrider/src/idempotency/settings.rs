//! What an operator chooses about Redis.

use std::fmt;
use std::time::Duration;

use redis::Client;

use crate::error::{Error, Kind, Result};
use crate::redis_server;

/// The settings of [`super::RedisIdempotency`].
#[derive(Clone)]
pub struct RedisSettings {
    /// `redis://user:password@host:port/db`, or `rediss://` for TLS.
    pub url: String,
    /// How long a finished event is remembered. Longer than a broker can hold a message back.
    pub ttl: Duration,
    /// How long a claim holds: longer than the handler may ever take, or the effect may run twice at once. After a crash
    /// the event waits for this long.
    pub claim: Duration,
    /// What all keys begin with. Two consumers of the same event on one Redis need different ones (`billing:`), or the
    /// second takes the first one's work for its own.
    pub prefix: String,
    /// How long to wait for a connection, and for each answer.
    pub timeout: Duration,
}

impl RedisSettings {
    /// The defaults with this address.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            ttl: Duration::from_secs(24 * 60 * 60),
            claim: Duration::from_secs(60),
            prefix: String::new(),
            timeout: Duration::from_secs(2),
        }
    }

    /// Checks everything that can be checked without Redis.
    pub(super) fn validate(&self) -> Result<Client> {
        let wrong = |what: &str| Err(Error::new(Kind::Config, what));
        // Redis counts milliseconds and refuses 0.
        let shortest = Duration::from_millis(1);
        if self.claim < shortest || self.timeout < shortest {
            return wrong("claim and timeout must be longer than zero");
        }
        if self.ttl < self.claim {
            return wrong("ttl must not be shorter than claim");
        }
        redis_server::client(&self.url)
    }
}

/// Does not show the address, which may hold a password.
impl fmt::Debug for RedisSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisSettings")
            .field("ttl", &self.ttl)
            .field("claim", &self.claim)
            .field("prefix", &self.prefix)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_setting_is_named_and_the_url_never_quoted() {
        let good = RedisSettings::new("redis://shop:s3cret@redis.example/1");
        assert!(good.validate().is_ok());
        assert!(!format!("{good:?}").contains("s3cret"));
        for bad in [
            RedisSettings { url: "http://s3cret".to_owned(), ..good.clone() },
            RedisSettings { claim: Duration::ZERO, ..good.clone() },
            RedisSettings { ttl: Duration::from_secs(1), ..good },
        ] {
            let error = bad.validate().unwrap_err();
            assert_eq!(error.kind(), Kind::Config);
            assert!(!format!("{error:?}").contains("s3cret"));
        }
    }

    #[test]
    fn tls_has_its_cryptography() {
        assert!(RedisSettings::new("rediss://redis.example").validate().is_ok());
        assert!(rustls::crypto::CryptoProvider::get_default().is_some());
    }
}
