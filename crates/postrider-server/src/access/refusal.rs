//! Why somebody is not let in, as problems with a remedy.

use std::net::SocketAddr;
use std::time::Duration;

use axum::http::StatusCode;

use super::{CSRF_HEADER, Need, Role};
use crate::api::Problem;

/// Why not. None of it repeats a token or a cookie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// No tokens are configured, and the port is open to other machines.
    Locked(SocketAddr),
    /// Neither a token nor a session.
    NoToken,
    /// An Authorization header of another kind.
    NotBearer,
    /// A token that is not in the configuration.
    Unknown,
    /// A session that has ended, or that was never one.
    Stale,
    /// Too many wrong tokens; how long to wait.
    TooMany(Duration),
    /// A session without its CSRF token.
    NoCsrf,
    /// A session with another CSRF token.
    WrongCsrf,
    /// A host that is not this machine.
    Host(String),
    /// Through a proxy, which has put this header there: whoever stands behind it may be anybody.
    Proxied(&'static str),
    /// A page of another site.
    OtherSite(String),
    /// A role that may not have it.
    Forbidden {
        /// The token's name.
        name: String,
        /// What it may do.
        role: Role,
        /// What it would need.
        need: Need,
    },
}

impl Refusal {
    /// Whether the browser should forget its cookie.
    pub fn ends_session(&self) -> bool {
        matches!(self, Refusal::Stale)
    }
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        let unauthorized =
            |detail: &str| Problem::new(StatusCode::UNAUTHORIZED, "unauthorized", "Not logged in", detail);
        let forbidden = |kind, detail: String| Problem::new(StatusCode::FORBIDDEN, kind, "Not allowed", detail);
        match refusal {
            Refusal::Locked(listen) => unauthorized(&format!(
                "HTTP listens on {listen}, reachable from other machines, and no token is configured"
            ))
            .remedy("make one with `postrider token new` and put it into the configuration, or listen on 127.0.0.1"),
            Refusal::NoToken => unauthorized("the request has neither a token nor a session")
                .remedy("send `Authorization: Bearer <token>`, or log in with POST /api/v1/session"),
            Refusal::NotBearer => unauthorized("the Authorization header holds no bearer token")
                .remedy("send `Authorization: Bearer <token>`"),
            Refusal::Unknown => unauthorized("this token is not in the configuration")
                .remedy("use another, or make one with `postrider token new` and put it into the configuration"),
            Refusal::Stale => unauthorized("the session has ended")
                .remedy("log in again; a session lasts 12 hours, or until its token is removed"),
            Refusal::TooMany(wait) => {
                let secs = wait.as_secs().max(1);
                let detail = format!("there were too many wrong tokens; the next may come in {secs} s");
                Problem::new(StatusCode::TOO_MANY_REQUESTS, "too_many", "Too many attempts", detail)
                    .remedy("wait, then try with the right token")
                    .retry_after(secs)
            }
            Refusal::NoCsrf => forbidden("csrf", format!("the request changes something and has no {CSRF_HEADER}"))
                .remedy(format!("send the csrf of GET /api/v1/session as {CSRF_HEADER}")),
            Refusal::WrongCsrf => forbidden("csrf", format!("the {CSRF_HEADER} is not the one of this session"))
                .remedy(format!("send the csrf of GET /api/v1/session as {CSRF_HEADER}; load the page again")),
            Refusal::Host(host) => {
                let detail = match host.as_str() {
                    "" => "the request names no host".to_owned(),
                    host => format!("the host {host:?} is not this machine"),
                };
                forbidden("host", detail).remedy(
                    "ask localhost or 127.0.0.1; to be reached by another name or through a proxy, configure a token (`postrider token new`)",
                )
            }
            Refusal::Proxied(header) => {
                forbidden("proxied", format!("the request comes through a proxy (it has the header {header}), and no token is configured"))
                    .remedy("make a token with `postrider token new` and put it into the configuration: behind a proxy anybody may ask")
            }
            Refusal::OtherSite(site) => {
                forbidden("cross_site", format!("the request comes from another site ({site})"))
                    .remedy("open the console itself; pages of other sites may not use it")
            }
            Refusal::Forbidden { name, role, need } => {
                let wanted = match need {
                    Need::Producer => "the role producer or operator",
                    Need::Operator => "the role operator",
                    Need::Nothing | Need::Metrics | Need::Viewer => "the role viewer or operator",
                };
                forbidden("forbidden", format!("the token {name:?} has the role {role}; this needs {wanted}"))
                    .remedy("ask somebody with that role, or change the role of the token in the configuration")
            }
        }
    }
}
