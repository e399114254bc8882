//! Gives events to a service over HTTP: CloudEvents 1.0 in binary mode, signed as Standard Webhooks asks.

use std::fmt;

use chrono::{DateTime, Utc};
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderName, HeaderValue};

use super::client::HttpClient;
use super::error::{self, Failure};
use super::request::Request;
use super::sign::Signer;
use super::verdict::Verdict as HttpVerdict;
use crate::broker::cloudevents::{self, Attribute};
use crate::error::{Error, Result};
use crate::event::Event;
use crate::handler::{HandlerError, RemoteHandler, Verdict};
use crate::inbox::Failed;

/// An endpoint that takes events: 2xx is done, 4xx but 408, 425 and 429 is refused for good, everything else is tried
/// again, after `Retry-After` where the endpoint says so. While the breaker of the endpoint's host is open, events wait,
/// and no attempt is counted.
///
/// Each request carries the event's id as `Idempotency-Key` and `webhook-id`: the same event may come more than once.
#[derive(Clone)]
pub struct Webhook {
    client: HttpClient,
    request: Request,
    signer: Signer,
}

impl Webhook {
    /// An endpoint. The client's time-out should be shorter than the consumer's `handler_timeout`, so that its breaker
    /// learns of what is slow.
    pub fn new(client: HttpClient, url: &str) -> Result<Self> {
        Ok(Self { client, request: Request::post(url)?, signer: Signer::default() })
    }

    /// Signs with a secret: `whsec_` and 24 to 64 bytes in base64. With several, as while one replaces another, there is
    /// a signature of each.
    pub fn secret(mut self, secret: &str) -> Result<Self> {
        self.signer = self.signer.secret(secret)?;
        Ok(self)
    }

    /// Whether [`Webhook::secret`] takes it.
    pub fn check_secret(secret: &str) -> Result<()> {
        Signer::default().secret(secret).map(drop)
    }

    /// Sends this `Authorization` with every event.
    pub fn authorization(mut self, value: &str) -> Result<Self> {
        self.request = self.request.header(AUTHORIZATION.as_str(), value)?;
        Ok(self)
    }

    fn request(&self, event: &Event, now: DateTime<Utc>) -> Request {
        let mut request = self.request.clone().body(event.payload().clone());
        let mut put = |name: &str, value: &str| {
            // Both are escaped, so neither can be refused.
            if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), HeaderValue::from_str(value)) {
                request.headers.insert(name, value);
            }
        };
        for (name, value) in event.headers() {
            put(&format!("ce-{}", escape_name(name)), &escape(value));
        }
        // After the producer's own headers, so that none of them can pretend to be an attribute.
        put("ce-topic", &escape(event.topic()));
        cloudevents::encode(event, |attribute, value| {
            put(&format!("ce-{}", attribute.name()), &escape(&value));
            // Where tracing looks for it.
            if matches!(attribute, Attribute::TraceParent | Attribute::TraceState) {
                put(attribute.name(), &escape(&value));
            }
        });
        let id = event.id().to_string();
        put("idempotency-key", &id);
        put(CONTENT_TYPE.as_str(), &escape_non_text(event.content_type()));
        for (name, value) in self.signer.headers(&id, now, event.payload()) {
            put(name, &value);
        }
        request
    }
}

impl fmt::Debug for Webhook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Webhook").field("destination", &self.request.destination()).finish_non_exhaustive()
    }
}

#[async_trait::async_trait]
impl RemoteHandler for Webhook {
    async fn deliver(&self, event: &Event) -> Result<(), HandlerError> {
        let request = self.request(event, Utc::now());
        let answer = match self.client.try_raw(&request).await {
            Ok(answer) => answer,
            // It was not sent.
            Err(failure @ Failure::Open { .. }) => return Err(HandlerError::away(failure.into_error(&request))),
            Err(failure) => {
                let error_type = format!("http_{}", failure.as_str());
                let failed = failed(error_type, &failure.into_error(&request));
                return Err(HandlerError(Verdict::Retry { failed, after: None }));
            }
        };
        let said = || {
            let status = answer.status();
            failed(format!("http_{}", status.as_u16()), &error::of_status(status, &answer.shown))
        };
        match answer.verdict() {
            HttpVerdict::Done => Ok(()),
            HttpVerdict::Rejected => Err(HandlerError(Verdict::Reject(said()))),
            HttpVerdict::Retry { after } => Err(HandlerError(Verdict::Retry { failed: said(), after })),
        }
    }

    fn trouble(&self) -> Option<String> {
        self.client.trouble(self.request.destination())
    }
}

fn failed(error_type: String, error: &Error) -> Failed {
    Failed::new(error_type, error.message(), error.causes())
}

/// As the HTTP binding of CloudEvents asks: what is not printable ASCII, spaces, quotes and percent signs.
fn escape(value: &str) -> String {
    escape_unless(value, |byte| matches!(byte, 0x21 | 0x23 | 0x24 | 0x26..=0x7e))
}

/// A name has fewer characters still.
fn escape_name(name: &str) -> String {
    escape_unless(name, |byte| byte.is_ascii_alphanumeric() || b"!#$&'*+-.^_`|~".contains(&byte))
}

/// A content type is text as it is; only what no header can carry is escaped.
fn escape_non_text(value: &str) -> String {
    escape_unless(value, |byte| matches!(byte, 0x20..=0x7e))
}

fn escape_unless(text: &str, is_plain: impl Fn(u8) -> bool) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match is_plain(byte) {
            true => escaped.push(char::from(byte)),
            false => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::super::settings::HttpSettings;
    use super::*;

    fn webhook() -> Webhook {
        Webhook::new(HttpClient::new(HttpSettings::default()).unwrap(), "http://h/events").unwrap()
    }

    fn header<'r>(request: &'r Request, name: &str) -> &'r str {
        request.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    #[test]
    fn an_event_is_a_cloudevent_in_binary_mode() {
        let event = Event::builder("orders.paid", "order.paid")
            .key("o 1")
            .tenant("thụ")
            .traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
            .header("x-shop", "50% \"off\"")
            .header("id", "forged")
            .payload("application/json; charset=utf-8", "{}")
            .build()
            .unwrap();
        let request = webhook().authorization("Bearer t").unwrap().request(&event, Utc::now());
        assert_eq!(header(&request, "ce-id"), event.id().to_string(), "no header can pretend to be the id");
        assert_eq!(header(&request, "idempotency-key"), event.id().to_string());
        assert_eq!(header(&request, "ce-type"), "order.paid");
        assert_eq!(header(&request, "ce-topic"), "orders.paid");
        assert_eq!(header(&request, "ce-specversion"), "1.0");
        assert_eq!(header(&request, "ce-partitionkey"), "o%201");
        assert_eq!(header(&request, "ce-tenant"), "th%E1%BB%A5");
        assert_eq!(header(&request, "ce-x-shop"), "50%25%20%22off%22");
        assert_eq!(header(&request, "traceparent"), header(&request, "ce-traceparent"));
        assert_eq!(header(&request, "content-type"), "application/json; charset=utf-8");
        assert_eq!(header(&request, "authorization"), "Bearer t");
        assert_eq!(header(&request, "webhook-signature"), "", "nothing is signed without a secret");
        assert!(!format!("{:?}", webhook()).contains("/events"));
    }
}
