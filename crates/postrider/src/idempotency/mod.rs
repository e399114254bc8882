//! Idempotency in Redis, for effects that no SQL transaction holds.
//!
//! Where effect and inbox share a database, [`crate::inbox`] makes effects happen once. A handler that writes elsewhere
//! can only remember what it has done. [`RedisIdempotency`] remembers under `event:{event_id}`:
//!
//! | value | kept for | meaning |
//! |---|---|---|
//! | `{"status":"PROCESSING","claim":"…"}` | [`RedisSettings::claim`], 60 s | somebody is at it |
//! | `{"processed_at":"…","status":"SUCCESS"}` | [`RedisSettings::ttl`], 24 h | done |
//! | none | | new, or forgotten |
//!
//! Effects happen at least once. They happen twice when the process dies between effect and [`Claim::done`], when a
//! handler takes longer than its claim, and when Redis loses or evicts the key or keeps it for a shorter time than a
//! broker keeps the message. [`RedisIdempotency::inspect`] finds settings that lose keys.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, SecondsFormat, Utc};
use redis::{FromRedisValue, Script, ScriptInvocation};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::doctor::Finding;
use crate::error::{Error, Kind, Result};
use crate::redis_server::Link;

mod handler;
mod inspect;
mod settings;

pub use handler::Idempotent;
pub use settings::RedisSettings;

/// What is there, or else our claim.
const BEGIN: &str = "\
    local value = redis.call('GET', KEYS[1]) \
    if value then return value end \
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) \
    return false";

/// Over our own claim. Also over nothing, since the effect has happened, and over itself, when the answer to the first
/// try was lost. Never over another's claim.
const DONE: &str = "\
    local value = redis.call('GET', KEYS[1]) \
    if value and value ~= ARGV[1] and value ~= ARGV[2] then return 0 end \
    redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) \
    return 1";

const RELEASE: &str = "\
    if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end \
    return redis.call('DEL', KEYS[1])";

/// The effect has happened, so a short trouble should not keep us from writing that down.
const DONE_TRIES: u32 = 3;
/// The wait between two of them.
const DONE_WAIT: Duration = Duration::from_millis(200);

/// Remembers in Redis which events were applied. Cheap to clone.
#[derive(Clone)]
pub struct RedisIdempotency {
    inner: Arc<Inner>,
}

struct Inner {
    settings: RedisSettings,
    link: Link,
    begin: Script,
    done: Script,
    release: Script,
}

/// Whether an effect may go ahead.
#[derive(Debug)]
pub enum Begun {
    /// It may; nobody else begins until the claim ends or runs out.
    New(Claim),
    /// Somebody has begun and not finished.
    InProgress,
    /// It has happened.
    Done {
        /// When.
        processed_at: DateTime<Utc>,
    },
}

/// The right to apply one event. Dropped, it runs out by itself: until then nobody knows what became of the effect.
#[must_use = "a claim that is not ended keeps the event until it runs out"]
pub struct Claim {
    idempotency: RedisIdempotency,
    key: String,
    /// What stands in Redis while the claim holds; no other claim has the same.
    value: String,
}

/// The value as anyone may have written it.
#[derive(Deserialize)]
struct Stored {
    status: String,
    processed_at: Option<DateTime<Utc>>,
}

#[derive(Serialize)]
struct Processing<'a> {
    status: &'a str,
    claim: Uuid,
}

#[derive(Serialize)]
struct Success<'a> {
    processed_at: &'a str,
    status: &'a str,
}

impl RedisIdempotency {
    /// Checks the settings. Connects when it is first needed.
    pub fn new(settings: RedisSettings) -> Result<Self> {
        let client = settings.validate()?;
        Ok(Self {
            inner: Arc::new(Inner {
                link: Link::new(client, settings.timeout),
                settings,
                begin: Script::new(BEGIN),
                done: Script::new(DONE),
                release: Script::new(RELEASE),
            }),
        })
    }

