//! What could make Redis forget events.

use crate::doctor::Finding;
use crate::error::{Kind, Result};
use crate::redis_server::{Info, Link};

/// The first version whose scripts may run while memory is full.
const MAJOR_MIN: u32 = 7;

pub(super) async fn inspect(link: &Link) -> Result<Vec<Finding>> {
    let Some(info) = Info::read(link).await? else {
        return Ok(vec![Finding::warning(
            "redis.settings",
            format!("Redis at {} does not let this user ask: eviction and persistence are unknown", link.shown),
            "allow INFO to the user (ACL: +info), or look at maxmemory-policy and appendonly by other means",
        )]);
    };
    let fsync: Result<Vec<String>> = link
        .call(async |connection| redis::cmd("CONFIG").arg("GET").arg("appendfsync").query_async(connection).await)
        .await;
    let fsync = match fsync {
        Ok(pair) => pair.into_iter().nth(1),
        // Hosted ones do not know the command at all.
        Err(error) if error.kind() == Kind::Unavailable => return Err(error),
        Err(_) => None,
    };
    let mut findings = vec![Finding::ok("redis.connection", format!("connected to {}", link.shown))];
    findings.extend(settings(&info, fsync.as_deref()));
    if link.is_plaintext_over_network() {
        findings.push(Finding::warning(
            "redis.tls",
            "password and events travel unencrypted",
            "use rediss:// and Redis's TLS port",
        ));
    }
    Ok(findings)
}

fn settings(info: &Info, fsync: Option<&str>) -> Vec<Finding> {
    let mut findings = info.basics(MAJOR_MIN);
    let policy = info.eviction();
    let remedy = "set maxmemory-policy noeviction in redis.conf, or use another Redis than the cache";
    findings.push(match policy {
        "noeviction" => Finding::ok("redis.eviction", policy),
        // Streams have no time to live, so these spare them, and leave no room for them.
        _ if policy.starts_with("volatile-") => {
            Finding::warning("redis.eviction", format!("{policy}: keys with a time to live are dropped first"), remedy)
        }
        _ if info.has_memory_limit() => Finding::error(
            "redis.eviction",
            format!("{policy}: when memory is full, Redis drops events; nothing is published"),
            remedy,
        ),
        _ => Finding::warning("redis.eviction", format!("{policy}, without effect while maxmemory is 0"), remedy),
    });
    let remedy = "set appendonly yes and appendfsync always in redis.conf";
    findings.push(match (info.has_append_only_file(), fsync) {
        (false, _) => {
            Finding::error("redis.persistence", "appendonly is off: a restart loses events that were confirmed", remedy)
        }
        (true, Some("always")) => Finding::ok("redis.persistence", "appendonly, appendfsync always"),
        (true, Some("no")) => Finding::error(
            "redis.persistence",
            "appendfsync is no: a loss of power loses what the kernel has not written, though it was confirmed",
            remedy,
        ),
        (true, Some(fsync)) => Finding::warning(
            "redis.persistence",
            format!("appendfsync is {fsync}: a loss of power loses up to a second of events that were confirmed"),
            remedy,
        ),
        (true, None) => Finding::warning(
            "redis.persistence",
            "whether events are on disk when they are confirmed cannot be seen: CONFIG is not allowed",
            "make sure that appendfsync is always, or allow CONFIG GET to the user (ACL: +config|get)",
        ),
    });
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Severity::{self, Error, Ok, Warning};

    const GOOD: &str =
        "redis_version:7.0.15\r\nmaxmemory:100\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\nrole:master\r\n";

    fn severities(info: &str, fsync: Option<&str>) -> Vec<Severity> {
        settings(&Info::of(info), fsync).into_iter().map(|finding| finding.severity).collect()
    }

    #[test]
    fn what_loses_events_is_found() {
        assert_eq!(severities(GOOD, Some("always")), [Ok, Ok, Ok]);
        assert_eq!(severities(GOOD, Some("everysec"))[2], Warning);
        assert_eq!(severities(GOOD, Some("no"))[2], Error);
        assert_eq!(severities(GOOD, None)[2], Warning);
        assert_eq!(severities(&GOOD.replace("aof_enabled:1", "aof_enabled:0"), Some("always"))[2], Error);
        assert_eq!(severities(&GOOD.replace("7.0.15", "6.2.1"), Some("always"))[0], Error);
        let evicting = GOOD.replace("noeviction", "allkeys-lru");
        assert_eq!(severities(&evicting, Some("always"))[1], Error);
        assert_eq!(severities(&evicting.replace("maxmemory:100", "maxmemory:0"), Some("always"))[1], Warning);
        assert_eq!(severities(&GOOD.replace("noeviction", "volatile-ttl"), Some("always"))[1], Warning);
    }
}
