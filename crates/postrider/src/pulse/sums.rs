//! Counts as a store adds them up.

use std::collections::BTreeMap;

use super::Count;

/// A label is cut to this, so that a handler that writes ids into its error types cannot fill the store.
const LABEL_BYTES_MAX: usize = 200;
/// No instance counts more within seconds; sums of it stay far below what a column holds.
const COUNT_MAX: u64 = 1_000_000_000_000_000;

/// A row for each metric and label, in their order: two instances that add to the same buckets lock them in the same order.
/// Nothing that a text column could refuse is left in a label.
pub(crate) fn sums(counts: &[Count]) -> Vec<(&'static str, String, i64)> {
    let mut sums: BTreeMap<(&'static str, String), u64> = BTreeMap::new();
    for count in counts.iter().filter(|count| count.count > 0) {
        let sum = sums.entry((count.metric.as_str(), label(&count.label))).or_default();
        *sum = sum.saturating_add(count.count);
    }
    sums.into_iter().map(|((metric, label), sum)| (metric, label, sum.min(COUNT_MAX) as i64)).collect()
}

fn label(text: &str) -> String {
    let mut end = text.len().min(LABEL_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].replace('\0', " ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pulse::Metric;

    #[test]
    fn labels_that_are_the_same_when_cut_are_added_and_all_are_sorted() {
        let count = |metric, label: &str, count| Count { metric, label: label.to_owned(), count };
        let long = "é".repeat(150);
        let counts = [
            count(Metric::Failed, "b", 1),
            count(Metric::Applied, "", 0),
            count(Metric::Failed, &format!("{long}1"), 2),
            count(Metric::Failed, &format!("{long}2"), 3),
            count(Metric::Failed, "a\0", 4),
            count(Metric::Dead, "", u64::MAX),
        ];
        let cut = "é".repeat(100);
        assert_eq!(
            sums(&counts),
            [
                ("dead", String::new(), COUNT_MAX as i64),
                ("failed", "a ".to_owned(), 4),
                ("failed", "b".to_owned(), 1),
                ("failed", cut, 5)
            ]
        );
    }
}
