//! Planted bugs: the mistakes that outboxes in the wild make, each behind our own traits.
//!
//! A suite that passes on a planted bug proves nothing. `tests/planted.rs` runs the suites on each of these and demands
//! that they fail, each time.

mod broker;
mod inbox;
mod source;

pub use broker::{BrokerBug, PlantedBroker};
pub use inbox::InboxFirst;
pub use source::{PlantedSource, SourceBug};

/// Whether a suite panics on a planted bug, in each of several runs.
pub async fn is_caught<F: Future<Output = ()> + Send + 'static>(runs: usize, mut suite: impl FnMut() -> F) -> bool {
    for _ in 0..runs {
        match tokio::spawn(suite()).await {
            Err(error) if error.is_panic() => {}
            Err(_) | Ok(()) => return false,
        }
    }
    true
}
