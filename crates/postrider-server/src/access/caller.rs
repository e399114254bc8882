//! Who asks, and what that one may do.

use std::fmt;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use serde::Serialize;

use super::session::Session;
use super::token::Token;
use crate::api::Problem;

/// More characters than this of a name that a client gives itself are not kept.
const SAID_CHARS_MAX: usize = 64;

/// What a token may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Write events, and nothing else.
    Producer,
    /// Look at everything but payloads.
    Viewer,
    /// Everything.
    Operator,
}

impl Role {
    /// The word in the configuration and in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Producer => "producer",
            Role::Viewer => "viewer",
            Role::Operator => "operator",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What an endpoint asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Nothing: health, the console's files, the session itself.
    Nothing,
    /// A viewer, unless the metrics are public.
    Metrics,
    /// A viewer or an operator.
    Viewer,
    /// A producer or an operator.
    Producer,
    /// An operator.
    Operator,
}

/// Who asks. Endpoints take it as an argument; the guard in front of them has put it there.
#[derive(Debug, Clone)]
pub struct Caller {
    name: String,
    role: Role,
    actor: String,
    session: Option<Session>,
}

impl Caller {
    /// Whoever is at this machine. The name that a client gives itself is kept; nobody has checked it.
    pub(super) fn local(headers: &HeaderMap) -> Self {
        let said = headers.get("x-postrider-actor").map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
        let said: String = said.unwrap_or_default().chars().filter(|c| !c.is_control()).take(SAID_CHARS_MAX).collect();
        let actor = match said.trim() {
            "" => "local".to_owned(),
            name => format!("local:{name}"),
        };
        Self { name: "local".to_owned(), role: Role::Operator, actor, session: None }
    }

    /// Somebody who needs no name: the endpoint is for all.
    pub(super) fn nobody() -> Self {
        Self { name: "nobody".to_owned(), role: Role::Viewer, actor: "nobody".to_owned(), session: None }
    }

    /// A program with a token.
    pub(super) fn bearer(token: &Token) -> Self {
        let actor = format!("token:{}", token.name);
        Self { name: token.name.clone(), role: token.role, actor, session: None }
    }

    /// A browser with a session.
    pub(super) fn session(token: &Token, session: Session) -> Self {
        Self { session: Some(session), ..Self::bearer(token) }
    }

    /// The token's name; `local` without tokens.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it may do.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Who it is in the audit table: `token:ops`, `local`.
    pub fn actor(&self) -> &str {
        &self.actor
    }

    /// Its session, if it is a browser's.
    pub fn session_of(&self) -> Option<&Session> {
        self.session.as_ref()
    }

    /// Whether it may have this.
    pub fn may(&self, need: Need) -> bool {
        match (need, self.role) {
            (Need::Nothing, _) | (_, Role::Operator) => true,
            (Need::Metrics | Need::Viewer, role) => role == Role::Viewer,
            (Need::Producer, role) => role == Role::Producer,
            (Need::Operator, _) => false,
        }
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        // Absent only if an endpoint stood outside of the table; then nobody is let in.
        parts.extensions.get::<Caller>().cloned().ok_or_else(|| {
            Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "other", "The request was not done", "nobody was asked")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_in_the_audit_table_is_short_and_clean() {
        let said = |name: &'static [u8]| {
            let value = axum::http::HeaderValue::from_bytes(name).unwrap();
            Caller::local(&HeaderMap::from_iter([("x-postrider-actor".parse().unwrap(), value)])).actor
        };
        assert_eq!(Caller::local(&HeaderMap::new()).actor, "local");
        assert_eq!(said(b"  "), "local");
        assert_eq!(said(b" alice\t"), "local:alice");
        assert_eq!(said(&[b'x'; 1000]).len(), "local:".len() + SAID_CHARS_MAX);
        assert!(said(&[0xff, b'a']).ends_with('a'));
    }

    #[test]
    fn roles_get_what_they_are_for() {
        let needs = [Need::Nothing, Need::Metrics, Need::Viewer, Need::Producer, Need::Operator];
        for (role, may) in [
            (Role::Producer, [true, false, false, true, false]),
            (Role::Viewer, [true, true, true, false, false]),
            (Role::Operator, [true; 5]),
        ] {
            let caller = Caller { role, ..Caller::nobody() };
            assert_eq!(needs.map(|need| caller.may(need)), may, "{role}");
        }
    }
}
