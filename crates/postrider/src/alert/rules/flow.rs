//! Rules about events: whether they flow, how fast, and what was given up.

use super::super::measure::{GroupMeasure, Measurements};
use super::super::{Condition, Urgency};
use super::{CLEAR, Thresholds, condition, secs, span};
use crate::pulse::Instance;

/// An instance whose breaker lets nothing through. Of several in a group the one that has waited for longest speaks.
pub fn breaker_open(seen: &Measurements, found: &mut Vec<Condition>) {
    let mut open: Vec<&Instance> = alive(seen).filter(|instance| instance.breaker.is_some()).collect();
    open.sort_by_key(|instance| (instance.group.clone(), std::cmp::Reverse(instance.breaker_secs)));
    open.dedup_by(|a, b| a.group == b.group);
    for instance in open {
        let (group, reason) = (&instance.group, instance.breaker.as_deref().unwrap_or_default());
        let since = span(secs(instance.breaker_secs.unwrap_or_default()));
        let summary = format!("{group}: the breaker has let nothing through for {since}: {reason}");
        let remedy = "bring the other side back (`postrider doctor` says what it sees); events wait and go on by \
                      themselves";
        found.push(condition("breaker_open", group, Urgency::Critical, summary, remedy.to_owned()));
    }
}

/// Something waited at every look, and nothing was published meanwhile.
pub fn stalled(seen: &Measurements, thresholds: &Thresholds, found: &mut Vec<Condition>) {
    for outbox in &seen.outboxes {
        let (group, pending) = (&outbox.group, outbox.backlog.pending);
        let is_explained = alive(seen).any(|instance| instance.group == *group && instance.breaker.is_some());
        let is_flowing = group_of(seen, group).is_some_and(|measure| measure.flowed > 0);
        // An instance that has just begun to watch has not seen for how long.
        let is_long = outbox.waiting >= thresholds.stalled_after || is_open(seen, "stalled", group);
        if pending == 0 || !is_long || is_flowing || is_explained {
            continue;
        }
        let (for_, limit) = (span(outbox.waiting), span(thresholds.stalled_after));
        let is_alone = !alive(seen).any(|instance| instance.group == *group);
        let (who, remedy) = match is_alone {
            true => ("no relay is running", "start one with `postrider run`, with relay.enabled = true"),
            false => ("its relay runs", "look at `postrider status` and the log of the instance that holds the lanes"),
        };
        let summary =
            format!("{group}: {pending} events wait and none was published for {for_} (limit {limit}); {who}");
        found.push(condition("stalled", group, Urgency::Critical, summary, remedy.to_owned()));
    }
}

/// R10: the oldest event of an outbox, or the oldest message that a consumer holds.
pub fn stale(seen: &Measurements, thresholds: &Thresholds, found: &mut Vec<Condition>) {
    let limit = thresholds.stale_after;
    let mut check = |group: &str, oldest: Option<u64>, what: String, remedy: String| {
        let Some(oldest) = oldest.map(secs).filter(|oldest| *oldest >= limit) else { return };
        let summary = format!("{group}: an event has waited for {} (limit {}); {what}", span(oldest), span(limit));
        found.push(condition("stale", group, Urgency::Critical, summary, remedy));
    };
    for outbox in &seen.outboxes {
        let backlog = &outbox.backlog;
        let what = format!(
            "{} pending, {} retrying, {} waiting behind others, {} failed",
            backlog.pending, backlog.retrying, backlog.waiting, backlog.failed
        );
        let remedy =
            "look at `postrider status` and at the broker; `postrider dead list --stage relay` shows what failed";
        check(&outbox.group, backlog.oldest_secs, what, remedy.to_owned());
    }
    for consumer in &seen.consumers {
        let what = format!("{} retrying, {} waiting behind others", consumer.retrying, consumer.waiting);
        let remedy = format!("look at the errors of {} in the console, or in the log of the consumer", consumer.name);
        check(&format!("consumer/{}", consumer.name), consumer.oldest_secs, what, remedy);
    }
}

