//! Stands in front of every endpoint of the table.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::{Access, Asked, Need, Refusal};
use crate::api::Problem;

/// What an endpoint needs, and who decides.
#[derive(Clone)]
pub struct Guard {
    /// Who decides.
    pub access: Arc<Access>,
    /// What is needed.
    pub need: Need,
}

/// Lets the request through with a [`super::Caller`], or refuses it before its body is read.
pub async fn guard(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    match guard.access.admit(guard.need, &Asked::of(&parts)) {
        Ok(caller) => {
            parts.extensions.insert(caller);
            next.run(Request::from_parts(parts, body)).await
        }
        Err(refusal) => refuse(&guard.access, &parts.headers, refusal),
    }
}

/// The answer to somebody who is not let in.
pub fn refuse(access: &Access, headers: &HeaderMap, refusal: Refusal) -> Response {
    let ends_session = refusal.ends_session();
    let mut response = Problem::from(refusal).into_response();
    if response.status() == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    if ends_session {
        response.headers_mut().insert(header::SET_COOKIE, access.no_cookie(headers));
    }
    response
}
