//! A browser's session: a signed cookie, and nothing that is kept here.
//!
//! The signature's key comes from the session key and the token's hash. So a session ends with its token, a new role of
//! the token holds at once, and whoever reads the configuration cannot make one.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aws_lc_rs::{constant_time, hmac};
use axum::http::{HeaderMap, header};
use chrono::{DateTime, Utc};

use super::token::{Token, hex, random};

/// The cookie's name.
pub const COOKIE: &str = "postrider_session";
/// How long a session lasts: a working day.
pub(super) const LASTS: Duration = Duration::from_secs(12 * 60 * 60);
/// More than any cookie of ours.
const COOKIE_BYTES_MAX: usize = 512;
/// Sessions that are remembered as logged out.
const ENDED_MAX: usize = 1024;

/// A session: whose, which, until when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    name: String,
    /// Until when, in whole seconds.
    until: i64,
    id: String,
}

impl Session {
    /// A session that begins now.
    pub(super) fn new(name: &str, now: DateTime<Utc>) -> Self {
        // Without random numbers two sessions that begin at once would be one; they would still be signed.
        let id = random::<16>().map(|bytes| hex(&bytes)).unwrap_or_default();
        Self { name: name.to_owned(), until: (now + LASTS).timestamp(), id }
    }

    /// When it ends.
    pub fn expires_at(&self) -> DateTime<Utc> {
        DateTime::from_timestamp(self.until, 0).unwrap_or_default()
    }
}

impl fmt::Display for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // No part has a full stop in it: names have none.
        write!(f, "{}.{}.{}", self.name, self.until, self.id)
    }
}

/// Signs sessions and knows its own signatures.
pub(super) struct Signer {
    key: hmac::Key,
    /// Sessions that were logged out before their time, with the end they would have had.
    ended: Mutex<HashMap<String, i64>>,
}

impl Signer {
    /// With the configured key, which all instances share; without one, with a key that ends with the process.
    pub fn new(key: Option<&[u8]>) -> postrider::Result<Self> {
        let key = match key {
            Some(key) => hmac::Key::new(hmac::HMAC_SHA256, key),
            None => hmac::Key::new(hmac::HMAC_SHA256, &random::<32>()?),
        };
        Ok(Self { key, ended: Mutex::default() })
    }

    /// The cookie's value.
    pub fn seal(&self, token: &Token, session: &Session) -> String {
        format!("{session}.{}", self.sign(token, "session", session))
    }

    /// The session of a cookie, if it is one that has not ended, of a token that there still is.
    pub fn open<'a>(&self, cookie: &str, tokens: &'a [Token], now: DateTime<Utc>) -> Option<(&'a Token, Session)> {
        let (body, signature) = cookie.rsplit_once('.')?;
        let (name, rest) = body.split_once('.')?;
        let (until, id) = rest.split_once('.')?;
        let session = Session { name: name.to_owned(), until: until.parse().ok()?, id: id.to_owned() };
        let token = tokens.iter().find(|token| token.name == name)?;
        let is_ours = is_same(self.sign(token, "session", &session).as_bytes(), signature.as_bytes());
        // What was parsed must be what was signed, digit by digit.
        (is_ours && session.to_string() == body && self.is_live(&session, now)).then_some((token, session))
    }

    /// Whether it has neither ended nor been logged out.
    pub fn is_live(&self, session: &Session, now: DateTime<Utc>) -> bool {
        session.until > now.timestamp() && !self.lock().contains_key(&session.id)
    }

    /// Logs a session out, in this process; another one learns of it by the cookie that is gone. When there are too many
    /// to remember, the one that ends first is forgotten.
    pub fn end(&self, session: &Session, now: DateTime<Utc>) {
        let mut ended = self.lock();
        ended.retain(|_, until| *until > now.timestamp());
        if ended.len() >= ENDED_MAX {
            let first = ended.iter().min_by_key(|(_, until)| **until).map(|(id, _)| id.clone());
            first.map(|id| ended.remove(&id));
        }
        ended.insert(session.id.clone(), session.until);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, i64>> {
        // Nothing panics while it is held, so a poisoned lock still guards a whole value.
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a page must say with everything that it changes; a page of another site cannot know it.
    pub fn csrf(&self, token: &Token, session: &Session) -> String {
        self.sign(token, "csrf", session)
    }

    /// Whether it said that.
    pub fn is_csrf(&self, token: &Token, session: &Session, said: &[u8]) -> bool {
        is_same(self.csrf(token, session).as_bytes(), said)
    }

    fn sign(&self, token: &Token, purpose: &str, session: &Session) -> String {
        let key = hmac::sign(&self.key, token.hash.bytes());
        let key = hmac::Key::new(hmac::HMAC_SHA256, key.as_ref());
        hex(hmac::sign(&key, format!("postrider {purpose} {session}").as_bytes()).as_ref())
    }
}

fn is_same(one: &[u8], other: &[u8]) -> bool {
    constant_time::verify_slices_are_equal(one, other).is_ok()
}

/// The value of our cookie, if the request has it.
pub(super) fn cookie(headers: &HeaderMap) -> Option<&str> {
    let pairs = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut pairs = pairs.flat_map(|value| value.split(';')).filter_map(|pair| pair.trim().split_once('='));
    let (_, value) = pairs.find(|(name, _)| *name == COOKIE)?;
    (value.len() <= COOKIE_BYTES_MAX).then_some(value)
}

/// The header that sets our cookie.
pub(super) fn set_cookie(value: &str, secs: u64, is_secure: bool) -> String {
    let secure = if is_secure { "; Secure" } else { "" };
    format!("{COOKIE}={value}; Path=/; Max-Age={secs}; HttpOnly; SameSite=Strict{secure}")
}
