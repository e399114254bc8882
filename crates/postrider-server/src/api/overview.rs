//! What a person wants to see first, and the lists behind it.

use std::sync::Arc;

use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use postrider::alert::Alert;
use postrider::pulse::figures::{Series, Summary, Target, Window};
use postrider::store::Store;
use serde::Serialize;
use serde_json::json;

use super::board::{ConsumerLine, InstanceView, OutboxView};
use super::dead::ReplayView;
use super::health::State as HealthState;
use super::page::{Page, Query};
use super::{Named, Problem, Shared, name};
use crate::status::{self, Outbox};

/// The overview, but for what changes slowly.
#[derive(Serialize)]
pub(super) struct Fast<'a> {
    window: Window,
    summary: &'a Summary,
    targets: &'a [Target],
    outboxes: Vec<OutboxView>,
    consumers: Vec<ConsumerLine>,
    instances: &'a [InstanceView],
    alerts: &'a [Alert],
    replays: Vec<ReplayView>,
    health: HealthState,
}

#[derive(Serialize)]
struct Overview<'a> {
    now: DateTime<Utc>,
    #[serde(flatten)]
    fast: Fast<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    series: Option<&'a Series>,
}

/// `?window=hour` or `day`.
pub async fn show(State(shared): State<Arc<Shared>>, RawQuery(query): RawQuery) -> Result<Response, Problem> {
    let query = Query::read(query.as_deref(), &["window"], "use window=hour or window=day")?;
    let window = query.parsed("window", "hour or day")?.unwrap_or(Window::Hour);
    if window == Window::Month {
        return Err(query.wrong("window", "the overview has no month; errors have".to_owned()));
    }
    Ok(json_of(read(&shared, window, true).await?))
}

/// The overview as JSON; with its charts, if they are wanted.
pub(super) async fn read(shared: &Shared, window: Window, is_whole: bool) -> Result<String, Problem> {
    let store = shared.store()?;
    compose(shared, &store, window, is_whole).await.map_err(|error| shared.not_done(&error))
}

async fn compose(shared: &Shared, store: &Arc<dyn Store>, window: Window, is_whole: bool) -> postrider::Result<String> {
    let board = &shared.board;
    let (measured, outboxes, consumers, crew, alerts) = tokio::join!(
        board.measured(store, window),
        board.outboxes(store),
        board.consumers(store),
        board.crew(store),
        board.alerts(store),
    );
    let (measured, crew, alerts) = (measured?, crew?, alerts?);
    let targets = board.targets(store, &measured).await?;
    let fast = Fast {
        window,
        summary: &measured.summary,
        targets: &targets,
        outboxes: outboxes?,
        consumers: consumers?,
        instances: &crew.instances,
        alerts: &alerts,
        replays: shared.replays.running(),
        health: shared.health.state(),
    };
    let overview = Overview { now: measured.now, fast, series: is_whole.then_some(&measured.series) };
    // Texts and numbers alone: it cannot fail to be written.
    Ok(serde_json::to_string(&overview).unwrap_or_default())
}

/// JSON that is written already.
pub(super) fn json_of(text: String) -> Response {
    ([(axum::http::header::CONTENT_TYPE, "application/json")], text).into_response()
}

/// The outboxes.
pub async fn outboxes(State(shared): State<Arc<Shared>>, RawQuery(query): RawQuery) -> Result<Response, Problem> {
    Query::read(query.as_deref(), &[], "leave the query out")?;
    let outboxes = shared.board.outboxes(&shared.store()?).await.map_err(|error| shared.not_done(&error))?;
    Ok(axum::Json(Page::whole(outboxes)).into_response())
}

/// What holds keys back in one of them. An adopted table marks its own rows and has none.
pub async fn parked(
    State(shared): State<Arc<Shared>>,
    outbox: Named,
    RawQuery(query): RawQuery,
) -> Result<Response, Problem> {
    let query = Query::read(query.as_deref(), &["after", "limit"], "use after (a number) and limit (1 to 1000)")?;
    let (after, limit) = (query.parsed("after", "a number")?.unwrap_or(0), query.limit()?);
    let wanted = name(outbox);
    let Some(Outbox { name, table, .. }) = status::outboxes(&shared.config).into_iter().find(|it| it.name == wanted)
    else {
        return Err(
            Problem::missing(format_args!("outbox {wanted:?}")).remedy("GET /api/v1/outbox shows which there are")
        );
    };
    if table.is_some() {
        return Ok(axum::Json(json!({ "items": [], "next": null })).into_response());
    }
    let parked = shared.ask(move |store| async move { store.parked(&name, after, limit).await }).await?;
    Ok(axum::Json(Page::new(parked, limit, |event| event.id)).into_response())
}

/// The consumers.
pub async fn consumers(State(shared): State<Arc<Shared>>, RawQuery(query): RawQuery) -> Result<Response, Problem> {
    Query::read(query.as_deref(), &[], "leave the query out")?;
    let consumers = shared.board.consumers(&shared.store()?).await.map_err(|error| shared.not_done(&error))?;
    Ok(axum::Json(Page::whole(consumers)).into_response())
}

/// The instances, and every slot with its holder.
pub async fn instances(State(shared): State<Arc<Shared>>, RawQuery(query): RawQuery) -> Result<Response, Problem> {
    Query::read(query.as_deref(), &[], "leave the query out")?;
    let crew = shared.board.crew(&shared.store()?).await.map_err(|error| shared.not_done(&error))?;
    let body = json!({ "items": crew.instances, "next": null, "leases": crew.leases });
    Ok(axum::Json(body).into_response())
}

/// What failed: `?window=hour`, `day` or `month`.
pub async fn errors(State(shared): State<Arc<Shared>>, RawQuery(query): RawQuery) -> Result<Response, Problem> {
    let query = Query::read(query.as_deref(), &["window"], "use window=hour, window=day or window=month")?;
    let window = query.parsed("window", "hour, day or month")?.unwrap_or(Window::Hour);
    let errors = shared.board.errors(&shared.store()?, window).await.map_err(|error| shared.not_done(&error))?;
    Ok(axum::Json(&*errors).into_response())
}

/// The same as `postrider status --json`.
pub async fn status(State(shared): State<Arc<Shared>>, RawQuery(query): RawQuery) -> Result<Response, Problem> {
    Query::read(query.as_deref(), &[], "leave the query out")?;
    let status = shared.board.status(&shared.store()?).await.map_err(|error| shared.not_done(&error))?;
    Ok(axum::Json(&*status).into_response())
}
