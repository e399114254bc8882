//! An answer: status, headers and a bounded body.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use reqwest::StatusCode;
use reqwest::header::HeaderMap;
use serde::de::DeserializeOwned;

use super::error;
use super::verdict::Verdict;
use crate::error::{Error, Kind, Result};

/// What a destination answered. `Debug` shows the status and the size only.
#[derive(Clone)]
pub struct Answer {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    pub(super) retry_after: Option<Duration>,
    /// Method and destination, for errors.
    pub(super) shown: String,
}

impl Answer {
    /// The status. Redirects are not followed, so it may be a 3xx.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The headers.
    pub fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// The whole body; never more than [`super::HttpSettings::body_bytes_max`].
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    /// The body, read as JSON.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T> {
        // The parser's error may quote the body, so only the place is kept.
        serde_json::from_slice(&self.body).map_err(|error| {
            let (line, column) = (error.line(), error.column());
            let message = format!("{}: the answer is not the JSON expected (line {line}, column {column})", self.shown);
            Error::new(Kind::Corrupt, message)
                .with_remedy("compare what the destination sends with the type it is read as")
        })
    }

    /// The wait that `Retry-After` asks for, at most [`super::HttpSettings::retry_after_max`].
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }

    /// What the answer means for the work that was sent.
    pub fn verdict(&self) -> Verdict {
        Verdict::of(self.status, self.retry_after)
    }

    /// The answer if it is a 2xx, else the error that its status stands for.
    pub fn accept(self) -> Result<Self> {
        if self.status.is_success() { Ok(self) } else { Err(error::of_status(self.status, &self.shown)) }
    }
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer")
            .field("to", &self.shown)
            .field("status", &self.status.as_u16())
            .field("body_bytes", &self.body.len())
            .finish_non_exhaustive()
    }
}
