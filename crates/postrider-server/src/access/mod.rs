//! Who may do what over HTTP.
//!
//! There are three situations. Without tokens and on loopback, whoever reaches the port is this machine's operator, but
//! for pages of other sites in somebody's browser. Without tokens and beyond loopback nobody is let in. With tokens, a
//! program sends one with every request and a browser exchanges one for a session.
//!
//! A token has 256 random bits, so a plain SHA-256 of it is all that the configuration needs: there is nothing to guess.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Instant;

use axum::extract::ConnectInfo;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, header};
use chrono::{DateTime, Utc};

use crate::config::{Config, CookieSecurity};

mod caller;
mod guard;
mod headers;
mod limiter;
mod refusal;
mod session;
mod site;
mod token;

pub use caller::{Caller, Need, Role};
pub use guard::{Guard, guard, refuse};
pub use headers::secure;
pub use refusal::Refusal;
pub use session::Session;
pub use token::{Hash, Token, new_token};

use limiter::Limiter;
use session::Signer;

/// The header that repeats the session's CSRF token.
pub const CSRF_HEADER: &str = "x-postrider-csrf";
/// What a program's token stands behind.
const BEARER: &str = "bearer ";
/// No token of ours is longer by far.
const TOKEN_BYTES_MAX: usize = 512;

/// What decides about every request.
pub struct Access {
    policy: Policy,
    signer: Signer,
    limiter: Limiter,
    is_metrics_public: bool,
    is_cookie_secure: Option<bool>,
}

enum Policy {
    /// No tokens, on loopback.
    Local,
    /// No tokens, beyond loopback.
    Locked(SocketAddr),
    /// Tokens.
    Tokens(Vec<Token>),
}

/// What a page needs to know before it knows who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Situation {
    /// Nobody needs to log in.
    Local,
    /// Nobody can.
    Locked,
    /// With a token.
    Tokens,
}

impl Access {
    /// As configured.
    pub fn new(config: &Config) -> postrider::Result<Self> {
        let http = &config.http;
        let is_loopback = http.listen.ip().to_canonical().is_loopback();
        let policy = match (config.tokens.as_slice(), is_loopback) {
            ([], true) => Policy::Local,
            ([], false) => Policy::Locked(http.listen),
            (tokens, _) => Policy::Tokens(tokens.to_vec()),
        };
        Ok(Self {
            policy,
            signer: Signer::new(http.session_key.as_ref().map(|key| key.expose().as_bytes()))?,
            limiter: Limiter::default(),
            is_metrics_public: http.metrics_public,
            is_cookie_secure: match http.secure_cookie {
                CookieSecurity::Always => Some(true),
                CookieSecurity::Never => Some(false),
                CookieSecurity::Auto if is_loopback => None,
                CookieSecurity::Auto => Some(true),
            },
        })
    }

    /// Which of the three it is.
    pub fn situation(&self) -> Situation {
        match self.policy {
            Policy::Local => Situation::Local,
            Policy::Locked(_) => Situation::Locked,
            Policy::Tokens(_) => Situation::Tokens,
        }
    }

    /// Who asks, if that one may have what is needed.
    pub fn admit(&self, need: Need, request: &Asked<'_>) -> Result<Caller, Refusal> {
        if need == Need::Nothing || (need == Need::Metrics && self.is_metrics_public) {
            return Ok(Caller::nobody());
        }
        let caller = self.identify(request)?;
        match caller.may(need) {
            true => Ok(caller),
            false => Err(Refusal::Forbidden { name: caller.name().to_owned(), role: caller.role(), need }),
        }
    }

    /// Who asks.
    pub fn identify(&self, request: &Asked<'_>) -> Result<Caller, Refusal> {
        let tokens = match &self.policy {
            Policy::Local => {
                site::require_local(request.headers)?;
                return Ok(Caller::local(request.headers));
            }
            Policy::Locked(listen) => return Err(Refusal::Locked(*listen)),
            Policy::Tokens(tokens) => tokens,
        };
        if let Some(value) = request.headers.get(header::AUTHORIZATION) {
            let token = bearer(value).ok_or(Refusal::NotBearer)?;
            return match self.find(token) {
                Some(token) => Ok(Caller::bearer(token)),
                None => {
                    self.limiter.attempt(request.peer, request.at).map_err(Refusal::TooMany)?;
                    Err(Refusal::Unknown)
                }
            };
        }
        let Some(cookie) = session::cookie(request.headers) else { return Err(Refusal::NoToken) };
        let (token, session) = self.signer.open(cookie, tokens, request.now).ok_or(Refusal::Stale)?;
        site::require_same(request.headers)?;
        if !request.method.is_safe() {
            let said = request.headers.get(CSRF_HEADER).map(HeaderValue::as_bytes).ok_or(Refusal::NoCsrf)?;
            if !self.signer.is_csrf(token, &session, said) {
                return Err(Refusal::WrongCsrf);
            }
        }
        Ok(Caller::session(token, session))
    }

