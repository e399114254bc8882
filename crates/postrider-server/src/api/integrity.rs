//! `/api/v1/integrity`: reports, and a check now.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use postrider::store::Store;
use serde_json::json;

use super::events::rejected;
use super::page::{Page, Query};
use super::{Named, Problem, Shared, name};
use crate::access::Caller;
use crate::integrity::Check;

/// The check that this process runs because somebody asked; one at a time.
#[derive(Default)]
pub struct Checking {
    is_running: Arc<AtomicBool>,
}

/// Ends the claim, however the check ends.
struct Claim(Arc<AtomicBool>);

impl Drop for Claim {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl Checking {
    fn claim(&self) -> Option<Claim> {
        let is_free = self.is_running.compare_exchange(false, true, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        is_free.then(|| Claim(self.is_running.clone()))
    }
}

/// Reports, newest first.
pub async fn list(State(shared): State<Arc<Shared>>, RawQuery(query): RawQuery) -> Result<Response, Problem> {
    let query = Query::read(query.as_deref(), &["before", "limit"], "use before (a number) and limit (1 to 1000)")?;
    let (before, limit) = (query.before()?, query.limit()?);
    let reports = shared.ask(move |store| async move { store.reports(before, limit).await }).await?;
    Ok(axum::Json(Page::new(reports, limit, |report| report.id)).into_response())
}

/// One of them, with its findings.
pub async fn show(State(shared): State<Arc<Shared>>, id: Named) -> Result<Response, Problem> {
    let said = name(id);
    let missing =
        || Problem::missing(format_args!("report {said}")).remedy("GET /api/v1/integrity shows which there are");
    let id: i64 = said.parse().map_err(|_| missing())?;
    let report = shared.ask(move |store| async move { store.report(id).await }).await?;
    Ok(axum::Json(report.ok_or_else(missing)?).into_response())
}

/// Begins a check and answers with the number of its report. The check runs to its end when the client hangs up.
pub async fn check(
    State(shared): State<Arc<Shared>>,
    caller: Caller,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Problem> {
    let body = body.map_err(rejected)?;
    if !matches!(body.trim_ascii(), b"" | b"{}") {
        return Err(Problem::bad_request("a check takes no settings").remedy("send an empty body"));
    }
    let Some(claim) = shared.checking.claim() else {
        return Err(Problem::new(StatusCode::CONFLICT, "conflict", "A check is running", "a check runs already")
            .remedy("wait for its report: GET /api/v1/integrity"));
    };
    let (check, tasks, actor) = (Check::new(&shared.config), shared.tasks.clone(), caller.actor().to_owned());
    let begin = move |store: Arc<dyn Store>| async move {
        // Only a scheduled one may have been begun before.
        let id = check.begin(store.as_ref(), &actor, None).await?.unwrap_or_default();
        store.audit(&actor, "check", &json!({ "report": id })).await?;
        let finish = async move {
            finish(store.as_ref(), id, &check).await;
            drop(claim);
        };
        tasks.spawn(finish.boxed());
        Ok(id)
    };
    let id = shared.ask(begin).await?;
    let location = [(header::LOCATION, format!("/api/v1/integrity/{id}"))];
    Ok((StatusCode::ACCEPTED, location, axum::Json(json!({ "id": id }))).into_response())
}

async fn finish(store: &dyn Store, id: i64, check: &Check) {
    if let Err(error) = check.finish(store, id).await {
        tracing::warn!(error_type = error.kind().as_str(), %error, causes = ?error.causes(), remedy = error.remedy(),
            report = id, "a check did not come to its end");
    }
}
