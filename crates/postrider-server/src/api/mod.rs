//! HTTP: health, metrics, events for services that would rather call than insert, and everything that the console shows
//! and does.
//!
//! `table` has all endpoints with what each needs; `access` decides who has it. A JSON body must be declared as JSON: a
//! page in somebody's browser cannot send that across origins without asking first.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use axum::http::StatusCode;
use metrics_exporter_prometheus::PrometheusHandle;
use postrider::broker::Broker;
use postrider::store::Store;
use postrider::{Error, Kind};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::access::Access;
use crate::config::Config;
use crate::task;

mod alerts;
mod audit;
mod board;
mod body;
mod cached;
mod cloudevent;
mod dead;
mod events;
mod health;
mod integrity;
mod openapi;
mod overview;
mod page;
mod problem;
mod serve;
mod session;
mod stream;
mod table;

pub use dead::Replays;
pub use health::Health;
pub use problem::Problem;
pub use serve::{Limits, serve};
pub use table::router;

use board::Board;
use health::Doctor;
use integrity::Checking;
use stream::Streams;

/// The largest request: a full batch of small events, or one event with the largest payload and room for escapes.
const BODY_BYTES_MAX: usize = 32 * 1024 * 1024;

/// Calls of the store at once on behalf of requests: fewer than it has connections, so that relay and consumers have some.
const CALLS_MAX: usize = 16;
/// A request that has waited this long for its turn is told to come again.
const CALL_WAIT: Duration = Duration::from_secs(5);

/// What the endpoints share.
pub struct Shared {
    /// The configuration.
    pub config: Arc<Config>,
    /// Who may do what.
    pub access: Arc<Access>,
    /// Readiness.
    pub health: Arc<Health>,
    /// The store, once it could be opened.
    pub store: OnceLock<Arc<dyn Store>>,
    /// The brokers by destination, once they are known.
    pub brokers: OnceLock<Vec<(String, Arc<dyn Broker>)>>,
    /// The recorder behind `/metrics`.
    pub metrics: PrometheusHandle,
    /// Replays under way, and some that have ended.
    pub replays: Replays,
    /// Ends streams.
    pub stop: CancellationToken,
    /// Room for calls of the store.
    calls: Arc<Semaphore>,
    /// What goes on after its request was answered.
    tasks: TaskTracker,
    board: Board,
    checking: Checking,
    doctor: Doctor,
    streams: Streams,
}

impl Shared {
    /// Before anything was opened. `stop` ends streams and replays.
    pub fn new(
        config: Arc<Config>,
        health: Arc<Health>,
        metrics: PrometheusHandle,
        stop: &CancellationToken,
    ) -> postrider::Result<Self> {
        Ok(Self {
            access: Arc::new(Access::new(&config)?),
            board: Board::new(config.clone()),
            config,
            health,
            store: OnceLock::new(),
            brokers: OnceLock::new(),
            metrics,
            replays: Replays::new(stop),
            stop: stop.clone(),
            calls: Arc::new(Semaphore::new(CALLS_MAX)),
            tasks: TaskTracker::new(),
            checking: Checking::default(),
            doctor: Doctor::default(),
            streams: Streams::default(),
        })
    }

    /// Waits until all that goes on has ended, after the stop.
    pub async fn ended(&self) {
        self.tasks.close();
        self.tasks.wait().await;
        self.replays.ended().await;
    }

    fn store(&self) -> Result<Arc<dyn Store>, Problem> {
        let unreached = || Problem::from(&Error::new(Kind::Unavailable, "the store has not been reached yet"));
        self.store.get().cloned().ok_or_else(unreached)
    }

    /// Asks the store, when it is this one's turn. A client that hangs up drops this future; the call runs to its end all
    /// the same, and takes its room until then.
    async fn ask<T, F>(&self, call: impl FnOnce(Arc<dyn Store>) -> F) -> Result<T, Problem>
    where
        T: Send + 'static,
        F: Future<Output = postrider::Result<T>> + Send + 'static,
    {
        let store = self.store()?;
        let room = turn(&self.calls, CALL_WAIT).await?;
        let call = call(store);
        let called = task::detached(async move {
            let result = call.await;
            drop(room);
            result
        });
        called.await.map_err(|error| self.not_done(&error))
    }

    /// What a client hears of an error of the store, and the log.
    fn not_done(&self, error: &Error) -> Problem {
        tracing::warn!(error_type = error.kind().as_str(), %error, causes = ?error.causes(), remedy = error.remedy(),
            "a request over HTTP was not done");
        Problem::of_store(error)
    }
}

/// Waits for room.
async fn turn(room: &Arc<Semaphore>, wait: Duration) -> Result<OwnedSemaphorePermit, Problem> {
    let busy = || {
        let detail = format!("{CALLS_MAX} requests wait for the store already");
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "busy", "The store is busy", detail).remedy("try again later")
    };
    let room = tokio::time::timeout(wait, room.clone().acquire_owned()).await;
    room.ok().and_then(Result::ok).ok_or_else(busy)
}

/// The part of a path that names something. One that is no text names nothing.
type Named = Result<Path<String>, PathRejection>;

fn name(named: Named) -> String {
    named.map(|Path(name)| name).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn whoever_waits_too_long_for_the_store_is_told_to_come_again() {
        let (room, wait) = (Arc::new(Semaphore::new(1)), Duration::from_millis(20));
        let first = turn(&room, wait).await.unwrap();
        let refused = axum::response::IntoResponse::into_response(turn(&room, wait).await.unwrap_err());
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(refused.headers()["retry-after"], "5");
        drop(first);
        assert!(turn(&room, wait).await.is_ok());
    }
}
