//! What `postrider run` does in the background beside relaying: upkeep, the backlog as metrics, a look at the store.
//!
//! Each duty is a `run_once` that reports, and [`every`] is the one loop around it.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

mod backlog;
mod claims;
mod histograms;
mod probe;
mod standing;
mod upkeep;
mod witness;

pub use backlog::{BacklogDuty, Outbox};
pub use claims::ClaimsDuty;
pub use histograms::HistogramsDuty;
pub use probe::ProbeDuty;
pub use standing::StandingDuty;
pub use upkeep::UpkeepDuty;
pub use witness::{WitnessDuty, WitnessFile};

/// Something that is done again and again. Its errors are its own to report: nothing here ends the process.
pub trait Duty: Send + 'static {
    /// How long to wait between two times.
    const EVERY: Duration;

    /// Does it once. Runs to its end even while the process stops, because database calls are never dropped half-way.
    fn run_once(&mut self) -> impl Future<Output = ()> + Send;
}

/// Does it at once, and then again and again until `stop`.
pub async fn every<D: Duty>(mut duty: D, stop: CancellationToken) {
    while !stop.is_cancelled() {
        duty.run_once().await;
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(D::EVERY) => {}
        }
    }
}
