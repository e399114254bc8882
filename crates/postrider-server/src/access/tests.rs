//! Who is let in, and who is not.

use std::time::Duration;

use chrono::TimeDelta;

use super::*;
use crate::config::Hidden;

const LOOPBACK: &str = "127.0.0.1:7070";
const OPEN: &str = "0.0.0.0:7070";

/// Access with an operator `ops`, a viewer `eye` and a producer `shop`, whose tokens are their names.
fn with_tokens(listen: &str) -> Access {
    let token = |name: &str, role| Token { name: name.to_owned(), role, hash: Hash::of(name) };
    access(listen, vec![token("ops", Role::Operator), token("eye", Role::Viewer), token("shop", Role::Producer)])
}

fn access(listen: &str, tokens: Vec<Token>) -> Access {
    let mut config = crate::config::defaults();
    config.http.listen = listen.parse().unwrap();
    config.http.session_key = Some(Hidden::new("0123456789abcdef0123456789abcdef"));
    config.tokens = tokens;
    Access::new(&config).unwrap()
}

fn headers(pairs: &[(&'static str, String)]) -> HeaderMap {
    pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
}

fn asked<'a>(method: &'a Method, headers: &'a HeaderMap) -> Asked<'a> {
    Asked { method, headers, peer: "192.0.2.7".parse().unwrap(), now: Utc::now(), at: Instant::now() }
}

/// Asks with these headers.
fn admit(access: &Access, method: Method, need: Need, pairs: &[(&'static str, String)]) -> Result<Caller, Refusal> {
    access.admit(need, &asked(&method, &headers(pairs)))
}

fn bearer_of(name: &str) -> Vec<(&'static str, String)> {
    vec![("authorization", format!("Bearer {name}"))]
}

/// Logs in, and returns the cookie's value and the CSRF token.
fn log_in(access: &Access, name: &str) -> (String, String) {
    let none = HeaderMap::new();
    let caller = access.log_in(name, &asked(&Method::POST, &none)).unwrap();
    let cookie = access.cookie(&caller, &none).unwrap().to_str().unwrap().to_owned();
    let value = cookie.split(';').next().unwrap().to_owned();
    (value, access.csrf(&caller).unwrap())
}

#[test]
fn without_tokens_loopback_is_for_this_machine() {
    let access = access(LOOPBACK, Vec::new());
    let caller = admit(&access, Method::POST, Need::Operator, &[("host", "localhost:7070".to_owned())]).unwrap();
    assert_eq!((caller.actor(), caller.role()), ("local", Role::Operator));
    assert!(access.csrf(&caller).is_none());
    let rebound = admit(&access, Method::GET, Need::Viewer, &[("host", "evil.example".to_owned())]);
    assert_eq!(rebound.unwrap_err(), Refusal::Host("evil.example".to_owned()));
    let page = [("host", "localhost:7070".to_owned()), ("origin", "https://evil.example".to_owned())];
    assert!(matches!(admit(&access, Method::POST, Need::Operator, &page), Err(Refusal::OtherSite(_))));
    let proxied = [("host", "localhost:7070".to_owned()), ("x-forwarded-for", "203.0.113.9".to_owned())];
    let refused = admit(&access, Method::GET, Need::Viewer, &proxied).unwrap_err();
    assert_eq!(refused, Refusal::Proxied("x-forwarded-for"));
    assert!(admit(&access, Method::GET, Need::Nothing, &[]).is_ok(), "health is for all");
}

#[test]
fn without_tokens_another_address_is_closed() {
    let access = access(OPEN, Vec::new());
    for need in [Need::Metrics, Need::Viewer, Need::Producer, Need::Operator] {
        let refused = admit(&access, Method::GET, need, &[("host", "localhost".to_owned())]).unwrap_err();
        assert_eq!(refused, Refusal::Locked(OPEN.parse().unwrap()));
    }
    assert!(admit(&access, Method::GET, Need::Nothing, &[]).is_ok());
    let none = HeaderMap::new();
    assert!(matches!(access.log_in("ops", &asked(&Method::POST, &none)), Err(Refusal::Locked(_))));
}

#[test]
fn a_token_is_a_role() {
    let access = with_tokens(LOOPBACK);
    let may = |name: &str, method, need| admit(&access, method, need, &bearer_of(name));
    assert_eq!(may("ops", Method::POST, Need::Operator).unwrap().actor(), "token:ops");
    assert!(may("eye", Method::GET, Need::Viewer).is_ok());
    assert!(matches!(may("eye", Method::POST, Need::Operator), Err(Refusal::Forbidden { .. })));
    assert!(may("shop", Method::POST, Need::Producer).is_ok());
    assert!(matches!(may("shop", Method::GET, Need::Viewer), Err(Refusal::Forbidden { .. })));
    assert_eq!(may("nobody", Method::GET, Need::Viewer).unwrap_err(), Refusal::Unknown);
    assert_eq!(may(&"x".repeat(10_000), Method::GET, Need::Viewer).unwrap_err(), Refusal::Unknown);
    assert_eq!(admit(&access, Method::GET, Need::Metrics, &[]).unwrap_err(), Refusal::NoToken);
    let basic = [("authorization", "Basic b3BzOm9wcw==".to_owned())];
    assert_eq!(admit(&access, Method::GET, Need::Viewer, &basic).unwrap_err(), Refusal::NotBearer);
}

#[test]
fn a_session_reads_with_its_cookie_and_writes_with_its_csrf_token() {
    let access = with_tokens(LOOPBACK);
    let (cookie, csrf) = log_in(&access, "ops");
    let with = |more: &[(&'static str, String)]| [&[("cookie", format!("a=b; {cookie}"))], more].concat();
    assert_eq!(admit(&access, Method::GET, Need::Viewer, &with(&[])).unwrap().name(), "ops");
    let write = |more: &[(&'static str, String)]| admit(&access, Method::POST, Need::Operator, &with(more));
    assert_eq!(write(&[]).unwrap_err(), Refusal::NoCsrf);
    assert_eq!(write(&[(CSRF_HEADER, "x".to_owned())]).unwrap_err(), Refusal::WrongCsrf);
    let other = log_in(&access, "ops").1;
    assert_eq!(write(&[(CSRF_HEADER, other)]).unwrap_err(), Refusal::WrongCsrf, "of another session");
    assert!(write(&[(CSRF_HEADER, csrf.clone())]).is_ok());
    let from = |site: &str| write(&[(CSRF_HEADER, csrf.clone()), ("sec-fetch-site", site.to_owned())]);
    assert!(from("same-origin").is_ok());
    assert!(matches!(from("same-site"), Err(Refusal::OtherSite(_))));
}

#[test]
fn forged_and_old_cookies_are_worth_nothing() {
    let access = with_tokens(LOOPBACK);
    let (cookie, _) = log_in(&access, "eye");
    let with = |cookie: &str| admit(&access, Method::GET, Need::Viewer, &[("cookie", cookie.to_owned())]);
    assert!(with(&cookie).is_ok());
    let value = cookie.strip_prefix("postrider_session=").unwrap();
    let parts: Vec<&str> = value.split('.').collect();
    let [name, until, id, signature] = parts.as_slice() else { panic!("{value}") };
    for forged in [
        format!("ops.{until}.{id}.{signature}"),
        format!("{name}.9999999999.{id}.{signature}"),
        format!("{name}.+{until}.{id}.{signature}"),
        format!("{name}.{until}.{id}x.{signature}"),
        format!("{name}.{until}.{id}."),
        format!("{name}.{until}.{id}.{}", "0".repeat(64)),
        format!("nobody.{until}.{id}.{signature}"),
        "x".repeat(400),
        "....".to_owned(),
    ] {
        assert_eq!(with(&format!("postrider_session={forged}")).unwrap_err(), Refusal::Stale, "{forged}");
    }
    let (headers, method) = (headers(&[("cookie", cookie.clone())]), Method::GET);
    let later = |hours| Asked { now: Utc::now() + TimeDelta::hours(hours), ..asked(&method, &headers) };
    assert!(access.admit(Need::Viewer, &later(11)).is_ok());
    assert_eq!(access.admit(Need::Viewer, &later(12)).unwrap_err(), Refusal::Stale);
}

#[test]
fn a_session_ends_with_its_token_and_has_the_role_that_it_has_now() {
    let (cookie, _) = log_in(&with_tokens(LOOPBACK), "ops");
    let ask = |access: &Access| admit(access, Method::GET, Need::Operator, &[("cookie", cookie.clone())]);
    assert!(ask(&with_tokens(LOOPBACK)).is_ok(), "another instance with the same session key");
    let one = |role, token: &str| vec![Token { name: "ops".to_owned(), role, hash: Hash::of(token) }];
    assert!(matches!(ask(&access(LOOPBACK, one(Role::Viewer, "ops"))), Err(Refusal::Forbidden { .. })));
    assert_eq!(ask(&access(LOOPBACK, one(Role::Operator, "new"))).unwrap_err(), Refusal::Stale);
    let mut config = crate::config::defaults();
    config.tokens = one(Role::Operator, "ops");
    assert_eq!(ask(&Access::new(&config).unwrap()).unwrap_err(), Refusal::Stale, "another session key");
}

#[test]
fn logged_out_is_logged_out() {
    let access = with_tokens(LOOPBACK);
    let (cookie, _) = log_in(&access, "eye");
    let ask = || admit(&access, Method::GET, Need::Viewer, &[("cookie", cookie.clone())]);
    let caller = ask().unwrap();
    assert!(access.is_live(&caller));
    access.log_out(&caller);
    assert!(!access.is_live(&caller));
    assert_eq!(ask().unwrap_err(), Refusal::Stale);
}

#[test]
fn wrong_tokens_are_slowed_down_and_right_ones_are_not() {
    let access = with_tokens(LOOPBACK);
    let (none, method) = (HeaderMap::new(), Method::POST);
    for _ in 0..20 {
        log_in(&access, "ops");
    }
    for _ in 0..5 {
        assert_eq!(access.log_in("guess", &asked(&method, &none)).unwrap_err(), Refusal::Unknown);
        assert_eq!(admit(&access, Method::GET, Need::Viewer, &bearer_of("guess")).unwrap_err(), Refusal::Unknown);
    }
    assert!(matches!(access.log_in("guess", &asked(&method, &none)), Err(Refusal::TooMany(_))));
    assert!(matches!(admit(&access, Method::GET, Need::Viewer, &bearer_of("guess")), Err(Refusal::TooMany(_))));
    assert!(access.log_in("ops", &asked(&method, &none)).is_ok(), "nobody is locked out by another's guesses");
    assert!(admit(&access, Method::GET, Need::Viewer, &bearer_of("ops")).is_ok(), "a program goes on");
    let later = Asked { at: Instant::now() + Duration::from_secs(61), ..asked(&method, &none) };
    assert_eq!(access.log_in("guess", &later).unwrap_err(), Refusal::Unknown);
}

#[test]
fn a_producer_has_no_use_for_a_session() {
    let access = with_tokens(LOOPBACK);
    let none = HeaderMap::new();
    let log_in = || access.log_in("shop", &asked(&Method::POST, &none)).unwrap_err();
    for _ in 0..10 {
        assert!(matches!(log_in(), Refusal::Forbidden { .. }));
    }
    assert!(matches!(log_in(), Refusal::TooMany(_)), "each is written down, so there is an end to them");
    assert!(admit(&access, Method::POST, Need::Producer, &bearer_of("shop")).is_ok());
}

#[test]
fn the_cookie_is_for_us_alone() {
    let cookie = |listen, pairs: &[(&'static str, String)]| {
        let access = with_tokens(listen);
        let caller = access.log_in("eye", &asked(&Method::POST, &HeaderMap::new())).unwrap();
        access.cookie(&caller, &headers(pairs)).unwrap().to_str().unwrap().to_owned()
    };
    let plain = cookie(LOOPBACK, &[]);
    for part in ["postrider_session=eye.", "; HttpOnly", "; SameSite=Strict", "; Path=/", "; Max-Age=43200"] {
        assert!(plain.contains(part), "{part} is missing in {plain}");
    }
    assert!(!plain.contains("Secure"));
    assert!(cookie(OPEN, &[]).ends_with("; Secure"));
    assert!(cookie(LOOPBACK, &[("x-forwarded-proto", "https".to_owned())]).ends_with("; Secure"));
}

#[test]
fn metrics_may_be_public() {
    let mut config = crate::config::defaults();
    config.tokens = vec![Token { name: "ops".to_owned(), role: Role::Operator, hash: Hash::of("ops") }];
    config.http.metrics_public = true;
    let access = Access::new(&config).unwrap();
    assert!(admit(&access, Method::GET, Need::Metrics, &[]).is_ok());
    assert_eq!(admit(&access, Method::GET, Need::Viewer, &[]).unwrap_err(), Refusal::NoToken);
}
