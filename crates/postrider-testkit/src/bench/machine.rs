//! What the figures were measured on.

use super::bed::Bed;
use crate::testbed::Result;

/// One line: processor, cores, memory, kernel, versions of the servers.
pub(super) async fn describe(bed: &Bed) -> Result<String> {
    let processor = field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown processor".to_owned());
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let kibibytes: f64 = field("/proc/meminfo", "MemTotal")
        .and_then(|text| text.split_whitespace().next()?.parse().ok())
        .unwrap_or_default();
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let postgres: String = sqlx::query_scalar("SHOW server_version").fetch_one(&mut bed.maintenance().await?).await?;
    let rabbit = bed.rabbit.ctl(&["version"]).await?;
    Ok(format!(
        "{cores} cores of {processor}, {:.0} GB, Linux {}, PostgreSQL {postgres}, RabbitMQ {}.",
        kibibytes / 1024.0 / 1024.0,
        kernel.trim(),
        rabbit.trim()
    ))
}

fn field(file: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}
