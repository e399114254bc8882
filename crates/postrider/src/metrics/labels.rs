//! Labels that may come from data: their number is bounded, every further one is counted as `other`.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use crate::pulse::OTHER;

/// More series than this cost the metrics server more than they tell anyone.
const LABELS_MAX: usize = 100;

/// One set for the process, because everything writes to the same metrics.
pub(crate) struct Labels {
    known: Mutex<BTreeSet<String>>,
}

/// The HTTP client's destinations.
#[cfg(feature = "http")]
pub(crate) static DESTINATIONS: Labels = Labels::new();
/// The topics of events that were applied.
pub(crate) static TOPICS: Labels = Labels::new();
/// The types of errors of consumers; endpoints may answer with any status.
pub(crate) static ERROR_TYPES: Labels = Labels::new();

impl Labels {
    pub const fn new() -> Self {
        Self { known: Mutex::new(BTreeSet::new()) }
    }

    /// The label of a name. The first ones keep theirs for the life of the process.
    pub fn of(&self, name: &str) -> String {
        // A set is whole between two calls, so a poisoned lock still guards a usable one.
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if !known.contains(name) {
            if known.len() >= LABELS_MAX {
                return OTHER.to_owned();
            }
            known.insert(name.to_owned());
        }
        name.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_beyond_the_bound_are_counted_as_other() {
        let labels = Labels::new();
        for number in 0..LABELS_MAX {
            assert_eq!(labels.of(&format!("h{number}:80")), format!("h{number}:80"));
        }
        assert_eq!(labels.of("late:80"), "other");
        assert_eq!(labels.of("h0:80"), "h0:80", "who has a label keeps it");
        assert_eq!(labels.known.lock().unwrap().len(), LABELS_MAX);
    }
}
