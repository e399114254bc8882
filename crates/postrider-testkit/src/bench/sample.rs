//! What processes cost while something happens.

use std::time::Duration;

use tokio::task::JoinHandle;

use super::bed::Bed;
use super::relay::Relay;
use crate::testbed::{Result, rss_bytes};

/// How often memory is looked at.
const EVERY: Duration = Duration::from_millis(50);

/// A measurement that has begun.
pub(super) struct Sampling<'a> {
    bed: &'a Bed,
    relay: &'a Relay,
    relay_cpu: Duration,
    postgres_cpu: Duration,
    peak: JoinHandle<u64>,
    stop: tokio::sync::oneshot::Sender<()>,
}

/// What it found.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cost {
    /// CPU time of the relay, in seconds.
    pub relay_s: f64,
    /// CPU time of all processes of PostgreSQL, in seconds.
    pub postgres_s: f64,
    /// The most resident memory that the relay had.
    pub rss_bytes: u64,
}

impl<'a> Sampling<'a> {
    /// Begins.
    pub fn start(bed: &'a Bed, relay: &'a Relay) -> Result<Self> {
        let (stop, mut stopped) = tokio::sync::oneshot::channel();
        let pid = relay.pid();
        let peak = tokio::spawn(async move {
            let mut peak = 0;
            loop {
                peak = peak.max(rss_bytes(pid).unwrap_or_default());
                if tokio::time::timeout(EVERY, &mut stopped).await.is_ok() {
                    return peak;
                }
            }
        });
        Ok(Self { bed, relay, relay_cpu: relay.cpu()?, postgres_cpu: bed.postgres.cpu()?, peak, stop })
    }

    /// Ends.
    pub async fn stop(self) -> Result<Cost> {
        let relay = self.relay.cpu()?.saturating_sub(self.relay_cpu);
        let postgres = self.bed.postgres.cpu()?.saturating_sub(self.postgres_cpu);
        // Nobody listens only when the task has ended already.
        let _ = self.stop.send(());
        let rss_bytes = self.peak.await?;
        Ok(Cost { relay_s: relay.as_secs_f64(), postgres_s: postgres.as_secs_f64(), rss_bytes })
    }
}
