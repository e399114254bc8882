//! Objects in a bucket of S3, or of a server that speaks its protocol (MinIO, Ceph, Garage …).
//!
//! Four requests are all that is needed, so they are signed here (`sign.rs`) and sent with [`crate::http`].

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::Utc;

use super::{Hash, Object, Objects};
use crate::error::{Error, Kind, Result};
use crate::event::PAYLOAD_BYTES_MAX;
use crate::http::reqwest::{Method, StatusCode};
use crate::http::{Answer, HttpClient, HttpSettings, Request};
use crate::relay::{Backoff, BreakerSettings};

mod list;
mod sign;

use sign::{Credentials, Signed};

/// The most that S3 lists at once.
const LIST_MAX: usize = 1_000;
/// A list of so many objects with the longest paths is below this.
const BODY_BYTES_MAX: usize = PAYLOAD_BYTES_MAX + 1;

/// Where the bucket is. `Debug` hides the keys.
#[derive(Clone, PartialEq, Eq)]
pub struct S3Settings {
    /// The name of the bucket. It must exist.
    pub bucket: String,
    /// The server, `http://minio:9000`. None for Amazon's.
    pub endpoint: Option<String>,
    /// The region; servers other than Amazon's mostly want `us-east-1`.
    pub region: String,
    /// The id of the access key.
    pub access_key: String,
    /// The secret access key.
    pub secret_key: String,
}

impl fmt::Debug for S3Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Settings")
            .field("bucket", &self.bucket)
            .field("endpoint", &self.endpoint)
            .field("region", &self.region)
            .finish_non_exhaustive()
    }
}

/// A bucket.
pub struct S3 {
    client: HttpClient,
    credentials: Credentials,
    bucket: String,
    /// Scheme, host and port, and the bucket where the path begins with it.
    base: String,
}

impl S3 {
    /// A bucket. Nothing is sent yet.
    pub fn new(settings: S3Settings) -> Result<Self> {
        Self::with_client(settings, HttpClient::new(http())?)
    }

    fn with_client(settings: S3Settings, client: HttpClient) -> Result<Self> {
        let S3Settings { bucket, endpoint, region, access_key, secret_key } = settings;
        let wrong = |what: &str| Err(Error::new(Kind::Config, what));
        let is_word = |text: &str| text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_'));
        if !(3..=63).contains(&bucket.len()) || !is_word(&bucket) || bucket.starts_with('.') {
            return wrong("the name of the bucket must have 3 to 63 letters, digits, '-' and '.'");
        }
        if region.is_empty() || !is_word(&region) {
            return wrong("the region of the bucket is missing, or has a wrong character");
        }
        if access_key.is_empty() || secret_key.is_empty() {
            return wrong("the access key or the secret key of the bucket is missing");
        }
        let base = match endpoint {
            // Only Amazon gives each bucket a name of its own in the DNS.
            Some(endpoint) => format!("{}/{bucket}", endpoint.trim_end_matches('/')),
            None => format!("https://{bucket}.s3.{region}.amazonaws.com"),
        };
        if base.contains(['@', '?', '#']) {
            return wrong("the endpoint must be scheme, host and port, without a user, a query or a fragment");
        }
        Request::get(&base).map_err(|error| error.context("the endpoint of the bucket"))?;
        Ok(Self { client, credentials: Credentials { region, access_key, secret_key }, bucket, base })
    }

    /// `path` needs no escapes: the callers' have none, and others are refused.
    async fn send(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, &str)],
        body: Bytes,
        hash: &Hash,
    ) -> Result<Answer> {
        if !path.split('/').all(is_plain) {
            return Err(Error::new(Kind::Other, "the path of an object has a wrong character"));
        }
        let signed = Signed { method: &method, base: &self.base, path, query, hash, at: Utc::now() };
        let mut request = Request::new(method.clone(), &signed.url())?;
        for (name, value) in signed.headers(&self.credentials) {
            request = request.header(name, &value)?;
        }
        self.client.send(&request.body(body)).await
    }
}

