//! What a relay counts.

use std::sync::Arc;

use metrics::{counter, gauge};

use crate::error::Kind;
use crate::pulse::{Metric, Tally};
use crate::source::ParkedState;

/// Counts for one destination, or one adopted table: in the metrics of this process, and for the pulse.
#[derive(Clone)]
pub(crate) struct RelayMeter {
    destination: String,
    tally: Arc<Tally>,
}

impl RelayMeter {
    pub fn new(destination: &str) -> Self {
        let meter = Self { destination: destination.to_owned(), tally: Arc::new(Tally::new()) };
        // A counter that begins with its first event hides it: an increase is seen only from one scrape to the next.
        meter.published(0);
        meter
    }

    /// What goes out with the pulse.
    pub fn tally(&self) -> Arc<Tally> {
        self.tally.clone()
    }

    fn destination(&self) -> String {
        self.destination.clone()
    }

    /// Once for a batch, not for each event.
    pub fn published(&self, count: u64) {
        counter!("postrider_published_total", "destination" => self.destination()).increment(count);
        self.tally.add(Metric::Published, "", count);
    }

    pub fn publish_failed(&self, kind: Kind) {
        counter!("postrider_publish_failed_total", "destination" => self.destination(), "kind" => kind.as_str())
            .increment(1);
        self.tally.add(Metric::PublishFailed, kind.as_str(), 1);
    }

    /// An attempt failed and its event was set aside; for good, if a person must decide.
    pub fn parked(&self, state: ParkedState, kind: &str) {
        counter!("postrider_parked_total", "destination" => self.destination(), "state" => state.as_str()).increment(1);
        if state == ParkedState::Failed {
            self.tally.add(Metric::Dead, kind, 1);
        }
    }

    pub fn lanes_held(&self, change: f64) {
        gauge!("postrider_lanes_held", "destination" => self.destination()).increment(change);
    }
}
