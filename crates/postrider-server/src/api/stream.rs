//! `/api/v1/events/stream`: what the console shows, as it changes (server-sent events).
//!
//! Nothing is kept for a client but what it was told last. What is told is read once for all clients (see `board`), and
//! a client that does not read is not written to.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use postrider::pulse::figures::Window;
use postrider::{Error, Kind};
use tokio::time::Instant;
use uuid::Uuid;

use super::page::Query;
use super::{Problem, Shared, overview};
use crate::access::Caller;

/// Clients at once.
const CLIENTS_MAX: usize = 64;
/// Clients of one token, so that one that forgets to hang up leaves room for the others.
const OWN_MAX: usize = 8;
/// How often the overview is told, if it changed.
const OVERVIEW_EVERY: Duration = Duration::from_secs(2);
/// How often replays are looked at; that costs no more than looking.
const REPLAYS_EVERY: Duration = Duration::from_millis(250);
/// Proxies close what is silent for a minute or less.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// A client hears after this long that the store does not answer.
const OVERVIEW_WAIT: Duration = Duration::from_secs(10);
/// How long a browser waits before it comes again.
const RETRY: Duration = Duration::from_secs(2);

/// Room for so many clients.
#[derive(Clone, Default)]
pub struct Streams {
    /// How many each name has open; none is not kept.
    open: Arc<Mutex<HashMap<String, usize>>>,
}

/// The room of one client, until it is dropped.
struct Room {
    streams: Streams,
    name: String,
}

impl Streams {
    fn enter(&self, name: &str) -> Result<Room, Problem> {
        let mut open = self.lock();
        let own = open.get(name).copied().unwrap_or_default();
        let detail = match (own, open.values().sum::<usize>()) {
            (OWN_MAX.., _) => format!("{OWN_MAX} streams are open as {name:?}"),
            (_, CLIENTS_MAX..) => format!("{CLIENTS_MAX} streams are open"),
            _ => {
                open.insert(name.to_owned(), own + 1);
                return Ok(Room { streams: self.clone(), name: name.to_owned() });
            }
        };
        Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "too_many", "Too many streams", detail)
            .remedy("close a console, or ask again and again: every endpoint has a GET"))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        // Nothing panics while it is held, so a poisoned lock still guards a whole value.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut open = self.streams.lock();
        match open.get_mut(&self.name) {
            Some(own) if *own > 1 => *own -= 1,
            _ => {
                open.remove(&self.name);
            }
        }
    }
}

/// One client.
struct Client {
    shared: Arc<Shared>,
    caller: Caller,
    _room: Room,
    /// What is to be told next.
    ready: Vec<Event>,
    /// What was told last.
    overview: String,
    alerts: String,
    replays: HashMap<Uuid, String>,
    overview_at: Instant,
}

/// Streams until the client hangs up, its session ends, or the process stops.
pub async fn open(
    State(shared): State<Arc<Shared>>,
    caller: Caller,
    RawQuery(query): RawQuery,
) -> Result<Response, Problem> {
    Query::read(query.as_deref(), &[], "leave the query out")?;
    let room = shared.streams.enter(caller.name())?;
    let client = Client {
        caller,
        _room: room,
        ready: vec![Event::default().retry(RETRY).comment("welcome")],
        overview: String::new(),
        alerts: String::new(),
        replays: shared.replays.views().into_iter().filter(|view| view.is_over()).map(|view| view.told()).collect(),
        overview_at: Instant::now(),
        shared,
    };
    let events = stream::unfold(client, |mut client| async move {
        let event = client.next().await?;
        Some((Ok::<_, Infallible>(event), client))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(HEARTBEAT)).into_response())
}

impl Client {
    /// The next event; none when it is over.
    async fn next(&mut self) -> Option<Event> {
        let stop = self.shared.stop.clone();
        loop {
            if stop.is_cancelled() || !self.shared.access.is_live(&self.caller) {
                return None;
            }
            if !self.ready.is_empty() {
                return Some(self.ready.remove(0));
            }
            self.look_at_replays();
            if self.overview_at <= Instant::now() {
                // The reading runs to its end by itself if the client hangs up here.
                tokio::select! {
                    () = stop.cancelled() => return None,
                    () = self.look_at_overview() => {}
                }
                self.overview_at = Instant::now() + OVERVIEW_EVERY;
            }
            if self.ready.is_empty() {
                tokio::select! {
                    () = stop.cancelled() => return None,
                    () = tokio::time::sleep(REPLAYS_EVERY) => {}
                }
            }
        }
    }

    async fn look_at_overview(&mut self) {
        let (shared, told) = (self.shared.clone(), &mut self.ready);
        let mut tell = |name: &str, last: &mut String, text: String| {
            if *last != text {
                told.push(Event::default().event(name).data(&text));
                *last = text;
            }
        };
        let read = in_time(OVERVIEW_WAIT, overview::read(&shared, Window::Hour, false)).await;
        match read {
            Ok(text) => tell("overview", &mut self.overview, text),
            // Told once, not again and again.
            Err(problem) => return tell("problem", &mut self.overview, problem.to_json()),
        }
        let Ok(store) = shared.store() else { return };
        if let Ok(Ok(alerts)) = tokio::time::timeout(OVERVIEW_WAIT, shared.board.alerts(&store)).await {
            tell("alerts", &mut self.alerts, serde_json::json!({ "items": *alerts }).to_string());
        }
    }

    /// Tells what became of each replay since it was told last.
    fn look_at_replays(&mut self) {
        let views = self.shared.replays.views();
        self.replays.retain(|id, _| views.iter().any(|view| view.id() == *id));
        for view in views {
            let (id, text) = view.told();
            if self.replays.get(&id) != Some(&text) {
                self.ready.push(Event::default().event("replay").data(&text));
                self.replays.insert(id, text);
            }
        }
    }
}

/// What is read, or a problem when it takes too long.
async fn in_time<T>(wait: Duration, reading: impl Future<Output = Result<T, Problem>>) -> Result<T, Problem> {
    let late = |_| {
        let detail = format!("the store has not answered for {} s", wait.as_secs());
        Err(Problem::of_store(&Error::new(Kind::Unavailable, detail)))
    };
    tokio::time::timeout(wait, reading).await.unwrap_or_else(late)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_for_many_and_for_few_of_one_name() {
        let streams = Streams::default();
        let mut rooms: Vec<Room> = (0..OWN_MAX).map(|_| streams.enter("a").unwrap()).collect();
        assert!(streams.enter("a").is_err());
        for name in 1..CLIENTS_MAX / OWN_MAX {
            rooms.extend((0..OWN_MAX).map(|_| streams.enter(&name.to_string()).unwrap()));
        }
        assert!(streams.enter("b").is_err(), "all together");
        drop(rooms.pop());
        let last = streams.enter("b").unwrap();
        drop((rooms, last));
        assert!(streams.lock().is_empty());
    }

    #[tokio::test]
    async fn a_store_that_hangs_is_a_problem() {
        let problem = in_time::<()>(Duration::from_millis(10), std::future::pending()).await.unwrap_err();
        assert!(problem.to_json().contains("the store has not answered"), "{problem:?}");
    }
}
