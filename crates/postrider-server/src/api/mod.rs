//! HTTP: health, metrics, and events for services that would rather call than insert.
//!
//! There is no authentication yet, so it listens on loopback by default. A JSON body must be declared as JSON: a page
//! in somebody's browser cannot send that across origins without asking first.

use std::sync::{Arc, OnceLock};

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};
use metrics_exporter_prometheus::PrometheusHandle;
use postrider::store::Store;

mod body;
mod cloudevent;
mod events;
mod health;
mod problem;

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
}

/// All routes.
pub fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/healthz", get(health::healthz))
        .route("/readyz", get(health::readyz))
        .route("/metrics", get(health::metrics))
        .route("/api/v1/events", post(events::post))
        .fallback(problem::not_found)
        .method_not_allowed_fallback(problem::method_not_allowed)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(shared)
}
