//! Signatures as Standard Webhooks has them: a receiver knows who sent a request, and that nobody changed it.

use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use chrono::{DateTime, Utc};

use crate::error::{Error, Kind, Result};

/// What Standard Webhooks writes before a secret.
const SECRET_PREFIX: &str = "whsec_";

/// Signs requests with one or more secrets. Without any it signs nothing.
#[derive(Clone, Default)]
pub struct Signer {
    keys: Vec<hmac::Key>,
}

impl Signer {
    /// One more secret: `whsec_` and 24 to 64 bytes in base64. With several, as while one replaces another, there is a
    /// signature of each.
    pub fn secret(mut self, secret: &str) -> Result<Self> {
        self.keys.push(key(secret)?);
        Ok(self)
    }

    /// The headers of a request with this id and body; none without a secret.
    pub fn headers(&self, id: &str, now: DateTime<Utc>, body: &[u8]) -> Vec<(&'static str, String)> {
        if self.keys.is_empty() {
            return Vec::new();
        }
        let timestamp = now.timestamp().to_string();
        let signatures = self.signatures(id, &timestamp, body);
        vec![("webhook-id", id.to_owned()), ("webhook-timestamp", timestamp), ("webhook-signature", signatures)]
    }

    fn signatures(&self, id: &str, timestamp: &str, body: &[u8]) -> String {
        let sign = |secret: &hmac::Key| {
            let mut signing = hmac::Context::with_key(secret);
            for part in [id.as_bytes(), b".", timestamp.as_bytes(), b".", body] {
                signing.update(part);
            }
            format!("v1,{}", BASE64_STANDARD.encode(signing.sign()))
        };
        self.keys.iter().map(sign).collect::<Vec<_>>().join(" ")
    }
}

fn key(secret: &str) -> Result<hmac::Key> {
    let encoded = secret.strip_prefix(SECRET_PREFIX).unwrap_or(secret);
    match BASE64_STANDARD.decode(encoded) {
        Ok(bytes) if (24..=64).contains(&bytes.len()) => Ok(hmac::Key::new(hmac::HMAC_SHA256, &bytes)),
        _ => Err(Error::new(Kind::Config, "the secret is not whsec_ and 24 to 64 bytes in base64")
            .with_remedy("make one: echo whsec_$(head -c 32 /dev/urandom | base64)")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the Standard Webhooks specification.
    #[test]
    fn the_signature_is_the_standards() {
        let signer = Signer::default().secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap();
        let now = DateTime::from_timestamp(1_614_265_330, 0).unwrap();
        let headers = signer.headers("msg_p5jXN8AQM9LWM0D4loKWxJek", now, br#"{"test": 2432232314}"#);
        let expected = [
            ("webhook-id", "msg_p5jXN8AQM9LWM0D4loKWxJek"),
            ("webhook-timestamp", "1614265330"),
            ("webhook-signature", "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="),
        ];
        assert_eq!(headers, expected.map(|(name, value)| (name, value.to_owned())));

        let both = signer.secret("whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=").unwrap();
        assert_eq!(both.signatures("m", "1", b"").split(' ').count(), 2);
        assert!(Signer::default().headers("m", now, b"").is_empty());
    }

    #[test]
    fn a_bad_secret_is_refused_and_not_quoted() {
        for secret in ["", "whsec_", "whsec_c2hvcnQ=", "whsec_!!!", "s3cret"] {
            let error = Signer::default().secret(secret).err().unwrap();
            assert_eq!(error.kind(), Kind::Config);
            assert!(!format!("{error:?}").contains("s3cret"));
        }
    }
}
