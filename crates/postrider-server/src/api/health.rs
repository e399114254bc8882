//! `/healthz`, `/readyz`, `/metrics` and `/api/v1/health`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::RawQuery;
use axum::extract::State as Extract;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use postrider::Error;
use postrider::doctor::Finding;
use serde::Serialize;

use super::cached::Cached;
use super::page::Query;
use super::{Problem, Shared};
use crate::config::redact;

/// Why this instance is not ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Trouble {
    /// What kind it is: `starting`, `ended`, or that of an error.
    pub kind: &'static str,
    /// What is the matter, for those who may look.
    pub detail: String,
    /// What to do.
    pub remedy: String,
}

/// How this instance stands.
#[derive(Debug, Serialize)]
pub struct State {
    is_ready: bool,
    troubles: Vec<Part>,
}

/// A part that is in trouble.
#[derive(Debug, Serialize)]
struct Part {
    part: &'static str,
    #[serde(flatten)]
    trouble: Trouble,
}

/// What keeps this instance from being ready, by part (`store`, `relay`). Empty means ready.
#[derive(Debug, Default)]
pub struct Health {
    troubles: Mutex<BTreeMap<&'static str, Trouble>>,
}

impl Health {
    /// Notes that a part is in trouble; `true` when it was not before.
    pub fn trouble(&self, part: &'static str, kind: &'static str, detail: &str, remedy: impl Into<String>) -> bool {
        let trouble = Trouble { kind, detail: redact(detail), remedy: remedy.into() };
        self.lock().insert(part, trouble).is_none()
    }

    /// Notes that a part is in trouble because of an error; `true` when it was not before.
    pub fn failed(&self, part: &'static str, error: &Error) -> bool {
        self.trouble(part, error.kind().as_str(), &error.to_string(), error.remedy())
    }

    /// Notes that a part is well; `true` when it was not before.
    pub fn clear(&self, part: &'static str) -> bool {
        self.lock().remove(part).is_some()
    }

    /// How this instance stands.
    pub fn state(&self) -> State {
        let troubles: Vec<Part> =
            self.lock().iter().map(|(part, trouble)| Part { part, trouble: trouble.clone() }).collect();
        State { is_ready: troubles.is_empty(), troubles }
    }

    /// Why this instance is not ready, for everybody: neither hosts nor users nor names of databases.
    fn why_not(&self) -> Option<Problem> {
        #[derive(Serialize)]
        struct Reason {
            kind: &'static str,
        }
        let troubles = self.lock();
        if troubles.is_empty() {
            return None;
        }
        let kinds = troubles.iter().map(|(part, trouble)| (*part, trouble.kind));
        let detail: Vec<String> = kinds.clone().map(|(part, kind)| format!("{part}: {kind}")).collect();
        let reasons: BTreeMap<&str, Reason> = kinds.map(|(part, kind)| (part, Reason { kind })).collect();
        let problem = Problem::new(StatusCode::SERVICE_UNAVAILABLE, "not_ready", "Not ready", detail.join("; "));
        Some(problem.remedy("GET /api/v1/health and the log say more").with("reasons", &reasons))
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
pub async fn readyz(Extract(shared): Extract<Arc<Shared>>) -> Response {
    match shared.health.why_not() {
        Some(problem) => problem.into_response(),
        None => "ready\n".into_response(),
    }
}

/// Prometheus' text format.
pub async fn metrics(Extract(shared): Extract<Arc<Shared>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], shared.metrics.render())
}

/// What store and brokers say of themselves, looked at when somebody asks, and at most once a minute.
pub struct Doctor {
    examined: Cached<Examined>,
    last: Arc<Mutex<Option<Arc<Examined>>>>,
}

impl Default for Doctor {
    fn default() -> Self {
        Self { examined: Cached::new(EXAMINED_KEPT), last: Arc::default() }
    }
}

/// What was found, and when.
struct Examined {
    at: DateTime<Utc>,
    schema: Option<i32>,
    findings: Vec<Finding>,
}

