//! Stores payloads, fetches them, and forgets them when their time is over.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use futures_util::future::join_all;

use super::reference::{Reference, day_of, is_path, join, path_of, whole};
use super::{Hash, Object, Objects};
use crate::doctor::Finding;
use crate::error::{Error, Kind, Result};
use crate::event::Event;

/// A storage that takes longer than this counts as unreachable.
const ANSWER_WAIT: Duration = Duration::from_secs(30);
/// Objects looked at together by [`Claims::expire`].
const EXPIRE_PAGE: usize = 1_000;
/// How many such pages one run looks at; the next run goes on.
const EXPIRE_PAGES: usize = 10;

/// Deletes at once.
const DELETES_MAX: usize = 16;

/// The payloads of one prefix of a storage.
pub struct Claims {
    objects: Arc<dyn Objects>,
    prefix: String,
}

/// What [`Claims::expire`] did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Expired {
    /// How many objects were deleted.
    pub deleted: u64,
    /// Whether the run ended at its bound.
    pub has_more: bool,
}

impl Claims {
    /// All of a storage.
    pub fn new(objects: Arc<dyn Objects>) -> Self {
        Self { objects, prefix: String::new() }
    }

    /// Chooses the part of the storage that is used: what paths begin with, `orders` or `shop/orders`.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Result<Self> {
        self.prefix = prefix.into();
        // The rest of a path has 47 bytes; S3 takes 1024 together.
        if self.prefix.is_empty() || (is_path(&self.prefix) && self.prefix.len() <= 512) {
            return Ok(self);
        }
        Err(Error::new(Kind::Config, "the prefix of the claim storage is no path").with_remedy(
            "use parts of letters, digits, '-', '_' and '.' that do not begin with '.', with '/' between them",
        ))
    }

    /// Where that is, for people.
    pub fn place(&self) -> String {
        join_shown(&self.objects.place(), &self.prefix)
    }

    /// Stores the payload and returns the event that refers to it. An error never belongs to the event.
    pub(super) async fn store(&self, event: &Event) -> Result<Event> {
        let payload = event.payload.clone();
        let hash = hash_of(payload.clone()).await?;
        let reference = Reference { path: path_of(event, &self.prefix), size: payload.len(), hash };
        self.bounded(self.objects.put(&reference.path, payload, &hash)).await.map_err(|error| self.failed(error))?;
        Ok(reference.put_into(event))
    }

    /// The event that refers to an object, as if it were stored already; to find out whether it can be carried.
    pub(super) fn sketch(&self, event: &Event) -> Event {
        let hash = Hash::of(&[]);
        Reference { path: path_of(event, &self.prefix), size: event.payload.len(), hash }.put_into(event)
    }

    /// The event with its payload. An error that belongs to the event says that the payload cannot be had; any other
    /// one that the storage cannot say.
    pub(crate) async fn fetch(&self, event: &Event) -> Result<Event> {
        let lost = |what: String| Err(Error::new(Kind::Corrupt, format!("the payload cannot be fetched: {what}")));
        let reference = match Reference::read(event, &self.prefix) {
            Ok(reference) => reference,
            Err(what) => return lost(what),
        };
        let Reference { path, size, hash } = &reference;
        let found = self.bounded(self.objects.get(path, *size)).await.map_err(|error| self.failed(error))?;
        let place = self.objects.place();
        let Some(payload) = found else { return lost(format!("the object {path} is missing in {place}")) };
        match payload.len() {
            bytes if bytes > *size => return lost(format!("the object {path} in {place} has more than {size} bytes")),
            bytes if bytes < *size => {
                return lost(format!("the object {path} in {place} has {bytes} bytes instead of {size}"));
            }
            _ => {}
        }
        if hash_of(payload.clone()).await? != *hash {
            return lost(format!("the object {path} in {place} was altered: its hash is not {hash}"));
        }
        Ok(whole(event, payload))
    }

    /// Deletes objects of days before `before` that were also stored before it, up to 10,000 a run. Safe to run on
    /// several instances.
    ///
    /// Both must be old: the day is that of the event, which a producer may have chosen freely, or which may have
    /// waited for a broker; an object that is stored again is young again.
    pub async fn expire(&self, before: DateTime<Utc>) -> Result<Expired> {
        let under = join(&self.prefix, "");
        let mut after = under.clone();
        let mut expired = Expired::default();
        for _ in 0..EXPIRE_PAGES {
            let page = self.objects.list(&under, &after, EXPIRE_PAGE);
            let page = self.bounded(page).await.map_err(|error| self.failed(error))?;
            let is_full = page.len() >= EXPIRE_PAGE;
            let day = |object: &Object| day_of(&object.path, &self.prefix);
            let is_young = |object: &Object| day(object).is_some_and(|day| day >= before.date_naive());
            let end = page.iter().position(is_young).unwrap_or(page.len());
            // Others were stored again, or are not ours.
            let is_old = |object: &&Object| day(object).is_some() && object.stored < before;
            let old: Vec<&Object> = page[..end].iter().filter(is_old).collect();
            for part in old.chunks(DELETES_MAX) {
                let deletes = part.iter().map(|object| self.bounded(self.objects.delete(&object.path)));
                for deleted in join_all(deletes).await {
                    deleted.map_err(|error| self.failed(error))?;
                    expired.deleted += 1;
                }
            }
            match page.last() {
                Some(last) if is_full && end == page.len() => after = last.path.clone(),
                _ => return Ok(expired),
            }
        }
        expired.has_more = true;
        Ok(expired)
    }

    /// Stores, reads and deletes an object. For `doctor` and for start-up.
    pub async fn inspect(&self) -> Result<Finding> {
        let path = join(&self.prefix, &format!("probe-{}", uuid::Uuid::now_v7()));
        let content = Bytes::from_static(b"postrider");
        let probe = async {
            self.objects.put(&path, content.clone(), &Hash::of(&content)).await?;
            let found = self.objects.get(&path, content.len()).await;
            self.objects.delete(&path).await?;
            found
        };
        let found = self.bounded(probe).await.map_err(|error| self.failed(error))?;
        if found.as_ref() != Some(&content) {
            let message = format!("what is stored in {} is not what is read there", self.place());
            return Err(Error::new(Kind::Mismatch, message));
        }
        Ok(Finding::ok("claim_check", format!("{} stores, reads and deletes", self.place())))
    }

    async fn bounded<T>(&self, call: impl Future<Output = Result<T>> + Send) -> Result<T> {
        tokio::time::timeout(ANSWER_WAIT, call).await.unwrap_or_else(|_| {
            let message = format!("no answer within {} s", ANSWER_WAIT.as_secs());
            Err(Error::new(Kind::Unavailable, message))
        })
    }

    /// The storage's trouble is never an event's.
    fn failed(&self, error: Error) -> Error {
        let doing = format!("the claim storage {}", self.place());
        if !error.kind().belongs_to_event() {
            return error.context(doing);
        }
        let remedy = error.remedy().to_owned();
        Error::new(Kind::Other, doing).with_remedy(remedy).with_source(error)
    }
}

impl std::fmt::Debug for Claims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Claims").field("place", &self.place()).finish()
    }
}

fn join_shown(place: &str, prefix: &str) -> String {
    if prefix.is_empty() { place.to_owned() } else { format!("{}/{prefix}", place.trim_end_matches('/')) }
}

/// Megabytes take milliseconds, which belong to no worker thread.
async fn hash_of(content: Bytes) -> Result<Hash> {
    tokio::task::spawn_blocking(move || Hash::of(&content)).await.map_err(crate::task::ended)
}
