//! Adds batches to the streams, and stops when Redis is full or would forget.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{RedisResult, Value};

use super::error::of_streams;
use super::message;
use super::settings::RedisStreamSettings;
use crate::broker::topic;
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::redis_server::{Info, Link, is_demoted};

/// How often Redis is asked whether it would forget events.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// After Redis was full, this long nothing is tried.
const FULL_WAIT: Duration = Duration::from_secs(2);

pub(super) struct Publisher {
    link: Arc<Link>,
    settings: Arc<RedisStreamSettings>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// When Redis was last found safe.
    safe_at: Option<Instant>,
    /// Why it took nothing, and when.
    full: Option<(Instant, String)>,
}

impl Publisher {
    pub fn new(link: Arc<Link>, settings: Arc<RedisStreamSettings>) -> Self {
        Self { link, settings, state: Mutex::default() }
    }

    pub fn blocked(&self) -> Option<String> {
        let state = self.state();
        let (at, reason) = state.full.as_ref()?;
        (at.elapsed() < FULL_WAIT).then(|| reason.clone())
    }

    pub async fn publish(&self, batch: &[Arc<Event>]) -> Result<Vec<Result<()>>> {
        self.look().await?;
        let mut pipe = redis::pipe();
        pipe.ignore_errors();
        for event in batch {
            let command = pipe.cmd("XADD");
            command.arg(self.settings.stream(topic::shard(event))).arg("*");
            message::fields(event, |name, value| {
                command.arg(name).arg(value);
            });
        }
        let adding = async |connection: &mut MultiplexedConnection| {
            let added: Vec<RedisResult<Value>> = pipe.query_async(connection).await?;
            // The link must hear of it, so that it connects anew; what was added before is known by its id.
            let heard = added.into_iter().map(|added| match added {
                Err(error) if is_demoted(&error) => Err(error),
                added => Ok(added),
            });
            heard.collect()
        };
        let added = self.link.call(adding).await;
        let added: Vec<RedisResult<Value>> = added.map_err(|error| self.heard(error))?;
        let results = added.into_iter().map(|added| match added {
            Ok(_) => Ok(()),
            Err(error) => Err(self.heard(self.link.failed(error))),
        });
        let results: Vec<_> = results.collect();
        match results.len() == batch.len() {
            true => Ok(results),
            false => Err(super::error::unexpected(&self.link.shown)),
        }
    }

    /// Refuses to publish where the whole stream could be evicted, or is gone after a restart. Nobody else would notice.
    async fn look(&self) -> Result<()> {
        if self.state().safe_at.is_some_and(|at| at.elapsed() < LOOK_EVERY) {
            return Ok(());
        }
        // A user who may not ask has been told by `inspect`.
        if let Some(info) = Info::read(&self.link).await? {
            if info.eviction().starts_with("allkeys-") && info.has_memory_limit() {
                let found = format!("Redis at {} drops events when its memory is full", self.link.shown);
                return Err(Error::new(Kind::Mismatch, format!("{found} (maxmemory-policy {})", info.eviction()))
                    .with_remedy(
                        "set maxmemory-policy noeviction in redis.conf, or use another Redis than the cache",
                    ));
            }
            if info.value("aof_enabled") == Some("0") {
                let found = format!("Redis at {} loses events when it restarts (appendonly is off)", self.link.shown);
                return Err(Error::new(Kind::Mismatch, found)
                    .with_remedy("set appendonly yes and appendfsync always in redis.conf"));
            }
        }
        self.state().safe_at = Some(Instant::now());
        Ok(())
    }

    /// Remembers that Redis is full: that is nothing which the event could help.
    fn heard(&self, error: Error) -> Error {
        let error = of_streams(error);
        let is_full = error.kind() == Kind::DiskFull
            || (error.kind() == Kind::Unavailable && error.causes().iter().any(|cause| cause.contains("OOM")));
        if is_full {
            self.state().full = Some((Instant::now(), error.message().to_owned()));
        }
        error
    }

    /// A panic elsewhere changes nothing about it.
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
