//! Publishes events once more that were applied before, as a broker or a relay may after a crash.

use std::sync::Arc;
use std::time::Duration;

use postrider::broker::Broker;
use postrider::broker::rabbitmq::{RabbitMq, RabbitMqSettings};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::Options;
use super::fleet::Places;
use super::ledger::Ledger;
use super::producer::event;
use crate::testbed::Result;

/// How often newly applied events are looked at.
const EVERY: Duration = Duration::from_millis(200);
/// At most so many at once.
const LIMIT: i64 = 1000;

pub(super) struct Duplicating {
    stop: CancellationToken,
    task: JoinHandle<u64>,
}

impl Duplicating {
    /// Ends it, and says how many events were published once more.
    pub async fn stop(self) -> u64 {
        self.stop.cancel();
        self.task.await.unwrap_or_default()
    }
}

/// Begins. What was applied was published before, so that a copy of it overtakes nothing.
pub(super) fn start(
    options: &Options,
    places: &Places,
    ledger: &Ledger,
    stop: CancellationToken,
) -> Result<Duplicating> {
    let broker = RabbitMq::new(RabbitMqSettings::new(places.rabbit.as_str()))?;
    let (ledger, stopped, one_in) = (ledger.clone(), stop.clone(), options.duplicate_in);
    let mut rng = fastrand::Rng::with_seed(options.seed ^ 1);
    let task = tokio::spawn(async move {
        let (mut last, mut published) = (0, 0);
        while one_in > 0 && !stopped.is_cancelled() {
            tokio::time::sleep(EVERY).await;
            // A database or broker that is away now is there later.
            let Ok(applied) = ledger.applied_after(last, LIMIT).await else { continue };
            let mut batch = Vec::new();
            for (seq, id, key, version) in applied {
                last = seq;
                if rng.u32(..one_in) == 0
                    && let Ok(event) = event(id, &key, version, false)
                {
                    batch.push(Arc::new(event));
                }
            }
            published += broker.publish(&batch).await.iter().filter(|result| result.is_ok()).count() as u64;
        }
        published
    });
    Ok(Duplicating { stop, task })
}