    /// Claims an event, unless it is claimed or done. Of any number of concurrent callers one gets [`Begun::New`].
    ///
    /// An error means that nothing may be applied. When only the answer was lost, the claim stands until it runs out, and
    /// the event counts as in progress meanwhile.
    pub async fn begin(&self, event_id: Uuid) -> Result<Begun> {
        let key = format!("{}event:{event_id}", self.inner.settings.prefix);
        let value = json(&Processing { status: "PROCESSING", claim: Uuid::now_v7() })?;
        let mut script = self.inner.begin.key(&key);
        script.arg(&value).arg(millis(self.inner.settings.claim));
        let failed = |error: Error| error.context(format!("the event {event_id} was not claimed"));
        let found: Option<String> = self.invoke(&script).await.map_err(failed)?;
        match found {
            None => Ok(Begun::New(Claim { idempotency: self.clone(), key, value })),
            Some(found) => read(&found).map_err(failed),
        }
    }

    /// Checks reachability, version, eviction and persistence.
    pub async fn inspect(&self) -> Result<Vec<Finding>> {
        inspect::inspect(&self.inner.link).await
    }

    async fn invoke<T: FromRedisValue>(&self, script: &ScriptInvocation<'_>) -> Result<T> {
        self.inner.link.call(async |connection| script.invoke_async(connection).await).await
    }
}

impl Claim {
    /// The effect has happened: nobody begins again within [`RedisSettings::ttl`]. Tried a few times.
    ///
    /// False when the claim had run out and another has it or is done: then the effect may happen twice, and what the
    /// other wrote stays. After an error the claim runs out, and the effect may happen again then.
    pub async fn done(self) -> Result<bool> {
        let processed_at = Utc::now().to_rfc3339_opts(SecondsFormat::Micros, true);
        let value = json(&Success { processed_at: &processed_at, status: "SUCCESS" })?;
        let inner = &self.idempotency.inner;
        let mut script = inner.done.key(&self.key);
        script.arg(&self.value).arg(&value).arg(millis(inner.settings.ttl));
        let mut tries = 1;
        loop {
            match self.idempotency.invoke(&script).await {
                Err(_) if tries < DONE_TRIES => {
                    tries += 1;
                    tokio::time::sleep(DONE_WAIT).await;
                }
                result => return result.map_err(|error| error.context(format!("{} was not marked as done", self.key))),
            }
        }
    }

    /// The effect has not happened: the event may begin again at once. False when the claim had run out.
    pub async fn release(self) -> Result<bool> {
        let mut script = self.idempotency.inner.release.key(&self.key);
        script.arg(&self.value);
        let result = self.idempotency.invoke(&script).await;
        result.map_err(|error| error.context(format!("the claim on {} was not released", self.key)))
    }
}

impl std::fmt::Debug for RedisIdempotency {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inner.settings.fmt(f)
    }
}

impl std::fmt::Debug for Claim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Claim").field("key", &self.key).finish_non_exhaustive()
    }
}

fn read(value: &str) -> Result<Begun> {
    match serde_json::from_str(value) {
        Ok(Stored { status, processed_at: Some(processed_at) }) if status == "SUCCESS" => {
            Ok(Begun::Done { processed_at })
        }
        Ok(Stored { status, .. }) if status == "PROCESSING" => Ok(Begun::InProgress),
        _ => Err(Error::new(Kind::Corrupt, "its key in Redis holds something else")
            .with_remedy("look at the key; delete it when the effect has not happened")),
    }
}

fn json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value)
        .map_err(|error| Error::new(Kind::Other, "a value for Redis could not be written").with_source(error))
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_two_states_are_read() {
        let done = read(r#"{"processed_at":"2026-11-16T03:00:00Z","status":"SUCCESS"}"#).unwrap();
        let Begun::Done { processed_at } = done else { panic!("{done:?}") };
        assert_eq!(processed_at.to_rfc3339(), "2026-11-16T03:00:00+00:00");
        assert!(matches!(read(r#"{"status":"PROCESSING","claim":"x"}"#), Ok(Begun::InProgress)));
        for wrong in ["", "1", "{}", r#"{"status":"SUCCESS"}"#, r#"{"status":"FAILED","processed_at":null}"#] {
            assert_eq!(read(wrong).unwrap_err().kind(), Kind::Corrupt, "{wrong}");
        }
    }
}