/// O2: what was applied took too long, or what waits does so already.
pub fn latency(seen: &Measurements, thresholds: &Thresholds, found: &mut Vec<Condition>) {
    let limit = |group: &str| match is_open(seen, "latency", group) {
        true => thresholds.latency.mul_f64(CLEAR),
        false => thresholds.latency,
    };
    let shown = span(thresholds.latency);
    for measure in &seen.groups {
        let Some(p99) = measure.latency_p99.filter(|p99| *p99 >= limit(&measure.group)) else { continue };
        let summary = format!(
            "{}: the slowest hundredth of the events took {} from creation to effect (limit {shown})",
            measure.group,
            span(p99)
        );
        let remedy = "see in the console whether the outbox or the consumer is behind; add instances, lanes or slots";
        found.push(condition("latency", &measure.group, Urgency::Warning, summary, remedy.to_owned()));
    }
    for outbox in &seen.outboxes {
        let backlog = &outbox.backlog;
        // The oldest may be a parked one, which is slow for reasons of its own and has rules of its own.
        let is_parked = backlog.retrying + backlog.waiting + backlog.failed > 0;
        let oldest = backlog.oldest_secs.map(secs).filter(|oldest| *oldest >= limit(&outbox.group));
        let is_told = found.iter().any(|told| told.rule == "latency" && told.subject == outbox.group);
        let Some(oldest) = oldest.filter(|_| !is_parked && !is_told && backlog.pending > 0) else { continue };
        let summary = format!(
            "{}: the oldest event has waited for {} to be published (limit {shown})",
            outbox.group,
            span(oldest)
        );
        let remedy = "look at `postrider status`; a relay that is only slow gets help from more lanes and instances";
        found.push(condition("latency", &outbox.group, Urgency::Warning, summary, remedy.to_owned()));
    }
}

/// O3.
pub fn error_rate(seen: &Measurements, thresholds: &Thresholds, found: &mut Vec<Condition>) {
    for GroupMeasure { group, attempts, failures, .. } in &seen.groups {
        if *attempts < thresholds.attempts_min.max(1) {
            continue;
        }
        let rate = *failures as f64 / *attempts as f64;
        let is_wrong = match is_open(seen, "error_rate", group) {
            true => rate > thresholds.error_rate * CLEAR,
            false => rate > thresholds.error_rate,
        };
        if is_wrong {
            let (shown, limit) = (percent(rate), percent(thresholds.error_rate));
            let summary =
                format!("{group}: {failures} of {attempts} attempts failed within 5 minutes: {shown} (limit {limit})");
            let remedy = "the console's page of errors says which; `postrider dead list` shows what was given up";
            found.push(condition("error_rate", group, Urgency::Warning, summary, remedy.to_owned()));
        }
    }
}

/// Many within an hour that nobody has decided on yet: replaying or discarding them ends the alert.
pub fn dead_letters(seen: &Measurements, thresholds: &Thresholds, found: &mut Vec<Condition>) {
    for (group, waiting, _) in given_up(seen) {
        let dead = group_of(seen, &group).map_or(0, |measure| measure.dead).min(waiting);
        if dead > 0 && dead >= thresholds.dead_letters {
            let limit = thresholds.dead_letters;
            let summary = format!("{group}: {dead} events were given up within an hour and still wait (limit {limit})");
            found.push(condition("dead_letters", &group, Urgency::Critical, summary, desk(&group)));
        }
    }
}

/// What was given up and nobody has looked after.
pub fn failed(seen: &Measurements, thresholds: &Thresholds, found: &mut Vec<Condition>) {
    let limit = thresholds.failed_after;
    for (group, waiting, oldest) in given_up(seen) {
        let Some(oldest) = oldest.map(secs).filter(|oldest| waiting > 0 && *oldest >= limit) else { continue };
        let (oldest, limit) = (span(oldest), span(limit));
        let summary = format!(
            "{group}: {waiting} events that were given up wait for a decision, for up to {oldest} (limit {limit})"
        );
        found.push(condition("failed", &group, Urgency::Warning, summary, desk(&group)));
    }
}

/// What waits for a person, of every relay and consumer: how much, and for how long. Of a relay that is at least the age
/// of its oldest event.
fn given_up(seen: &Measurements) -> impl Iterator<Item = (String, u64, Option<u64>)> {
    let relays =
        seen.outboxes.iter().map(|outbox| (outbox.group.clone(), outbox.backlog.failed, outbox.backlog.oldest_secs));
    let consumers = seen
        .consumers
        .iter()
        .map(|consumer| (format!("consumer/{}", consumer.name), consumer.dead, consumer.oldest_dead_secs));
    relays.chain(consumers)
}

/// Dead letters of a relay are kept under its group, those of a consumer under its name.
fn desk(group: &str) -> String {
    let consumer = group.strip_prefix("consumer/").unwrap_or(group);
    format!(
        "`postrider dead list --consumer {consumer}` shows why; mend it, then `postrider dead replay --consumer {consumer}`"
    )
}

pub fn alive(seen: &Measurements) -> impl Iterator<Item = &Instance> {
    seen.instances.iter().filter(|instance| !instance.is_lost())
}

fn group_of<'a>(seen: &'a Measurements, group: &str) -> Option<&'a GroupMeasure> {
    seen.groups.iter().find(|measure| measure.group == group)
}

pub(super) fn is_open(seen: &Measurements, rule: &str, subject: &str) -> bool {
    seen.open.contains(&(rule.to_owned(), subject.to_owned()))
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}
