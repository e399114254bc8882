//! What a caller gets when it would rather have something than an error.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use super::answer::Answer;

/// What [`super::HttpClient::send_or`] found, and where it is from.
#[derive(Clone)]
pub enum Supplied {
    /// The destination answered just now.
    Fresh(Answer),
    /// The destination does not serve; this is its last good answer.
    Cached {
        /// The answer as it was.
        answer: Answer,
        /// How long ago it was.
        age: Duration,
    },
    /// The destination does not serve; this is the caller's own default.
    Default(Bytes),
}

impl Supplied {
    /// The body, wherever it is from. A fresh answer may be a 3xx or 4xx: look at its status first.
    pub fn body(&self) -> &Bytes {
        match self {
            Supplied::Fresh(answer) | Supplied::Cached { answer, .. } => answer.body(),
            Supplied::Default(body) => body,
        }
    }

    /// `fresh`, `cached` or `default`.
    pub fn origin(&self) -> &'static str {
        match self {
            Supplied::Fresh(_) => "fresh",
            Supplied::Cached { .. } => "cached",
            Supplied::Default(_) => "default",
        }
    }
}

/// Shows where it is from and how large it is, not what it holds.
impl fmt::Debug for Supplied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Supplied")
            .field("origin", &self.origin())
            .field("body_bytes", &self.body().len())
            .finish_non_exhaustive()
    }
}