/// Servers are asked for their settings no more often than this.
const EXAMINED_KEPT: Duration = Duration::from_secs(60);
/// A server that is away takes its time to be; what was found before is shown meanwhile.
const EXAMINED_WAIT: Duration = Duration::from_millis(100);

/// Everything about this instance's health: what keeps it from being ready, and what `doctor` would say of its servers.
pub async fn show(Extract(shared): Extract<Arc<Shared>>, RawQuery(query): RawQuery) -> Result<Response, Problem> {
    #[derive(Serialize)]
    struct BrokerLine {
        destination: String,
        url: String,
    }
    #[derive(Serialize)]
    struct View<'a> {
        #[serde(flatten)]
        state: State,
        version: &'static str,
        store: String,
        schema: Option<i32>,
        brokers: Vec<BrokerLine>,
        checked_at: Option<DateTime<Utc>>,
        findings: &'a [Finding],
    }
    Query::read(query.as_deref(), &[], "leave the query out")?;
    let examined = examine(&shared).await;
    let brokers = shared.config.destinations().into_iter();
    let view = View {
        state: shared.health.state(),
        version: env!("CARGO_PKG_VERSION"),
        store: shared.config.store.to_string(),
        schema: examined.as_ref().and_then(|examined| examined.schema),
        brokers: brokers
            .map(|(route, broker)| BrokerLine { destination: route.destination, url: broker.url.to_string() })
            .collect(),
        checked_at: examined.as_ref().map(|examined| examined.at),
        findings: examined.as_ref().map_or(&[], |examined| &examined.findings),
    };
    Ok(axum::Json(view).into_response())
}

/// What was found, as new as can be had without waiting for long.
async fn examine(shared: &Arc<Shared>) -> Option<Arc<Examined>> {
    let (asking, last) = (shared.clone(), shared.doctor.last.clone());
    let keep = |last: &Mutex<_>, examined: &Arc<Examined>| {
        *last.lock().unwrap_or_else(PoisonError::into_inner) = Some(examined.clone());
    };
    let examined = shared.doctor.examined.get(move || async move { Ok(ask_servers(&asking).await) });
    match tokio::time::timeout(EXAMINED_WAIT, examined).await {
        Ok(Ok(examined)) => {
            keep(&last, &examined);
            Some(examined)
        }
        Ok(Err(_)) | Err(_) => last.lock().unwrap_or_else(PoisonError::into_inner).clone(),
    }
}

async fn ask_servers(shared: &Shared) -> Examined {
    let mut findings = shared.config.warnings();
    let mut schema = None;
    if let Some(store) = shared.store.get() {
        schema = store.schema().await.ok().map(|schema| schema.found);
        match store.inspect().await {
            Ok(found) => findings.extend(found),
            Err(error) => findings.push(Finding::of("store", &error)),
        }
    }
    for (destination, broker) in shared.brokers.get().into_iter().flatten() {
        match broker.inspect().await {
            Ok(found) => findings.extend(found),
            Err(error) => findings.push(Finding::of(format!("broker.{destination}"), &error)),
        }
    }
    for finding in &mut findings {
        finding.message = redact(&finding.message);
    }
    Examined { at: Utc::now(), schema, findings }
}

#[cfg(test)]
mod tests {
    use postrider::Kind;

    use super::*;

    #[test]
    fn everybody_hears_the_kind_and_nobody_a_password() {
        let health = Health::default();
        assert!(health.why_not().is_none());
        let error = Error::new(Kind::Unavailable, "postgres://shop:s3cret@db.internal/shop does not answer");
        assert!(health.failed("store", &error));
        assert!(!health.failed("store", &error), "once");
        let said = health.why_not().unwrap().to_json();
        assert!(said.contains(r#""reasons":{"store":{"kind":"unavailable"}}"#), "{said}");
        assert!(!said.contains("db.internal") && !said.contains("shop"), "{said}");
        let state = serde_json::to_string(&health.state()).unwrap();
        assert!(state.contains("db.internal") && !state.contains("s3cret"), "{state}");
    }
}
