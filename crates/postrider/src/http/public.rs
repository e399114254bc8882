//! Only public addresses: a request whose target somebody else may choose must not reach what only we can reach.
//!
//! Names are looked up here, and the connection goes to the addresses that were judged, so that a name cannot lead to one
//! address when it is judged and to another when it is used. A URL with an address in it is judged as it stands; the URL
//! parser has already turned odd notations (`2130706433`, `0x7f.1`, `017700000001`) into plain ones.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::{ClientBuilder, Url};

use crate::error::{Error, Kind, Result};

/// A builder for [`super::HttpClient::with_builder`] that looks names up and refuses those with an address that is not
/// public. URLs must pass [`check_public`] too.
pub fn public_only() -> ClientBuilder {
    reqwest::Client::builder().no_proxy().dns_resolver(Arc::new(PublicOnly))
}

/// An error when the URL leads to an address that is not public, as far as that can be said without looking names up.
pub fn check_public(url: &str) -> Result<()> {
    // The parser's error may hold credentials, so it is not kept.
    let unreadable = || Error::new(Kind::Config, "the URL cannot be read").with_remedy("write https://host:port/path");
    let url = Url::parse(url).map_err(|_| unreadable())?;
    let host = url.host_str().ok_or_else(unreadable)?.trim_end_matches('.');
    let plain = host.trim_start_matches('[').trim_end_matches(']');
    match plain.parse() {
        Ok(address) if !is_public(address) => Err(refused(host)),
        Ok(_) => Ok(()),
        // Every resolver knows these without asking; a public name never ends like this.
        Err(_) if host == "localhost" || host.ends_with(".localhost") => Err(refused(host)),
        Err(_) => Ok(()),
    }
}

fn refused(host: &str) -> Error {
    Error::new(Kind::Denied, format!("{host} is not a public address"))
        .with_remedy("name a public host; if it is meant, allow private addresses for this target")
}

struct PublicOnly;

impl Resolve for PublicOnly {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let host = name.as_str().to_owned();
            let addresses: Vec<SocketAddr> = tokio::net::lookup_host((host.as_str(), 0)).await?.collect();
            // One bad address is enough: whoever mixes them in hopes that it will be the one that is used.
            if addresses.iter().any(|address| !is_public(address.ip())) {
                return Err(refused(&host).into());
            }
            Ok(Box::new(addresses.into_iter()) as Addrs)
        })
    }
}

/// Whether everybody on the internet means the same host by this address.
pub fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let is_special = match (a, b, c) {
        // This network, private ones, loopback, link-local (metadata services), shared by carriers.
        (0 | 10 | 127, _, _) | (169, 254, _) | (192, 168, _) => true,
        (172, 16..=31, _) | (100, 64..=127, _) => true,
        // Protocol assignments, documentation, 6to4 relays, benchmarks.
        (192, 0, 0 | 2) | (192, 88, 99) | (198, 51, 100) | (203, 0, 113) | (198, 18 | 19, _) => true,
        // Multicast, reserved, broadcast.
        (224.., _, _) => true,
        _ => false,
    };
    // Azure's host, which answers its virtual machines alone.
    !is_special && address != Ipv4Addr::new(168, 63, 129, 16)
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let [a, b, ..] = address.segments();
    // Global unicast, without what is set aside in it: protocols and tunnels (2001::/23, with Teredo), documentation, 6to4.
    // Addresses of version 4 in other clothes (::ffff:0:0/96, 64:ff9b::/96) lie outside of it.
    (0x2000..=0x3fff).contains(&a)
        && !(a == 0x2001 && b < 0x0200)
        && !(a == 0x2001 && b == 0x0db8)
        && a != 0x2002
        && !(a == 0x3fff && b < 0x1000)
}

#[cfg(test)]
mod tests {
    use super::super::{HttpClient, HttpSettings, Request};
    use super::*;

    #[test]
    fn only_what_is_public_is_public() {
        let public = ["1.1.1.1", "8.8.8.8", "172.15.0.1", "172.32.0.1", "100.63.0.1", "192.0.1.1", "223.255.255.255"];
        for address in public.into_iter().chain(["2606:4700::1111", "2a00:1450:4001:812::200e", "2001:4860:4860::8888"])
        {
            assert!(is_public(address.parse().unwrap()), "{address}");
        }
        let private = [
            "0.0.0.0",
            "10.1.2.3",
            "127.0.0.1",
            "127.255.0.1",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "100.64.0.1",
            "100.100.100.200",
            "192.0.0.192",
            "192.0.2.1",
            "198.18.0.1",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "168.63.129.16",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:8.8.8.8",
            "::127.0.0.1",
            "64:ff9b::7f00:1",
            "fe80::1",
            "fec0::1",
            "fc00::1",
            "fd00:ec2::254",
            "ff02::1",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "3fff:1::1",
        ];
        for address in private {
            assert!(!is_public(address.parse().unwrap()), "{address}");
        }
    }

    #[test]
    fn addresses_in_any_notation_are_judged() {
        let private = [
            "http://127.0.0.1/hook",
            "http://127.1/",
            "http://2130706433/",
            "http://0x7f000001/",
            "http://0x7f.1/",
            "http://0177.0.0.1/",
            "http://017700000001/",
            "http://%31%32%37.0.0.1/",
            "http://①②⑦.0.0.1/",
            "http://user:s3cret@127.0.0.1/",
            "http://[::1]/",
            "http://[::ffff:127.0.0.1]/",
            "http://[::ffff:7f00:1]/",
            "http://[0:0:0:0:0:ffff:a9fe:a9fe]/",
            "http://169.254.169.254/latest/meta-data",
            "http://localhost/",
            "http://LOCALHOST./",
            "http://a.localhost:8080/",
        ];
        for url in private {
            let error = check_public(url).unwrap_err();
            assert_eq!(error.kind(), Kind::Denied, "{url}");
            assert!(!format!("{error:?}").contains("s3cret"), "{url}");
        }
        for url in ["https://hooks.example/x", "https://8.8.8.8/", "https://[2606:4700::1111]/"] {
            check_public(url).unwrap();
        }
        assert_eq!(check_public("no address").unwrap_err().kind(), Kind::Config);
    }

    /// A name that every machine resolves to itself.
    #[tokio::test]
    async fn a_name_that_leads_home_is_refused_before_anything_connects() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let client = HttpClient::with_builder(HttpSettings::default(), public_only()).unwrap();
        let error = client.send_once(&Request::get(&format!("http://localhost:{port}/")).unwrap()).await.unwrap_err();
        assert!(format!("{error:?} {:?}", error.causes()).contains("not a public address"), "{error:?}");
        let nobody = tokio::time::timeout(std::time::Duration::from_millis(50), listener.accept()).await;
        assert!(nobody.is_err(), "something connected");
    }
}
