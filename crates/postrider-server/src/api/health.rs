//! `/healthz`, `/readyz` and `/metrics`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use super::{Problem, Shared};

/// Why this instance is not ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Trouble {
    /// What is the matter.
    pub detail: String,
    /// What to do.
    pub remedy: String,
}

/// What keeps this instance from being ready, by part (`store`, `relay`). Empty means ready.
#[derive(Debug, Default)]
pub struct Health {
    troubles: Mutex<BTreeMap<&'static str, Trouble>>,
}

impl Health {
    /// Notes that a part is in trouble; `true` when it was not before.
    pub fn trouble(&self, part: &'static str, detail: impl Into<String>, remedy: impl Into<String>) -> bool {
        let trouble = Trouble { detail: detail.into(), remedy: remedy.into() };
        self.lock().insert(part, trouble).is_none()
    }

    /// Notes that a part is well; `true` when it was not before.
    pub fn clear(&self, part: &'static str) -> bool {
        self.lock().remove(part).is_some()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, Trouble>> {
        // Nothing panics while it is held, so a poisoned lock still guards a whole value.
        self.troubles.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The process lives.
pub async fn healthz() -> &'static str {
    "ok\n"
}

/// The store is reachable, has the right schema, and the relay runs (where it is enabled).
pub async fn readyz(State(shared): State<Arc<Shared>>) -> Response {
    let troubles = shared.health.lock().clone();
    if troubles.is_empty() {
        return "ready\n".into_response();
    }
    let detail: Vec<String> = troubles.iter().map(|(part, trouble)| format!("{part}: {}", trouble.detail)).collect();
    let remedy: Vec<&str> = troubles.values().map(|trouble| trouble.remedy.as_str()).collect();
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "not_ready", "Not ready", detail.join("; "))
        .remedy(remedy.join("; "))
        .with("reasons", &troubles)
        .into_response()
}

/// Prometheus' text format.
pub async fn metrics(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], shared.metrics.render())
}