    /// Exchanges a token for a session. An attempt that fails is counted against its peer and against all; one with the
    /// right token is never slowed down by those of others.
    pub fn log_in(&self, said: &str, request: &Asked<'_>) -> Result<Caller, Refusal> {
        match self.policy {
            Policy::Local => return self.identify(request),
            Policy::Locked(listen) => return Err(Refusal::Locked(listen)),
            Policy::Tokens(_) => {}
        }
        site::require_same(request.headers)?;
        let attempt = || self.limiter.attempt(request.peer, request.at).map_err(Refusal::TooMany);
        let Some(token) = self.find(said) else {
            attempt()?;
            return Err(Refusal::Unknown);
        };
        let caller = Caller::session(token, Session::new(&token.name, request.now));
        if !caller.may(Need::Viewer) {
            // It is written down, so it is counted.
            attempt()?;
            return Err(Refusal::Forbidden { name: token.name.clone(), role: token.role, need: Need::Viewer });
        }
        Ok(caller)
    }

    /// Ends the session of a browser.
    pub fn log_out(&self, caller: &Caller) {
        if let Some(session) = caller.session_of() {
            self.signer.end(session, Utc::now());
        }
    }

    /// Whether whoever was let in would be let in now: a session may have ended meanwhile.
    pub fn is_live(&self, caller: &Caller) -> bool {
        caller.session_of().is_none_or(|session| self.signer.is_live(session, Utc::now()))
    }

    /// The CSRF token of a session.
    pub fn csrf(&self, caller: &Caller) -> Option<String> {
        let (token, session) = self.parts(caller)?;
        Some(self.signer.csrf(token, session))
    }

    /// The cookie of a session.
    pub fn cookie(&self, caller: &Caller, headers: &HeaderMap) -> Option<HeaderValue> {
        let (token, session) = self.parts(caller)?;
        let value = self.signer.seal(token, session);
        HeaderValue::try_from(session::set_cookie(&value, session::LASTS.as_secs(), self.is_secure(headers))).ok()
    }

    /// What makes a browser forget its cookie.
    pub fn no_cookie(&self, headers: &HeaderMap) -> HeaderValue {
        let text = session::set_cookie("", 0, self.is_secure(headers));
        HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static(""))
    }

    fn parts<'a>(&'a self, caller: &'a Caller) -> Option<(&'a Token, &'a Session)> {
        let Policy::Tokens(tokens) = &self.policy else { return None };
        let session = caller.session_of()?;
        Some((tokens.iter().find(|token| token.name == caller.name())?, session))
    }

    /// A proxy that says it was asked over TLS is believed: that can only make the cookie stricter.
    fn is_secure(&self, headers: &HeaderMap) -> bool {
        let is_forwarded = || headers.get("x-forwarded-proto").is_some_and(|value| value.as_bytes() == b"https");
        self.is_cookie_secure.unwrap_or_else(is_forwarded)
    }

    /// All tokens are compared, each in constant time.
    fn find(&self, said: &str) -> Option<&Token> {
        let Policy::Tokens(tokens) = &self.policy else { return None };
        if said.len() > TOKEN_BYTES_MAX {
            return None;
        }
        let hash = Hash::of(said);
        tokens.iter().fold(None, |found, token| if token.hash == hash { Some(token) } else { found })
    }
}

/// The parts of a request that decide.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// Its method.
    pub method: &'a Method,
    /// Its headers.
    pub headers: &'a HeaderMap,
    /// Whom it comes from.
    pub peer: IpAddr,
    /// When, for people.
    pub now: DateTime<Utc>,
    /// When, for waiting.
    pub at: Instant,
}

impl<'a> Asked<'a> {
    /// Of a request.
    pub fn of(parts: &'a Parts) -> Self {
        let peer = parts.extensions.get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(peer)| peer.ip());
        Self {
            method: &parts.method,
            headers: &parts.headers,
            // Always there, but for a server that was started in another way; then all are one peer.
            peer: peer.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
            now: Utc::now(),
            at: Instant::now(),
        }
    }
}

fn bearer(value: &HeaderValue) -> Option<&str> {
    let text = value.to_str().ok()?;
    let (scheme, token) = text.split_at_checked(BEARER.len())?;
    scheme.eq_ignore_ascii_case(BEARER).then(|| token.trim())
}

#[cfg(test)]
mod tests;
