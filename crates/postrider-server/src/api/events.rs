//! `POST /api/v1/events`: writes events into the outbox. All events of a request are stored, or none.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use postrider::Event;

use super::page::Query;
use super::serve::is_late;
use super::{BODY_BYTES_MAX, Problem, Shared, body, cloudevent};
use crate::task;
use crate::wire;

/// Answers 202 with the ids when the events are on disk.
pub async fn post(
    State(shared): State<Arc<Shared>>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Problem> {
    // For CloudEvents, which know no topics.
    let query = Query::read(query.as_deref(), &["topic"], "use topic, with a CloudEvent in binary mode")?;
    let body = body.map_err(rejected)?;
    let events = if cloudevent::is_binary_mode(&headers) {
        vec![cloudevent::read(&headers, query.text("topic"), body)?]
    } else {
        require_json(&headers, "send application/json, or a CloudEvent in binary mode (ce-id, ce-type, … as headers)")?;
        body::read(&body, &Trace::of(&headers))?
    };
    for (index, event) in events.iter().enumerate() {
        wire::check_weight(event, shared.config.payload_bytes_max())
            .map_err(|error| Problem::from(&error).pointer(format!("/{index}/payload")))?;
    }
    let ids: Vec<_> = events.iter().map(Event::id).collect();
    enqueue(&shared, events).await?;
    Ok((StatusCode::ACCEPTED, axum::Json(serde_json::json!({ "ids": ids }))).into_response())
}

async fn enqueue(shared: &Shared, events: Vec<Event>) -> Result<(), Problem> {
    let store = shared.store()?;
    // A client that hangs up drops this future; the write must run to its end all the same.
    let written = task::detached(async move { store.enqueue(&events).await });
    written.await.map_err(|error| {
        tracing::warn!(error_type = error.kind().as_str(), %error, causes = ?error.causes(), remedy = error.remedy(),
            "events from HTTP were not stored");
        Problem::from(&error)
    })
}

/// The trace that the request belongs to; its events carry it on.
#[derive(Debug, Default)]
pub struct Trace {
    /// W3C `traceparent`.
    pub parent: Option<String>,
    /// W3C `tracestate`.
    pub state: Option<String>,
}

impl Trace {
    /// From the request's headers. A `traceparent` that is none is ignored, as the standard asks.
    pub fn of(headers: &HeaderMap) -> Self {
        let get = |name| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let parent = get("traceparent").filter(|parent| is_traceparent(parent));
        // The standard gives tracestate 512 characters at least; more than our limit is not worth losing the event for.
        let state = get("tracestate").filter(|state| parent.is_some() && !state.is_empty() && state.len() <= 1024);
        Self { parent, state }
    }
}

fn is_traceparent(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let lengths: Vec<usize> = parts.iter().map(|part| part.len()).collect();
    lengths.starts_with(&[2, 32, 16, 2]) && parts[..4].iter().all(|part| part.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Refuses a body that is not declared as JSON.
pub(super) fn require_json(headers: &HeaderMap, remedy: &str) -> Result<(), Problem> {
    let declared = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let media = declared.split(';').next().unwrap_or_default().trim();
    if media.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let detail = match media {
        "" => "the request has no content-type".to_owned(),
        media => format!("the content-type {media} is not taken here"),
    };
    Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "media_type", "Unsupported media type", detail).remedy(remedy))
}

/// A body that could not be read.
pub(super) fn rejected(rejection: BytesRejection) -> Problem {
    if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
        let detail = format!("the request has more than {BODY_BYTES_MAX} bytes");
        return Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", "The request is too large", detail)
            .remedy("send fewer events per request, or a smaller payload");
    }
    if is_late(&rejection) {
        return Problem::new(
            StatusCode::REQUEST_TIMEOUT,
            "too_slow",
            "The request is too slow",
            "its body did not come in time",
        )
        .remedy("send fewer events per request, or over a faster connection");
    }
    Problem::bad_request("the request's body ended early")
}

#[cfg(test)]
mod tests {
    use super::is_traceparent;

    #[test]
    fn only_a_real_traceparent_is_carried_on() {
        assert!(is_traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"));
        for bad in ["", "00", "00-xyz-b7ad6b7169203331-01", "00-0af7651916cd43dd8448eb211c80319g-b7ad6b7169203331-01"] {
            assert!(!is_traceparent(bad), "{bad}");
        }
    }
}