/// A part of a path that is the same in a URL, and that no client takes for a step upwards.
fn is_plain(part: &str) -> bool {
    !matches!(part, "." | "..") && part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

/// Whoever calls tries again in any case, the relay behind a breaker of its own. So this is for short interruptions.
fn http() -> HttpSettings {
    HttpSettings {
        timeout: Duration::from_secs(20),
        connect_timeout: Duration::from_secs(5),
        body_bytes_max: BODY_BYTES_MAX,
        retries_max: 1,
        backoff: Backoff {
            base: Duration::from_millis(200),
            max: Duration::from_secs(1),
            jitter: Duration::from_millis(100),
        },
        retry_after_max: Duration::from_secs(2),
        breaker: BreakerSettings { failures: u32::MAX, calls_min: usize::MAX, ..BreakerSettings::default() },
        ..HttpSettings::default()
    }
}

#[async_trait]
impl Objects for S3 {
    async fn put(&self, path: &str, content: Bytes, hash: &Hash) -> Result<()> {
        // The server compares the content with the hash that is signed: it stores all of it, or nothing.
        accept(self.send(Method::PUT, path, &[], content, hash).await?).map(drop)
    }

    async fn get(&self, path: &str, bytes_max: usize) -> Result<Option<Bytes>> {
        let answer = match self.send(Method::GET, path, &[], Bytes::new(), &Hash::of(b"")).await {
            Ok(answer) => answer,
            // The caller wants to hear of it as of any other object with too many bytes.
            Err(error) if error.kind() == Kind::TooLarge => return Ok(Some(vec![0; bytes_max + 1].into())),
            Err(error) => return Err(error),
        };
        if answer.status() == StatusCode::NOT_FOUND && code(&answer).as_deref() == Some("NoSuchKey") {
            return Ok(None);
        }
        let body = accept(answer)?.body().clone();
        Ok(Some(body.slice(..body.len().min(bytes_max + 1))))
    }

    async fn delete(&self, path: &str) -> Result<()> {
        let answer = self.send(Method::DELETE, path, &[], Bytes::new(), &Hash::of(b"")).await?;
        if answer.status() == StatusCode::NOT_FOUND && code(&answer).as_deref() == Some("NoSuchKey") {
            return Ok(());
        }
        accept(answer).map(drop)
    }

    async fn list(&self, under: &str, after: &str, limit: usize) -> Result<Vec<Object>> {
        let limit = limit.min(LIST_MAX).to_string();
        // In the order of their names, as the signature wants them.
        let query = [("list-type", "2"), ("max-keys", &limit), ("prefix", under), ("start-after", after)];
        let answer = accept(self.send(Method::GET, "", &query, Bytes::new(), &Hash::of(b"")).await?)?;
        list::read(answer.body()).ok_or_else(|| Error::new(Kind::Other, "the list of objects cannot be understood"))
    }

    fn place(&self) -> String {
        format!("s3://{}", self.bucket)
    }
}

/// The answer if it is a good one, else an error that holds S3's own word for what is wrong.
fn accept(answer: Answer) -> Result<Answer> {
    let code = code(&answer);
    answer.accept().map_err(|error| match code {
        Some(code) => error.context(code),
        None => error,
    })
}

/// `<Code>NoSuchKey</Code>`. The rest of an error's body may repeat what was sent.
fn code(answer: &Answer) -> Option<String> {
    let body = std::str::from_utf8(answer.body()).ok().filter(|_| !answer.status().is_success())?;
    let code = list::element(body, "Code")?;
    (code.len() <= 64 && code.bytes().all(|b| b.is_ascii_alphanumeric())).then(|| code.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> S3Settings {
        S3Settings {
            bucket: "claims".to_owned(),
            endpoint: None,
            region: "eu-central-1".to_owned(),
            access_key: "AKIDEXAMPLE".to_owned(),
            secret_key: "s3cret".to_owned(),
        }
    }

    #[test]
    fn keys_are_not_shown() {
        let shown = format!("{:?}", settings());
        assert!(!shown.contains("s3cret") && !shown.contains("AKID"), "{shown}");
    }

    #[test]
    fn wrong_settings_are_refused_without_being_quoted() {
        let wrong = [
            S3Settings { bucket: "a/b".to_owned(), ..settings() },
            S3Settings { bucket: String::new(), ..settings() },
            S3Settings { region: "x y".to_owned(), ..settings() },
            S3Settings { secret_key: String::new(), ..settings() },
            S3Settings { endpoint: Some("minio:9000".to_owned()), ..settings() },
            S3Settings { endpoint: Some("http://u:s3cret@minio:9000".to_owned()), ..settings() },
        ];
        for settings in wrong {
            let error = S3::new(settings).err().unwrap();
            assert_eq!(error.kind(), Kind::Config);
            assert!(!format!("{error:?}").contains("s3cret"));
        }
    }

    /// A bucket of a server that gives one answer.
    async fn answering(status: &str, body: &str) -> S3 {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = Some(format!("http://{}", listener.local_addr().unwrap()));
        let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.read(&mut [0; 4096]).await;
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        });
        S3::new(S3Settings { endpoint, ..settings() }).unwrap()
    }

    #[tokio::test]
    async fn only_a_missing_key_is_a_missing_object() {
        let error = |code: &str| format!("<Error><Code>{code}</Code><Message>s3cret</Message></Error>");
        let bucket = answering("404 Not Found", &error("NoSuchKey")).await;
        assert_eq!(bucket.get("x", 9).await.unwrap(), None);
        bucket.delete("x").await.unwrap();
        for (status, body, kind) in [
            ("404 Not Found", error("NoSuchBucket"), Kind::Missing),
            ("404 Not Found", "<html>s3cret</html>".to_owned(), Kind::Missing),
            ("403 Forbidden", error("AccessDenied"), Kind::Denied),
            ("503 Slow Down", error("SlowDown"), Kind::Unavailable),
            ("301 Moved", String::new(), Kind::Mismatch),
        ] {
            let bucket = answering(status, &body).await;
            for failed in [bucket.get("x", 9).await.map(drop), bucket.delete("x").await] {
                let error = failed.unwrap_err();
                assert_eq!(error.kind(), kind, "{status}");
                assert!(!format!("{error:?}").contains("s3cret"), "{error:?}");
            }
        }
    }

    #[test]
    fn the_address_is_amazons_unless_there_is_an_endpoint() {
        assert_eq!(S3::new(settings()).unwrap().base, "https://claims.s3.eu-central-1.amazonaws.com");
        let minio = S3Settings { endpoint: Some("http://minio:9000/".to_owned()), ..settings() };
        assert_eq!(S3::new(minio).unwrap().base, "http://minio:9000/claims");
    }
}
