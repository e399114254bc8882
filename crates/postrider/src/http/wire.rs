//! The seam to the network: one request out, one bounded answer in. Everything above it is tested without sockets.

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};

use super::answer::Answer;
use super::error::{self, Failure};
use super::request::Request;
use super::retry_after;
use super::settings::HttpSettings;
use crate::error::{Error, Kind, Result};

/// Carries one request to its destination. Called concurrently; the future may be dropped at any time.
#[async_trait]
pub(super) trait Wire: Send + Sync {
    /// Sends the request once and reads the whole answer. The caller bounds the time.
    async fn exchange(&self, request: &Request) -> Result<Answer, Failure>;
}

/// The real network.
pub(super) struct Network {
    client: reqwest::Client,
    settings: HttpSettings,
}

impl Network {
    /// `builder` brings what belongs to the installation (certificates, a proxy); what the client promises is set here.
    pub fn new(settings: &HttpSettings, builder: reqwest::ClientBuilder) -> Result<Self> {
        let client = builder
            .redirect(reqwest::redirect::Policy::none())
            // Retries are counted, budgeted and shown by us alone.
            .retry(reqwest::retry::never())
            .connect_timeout(settings.connect_timeout)
            .build()
            .map_err(|error| {
                Error::new(Kind::Config, "the HTTP client cannot be built")
                    .with_source(error::causes(&error.without_url()))
                    .with_remedy("install the system's CA certificates, or bring some with HttpClient::with_builder")
            })?;
        Ok(Self { client, settings: settings.clone() })
    }

    /// Reads the body, and stops with the first byte too many.
    async fn body(&self, mut response: reqwest::Response) -> Result<Bytes, Failure> {
        let max = self.settings.body_bytes_max;
        let announced = response.content_length().unwrap_or(0);
        if announced > max as u64 {
            return Err(Failure::TooLarge(max));
        }
        let mut body = BytesMut::new();
        while let Some(chunk) = response.chunk().await.map_err(Failure::of)? {
            if chunk.len() > max - body.len() {
                return Err(Failure::TooLarge(max));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body.freeze())
    }
}

#[async_trait]
impl Wire for Network {
    async fn exchange(&self, request: &Request) -> Result<Answer, Failure> {
        let mut response = self
            .client
            .request(request.method.clone(), request.url.clone())
            .headers(request.headers.clone())
            .body(request.body.clone())
            .send()
            .await
            .map_err(Failure::of)?;
        let status = response.status();
        let headers = std::mem::take(response.headers_mut());
        let retry_after = retry_after::read(&headers, chrono::Utc::now());
        Ok(Answer {
            status,
            headers,
            body: self.body(response).await?,
            retry_after: retry_after.map(|wait| wait.min(self.settings.retry_after_max)),
            shown: request.shown(),
        })
    }
}
