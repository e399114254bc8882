//! The history checker: what was committed against what was applied.
//!
//! It knows nothing of Postrider. A run records which events were committed and which rolled back, and every consumer
//! records its effects; [`History::check`] says what does not agree. It is only worth as much as the bugs that it finds,
//! so the tests below plant each kind of violation.

use std::collections::{HashMap, HashSet};
use std::fmt;

use uuid::Uuid;

/// Examples kept per kind of violation; the counts are always whole.
pub const EXAMPLES_MAX: usize = 10;

/// An event whose transaction was committed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// The event.
    pub id: Uuid,
    /// The aggregate whose events must stay in order.
    pub key: String,
    /// Its place among the committed events of the key.
    pub version: i64,
}

/// What a consumer did because of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Effect {
    /// Who.
    pub consumer: String,
    /// Because of which event.
    pub id: Uuid,
    /// The key, as the consumer received it.
    pub key: String,
    /// The version, as the consumer received it.
    pub version: i64,
    /// The version that the consumer found when it applied this one, where it looks. Two handlers that overlap on a key
    /// find the same one, although the order of their commits may look right.
    pub previous: Option<i64>,
}

/// An event that a consumer has given up on, visibly.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DeadLetter {
    /// Whose.
    pub consumer: String,
    /// Which event.
    pub id: Uuid,
}

/// Everything that is known of a run.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// All consumers that every event must reach; one without a single effect would not be missed otherwise.
    pub consumers: Vec<String>,
    /// Committed events, in any order.
    pub committed: Vec<Committed>,
    /// Events whose transaction was rolled back for certain.
    pub rolled_back: Vec<Uuid>,
    /// Effects in the order in which they were applied, as far as they are of the same consumer and key.
    pub effects: Vec<Effect>,
    /// Dead letters.
    pub dead: Vec<DeadLetter>,
}

/// A kind of violation: how often, and the first of them in words.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Violations {
    /// How often it was found.
    pub count: usize,
    /// At most [`EXAMPLES_MAX`] of them.
    pub examples: Vec<String>,
}

impl Violations {
    fn add(&mut self, example: impl FnOnce() -> String) {
        self.count += 1;
        if self.examples.len() < EXAMPLES_MAX {
            self.examples.push(example());
        }
    }
}

/// What one consumer made of the history.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConsumerReport {
    /// Its name.
    pub consumer: String,
    /// Its effects, violations included.
    pub effects: usize,
    /// Its dead letters.
    pub dead: usize,
    /// Committed events without an effect and without a dead letter.
    pub lost: Violations,
    /// Effects beyond the first of an event.
    pub doubled: Violations,
    /// Effects whose version does not rise, or that did not see the one before.
    pub reordered: Violations,
    /// Effects of events that were not committed as they arrived.
    pub ghosts: Violations,
}

impl ConsumerReport {
    fn kinds(&self) -> [(&'static str, &Violations); 4] {
        [("lost", &self.lost), ("doubled", &self.doubled), ("reordered", &self.reordered), ("ghosts", &self.ghosts)]
    }
}

/// What the checker found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Committed events.
    pub committed: usize,
    /// Events of transactions that were rolled back.
    pub rolled_back: usize,
    /// One part for each consumer of the history, and for each that nobody named.
    pub consumers: Vec<ConsumerReport>,
}

impl Report {
    /// Whether nothing was lost, doubled, reordered or made up.
    pub fn is_clean(&self) -> bool {
        self.consumers.iter().all(|part| part.kinds().iter().all(|(_, violations)| violations.count == 0))
    }

    /// How many of all consumers were lost, doubled, reordered and ghosts.
    pub fn totals(&self) -> [(&'static str, usize); 4] {
        let sum = |index: usize| self.consumers.iter().map(|part| part.kinds()[index].1.count).sum();
        [("lost", sum(0)), ("doubled", sum(1)), ("reordered", sum(2)), ("ghosts", sum(3))]
    }
}

impl History {
    /// Compares effects with what was committed.
    pub fn check(&self) -> Report {
        let committed: HashMap<Uuid, &Committed> = self.committed.iter().map(|event| (event.id, event)).collect();
        let rolled_back: HashSet<Uuid> = self.rolled_back.iter().copied().collect();
        let mut names: Vec<&str> = self.consumers.iter().map(String::as_str).collect();
        for effect in &self.effects {
            if !names.contains(&effect.consumer.as_str()) {
                names.push(&effect.consumer);
            }
        }
        let consumers = names.into_iter().map(|name| self.check_consumer(name, &committed, &rolled_back)).collect();
        Report { committed: committed.len(), rolled_back: rolled_back.len(), consumers }
    }

