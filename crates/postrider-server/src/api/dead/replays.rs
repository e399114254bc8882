//! Replays that run in this process. They end with it: a graceful stop takes back what was not begun.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use futures_util::FutureExt;
use postrider::dead::{REPLAY_RATE, Replay, Replayed};
use postrider::store::Store;
use postrider::{Error, Kind};
use serde::Serialize;
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::super::events::rejected;
use super::super::page::{Page, Query};
use super::super::{Named, Problem, Shared, name};
use super::body::Body;
use super::{page, require_all};
use crate::access::Caller;
use crate::config::redact;

/// Replays at once; each asks the store for its progress five times a second.
const RUNNING_MAX: usize = 8;
/// Replays that are remembered.
const KEPT_MAX: usize = 100;
/// How long one that has ended is remembered.
const KEPT_FOR: Duration = Duration::from_secs(60 * 60);
/// More than this per second is not slowed down at all.
const RATE_MAX: u32 = 10_000;
/// Counting what there is to replay ends here.
const EXPECTED_MAX: u64 = 10_000;
/// What a dry run shows.
const DRY_RUN_MAX: usize = 1000;

/// The replays of this process.
pub struct Replays {
    stop: CancellationToken,
    tasks: TaskTracker,
    /// By their ids, which are in the order of their beginnings.
    kept: Mutex<BTreeMap<Uuid, Kept>>,
}

#[derive(Clone)]
struct Kept {
    stop: CancellationToken,
    progress: watch::Receiver<Replayed>,
    began_at: DateTime<Utc>,
    actor: String,
    expected: Arc<OnceLock<Option<u64>>>,
    end: Arc<OnceLock<End>>,
}

/// How a replay ended; with the error, if the store failed it.
struct End {
    at: DateTime<Utc>,
    error: Option<String>,
}

/// What a client sees of a replay.
#[derive(Debug, Serialize)]
pub struct ReplayView {
    id: Uuid,
    /// `running`, `done`, `stopped` or `failed`.
    state: &'static str,
    #[serde(flatten)]
    progress: Replayed,
    /// How many there were to be replayed when it began; none while that is counted, and when there are too many.
    expected: Option<u64>,
    actor: String,
    began_at: DateTime<Utc>,
    ended_at: Option<DateTime<Utc>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl ReplayView {
    /// Its id.
    pub fn id(&self) -> Uuid {
        self.id
    }

    /// Whether it has ended.
    pub fn is_over(&self) -> bool {
        self.ended_at.is_some()
    }

    /// Its id, and all of it as JSON.
    pub fn told(&self) -> (Uuid, String) {
        // Texts and numbers alone: it cannot fail to be written.
        (self.id, serde_json::to_string(self).unwrap_or_default())
    }
}

impl Kept {
    fn is_over(&self) -> bool {
        self.end.get().is_some()
    }

    fn view(&self, id: Uuid) -> ReplayView {
        // The end first: what it says must not be newer than the progress.
        let end = self.end.get();
        let progress = *self.progress.borrow();
        let error = end.and_then(|end| end.error.clone());
        let state = match (end, &error, progress.stopped) {
            (None, _, _) => "running",
            (_, Some(_), _) => "failed",
            (_, _, Some(_)) => "stopped",
            _ => "done",
        };
        ReplayView {
            id,
            state,
            progress,
            expected: self.expected.get().copied().flatten(),
            actor: self.actor.clone(),
            began_at: self.began_at,
            ended_at: end.map(|end| end.at),
            error,
        }
    }

    fn response(&self, id: Uuid, status: StatusCode) -> Response {
        (status, axum::Json(self.view(id))).into_response()
    }
}

impl Replays {
    /// None yet; `stop` ends them all.
    pub fn new(stop: &CancellationToken) -> Self {
        Self { stop: stop.child_token(), tasks: TaskTracker::new(), kept: Mutex::default() }
    }

