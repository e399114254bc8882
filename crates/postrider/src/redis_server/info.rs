//! What Redis says of itself.

use super::Link;
use crate::doctor::Finding;
use crate::error::{Error, Kind, Result};

/// The answer to `INFO`, one command that every Redis and most hosted ones allow, unlike `CONFIG`.
pub(crate) struct Info(String);

impl Info {
    /// None when the user may not ask.
    pub async fn read(link: &Link) -> Result<Option<Self>> {
        let info = link.call(async |connection| redis::cmd("INFO").query_async(connection).await).await;
        match info {
            Ok(text) => Self(text).ready(&link.shown).map(Some),
            Err(error) if error.kind() == Kind::Denied => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// While Redis loads its file after a start, it says that it has none.
    fn ready(self, shown: &str) -> Result<Self> {
        match self.value("loading") {
            Some("1") => {
                Err(Error::new(Kind::Unavailable, format!("Redis at {shown} is not ready: it loads its data")))
            }
            _ => Ok(self),
        }
    }

    #[cfg(test)]
    pub fn of(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// The value of a field.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    }

    /// What happens when memory is full.
    pub fn eviction(&self) -> &str {
        self.value("maxmemory_policy").unwrap_or("unknown")
    }

    /// Whether memory can be full at all.
    pub fn has_memory_limit(&self) -> bool {
        self.value("maxmemory").is_none_or(|bytes| bytes != "0")
    }

    /// Whether every write goes to a file.
    pub fn has_append_only_file(&self) -> bool {
        self.value("aof_enabled") == Some("1")
    }

    /// Version and role. What is older than `major_min` lacks something that we use.
    pub fn basics(&self, major_min: u32) -> Vec<Finding> {
        let mut findings = Vec::new();
        let version = self.value("redis_version").unwrap_or("unknown");
        let major = version.split('.').next().and_then(|major| major.parse().ok()).unwrap_or(0u32);
        findings.push(if major >= major_min {
            Finding::ok("redis.version", version)
        } else {
            Finding::error("redis.version", format!("{version} is too old"), format!("use Redis {major_min} or newer"))
        });
        if self.value("role") == Some("slave") {
            let found = "a replica, which accepts no writes";
            findings.push(Finding::error("redis.writable", found, "connect to the primary"));
        }
        findings
    }
}
