//! Rules about places: rights, instances, leases, certificates, the integrity check.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::TimeDelta;

use super::super::measure::{FreeSlot, Measurements};
use super::super::{Condition, Urgency};
use super::flow::{alive, is_open};
use super::{Thresholds, condition, secs, span};
use crate::pulse::Instance;

/// 401 and 403: once is enough.
pub fn denied(seen: &Measurements, found: &mut Vec<Condition>) {
    for measure in seen.groups.iter().filter(|measure| measure.denied > 0) {
        let (group, denied) = (&measure.group, measure.denied);
        let summary =
            format!("{group}: {denied} attempts within 5 minutes were refused: wrong password or missing right");
        let remedy = "correct user, password or rights at the other side (`postrider doctor` checks store and brokers), \
                      then replay what was given up (`postrider dead list`)";
        found.push(condition("denied", group, Urgency::Critical, summary, remedy.to_owned()));
    }
}

/// An instance that fell silent without an orderly end and was not replaced by one that started later.
pub fn instance_lost(seen: &Measurements, found: &mut Vec<Condition>) {
    let mut groups: BTreeMap<&str, Vec<&Instance>> = BTreeMap::new();
    for instance in &seen.instances {
        groups.entry(&instance.group).or_default().push(instance);
    }
    for (group, instances) in groups {
        let (mut lost, alive): (Vec<&Instance>, Vec<&Instance>) =
            instances.into_iter().partition(|instance| instance.is_lost());
        // Each newcomer stands for one that was lost before it came.
        let mut newcomers: Vec<&Instance> = alive.clone();
        newcomers.sort_by_key(|instance| instance.started_at);
        lost.sort_by_key(|instance| std::cmp::Reverse(instance.silent_secs));
        lost.retain(|lost| {
            let last_heard = seen.now - TimeDelta::from_std(secs(lost.silent_secs)).unwrap_or_default();
            match newcomers.iter().position(|newcomer| newcomer.started_at >= last_heard) {
                Some(at) => {
                    newcomers.remove(at);
                    false
                }
                None => true,
            }
        });
        let Some(last) = lost.last() else { continue };
        let (count, left) = (lost.len(), alive.len());
        let summary = format!(
            "{group}: {count} went without a word, the last one {} ago ({}); {left} left",
            span(secs(last.silent_secs)),
            last.owner
        );
        let remedy = "look why it ended and start it again; what it held has gone to others, if there are any. One that \
                      is not needed any more is forgotten after a day";
        let urgency = if left == 0 { Urgency::Critical } else { Urgency::Warning };
        found.push(condition("instance_lost", group, urgency, summary, remedy.to_owned()));
    }
}

/// A lane or slot that nobody works on, while there are instances that could and events that wait.
pub fn lease(seen: &Measurements, thresholds: &Thresholds, found: &mut Vec<Condition>) {
    let mut free: BTreeMap<&str, (Vec<u32>, Duration)> = BTreeMap::new();
    // An instance that has just begun to watch has not seen for how long.
    let is_long = |slot: &&FreeSlot| slot.free >= thresholds.lease_after || is_open(seen, "lease", &slot.group);
    for slot in seen.free_slots.iter().filter(is_long) {
        let has_members = alive(seen).any(|instance| instance.group == slot.group);
        // What waits for a consumer is known to its broker alone.
        let has_work = match slot.group.starts_with("relay/") {
            true => seen.outboxes.iter().any(|outbox| outbox.group == slot.group && outbox.backlog.pending > 0),
            false => true,
        };
        if has_members && has_work {
            let (slots, longest) = free.entry(&slot.group).or_default();
            slots.push(slot.slot);
            *longest = slot.free.max(*longest);
        }
    }
    for (group, (mut slots, longest)) in free {
        slots.sort_unstable();
        let slots: Vec<String> = slots.iter().map(u32::to_string).collect();
        let summary = format!(
            "{group}: nobody has held slot {} for {} (limit {}), though instances are there",
            slots.join(", "),
            span(longest),
            span(thresholds.lease_after)
        );
        let remedy = "`postrider status` shows the holders; look for \"cannot renew leases\" and \"cannot take a slot\" \
                      in the logs, and start instances with the same number of lanes and slots";
        found.push(condition("lease", group, Urgency::Critical, summary, remedy.to_owned()));
    }
}

/// Certificates that end soon, or have ended.
pub fn certificate(seen: &Measurements, thresholds: &Thresholds, found: &mut Vec<Condition>) {
    for certificate in &seen.certificates {
        let left = (certificate.ends_at - seen.now).to_std().unwrap_or_default();
        if left >= thresholds.certificate_before {
            continue;
        }
        let (server, limit) = (&certificate.server, span(thresholds.certificate_before));
        let ends_at = certificate.ends_at.format("%Y-%m-%d %H:%M");
        let (urgency, when) = match left.is_zero() {
            true => (Urgency::Critical, "has ended".to_owned()),
            false => (Urgency::Warning, format!("ends in {}", span(left))),
        };
        let summary = format!("{server}: its certificate {when}, at {ends_at} UTC (limit {limit})");
        let remedy = "renew it where that server is run; nothing flows to it once the certificate has ended";
        found.push(condition("certificate", server, urgency, summary, remedy.to_owned()));
    }
}

/// The last report; the next clean one ends the alert.
pub fn integrity(seen: &Measurements, found: &mut Vec<Condition>) {
    let Some(report) = seen.report.as_ref().filter(|report| report.warnings + report.errors > 0) else { return };
    let urgency = if report.errors > 0 { Urgency::Critical } else { Urgency::Warning };
    let (id, errors, warnings) = (report.id, report.errors, report.warnings);
    let summary = format!("integrity check {id} found {errors} errors and {warnings} warnings");
    let remedy = format!("`postrider check --report {id}` lists them with what to do; then `postrider check` again");
    found.push(condition("integrity", "", urgency, summary, remedy));
}
