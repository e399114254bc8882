//! `/api/v1/session`: who asks, logging in and out.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::events::{rejected, require_json};
use super::{Problem, Shared};
use crate::access::{Asked, Caller, Refusal, Role, Situation, refuse};

/// A request to log in is a token and little else.
pub const LOGIN_BYTES_MAX: usize = 4096;

/// Whoever logs in waits no longer than this for the line in the audit table.
const AUDIT_WAIT: Duration = Duration::from_secs(2);

const REMEDY: &str = "send {\"token\": \"prt_…\"}";

/// What a page needs to know at its start.
#[derive(Serialize)]
struct View {
    needs_login: bool,
    is_locked: bool,
    remedy: Option<&'static str>,
    name: Option<String>,
    role: Option<Role>,
    csrf: Option<String>,
    expires_at: Option<DateTime<Utc>>,
    version: &'static str,
}

impl View {
    fn of(shared: &Shared, caller: Option<&Caller>) -> Self {
        let situation = shared.access.situation();
        Self {
            needs_login: caller.is_none() && situation == Situation::Tokens,
            is_locked: situation == Situation::Locked,
            remedy: (situation == Situation::Locked).then_some(
                "make a token with `postrider token new` and put it into the configuration, or listen on 127.0.0.1",
            ),
            name: caller.map(|caller| caller.name().to_owned()),
            role: caller.map(Caller::role),
            csrf: caller.and_then(|caller| shared.access.csrf(caller)),
            expires_at: caller.and_then(Caller::session_of).map(|session| session.expires_at()),
            version: env!("CARGO_PKG_VERSION"),
        }
    }
}

/// Who asks. Nobody in particular is an answer too.
pub async fn show(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let (parts, _) = request.into_parts();
    match shared.access.identify(&Asked::of(&parts)) {
        Ok(caller) => axum::Json(View::of(&shared, Some(&caller))).into_response(),
        Err(Refusal::NoToken | Refusal::Locked(_)) => axum::Json(View::of(&shared, None)).into_response(),
        Err(Refusal::Stale) => {
            let forget = [(header::SET_COOKIE, shared.access.no_cookie(&parts.headers))];
            (forget, axum::Json(View::of(&shared, None))).into_response()
        }
        Err(refusal) => refuse(&shared.access, &parts.headers, refusal),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Login {
    token: String,
}

/// Exchanges a token for a session cookie. That somebody came in, or tried to, is written down.
pub async fn log_in(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = Bytes::from_request(Request::from_parts(parts.clone(), body), &()).await;
    let login = match read(&parts.headers, body) {
        Ok(login) => login,
        Err(problem) => return problem.into_response(),
    };
    let asked = Asked::of(&parts);
    let peer = asked.peer.to_canonical().to_string();
    let caller = match shared.access.log_in(login.token.trim(), &asked) {
        Ok(caller) => caller,
        Err(refusal) => {
            // One that was not looked at is not written down: somebody who floods us must not flood the audit table.
            let actor = match &refusal {
                Refusal::Unknown => Some("unknown".to_owned()),
                Refusal::Forbidden { name, .. } => Some(format!("token:{name}")),
                _ => None,
            };
            if let Some(actor) = actor {
                audit(&shared, &actor, "login_failed", json!({ "peer": peer })).await;
            }
            return refuse(&shared.access, &parts.headers, refusal);
        }
    };
    audit(&shared, caller.actor(), "login", json!({ "peer": peer, "role": caller.role() })).await;
    let mut response = axum::Json(View::of(&shared, Some(&caller))).into_response();
    if let Some(cookie) = shared.access.cookie(&caller, &parts.headers) {
        response.headers_mut().insert(header::SET_COOKIE, cookie);
    }
    response
}

fn read(headers: &HeaderMap, body: Result<Bytes, BytesRejection>) -> Result<Login, Problem> {
    require_json(headers, REMEDY)?;
    // The parser's own words might repeat what was sent.
    serde_json::from_slice(&body.map_err(rejected)?)
        .map_err(|_| Problem::bad_request("the body is not an object with a token").remedy(REMEDY))
}

/// Ends the session, here and in the browser.
pub async fn log_out(State(shared): State<Arc<Shared>>, caller: Caller, headers: HeaderMap) -> Response {
    if caller.session_of().is_some() {
        shared.access.log_out(&caller);
        audit(&shared, caller.actor(), "logout", json!({})).await;
    }
    (StatusCode::NO_CONTENT, [(header::SET_COOKIE, shared.access.no_cookie(&headers))]).into_response()
}

/// A session must be had while the store is away or hangs too, if only to see that it does; so the log says it then. A
/// line that was begun is written all the same.
async fn audit(shared: &Shared, actor: &str, action: &'static str, detail: Value) {
    let line = (actor.to_owned(), detail.clone());
    let writing = shared.ask(move |store| async move { store.audit(&line.0, action, &line.1).await });
    if !matches!(tokio::time::timeout(AUDIT_WAIT, writing).await, Ok(Ok(_))) {
        tracing::warn!(error_type = "unavailable", actor, action, %detail, "could not be written into the audit table");
    }
}
