//! Errors as `application/problem+json` (RFC 9457), with a `remedy`.

use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use postrider::{Error, Kind};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use crate::config::redact;

/// A client that gets 503 may try again after this many seconds.
const RETRY_AFTER_SECS: u64 = 5;
/// What a client has sent may be long.
const DETAIL_CHARS_MAX: usize = 200;

/// One error for a client. Boxed, because it stands in many results that are nearly always good.
#[derive(Debug)]
pub struct Problem(Box<Members>);

#[derive(Debug, Serialize)]
struct Members {
    r#type: String,
    title: String,
    #[serde(serialize_with = "number")]
    status: StatusCode,
    detail: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pointer: Option<String>,
    #[serde(flatten)]
    more: Map<String, Value>,
    #[serde(skip)]
    retry_after_secs: Option<u64>,
}

fn number<S: Serializer>(status: &StatusCode, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u16(status.as_u16())
}

impl Problem {
    /// A problem of a kind (`invalid`), with a title that is the same for all of its kind and a detail that is not.
    pub fn new(status: StatusCode, kind: &str, title: &str, detail: impl Into<String>) -> Self {
        Self(Box::new(Members {
            r#type: format!("urn:postrider:problem:{kind}"),
            title: title.to_owned(),
            status,
            detail: detail.into(),
            remedy: None,
            pointer: None,
            more: Map::new(),
            retry_after_secs: (status == StatusCode::SERVICE_UNAVAILABLE).then_some(RETRY_AFTER_SECS),
        }))
    }

    /// A request that cannot be understood.
    pub fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad_request", "The request cannot be understood", detail)
    }

    /// An error of the store that is not about taking events.
    pub fn of_store(error: &Error) -> Self {
        let mut problem = Self::from(error);
        problem.0.title = match problem.0.status {
            StatusCode::SERVICE_UNAVAILABLE => "The store cannot be used",
            _ => "The request was not done",
        }
        .to_owned();
        problem
    }

    /// What the client can do.
    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.0.remedy = Some(remedy.into());
        self
    }

    /// The place in the body, as a JSON pointer (RFC 6901).
    #[must_use]
    pub fn pointer(mut self, pointer: impl Into<String>) -> Self {
        self.0.pointer = Some(pointer.into());
        self
    }

    /// When the client may try again.
    #[must_use]
    pub fn retry_after(mut self, secs: u64) -> Self {
        self.0.retry_after_secs = Some(secs);
        self
    }

    /// Something that is not there. Of what a client calls it, enough is told to recognise it.
    pub fn missing(what: impl std::fmt::Display) -> Self {
        let detail = format!("there is no {what}").chars().take(DETAIL_CHARS_MAX).collect::<String>();
        Self::new(StatusCode::NOT_FOUND, "not_found", "Not found", detail)
    }

    /// As JSON, where it is not an answer of its own.
    pub fn to_json(&self) -> String {
        // Texts and numbers alone: it cannot fail to be written.
        serde_json::to_string(&self.0).unwrap_or_default()
    }

    /// A member of the problem's own.
    #[must_use]
    pub fn with<T: Serialize>(mut self, name: &str, value: &T) -> Self {
        self.0.more.insert(name.to_owned(), serde_json::to_value(value).unwrap_or(Value::Null));
        self
    }
}

impl From<&Error> for Problem {
    fn from(error: &Error) -> Self {
        let (status, title) = match error.kind() {
            Kind::Invalid | Kind::Corrupt => (StatusCode::UNPROCESSABLE_ENTITY, "The event breaks a rule"),
            Kind::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "The event is too large"),
            Kind::Unavailable
            | Kind::Denied
            | Kind::Missing
            | Kind::NotMigrated
            | Kind::SchemaNewer
            | Kind::ReadOnly
            | Kind::DiskFull => (StatusCode::SERVICE_UNAVAILABLE, "The store cannot take events"),
            Kind::Config
            | Kind::Unroutable
            | Kind::Refused
            | Kind::Mismatch
            | Kind::LeaseLost
            | Kind::Handler
            | Kind::Other => (StatusCode::INTERNAL_SERVER_ERROR, "The event was not stored"),
        };
        Problem::new(status, error.kind().as_str(), title, redact(error.message())).remedy(error.remedy())
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut text = self.to_json();
        text.push('\n');
        let mut response = (self.0.status, [(header::CONTENT_TYPE, "application/problem+json")], text).into_response();
        if let Some(secs) = self.0.retry_after_secs {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(secs));
        }
        response
    }
}

/// No such path.
pub async fn not_found(uri: Uri) -> Problem {
    Problem::new(StatusCode::NOT_FOUND, "not_found", "Not found", format!("there is nothing at {}", short(&uri)))
        .remedy("GET /api/v1/openapi.json says what there is")
}

/// The path exists, the method does not.
pub async fn method_not_allowed(method: Method, uri: Uri) -> Problem {
    let detail = format!("{} does not take {method}", short(&uri));
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "Method not allowed", detail)
        .remedy("GET /api/v1/openapi.json says what there is")
}

/// Enough of a path to recognise it.
fn short(uri: &Uri) -> String {
    uri.path().chars().take(DETAIL_CHARS_MAX).collect()
}
