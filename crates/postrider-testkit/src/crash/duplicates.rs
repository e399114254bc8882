//! Publishes events once more that were applied before, as a broker or a relay may after a crash.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::fleet::Places;
use super::producer::event;
use super::store::Ledger;
use super::{Options, broker, store};
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

/// Begins, if there is something to do. What was applied was published before, so that a copy of it overtakes nothing.
pub(super) async fn start(
    options: &Options,
    places: &Places,
    ledger: Arc<dyn Ledger>,
    stop: CancellationToken,
) -> Result<Option<Duplicating>> {
    let one_in = options.duplicate_in;
    if one_in == 0 {
        return Ok(None);
    }
    let store = store::open(options.store, &places.store).await?;
    let broker = broker::client(options.broker, &places.broker, store)?;
    let stopped = stop.clone();
    let mut rng = fastrand::Rng::with_seed(options.seed ^ 1);
    let task = tokio::spawn(async move {
        let (mut last, mut published) = (0, 0);
        while !stopped.is_cancelled() {
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
    Ok(Some(Duplicating { stop, task }))
}
