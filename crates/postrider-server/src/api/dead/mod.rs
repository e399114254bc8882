//! `/api/v1/dead-letters`: the desk over HTTP, the same as `postrider dead`.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, RawQuery, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use postrider::dead::{DeadDetail, DeadFilter, DeadView};
use serde::Serialize;
use serde_json::json;

use super::events::rejected;
use super::{Problem, Shared};

mod body;
mod query;
mod replays;

pub use replays::Replays;

use body::Body;

/// More characters than this of a name that a client gives itself are not kept.
const ACTOR_CHARS_MAX: usize = 64;
/// A reason is a sentence.
const REASON_BYTES_MAX: usize = 1000;

/// The routes.
pub fn routes() -> Router<Arc<Shared>> {
    Router::new()
        .route("/api/v1/dead-letters", get(list))
        .route("/api/v1/dead-letters/stats", get(stats))
        .route("/api/v1/dead-letters/discards", post(discard))
        .route("/api/v1/dead-letters/replays", post(replays::start))
        .route("/api/v1/dead-letters/replays/{id}", get(replays::show).delete(replays::cancel))
        .route("/api/v1/dead-letters/{id}", get(show))
        .route("/api/v1/dead-letters/{id}/payload", get(payload))
}

/// A page of a list.
#[derive(Serialize)]
struct Page {
    items: Vec<DeadView>,
    /// What `after` must be for the next page; none when this is the last.
    next: Option<i64>,
}

async fn page(shared: &Shared, filter: DeadFilter, after: i64, limit: usize) -> Result<Page, Problem> {
    let items = shared.ask(move |store| async move { store.dead_list(&filter, after, limit).await }).await?;
    let next = items.last().filter(|_| items.len() == limit).map(|last| last.id);
    Ok(Page { items, next })
}

async fn list(State(shared): State<Arc<Shared>>, RawQuery(query): RawQuery) -> Result<Response, Problem> {
    let query::List { filter, after, limit } = query::List::read(query.as_deref().unwrap_or_default())?;
    Ok(axum::Json(page(&shared, filter, after, limit).await?).into_response())
}

async fn stats(State(shared): State<Arc<Shared>>) -> Result<Response, Problem> {
    let counts = shared.ask(|store| async move { store.dead_stats().await }).await?;
    Ok(axum::Json(json!({ "items": counts })).into_response())
}

/// Everything about one, but for its payload.
async fn show(State(shared): State<Arc<Shared>>, id: Named) -> Result<Response, Problem> {
    #[derive(Serialize)]
    struct Shown {
        #[serde(flatten)]
        detail: DeadDetail,
        payload_bytes: usize,
    }
    let id = number(id)?;
    let detail = shared.ask(move |store| async move { store.dead_show(id).await }).await?;
    let detail = detail.ok_or_else(|| missing(id))?;
    let payload_bytes = detail.payload.len();
    Ok(axum::Json(Shown { detail, payload_bytes }).into_response())
}

/// The payload, as a file that no browser renders. Who looked is written down.
async fn payload(State(shared): State<Arc<Shared>>, id: Named, headers: HeaderMap) -> Result<Response, Problem> {
    let (id, actor) = (number(id)?, actor(&headers));
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

async fn discard(
    State(shared): State<Arc<Shared>>,
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
    let (filter, actor) = (body.filter()?, actor(&headers));
    require_all(&shared, &filter).await?;
    let discarded = shared.ask(move |store| async move { store.dead_discard(&filter, &reason, &actor).await }).await?;
    Ok(axum::Json(json!({ "discarded": discarded })).into_response())
}

/// Who asks, for the audit table. Nobody has checked the name.
fn actor(headers: &HeaderMap) -> String {
    let said = headers.get("x-postrider-actor").map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    let kept = said.unwrap_or_default().chars().filter(|c| !c.is_control()).take(ACTOR_CHARS_MAX).collect::<String>();
    match kept.trim() {
        "" => "api".to_owned(),
        name => format!("api:{name}"),
    }
}

/// The part of a path that names something. One that is no text names nothing.
type Named = Result<Path<String>, PathRejection>;

fn name(named: Named) -> String {
    named.map(|Path(name)| name).unwrap_or_default()
}

fn number(id: Named) -> Result<i64, Problem> {
    let id = name(id);
    id.parse().map_err(|_| missing(id))
}

fn missing(id: impl std::fmt::Display) -> Problem {
    Problem::new(StatusCode::NOT_FOUND, "not_found", "Not found", format!("there is no dead letter {id}"))
        .remedy("GET /api/v1/dead-letters shows which there are")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_in_the_audit_table_is_short_and_clean() {
        let said = |name: &'static [u8]| {
            let value = axum::http::HeaderValue::from_bytes(name).unwrap();
            actor(&HeaderMap::from_iter([("x-postrider-actor".parse().unwrap(), value)]))
        };
        assert_eq!(actor(&HeaderMap::new()), "api");
        assert_eq!(said(b"  "), "api");
        assert_eq!(said(b" alice\t"), "api:alice");
        assert_eq!(said(&[b'x'; 1000]).len(), "api:".len() + ACTOR_CHARS_MAX);
        assert!(said(&[0xff, b'a']).ends_with('a'));
    }
}
