//! Alerts over HTTP: as JSON of our own, or as Slack wants them.

use async_trait::async_trait;
use chrono::Utc;
use postrider::Result;
use postrider::http::reqwest::Client;
use postrider::http::{HttpClient, HttpSettings, Request, Signer, check_public, public_only};

use super::{Message, Sink, TELL_WAIT};
use crate::config::WebhookSink;

/// Nobody needs to answer with more.
const ANSWER_BYTES_MAX: usize = 64 * 1024;

/// What both have in common: an address that may be called, and signatures.
struct Target {
    client: HttpClient,
    request: Request,
    signer: Signer,
}

impl Target {
    fn new(config: &WebhookSink) -> Result<Self> {
        let settings = HttpSettings {
            timeout: TELL_WAIT,
            connect_timeout: TELL_WAIT / 2,
            body_bytes_max: ANSWER_BYTES_MAX,
            ..HttpSettings::default()
        };
        let builder = match config.allow_private {
            true => Client::builder().no_proxy(),
            // Names are judged when they are looked up; an address is never looked up.
            false => check_public(config.url.expose()).map(|()| public_only())?,
        };
        let mut request = Request::post(config.url.expose())?;
        if let Some(authorization) = &config.authorization {
            request = request.header("authorization", authorization.expose())?;
        }
        let mut signer = Signer::default();
        for secret in &config.secrets {
            signer = signer.secret(secret.expose())?;
        }
        Ok(Self { client: HttpClient::with_builder(settings, builder)?, request, signer })
    }

    async fn post(&self, id: &str, body: &serde_json::Value) -> Result<()> {
        let text = body.to_string();
        let mut request = self.request.clone().header("idempotency-key", id)?;
        for (name, value) in self.signer.headers(id, Utc::now(), text.as_bytes()) {
            request = request.header(name, &value)?;
        }
        let request = request.header("content-type", "application/json")?.body(text);
        self.client.send_once(&request).await?.accept().map(drop)
    }
}

/// Our own JSON.
pub struct Json(Target);

impl Json {
    /// A webhook.
    pub fn new(config: &WebhookSink) -> Result<Self> {
        Target::new(config).map(Self)
    }
}

#[async_trait]
impl Sink for Json {
    async fn tell(&self, message: &Message) -> Result<()> {
        // A structure of texts and numbers always becomes JSON.
        let body = serde_json::to_value(message).unwrap_or_default();
        self.0.post(&message.id, &body).await
    }
}

/// An incoming webhook of Slack, Mattermost, Rocket.Chat and others.
pub struct Slack(Target);

impl Slack {
    /// A webhook.
    pub fn new(config: &WebhookSink) -> Result<Self> {
        Target::new(config).map(Self)
    }
}

#[async_trait]
impl Sink for Slack {
    async fn tell(&self, message: &Message) -> Result<()> {
        self.0.post(&message.id, &slack(message)).await
    }
}

/// Slack reads `<…>` as links and mentions, so these are escaped as it asks.
fn slack(message: &Message) -> serde_json::Value {
    let escape = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    serde_json::json!({ "text": format!("*{}*\n{}", escape(&message.title()), escape(&message.text())) })
}

#[cfg(test)]
mod tests {
    use postrider::Kind;

    use super::super::tests::message;
    use super::*;
    use crate::config::Hidden;

    #[test]
    fn slack_sees_neither_links_nor_mentions() {
        let text = slack(&message())["text"].as_str().unwrap().to_owned();
        assert!(
            text.starts_with("*[CRITICAL] breaker_open relay/default*\nrelay/default: &lt;refused&gt; &amp; more\n")
        );
    }

    #[tokio::test]
    async fn private_targets_are_refused_unless_they_are_allowed() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let sink = |allow_private| WebhookSink {
            url: Hidden::new(format!("http://127.0.0.1:{port}/hook")),
            secrets: Vec::new(),
            authorization: None,
            allow_private,
        };
        assert_eq!(Json::new(&sink(false)).err().unwrap().kind(), Kind::Denied);
        let answering = std::thread::spawn(move || {
            use std::io::{Read, Write};
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).unwrap();
            stream.write_all(b"HTTP/1.1 302 Found\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n").unwrap();
        });
        let error = Json::new(&sink(true)).unwrap().tell(&message()).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Mismatch, "redirects are not followed");
        answering.join().unwrap();
    }
}
