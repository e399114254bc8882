//! HTTP: health, metrics, events for services that would rather call than insert, and the desk for dead letters.
//!
//! There is no authentication yet, so it listens on loopback by default. A JSON body must be declared as JSON: a page
//! in somebody's browser cannot send that across origins without asking first.

use std::sync::{Arc, OnceLock};

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};
use metrics_exporter_prometheus::PrometheusHandle;
use postrider::store::Store;
use postrider::{Error, Kind};

mod body;
mod cloudevent;
mod dead;
mod events;
mod health;
mod problem;

pub use dead::Replays;
pub use health::Health;
pub use problem::Problem;

/// The largest request: a full batch of small events, or one event with the largest payload and room for escapes.
const BODY_BYTES_MAX: usize = 32 * 1024 * 1024;

/// What the routes share.
pub struct Shared {
    /// Readiness.
    pub health: Arc<Health>,
    /// The store, once it could be opened.
    pub store: OnceLock<Arc<dyn Store>>,
    /// The recorder behind `/metrics`.
    pub metrics: PrometheusHandle,
    /// What the destination accepts.
    pub payload_bytes_max: usize,
    /// Replays under way, and some that have ended.
    pub replays: Replays,
}

impl Shared {
    fn store(&self) -> Result<Arc<dyn Store>, Problem> {
        let unreached = || Problem::from(&Error::new(Kind::Unavailable, "the store has not been reached yet"));
        self.store.get().cloned().ok_or_else(unreached)
    }

    /// Asks the store. A client that hangs up drops this future; the call runs to its end all the same.
    async fn ask<T, F>(&self, call: impl FnOnce(Arc<dyn Store>) -> F) -> Result<T, Problem>
    where
        T: Send + 'static,
        F: Future<Output = postrider::Result<T>> + Send + 'static,
    {
        let result = match tokio::spawn(call(self.store()?)).await {
            Ok(result) => result,
            Err(error) => Err(Error::new(Kind::Other, "the call ended unexpectedly").with_source(error)),
        };
        result.map_err(|error| {
            tracing::warn!(error_type = error.kind().as_str(), %error, causes = ?error.causes(),
                remedy = error.remedy(), "a request over HTTP was not done");
            Problem::of_store(&error)
        })
    }
}

/// All routes.
pub fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/healthz", get(health::healthz))
        .route("/readyz", get(health::readyz))
        .route("/metrics", get(health::metrics))
        .route("/api/v1/events", post(events::post))
        .merge(dead::routes())
        .fallback(problem::not_found)
        .method_not_allowed_fallback(problem::method_not_allowed)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(shared)
}
