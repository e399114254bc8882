//! `/api/v1/dead-letters`: the desk over HTTP, the same as `postrider dead`.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use postrider::dead::{DeadFilter, DeadView};
use serde_json::json;

use super::events::rejected;
use super::page::Page;
use super::{Named, Problem, Shared, name};
use crate::access::Caller;

mod body;
mod query;
pub(super) mod replays;

pub use replays::{ReplayView, Replays};

use body::Body;

/// A reason is a sentence.
const REASON_BYTES_MAX: usize = 1000;

async fn page(shared: &Shared, filter: DeadFilter, after: i64, limit: usize) -> Result<Page<DeadView>, Problem> {
    let items = shared.ask(move |store| async move { store.dead_list(&filter, after, limit).await }).await?;
    Ok(Page::new(items, limit, |letter| letter.id))
}

pub async fn list(State(shared): State<Arc<Shared>>, RawQuery(query): RawQuery) -> Result<Response, Problem> {
    let query::List { filter, after, limit } = query::List::read(query.as_deref())?;
    Ok(axum::Json(page(&shared, filter, after, limit).await?).into_response())
}

pub async fn stats(State(shared): State<Arc<Shared>>) -> Result<Response, Problem> {
    let counts = shared.board.dead(&shared.store()?).await.map_err(|error| shared.not_done(&error))?;
    Ok(axum::Json(json!({ "items": *counts })).into_response())
}

/// Everything about one, but for its payload.
pub async fn show(State(shared): State<Arc<Shared>>, id: Named) -> Result<Response, Problem> {
    let id = number(id)?;
    let detail = shared.ask(move |store| async move { store.dead_show(id).await }).await?;
    Ok(axum::Json(detail.ok_or_else(|| missing(id))?).into_response())
}

/// The payload, as a file that no browser renders. Who looked is written down.
pub async fn payload(State(shared): State<Arc<Shared>>, caller: Caller, id: Named) -> Result<Response, Problem> {
    let (id, actor) = (number(id)?, caller.actor().to_owned());
    let payload = shared.ask(move |store| async move { store.dead_payload(id, &actor).await }).await?;
    let payload = payload.ok_or_else(|| missing(id))?;
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_DISPOSITION, format!("attachment; filename=\"dead-letter-{id}\"")),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (header::CACHE_CONTROL, "no-store".to_owned()),
    ];
    Ok((headers, payload).into_response())
}

pub async fn discard(
    State(shared): State<Arc<Shared>>,
    caller: Caller,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Problem> {
    let mut body = Body::read(&headers, &body.map_err(rejected)?)?;
    let reason = body.take::<String>("reason")?.unwrap_or_default().trim().to_owned();
    if reason.is_empty() {
        return Err(Problem::bad_request("there is no reason")
            .pointer("/reason")
            .remedy("say why, for those who ask later"));
    }
    if reason.len() > REASON_BYTES_MAX {
        let detail = format!("the reason has {} bytes, the limit is {REASON_BYTES_MAX}", reason.len());
        return Err(Problem::bad_request(detail).pointer("/reason").remedy("say it in a sentence"));
    }
    let (filter, actor) = (body.filter()?, caller.actor().to_owned());
    require_all(&shared, &filter).await?;
    let discarded = shared.ask(move |store| async move { store.dead_discard(&filter, &reason, &actor).await }).await?;
    shared.board.dead_changed().await;
    Ok(axum::Json(json!({ "discarded": discarded })).into_response())
}

fn number(id: Named) -> Result<i64, Problem> {
    let id = name(id);
    id.parse().map_err(|_| missing(id))
}

fn missing(id: impl std::fmt::Display) -> Problem {
    Problem::missing(format_args!("dead letter {id}")).remedy("GET /api/v1/dead-letters shows which there are")
}

/// Whoever names numbers means all of them.
async fn require_all(shared: &Shared, filter: &DeadFilter) -> Result<(), Problem> {
    let Some(ids) = filter.ids.clone() else { return Ok(()) };
    let named = DeadFilter { ids: Some(ids.clone()), ..DeadFilter::default() };
    let found = page(shared, named, 0, ids.len()).await?.items;
    match ids.iter().position(|id| !found.iter().any(|letter| letter.id == *id)) {
        Some(index) => Err(missing(ids[index]).pointer(format!("/ids/{index}"))),
        None => Ok(()),
    }
}
