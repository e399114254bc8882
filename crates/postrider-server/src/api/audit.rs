//! `/api/v1/audit`: who did what.

use std::sync::Arc;

use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};

use super::page::{Page, Query};
use super::{Problem, Shared};

/// Lines, newest first.
pub async fn list(State(shared): State<Arc<Shared>>, RawQuery(query): RawQuery) -> Result<Response, Problem> {
    let query = Query::read(query.as_deref(), &["before", "limit"], "use before (a number) and limit (1 to 1000)")?;
    let (before, limit) = (query.before()?, query.limit()?);
    let lines = shared.ask(move |store| async move { store.audit_list(before, limit).await }).await?;
    Ok(axum::Json(Page::new(lines, limit, |line| line.id)).into_response())
}
