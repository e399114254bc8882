//! `/api/v1/alerts` and `/api/v1/silences`.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::json;

use super::events::{rejected, require_json};
use super::page::{Page, Query};
use super::{Named, Problem, Shared, body, name};
use crate::access::Caller;

/// The longest silence: what is silent for longer should be a setting.
const SILENCE_SECS_MAX: u64 = 30 * 24 * 60 * 60;
/// Names of rules and subjects are short.
const NAME_BYTES_MAX: usize = 200;
/// A reason is a sentence.
const REASON_BYTES_MAX: usize = 1000;

const REMEDY: &str =
    "send {\"rule\", \"subject\" (each may be empty for all), \"for_secs\" (1 to 2592000), \"reason\"}";

/// Alerts, newest first.
pub async fn list(State(shared): State<Arc<Shared>>, RawQuery(query): RawQuery) -> Result<Response, Problem> {
    let remedy = "use state=open or state=all, before (a number), limit (1 to 1000)";
    let query = Query::read(query.as_deref(), &["state", "before", "limit"], remedy)?;
    let is_open_only = match query.text("state") {
        None | Some("open") => true,
        Some("all") => false,
        Some(_) => return Err(query.wrong("state", "the state is neither open nor all".to_owned())),
    };
    let (before, limit) = (query.before()?, query.limit()?);
    let alerts = shared.ask(move |store| async move { store.alerts(is_open_only, before, limit).await }).await?;
    Ok(axum::Json(Page::new(alerts, limit, |alert| alert.id)).into_response())
}

/// Silences that have not ended.
pub async fn silences(State(shared): State<Arc<Shared>>, RawQuery(query): RawQuery) -> Result<Response, Problem> {
    Query::read(query.as_deref(), &[], "leave the query out")?;
    let silences = shared.ask(|store| async move { store.silences().await }).await?;
    Ok(axum::Json(Page::whole(silences)).into_response())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    #[serde(default)]
    rule: String,
    #[serde(default)]
    subject: String,
    for_secs: u64,
    reason: String,
}

impl Wanted {
    fn read(headers: &HeaderMap, body: &[u8]) -> Result<Self, Problem> {
        require_json(headers, "send application/json")?;
        let wanted: Self =
            serde_path_to_error::deserialize(&mut serde_json::Deserializer::from_slice(body)).map_err(|error| {
                let problem = Problem::bad_request(error.inner().to_string()).remedy(REMEDY);
                problem.pointer(body::pointer(error.path()))
            })?;
        let wanted = Self { reason: wanted.reason.trim().to_owned(), ..wanted };
        let wrong =
            |field: &str, detail: String| Err(Problem::bad_request(detail).pointer(format!("/{field}")).remedy(REMEDY));
        if !(1..=SILENCE_SECS_MAX).contains(&wanted.for_secs) {
            return wrong("for_secs", format!("for_secs is {}, it must be 1 to {SILENCE_SECS_MAX}", wanted.for_secs));
        }
        if wanted.reason.is_empty() {
            return wrong("reason", "there is no reason".to_owned());
        }
        let texts = [
            ("rule", &wanted.rule, NAME_BYTES_MAX),
            ("subject", &wanted.subject, NAME_BYTES_MAX),
            ("reason", &wanted.reason, REASON_BYTES_MAX),
        ];
        for (field, text, max) in texts {
            if text.len() > max {
                return wrong(field, format!("the {field} has {} bytes, the limit is {max}", text.len()));
            }
            if text.contains('\0') {
                return wrong(field, format!("the {field} has a zero byte in it"));
            }
        }
        Ok(wanted)
    }
}

/// Silences alerts for a time.
pub async fn silence(
    State(shared): State<Arc<Shared>>,
    caller: Caller,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Problem> {
    let Wanted { rule, subject, for_secs, reason } = Wanted::read(&headers, &body.map_err(rejected)?)?;
    let (length, actor) = (Duration::from_secs(for_secs), caller.actor().to_owned());
    let call = move |store: Arc<dyn postrider::store::Store>| async move {
        store.silence(&rule, &subject, length, &reason, &actor).await
    };
    let id = shared.ask(call).await?;
    shared.board.alerts_changed().await;
    let location = [(header::LOCATION, format!("/api/v1/silences/{id}"))];
    Ok((StatusCode::CREATED, location, axum::Json(json!({ "id": id }))).into_response())
}

/// Ends a silence.
pub async fn unsilence(State(shared): State<Arc<Shared>>, caller: Caller, id: Named) -> Result<Response, Problem> {
    let missing =
        |id: &str| Problem::missing(format_args!("silence {id}")).remedy("GET /api/v1/silences shows which there are");
    let said = name(id);
    let id: i64 = said.parse().map_err(|_| missing(&said))?;
    let actor = caller.actor().to_owned();
    if !shared.ask(move |store| async move { store.unsilence(id, &actor).await }).await? {
        return Err(missing(&said));
    }
    shared.board.alerts_changed().await;
    Ok(StatusCode::NO_CONTENT.into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silence_says_for_how_long_and_why() {
        let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, "application/json".parse().unwrap())]);
        let read = |body: &str| Wanted::read(&headers, body.as_bytes());
        let wanted = read(r#"{"rule":"stale","for_secs":60,"reason":" a test "}"#).unwrap();
        assert_eq!((wanted.rule.as_str(), wanted.subject.as_str(), wanted.reason.as_str()), ("stale", "", "a test"));
        let long = format!(r#"{{"rule":"{}","for_secs":60,"reason":"x"}}"#, "r".repeat(201));
        for (body, part) in [
            (r#"{"for_secs":0,"reason":"x"}"#, "/for_secs"),
            (r#"{"for_secs":2592001,"reason":"x"}"#, "/for_secs"),
            (r#"{"for_secs":-1,"reason":"x"}"#, "/for_secs"),
            (r#"{"for_secs":1,"reason":"  "}"#, "no reason"),
            (r#"{"for_secs":1}"#, "reason"),
            (r#"{"for_secs":1,"reason":"a\u0000"}"#, "zero byte"),
            (r#"{"for_secs":1,"reason":"x","until":1}"#, "/until"),
            (&long, "the limit is 200"),
            ("[]", "for_secs"),
            ("", "EOF"),
        ] {
            let said = format!("{:?}", read(body).err().unwrap());
            assert!(said.contains(part), "{part:?} is missing in {said}");
        }
    }
}