    /// Waits until all have ended, after the stop.
    pub async fn ended(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// All that are remembered, newest first.
    pub fn views(&self) -> Vec<ReplayView> {
        self.lock().iter().rev().map(|(id, kept)| kept.view(*id)).collect()
    }

    /// Those that run.
    pub fn running(&self) -> Vec<ReplayView> {
        self.views().into_iter().filter(|view| !view.is_over()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Uuid, Kept>> {
        // Nothing panics while it is held, so a poisoned lock still guards a whole value.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, id: &str) -> Result<(Uuid, Kept), Problem> {
        let found = id.parse().ok().and_then(|id| self.lock().get(&id).cloned().map(|kept| (id, kept)));
        found.ok_or_else(|| {
            Problem::missing(format_args!("replay {id}"))
                .remedy("a replay is known to the process that runs it, and for an hour after its end")
        })
    }

    fn start(&self, store: Arc<dyn Store>, replay: Replay) -> Result<Uuid, Problem> {
        if self.stop.is_cancelled() {
            let error = Error::new(Kind::Unavailable, "this process is about to end");
            return Err(Problem::from(&error).remedy("try again when it runs"));
        }
        let mut kept = self.lock();
        let is_kept = |end: &End| (Utc::now() - end.at).to_std().unwrap_or_default() < KEPT_FOR;
        kept.retain(|_, replay| replay.end.get().is_none_or(is_kept));
        if kept.values().filter(|replay| !replay.is_over()).count() >= RUNNING_MAX {
            let detail = format!("{RUNNING_MAX} replays are running");
            return Err(Problem::new(StatusCode::TOO_MANY_REQUESTS, "too_many", "Too many replays", detail)
                .remedy("wait for one to end, or cancel it"));
        }
        let oldest = kept.iter().find(|(_, replay)| replay.is_over()).map(|(id, _)| *id);
        if let Some(oldest) = oldest.filter(|_| kept.len() >= KEPT_MAX) {
            kept.remove(&oldest);
        }
        let (id, stop, end) = (Uuid::now_v7(), self.stop.child_token(), Arc::new(OnceLock::new()));
        let progress = watch::Sender::new(Replayed::default());
        let expected = Arc::new(OnceLock::new());
        let known = Kept {
            stop: stop.clone(),
            progress: progress.subscribe(),
            began_at: Utc::now(),
            actor: replay.actor.clone(),
            expected: expected.clone(),
            end: end.clone(),
        };
        kept.insert(id, known);
        let run = async move {
            // For the progress bar alone; without it the replay goes on all the same.
            let counted = store.dead_count(&replay.filter, EXPECTED_MAX + 1).await;
            let _ = expected.set(counted.ok().filter(|count| *count <= EXPECTED_MAX));
            let ended = replay.run(store.as_ref(), &stop, &progress).await;
            let error = ended.err().map(|error| {
                tracing::warn!(error_type = error.kind().as_str(), %error, causes = ?error.causes(),
                    remedy = error.remedy(), "a replay ended early");
                redact(error.message())
            });
            // Set once, here.
            let _ = end.set(End { at: Utc::now(), error });
        };
        self.tasks.spawn(run.boxed());
        Ok(id)
    }
}

/// Begins a replay; `dry_run` shows what it would take.
pub async fn start(
    State(shared): State<Arc<Shared>>,
    caller: Caller,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Problem> {
    let mut body = Body::read(&headers, &body.map_err(rejected)?)?;
    let rate = body.take::<u32>("rate")?.unwrap_or(REPLAY_RATE);
    if !(1..=RATE_MAX).contains(&rate) {
        return Err(Problem::bad_request(format!("the rate is {rate}"))
            .pointer("/rate")
            .remedy(format!("give 1 to {RATE_MAX} per second")));
    }
    let is_dry = body.take::<bool>("dry_run")?.unwrap_or_default();
    let filter = body.filter()?;
    require_all(&shared, &filter).await?;
    if is_dry {
        return Ok(axum::Json(page(&shared, filter, 0, DRY_RUN_MAX).await?).into_response());
    }
    let id = shared.replays.start(shared.store()?, Replay { filter, rate, actor: caller.actor().to_owned() })?;
    let location = format!("/api/v1/dead-letters/replays/{id}");
    Ok((StatusCode::ACCEPTED, [(header::LOCATION, location)], axum::Json(json!({ "id": id }))).into_response())
}

/// All that this process remembers.
pub async fn list(State(shared): State<Arc<Shared>>, RawQuery(query): RawQuery) -> Result<Response, Problem> {
    Query::read(query.as_deref(), &[], "leave the query out")?;
    Ok(axum::Json(Page::whole(shared.replays.views())).into_response())
}

/// How one fares.
pub async fn show(State(shared): State<Arc<Shared>>, id: Named) -> Result<Response, Problem> {
    let (id, replay) = shared.replays.find(&name(id))?;
    Ok(replay.response(id, StatusCode::OK))
}

/// Asks a replay to take back what was not begun, and to end. One that has ended stays as it is.
pub async fn cancel(State(shared): State<Arc<Shared>>, caller: Caller, id: Named) -> Result<Response, Problem> {
    let (id, replay) = shared.replays.find(&name(id))?;
    if replay.is_over() {
        return Ok(replay.response(id, StatusCode::OK));
    }
    // First: whatever becomes of the line, the replay must end.
    replay.stop.cancel();
    let (actor, detail) = (caller.actor().to_owned(), json!({ "replay": id, "begun_by": replay.actor }));
    shared.ask(move |store| async move { store.audit(&actor, "cancel", &detail).await }).await?;
    Ok(replay.response(id, StatusCode::ACCEPTED))
}
