//! What the figures were measured on.

use std::time::Duration;

use super::bed::Bed;
use crate::testbed::{Result, machine_cpu, stolen_cpu};

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

/// How much of its CPU time the machine does not get: a host that gives it to others makes figures worse, and ratios less so.
pub(super) struct Stolen {
    used: Duration,
    stolen: Duration,
}

impl Stolen {
    pub(super) fn start() -> Result<Self> {
        Ok(Self { used: machine_cpu()?, stolen: stolen_cpu()? })
    }

    /// Since the start.
    pub(super) fn percent(&self) -> Result<f64> {
        let stolen = stolen_cpu()?.saturating_sub(self.stolen).as_secs_f64();
        let used = machine_cpu()?.saturating_sub(self.used).as_secs_f64();
        Ok(stolen / (used + stolen).max(f64::EPSILON) * 100.0)
    }
}

fn field(file: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}
