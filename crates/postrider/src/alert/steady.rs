//! Keeps alerts from flapping, and knows since when something is so.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::Condition;

/// A condition that ends is given for this long still. A breaker that probes, or a figure that wavers around its
/// threshold, is one alert and not ten.
pub const LINGER: Duration = Duration::from_secs(15);

/// Conditions with a memory.
#[derive(Debug, Default)]
pub struct Steady {
    known: HashMap<(String, String), (Condition, Instant)>,
}

impl Steady {
    /// Begins with the conditions of the alerts that are open in the store, as if they had held until now: an instance
    /// that takes over goes on where its predecessor was.
    pub fn new(open: Vec<Condition>, now: Instant) -> Self {
        let known = open.into_iter().map(|condition| (name(&condition), (condition, now)));
        Self { known: known.collect() }
    }

    /// Rule and subject of all that holds, or held a moment ago.
    pub fn open(&self) -> impl Iterator<Item = &(String, String)> {
        self.known.keys()
    }

    /// Takes what holds now, and returns it together with what held a moment ago.
    pub fn take(&mut self, holding: Vec<Condition>, now: Instant) -> Vec<Condition> {
        for condition in holding {
            self.known.insert(name(&condition), (condition, now));
        }
        self.known.retain(|_, (_, held)| now.saturating_duration_since(*held) < LINGER);
        let mut conditions: Vec<Condition> = self.known.values().map(|(condition, _)| condition.clone()).collect();
        conditions.sort_by_key(name);
        conditions
    }
}

fn name(condition: &Condition) -> (String, String) {
    (condition.rule.clone(), condition.subject.clone())
}

/// For how long things have been so at every look.
#[derive(Debug, Default)]
pub struct Since {
    first: HashMap<String, Instant>,
}

impl Since {
    /// One look: which are so now. Returns for how long each of them has been; whatever is not named begins anew.
    pub fn look(&mut self, now: Instant, are_so: impl IntoIterator<Item = String>) -> HashMap<String, Duration> {
        let mut first = HashMap::new();
        for name in are_so {
            let since = self.first.get(&name).copied().unwrap_or(now);
            first.insert(name, since);
        }
        self.first = first;
        let lengths = self.first.iter().map(|(name, since)| (name.clone(), now.saturating_duration_since(*since)));
        lengths.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Urgency;
    use super::*;

    fn condition(subject: &str, summary: &str) -> Condition {
        Condition {
            rule: "breaker_open".to_owned(),
            subject: subject.to_owned(),
            urgency: Urgency::Critical,
            summary: summary.to_owned(),
            remedy: String::new(),
        }
    }

    #[test]
    fn what_ends_lingers_and_what_comes_back_is_the_same() {
        let start = Instant::now();
        let at = |secs| start + Duration::from_secs(secs);
        let mut steady = Steady::new(vec![condition("old", "1")], start);
        assert_eq!(steady.take(vec![condition("new", "2")], at(5)), [condition("new", "2"), condition("old", "1")]);
        assert_eq!(steady.take(vec![], at(14)), [condition("new", "2"), condition("old", "1")]);
        assert_eq!(steady.take(vec![], at(15)), [condition("new", "2")]);
        assert_eq!(steady.take(vec![condition("new", "3")], at(19)), [condition("new", "3")]);
        assert_eq!(steady.take(vec![], at(33)), [condition("new", "3")]);
        assert_eq!(steady.open().count(), 1);
        assert!(steady.take(vec![], at(34)).is_empty());
    }

    #[test]
    fn a_time_is_counted_while_it_is_so_at_every_look() {
        let start = Instant::now();
        let at = |secs| start + Duration::from_secs(secs);
        let mut since = Since::default();
        assert_eq!(since.look(at(0), ["a".to_owned()])["a"], Duration::ZERO);
        assert_eq!(since.look(at(30), ["a".to_owned(), "b".to_owned()])["a"], Duration::from_secs(30));
        assert_eq!(since.look(at(40), ["b".to_owned()])["b"], Duration::from_secs(10));
        assert_eq!(since.look(at(50), ["a".to_owned()])["a"], Duration::ZERO);
    }
}
