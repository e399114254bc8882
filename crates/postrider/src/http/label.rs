//! The names of destinations in metrics. Destinations come from URLs, possibly from data, so their number is bounded:
//! every further one is counted as `other`.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// More series than this cost the metrics server more than they tell anyone.
const LABELS_MAX: usize = 100;

const OTHER: &str = "other";

/// One set for the process, because all clients write to the same metrics.
static LABELS: Mutex<Labels> = Mutex::new(Labels { known: BTreeSet::new(), max: LABELS_MAX });

/// The label of a destination. The first ones keep theirs for the life of the process.
pub(super) fn of(destination: &str) -> String {
    // A set is whole between two calls, so a poisoned lock still guards a usable one.
    LABELS.lock().unwrap_or_else(PoisonError::into_inner).of(destination)
}

struct Labels {
    known: BTreeSet<String>,
    max: usize,
}

impl Labels {
    fn of(&mut self, destination: &str) -> String {
        if !self.known.contains(destination) {
            if self.known.len() >= self.max {
                return OTHER.to_owned();
            }
            self.known.insert(destination.to_owned());
        }
        destination.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_beyond_the_bound_are_counted_as_other() {
        let mut labels = Labels { known: BTreeSet::new(), max: LABELS_MAX };
        for number in 0..LABELS_MAX {
            assert_eq!(labels.of(&format!("h{number}:80")), format!("h{number}:80"));
        }
        assert_eq!(labels.of("late:80"), "other");
        assert_eq!(labels.of("h0:80"), "h0:80", "who has a label keeps it");
        assert_eq!(labels.known.len(), LABELS_MAX);
    }
}
