//! Removes what is old and done by everybody: Redis keeps streams in memory.

use super::error::of_streams;
use super::script::Scripts;
use super::settings::RedisStreamSettings;
use crate::error::Result;
use crate::redis_server::Link;

/// Trims shards and returns how many entries are gone. Whole nodes of Redis's tree at a time, so some stay a little longer.
pub(super) async fn trim(
    link: &Link,
    scripts: &Scripts,
    settings: &RedisStreamSettings,
    shards: &[u32],
) -> Result<u64> {
    let retention = u64::try_from(settings.retention.as_millis()).unwrap_or(u64::MAX);
    let mut total = 0;
    for shard in shards {
        let mut script = scripts.trim.key(settings.stream(*shard));
        script.arg(retention);
        let trimmed: u64 =
            link.call(async |connection| script.invoke_async(connection).await).await.map_err(of_streams)?;
        total += trimmed;
    }
    tracing::debug!(total, "trimmed what every consumer has done");
    Ok(total)
}
