//! A request: everything that a try needs, kept so that it can be sent again.

use std::fmt;

use bytes::Bytes;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Method, Url};
use serde::Serialize;

use crate::error::{Error, Kind, Result};

/// With this header a destination recognises a repetition, so that any method may be sent again.
const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// A request to one destination. `Debug` shows the method and the destination only: paths, queries, headers and bodies
/// may hold secrets.
#[derive(Clone)]
pub struct Request {
    pub(super) method: Method,
    pub(super) url: Url,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    pub(super) cache_scope: Option<String>,
    destination: String,
}

impl Request {
    /// A request without headers and body. A user and a password in the URL become an `Authorization` header.
    pub fn new(method: Method, url: &str) -> Result<Self> {
        // The parser's error and the URL may hold credentials, so neither is kept.
        let unreadable =
            || Error::new(Kind::Config, "the URL cannot be read").with_remedy("write it as https://host:port/path");
        let url = Url::parse(url).map_err(|_| unreadable())?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(unreadable());
        }
        let (host, port) = url.host_str().zip(url.port_or_known_default()).ok_or_else(unreadable)?;
        let destination = format!("{host}:{port}");
        Ok(Self { method, url, headers: HeaderMap::new(), body: Bytes::new(), cache_scope: None, destination })
    }

    /// A `GET`.
    pub fn get(url: &str) -> Result<Self> {
        Self::new(Method::GET, url)
    }

    /// A `POST`. It is sent once, unless it carries an `Idempotency-Key`.
    pub fn post(url: &str) -> Result<Self> {
        Self::new(Method::POST, url)
    }

    /// A `PUT`.
    pub fn put(url: &str) -> Result<Self> {
        Self::new(Method::PUT, url)
    }

    /// A `DELETE`.
    pub fn delete(url: &str) -> Result<Self> {
        Self::new(Method::DELETE, url)
    }

    /// Sets a header, in place of one with the same name.
    pub fn header(mut self, name: &str, value: &str) -> Result<Self> {
        let name: HeaderName =
            name.parse().map_err(|_| Error::new(Kind::Invalid, "the name of a header has a wrong character"))?;
        let mut value: HeaderValue = value
            .parse()
            .map_err(|_| Error::new(Kind::Invalid, format!("the value of the header {name} has a wrong character")))?;
        value.set_sensitive(true);
        self.headers.insert(name, value);
        Ok(self)
    }

    /// Sets the body. Its type is told with the header `Content-Type`.
    #[must_use]
    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    /// Sets the body and `Content-Type: application/json`.
    pub fn json(mut self, value: &impl Serialize) -> Result<Self> {
        // The serializer's error may quote the value.
        let body =
            serde_json::to_vec(value).map_err(|_| Error::new(Kind::Invalid, "the body cannot be written as JSON"))?;
        self.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Ok(self.body(body))
    }

    /// Says for whom an answer may be kept (see [`super::HttpClient::send_or`]). Without it an answer is found again
    /// only by a request with the same headers, because they may decide what it holds: a tenant, a user. Name whatever
    /// decides here (`"tenant-7"`) when a header changes and the answer does not, a token that is renewed for example.
    #[must_use]
    pub fn cache_scope(mut self, scope: impl Into<String>) -> Self {
        self.cache_scope = Some(scope.into());
        self
    }

    /// `host:port`. Breaker, budget and metrics are kept for each.
    pub fn destination(&self) -> &str {
        &self.destination
    }

    /// Whether the request may be sent again when nobody knows what became of it.
    pub fn is_repeatable(&self) -> bool {
        matches!(self.method, Method::GET | Method::HEAD | Method::PUT | Method::DELETE | Method::OPTIONS)
            || self.headers.contains_key(IDEMPOTENCY_KEY)
    }

    /// What may be shown: `GET to host:port`.
    pub(super) fn shown(&self) -> String {
        format!("{} to {}", self.method, self.destination)
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("method", &self.method)
            .field("destination", &self.destination)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_destination_is_host_and_port() {
        let cases = [
            ("https://api.example/a?b=c", "api.example:443"),
            ("http://API.example", "api.example:80"),
            ("http://user:s3cret@api.example:8080/", "api.example:8080"),
            ("http://[::1]:9/", "[::1]:9"),
            ("https://127.0.0.1/", "127.0.0.1:443"),
        ];
        for (url, destination) in cases {
            assert_eq!(Request::get(url).unwrap().destination(), destination, "{url}");
        }
    }

    #[test]
    fn an_unreadable_url_is_not_quoted() {
        for url in ["", "s3cret", "/s3cret", "http://", "ftp://s3cret/", "http://user:s3cret@host:port/", "data:s3cret"]
        {
            let error = Request::get(url).unwrap_err();
            assert_eq!(error.kind(), Kind::Config, "{url}");
            assert!(!format!("{error:?}").contains("s3cret"), "{url}");
        }
    }

    #[test]
    fn wrong_headers_are_refused_without_their_value() {
        for (name, value) in [("a b", "s3cret"), ("", "s3cret"), ("x-token", "s3cret\n"), ("x-token", "s3cret\0")] {
            let error = Request::get("http://h/").unwrap().header(name, value).unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid);
            assert!(!format!("{error:?}").contains("s3cret"));
        }
    }

    #[test]
    fn debug_shows_neither_url_nor_headers_nor_body() {
        let request = Request::post("http://user:s3cret@h/s3cret?token=s3cret").unwrap();
        let request = request.header("authorization", "Bearer s3cret").unwrap().body("s3cret").cache_scope("s3cret");
        assert_eq!(format!("{request:?}"), "Request { method: POST, destination: \"h:80\", .. }");
    }

    #[test]
    fn only_idempotent_methods_are_repeatable_or_what_has_an_idempotency_key() {
        let methods = [
            (Method::GET, true),
            (Method::HEAD, true),
            (Method::PUT, true),
            (Method::DELETE, true),
            (Method::OPTIONS, true),
            (Method::POST, false),
            (Method::PATCH, false),
            (Method::CONNECT, false),
            (Method::from_bytes(b"PURGE").unwrap(), false),
        ];
        for (method, expected) in methods {
            let request = Request::new(method.clone(), "http://h/").unwrap();
            assert_eq!(request.is_repeatable(), expected, "{method}");
            assert!(request.header("Idempotency-Key", "k-1").unwrap().is_repeatable(), "{method}");
        }
    }
}
