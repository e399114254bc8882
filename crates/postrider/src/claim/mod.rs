//! The claim check: large payloads wait in object storage, and the event carries where.
//!
//! [`ClaimCheck`] stands in front of a broker. An event whose payload is above a size is published without it, after
//! the payload was stored under `<prefix>/<day>/<event id>`. It says so in three CloudEvents attributes, `dataref` (the
//! path), `datasize` and `datahash`, which stand among its headers, so that they are kept with it wherever it is kept.
//! A consumer that has the same [`Claims`] fetches the payload before it begins its transaction, and the handler sees
//! the event as it was written.
//!
//! What must hold: no reference is published before its object is stored whole; a payload is handed on only if it has
//! the size and the hash that the event names; only objects of the configured prefix, under the event's own id, are
//! read.

use async_trait::async_trait;
use bytes::Bytes;
use chrono::{DateTime, Utc};

use crate::error::Result;

mod check;
mod claims;
mod folder;
mod hash;
mod reference;
#[cfg(feature = "s3")]
pub mod s3;

pub use check::{ABOVE_BYTES_DEFAULT, ClaimCheck};
pub use claims::{Claims, Expired};
pub use folder::Folder;
pub use hash::Hash;
pub use reference::is_path;
pub(crate) use reference::{is_claimed, is_reference_header};

/// An object in storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// Where it is: parts of letters, digits, `-`, `_` and `.`, with `/` between them.
    pub path: String,
    /// When it was stored last, by the storage's clock.
    pub stored: DateTime<Utc>,
}

/// Object storage. Called concurrently; the caller bounds the time of each call.
#[async_trait]
pub trait Objects: Send + Sync {
    /// Stores an object, in place of one with the same path. Success means that it is stored durably and whole; nobody
    /// ever sees a part of it. Idempotent.
    async fn put(&self, path: &str, content: Bytes, hash: &Hash) -> Result<()>;

    /// Reads an object; none when it is missing. An error means that the storage cannot say. Of an object with more
    /// than `bytes_max` bytes one byte more than that is enough.
    async fn get(&self, path: &str, bytes_max: usize) -> Result<Option<Bytes>>;

    /// Deletes an object. One that is missing is no error.
    async fn delete(&self, path: &str) -> Result<()>;

    /// Up to `limit` objects whose paths begin with `under` and come after `after`, in the order of their bytes.
    async fn list(&self, under: &str, after: &str, limit: usize) -> Result<Vec<Object>>;

    /// Where that is, for people. Holds no secret.
    fn place(&self) -> String;
}
