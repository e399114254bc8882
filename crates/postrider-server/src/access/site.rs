//! Pages of other sites, in the browser of somebody who may do what they may not.

use std::net::IpAddr;

use axum::http::{HeaderMap, header};

use super::Refusal;

/// What proxies add to a request.
const PROXY: [&str; 6] = ["forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via"];

/// Refuses what a proxy passes on from who knows where, what a browser sends for a page of another site, and what comes
/// through a name that is not this machine's: such a name may have been given our address to get around the browser's
/// rules.
pub(super) fn require_local(headers: &HeaderMap) -> Result<(), Refusal> {
    if let Some(name) = PROXY.into_iter().find(|name| headers.contains_key(*name)) {
        return Err(Refusal::Proxied(name));
    }
    let origin = text(headers, header::ORIGIN.as_str());
    // A proxy that hides itself and gives us another name still leaves the browser's word of where its page is from.
    if !origin.is_empty() && !is_local(authority(origin)) {
        return Err(Refusal::OtherSite(shorten(origin)));
    }
    let host = text(headers, header::HOST.as_str());
    if !is_local(host) {
        return Err(Refusal::Host(shorten(host)));
    }
    require_same(headers)
}

/// Refuses what a browser sends for a page of another site. Programs that are no browsers say nothing of it.
pub(super) fn require_same(headers: &HeaderMap) -> Result<(), Refusal> {
    let site = text(headers, "sec-fetch-site");
    if !matches!(site, "" | "same-origin" | "none") {
        return Err(Refusal::OtherSite(shorten(site)));
    }
    let origin = text(headers, header::ORIGIN.as_str());
    // A proxy may have put its own name for us into Host; then the browser's word above is all there is.
    if origin.is_empty() || site == "same-origin" || authority(origin).eq_ignore_ascii_case(text(headers, "host")) {
        return Ok(());
    }
    Err(Refusal::OtherSite(shorten(origin)))
}

fn authority(origin: &str) -> &str {
    origin.split_once("://").map_or(origin, |(_, authority)| authority)
}

/// What is no text is shown as what it is not: none of the texts that are allowed.
fn text<'a>(headers: &'a HeaderMap, name: &str) -> &'a str {
    headers.get(name).map_or("", |value| value.to_str().unwrap_or("?"))
}

fn is_local(host: &str) -> bool {
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((name, _)) => name,
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    let is_loopback = |address: IpAddr| address.to_canonical().is_loopback();
    name.eq_ignore_ascii_case("localhost") || name.parse().is_ok_and(is_loopback)
}

/// Enough of it to recognise it.
fn shorten(text: &str) -> String {
    text.chars().take(100).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn this_machine_has_few_names() {
        for host in ["localhost", "LOCALHOST:7070", "127.0.0.1:7070", "127.1.2.3", "[::1]:7070", "[::1]"] {
            assert!(is_local(host), "{host}");
        }
        for host in
            ["", "evil.example", "localhost.evil.example:7070", "10.0.0.1:7070", "127.0.0.1.nip.io", "[::2]", "?"]
        {
            assert!(!is_local(host), "{host}");
        }
    }

    #[test]
    fn another_site_is_refused() {
        let local = ("host", "localhost:7070");
        for good in [
            vec![local],
            vec![local, ("sec-fetch-site", "none")],
            vec![local, ("sec-fetch-site", "same-origin"), ("origin", "http://localhost:7070")],
            vec![local, ("origin", "http://LocalHost:7070")],
        ] {
            assert!(require_local(&headers(&good)).is_ok(), "{good:?}");
        }
        for bad in [
            vec![],
            vec![("host", "evil.example:7070")],
            vec![local, ("sec-fetch-site", "cross-site")],
            vec![local, ("sec-fetch-site", "same-site")],
            vec![local, ("origin", "null")],
            vec![local, ("origin", "https://evil.example")],
            vec![local, ("origin", "http://localhost:3000")],
            vec![local, ("origin", "https://postrider.example"), ("sec-fetch-site", "same-origin")],
            vec![local, ("forwarded", "for=203.0.113.9")],
            vec![local, ("x-forwarded-for", "203.0.113.9")],
            vec![local, ("x-forwarded-host", "localhost:7070")],
            vec![local, ("x-forwarded-proto", "http")],
            vec![local, ("x-real-ip", "127.0.0.1")],
            vec![local, ("via", "1.1 proxy")],
        ] {
            assert!(require_local(&headers(&bad)).is_err(), "{bad:?}");
        }
    }
}
