//! What changes when the conditions that hold now meet the alerts that are open: pure, the same for every store.

use std::collections::{HashMap, HashSet};

use super::Condition;

/// An alert that is open in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Open {
    pub id: i64,
    pub rule: String,
    pub subject: String,
    pub urgency: String,
    pub summary: String,
    pub remedy: String,
    /// Whether somebody was told that it fires.
    pub is_told: bool,
}

/// The rule and the subject of a silence that has not ended; empty for all.
pub(crate) type Silenced = (String, String);

/// What is to be written.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan<'a> {
    /// Alerts to open, each with whether to tell it.
    pub opened: Vec<(&'a Condition, bool)>,
    /// Open alerts whose text or urgency is another now.
    pub changed: Vec<(i64, &'a Condition)>,
    /// Alerts that are over, each with whether to tell it.
    pub resolved: Vec<(i64, bool)>,
    /// Open alerts whose silence has ended, and of which nobody knows.
    pub told: Vec<i64>,
}

/// Whether one of the silences covers an alert.
pub(crate) fn is_silenced(silences: &[Silenced], rule: &str, subject: &str) -> bool {
    silences.iter().any(|(of_rule, of_subject)| {
        (of_rule.is_empty() || of_rule == rule) && (of_subject.is_empty() || of_subject == subject)
    })
}

/// A condition that is given twice counts once. A resolution is told only where the firing was.
pub(crate) fn plan<'a>(open: &[Open], conditions: &'a [Condition], silences: &[Silenced]) -> Plan<'a> {
    let known: HashMap<(&str, &str), &Open> =
        open.iter().map(|alert| ((alert.rule.as_str(), alert.subject.as_str()), alert)).collect();
    let mut plan = Plan::default();
    let mut holding = HashSet::new();
    for condition in conditions {
        let name = (condition.rule.as_str(), condition.subject.as_str());
        if !holding.insert(name) {
            continue;
        }
        let is_silenced = is_silenced(silences, name.0, name.1);
        let Some(alert) = known.get(&name) else {
            plan.opened.push((condition, !is_silenced));
            continue;
        };
        let text = (alert.urgency.as_str(), alert.summary.as_str(), alert.remedy.as_str());
        if text != (condition.urgency.as_str(), &condition.summary, &condition.remedy) {
            plan.changed.push((alert.id, condition));
        }
        if !alert.is_told && !is_silenced {
            plan.told.push(alert.id);
        }
    }
    for alert in open.iter().filter(|alert| !holding.contains(&(alert.rule.as_str(), alert.subject.as_str()))) {
        let is_silenced = is_silenced(silences, &alert.rule, &alert.subject);
        plan.resolved.push((alert.id, alert.is_told && !is_silenced));
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alert::Urgency;

    fn condition(rule: &str, subject: &str) -> Condition {
        Condition {
            rule: rule.into(),
            subject: subject.into(),
            urgency: Urgency::Warning,
            summary: "what".into(),
            remedy: "do".into(),
        }
    }

    fn open(id: i64, rule: &str, is_told: bool) -> Open {
        let (rule, subject) = (rule.to_owned(), String::new());
        Open { id, rule, subject, urgency: "warning".into(), summary: "what".into(), remedy: "do".into(), is_told }
    }

    #[test]
    fn a_condition_that_goes_on_changes_nothing() {
        assert_eq!(plan(&[open(1, "latency", true)], &[condition("latency", "")], &[]), Plan::default());
    }

    #[test]
    fn a_condition_given_twice_opens_one_alert() {
        let twice = [condition("latency", "a"), condition("latency", "a")];
        assert_eq!(plan(&[], &twice, &[]).opened, [(&twice[0], true)]);
    }

    #[test]
    fn another_text_is_written_and_not_told() {
        let mut worse = condition("latency", "");
        worse.urgency = Urgency::Critical;
        let conditions = [worse];
        let plan = plan(&[open(1, "latency", true)], &conditions, &[]);
        assert_eq!(plan, Plan { changed: vec![(1, &conditions[0])], ..Plan::default() });
    }

    #[test]
    fn a_silenced_alert_is_told_when_its_silence_ends() {
        let silence = [("latency".to_owned(), String::new())];
        let conditions = [condition("latency", "")];
        assert_eq!(plan(&[], &conditions, &silence).opened, [(&conditions[0], false)]);
        assert!(plan(&[open(1, "latency", false)], &conditions, &silence).told.is_empty());
        assert_eq!(plan(&[open(1, "latency", false)], &conditions, &[]).told, [1]);
    }

    #[test]
    fn a_resolution_is_told_where_its_firing_was() {
        let silence = [(String::new(), String::new())];
        let open = [open(1, "latency", true), open(2, "stale", false)];
        assert_eq!(plan(&open, &[], &[]).resolved, [(1, true), (2, false)]);
        assert_eq!(plan(&open, &[], &silence).resolved, [(1, false), (2, false)]);
    }

    #[test]
    fn a_silence_covers_a_rule_a_subject_or_all() {
        let is = |silence: (&str, &str), rule, subject| {
            is_silenced(&[(silence.0.to_owned(), silence.1.to_owned())], rule, subject)
        };
        assert!(is(("", ""), "latency", "relay/default"));
        assert!(is(("latency", ""), "latency", "relay/default"));
        assert!(is(("", "relay/default"), "latency", "relay/default"));
        assert!(!is(("latency", "relay/other"), "latency", "relay/default"));
        assert!(!is(("stale", ""), "latency", "relay/default"));
    }
}
