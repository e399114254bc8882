//! What could make Redis forget what was done.

use crate::doctor::Finding;
use crate::error::Result;
use crate::redis_server::{Info, Link};

/// The first version that redis-rs and our scripts are meant for.
const MAJOR_MIN: u32 = 6;

pub(super) async fn inspect(link: &Link) -> Result<Vec<Finding>> {
    let Some(info) = Info::read(link).await? else {
        return Ok(vec![Finding::warning(
            "redis.settings",
            format!("Redis at {} does not let this user ask: eviction and persistence are unknown", link.shown),
            "allow INFO to the user (ACL: +info), or look at maxmemory-policy and appendonly by other means",
        )]);
    };
    let mut findings = vec![Finding::ok("redis.connection", format!("connected to {}", link.shown))];
    findings.extend(settings(&info));
    if link.is_plaintext_over_network() {
        findings.push(Finding::warning(
            "redis.tls",
            "the password travels unencrypted",
            "use rediss:// and Redis's TLS port",
        ));
    }
    Ok(findings)
}

fn settings(info: &Info) -> Vec<Finding> {
    let mut findings = info.basics(MAJOR_MIN);
    let policy = info.eviction();
    let remedy = "set maxmemory-policy noeviction in redis.conf, or use another Redis than the cache";
    findings.push(match policy {
        "noeviction" => Finding::ok("redis.eviction", policy),
        _ if info.has_memory_limit() => Finding::error(
            "redis.eviction",
            format!("{policy}: when memory is full, Redis forgets what was done and effects happen twice"),
            remedy,
        ),
        _ => Finding::warning("redis.eviction", format!("{policy}, without effect while maxmemory is 0"), remedy),
    });

    findings.push(if info.has_append_only_file() {
        Finding::ok("redis.persistence", "appendonly")
    } else {
        Finding::warning(
            "redis.persistence",
            "appendonly is off: a restart forgets what was done since the last snapshot, and effects happen twice",
            "set appendonly yes in redis.conf",
        )
    });
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Severity::{self, Error, Ok, Warning};

    fn severities(info: &str) -> Vec<(String, Severity)> {
        settings(&Info::of(info)).into_iter().map(|finding| (finding.check, finding.severity)).collect()
    }

    fn named(expected: &[(&str, Severity)]) -> Vec<(String, Severity)> {
        expected.iter().map(|(check, severity)| (format!("redis.{check}"), *severity)).collect()
    }

    #[test]
    fn what_loses_keys_is_found() {
        let good =
            "redis_version:7.0.15\r\nmaxmemory:100\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\nrole:master\r\n";
        assert_eq!(severities(good), named(&[("version", Ok), ("eviction", Ok), ("persistence", Ok)]));
        let evicting = good.replace("noeviction", "volatile-ttl");
        assert_eq!(severities(&evicting)[1].1, Error);
        assert_eq!(severities(&evicting.replace("maxmemory:100", "maxmemory:0"))[1].1, Warning);
        let bad =
            "redis_version:5.0.1\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\naof_enabled:0\r\nrole:slave\r\n";
        assert_eq!(
            severities(bad),
            named(&[("version", Error), ("writable", Error), ("eviction", Ok), ("persistence", Warning)])
        );
        assert_eq!(severities("")[1].1, Error, "what is not known is not trusted");
    }
}