    fn check_consumer(
        &self,
        name: &str,
        committed: &HashMap<Uuid, &Committed>,
        rolled_back: &HashSet<Uuid>,
    ) -> ConsumerReport {
        let mut report = ConsumerReport { consumer: name.to_owned(), ..ConsumerReport::default() };
        let mut applied: HashSet<Uuid> = HashSet::with_capacity(committed.len());
        let mut last: HashMap<&str, i64> = HashMap::new();
        for effect in self.effects.iter().filter(|effect| effect.consumer == name) {
            report.effects += 1;
            if let Some(why) = ghost(effect, committed, rolled_back) {
                report.ghosts.add(|| format!("{} {why}", shown(effect)));
                continue;
            }
            if !applied.insert(effect.id) {
                report.doubled.add(|| format!("{} was applied again", shown(effect)));
                continue;
            }
            let before = last.insert(&effect.key, effect.version);
            if before.is_some_and(|before| effect.version <= before) {
                report.reordered.add(|| format!("{} came after version {}", shown(effect), before.unwrap_or_default()));
            } else if effect.previous.is_some_and(|previous| previous != before.unwrap_or(0)) {
                report.reordered.add(|| {
                    let (found, before) = (effect.previous.unwrap_or_default(), before.unwrap_or(0));
                    format!("{} was applied on top of version {found}, but {before} came before it", shown(effect))
                });
            }
        }
        let dead: HashSet<Uuid> =
            self.dead.iter().filter(|letter| letter.consumer == name).map(|letter| letter.id).collect();
        report.dead = dead.len();
        let missing = self.committed.iter().filter(|event| !applied.contains(&event.id) && !dead.contains(&event.id));
        for Committed { id, key, version } in missing {
            report.lost.add(|| format!("event {id} (key {key}, version {version}) has no effect and no dead letter"));
        }
        report
    }
}

/// Why the effect should not be there, if so.
fn ghost(effect: &Effect, committed: &HashMap<Uuid, &Committed>, rolled_back: &HashSet<Uuid>) -> Option<String> {
    match committed.get(&effect.id) {
        None if rolled_back.contains(&effect.id) => Some("was rolled back by its producer".to_owned()),
        None => Some("was never committed".to_owned()),
        Some(event) if event.key != effect.key || event.version != effect.version => {
            Some(format!("was committed with key {} and version {}", event.key, event.version))
        }
        Some(_) => None,
    }
}

fn shown(effect: &Effect) -> String {
    format!("event {} (key {}, version {})", effect.id, effect.key, effect.version)
}

impl fmt::Display for Report {
    /// A table with a line for each consumer, a verdict, and the examples.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} events committed, {} rolled back", self.committed, self.rolled_back)?;
        let width = self.consumers.iter().map(|part| part.consumer.len()).max().unwrap_or(0).max("consumer".len());
        writeln!(
            f,
            "{:width$} {:>9} {:>5} {:>6} {:>8} {:>10} {:>7}",
            "consumer", "effects", "dead", "lost", "doubled", "reordered", "ghosts"
        )?;
        for part in &self.consumers {
            let ConsumerReport { consumer, effects, dead, lost, doubled, reordered, ghosts } = part;
            writeln!(
                f,
                "{consumer:width$} {effects:>9} {dead:>5} {:>6} {:>8} {:>10} {:>7}",
                lost.count, doubled.count, reordered.count, ghosts.count
            )?;
        }
        write!(f, "{}", if self.is_clean() { "clean" } else { "NOT CLEAN" })?;
        for part in &self.consumers {
            for (kind, violations) in part.kinds() {
                for example in &violations.examples {
                    write!(f, "\n  {} {kind}: {example}", part.consumer)?;
                }
                let more = violations.count - violations.examples.len();
                if more > 0 {
                    write!(f, "\n  {} {kind}: and {more} more", part.consumer)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two keys with three events each, all applied by two consumers that take turns.
    fn clean() -> History {
        let mut history = History { consumers: vec!["billing".into(), "search".into()], ..History::default() };
        for version in 1..=3 {
            for key in ["a", "b"] {
                let id = Uuid::now_v7();
                history.committed.push(Committed { id, key: key.into(), version });
                for consumer in ["billing", "search"] {
                    let previous = Some(version - 1);
                    history.effects.push(Effect { consumer: consumer.into(), id, key: key.into(), version, previous });
                }
            }
        }
        history
    }

    fn counts(history: &History) -> [usize; 4] {
        let report = history.check();
        let counts = report.totals().map(|(_, count)| count);
        assert_eq!(report.is_clean(), counts == [0; 4], "{report}");
        counts
    }

    #[test]
    fn a_clean_history_passes() {
        let mut history = clean();
        history.rolled_back.push(Uuid::now_v7());
        assert_eq!(counts(&history), [0; 4]);
        let report = history.check();
        assert_eq!((report.committed, report.rolled_back), (6, 1));
        assert!(report.to_string().ends_with("clean"), "{report}");
        assert!(History::default().check().is_clean());
    }

    #[test]
    fn keys_and_consumers_have_an_order_of_their_own() {
        let mut history = clean();
        history
            .effects
            .sort_by_key(|effect| (effect.consumer.clone(), std::cmp::Reverse(effect.key.clone()), effect.version));
        assert_eq!(counts(&history), [0; 4]);
    }

    #[test]
    fn a_lost_event_is_found() {
        let mut history = clean();
        let lost = history.effects.pop().unwrap();
        assert_eq!(counts(&history), [1, 0, 0, 0]);
        assert!(history.check().to_string().contains(&lost.id.to_string()));
        history.dead.push(DeadLetter { consumer: "billing".into(), id: lost.id });
        assert_eq!(counts(&history), [1, 0, 0, 0], "another consumer's dead letter is no excuse");
        history.dead.push(DeadLetter { consumer: lost.consumer, id: lost.id });
        assert_eq!(counts(&history), [0; 4]);
    }

    #[test]
    fn a_consumer_without_any_effect_is_missed() {
        let mut history = clean();
        history.effects.retain(|effect| effect.consumer == "billing");
        assert_eq!(counts(&history), [6, 0, 0, 0]);
    }

    #[test]
    fn a_double_effect_is_found_once() {
        let mut history = clean();
        history.effects.push(history.effects[0].clone());
        history.effects.push(history.effects[11].clone());
        assert_eq!(counts(&history), [0, 2, 0, 0]);
    }

    #[test]
    fn an_inversion_is_found() {
        let mut history = clean();
        // Billing's versions 1 and 2 of key a.
        history.effects.swap(0, 4);
        for effect in &mut history.effects {
            effect.previous = None;
        }
        assert_eq!(counts(&history), [0, 0, 1, 0]);
    }

    #[test]
    fn an_overlap_is_found_although_the_order_looks_right() {
        let mut history = clean();
        // Version 2 of key a did not see version 1.
        history.effects[4].previous = Some(0);
        assert_eq!(counts(&history), [0, 0, 1, 0]);
    }

    #[test]
    fn ghosts_are_found() {
        let mut history = clean();
        let ghost = Effect { id: Uuid::now_v7(), version: 4, previous: None, ..history.effects[0].clone() };
        history.effects.push(ghost.clone());
        assert_eq!(counts(&history), [0, 0, 0, 1]);
        assert!(history.check().to_string().contains("never committed"));
        history.rolled_back.push(ghost.id);
        assert_eq!(counts(&history), [0, 0, 0, 1]);
        assert!(history.check().to_string().contains("rolled back"));
        // An event that changed on its way stands in for none.
        history.effects[0].version = 9;
        assert_eq!(counts(&history)[3], 2);
    }

    #[test]
    fn examples_are_bounded_and_counts_are_not() {
        let mut history = clean();
        history.effects.clear();
        for version in 4..40 {
            history.committed.push(Committed { id: Uuid::now_v7(), key: "a".into(), version });
        }
        let report = history.check();
        assert_eq!(report.consumers[0].lost.count, 42);
        assert_eq!(report.consumers[0].lost.examples.len(), EXAMPLES_MAX);
        assert!(report.to_string().contains("and 32 more"));
    }
}
