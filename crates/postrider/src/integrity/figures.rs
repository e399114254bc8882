//! What a store has found, and the findings that follow from it: the same words for every store.

use std::time::Duration;

use super::Limits;
use crate::doctor::Finding;
use crate::pulse::Instance;
use crate::upkeep::{Backlog, ConsumerView};

/// Counting what is wrong ends here.
pub(crate) const COUNT_MAX: i64 = 1_000;
/// What upkeep should have removed is left alone for this long: it works in pieces.
pub(crate) const GRACE: Duration = Duration::from_secs(24 * 60 * 60);

/// What a store has found. All counts end at [`COUNT_MAX`].
#[derive(Debug, Default)]
pub(crate) struct Figures {
    /// The backlog of every route, by destination.
    pub backlogs: Vec<(String, Backlog)>,
    /// The destinations that have parked events.
    pub parked_destinations: Vec<String>,
    /// Parked events that are to be tried again, and were not for too long.
    pub parked_overdue: i64,
    /// Parked events that wait behind none.
    pub parked_stranded: i64,
    /// Leases that last longer than any lease does.
    pub leases_ahead: i64,
    /// The consumers, and those of them that are known to live.
    pub consumers: Vec<ConsumerView>,
    /// All instances.
    pub instances: Vec<Instance>,
    /// Held messages that are to be tried, and were not for too long.
    pub held_overdue: i64,
    /// Held messages that wait behind none.
    pub held_stranded: i64,
    /// Dead letters that are said to be replayed and that nobody will try.
    pub dead_lost: i64,
    /// Messages that are done by the inbox, and held or dead at once.
    pub inbox_contradicted: i64,
    /// Inbox rows that should be gone.
    pub inbox_old: i64,
    /// Where the outbox has partitions.
    pub partitions: Option<Partitions>,
}

/// The partitions of an outbox.
#[derive(Debug, Default)]
pub(crate) struct Partitions {
    /// Days from today on that have none.
    pub missing: Vec<String>,
    /// Rows in the default partition.
    pub in_default: i64,
}

impl Figures {
    /// One finding for each thing that was checked.
    pub(crate) fn findings(&self, limits: &Limits) -> Vec<Finding> {
        let mut findings = Vec::new();
        for (destination, backlog) in &self.backlogs {
            findings.push(stale(destination, backlog, limits.stale_after));
        }
        findings.push(found(
            "parked.stranded",
            self.parked_stranded,
            "parked events wait behind an event of their key that is not there",
            "`postrider run`: a relay that opens its lane frees them",
        ));
        findings.push(self.parked_homeless(limits));
        let overdue = format!("are due for longer than {} and nobody tries them", span(limits.stale_after));
        findings.push(found(
            "leases.stuck",
            self.leases_ahead,
            "leases end more than an hour from now: they were written while the database's clock was wrong",
            "set the clock of the database's machine; instances take such leases over by themselves",
        ));
        findings.push(found(
            "retries.stuck",
            (self.held_overdue + self.parked_overdue).min(COUNT_MAX),
            &format!("messages {overdue}"),
            "`postrider status` shows who holds the slots; start the consumer or the relay that they belong to",
        ));
        findings.push(found(
            "held.stranded",
            self.held_stranded,
            "held messages wait behind a message of their key that is not there",
            "restart the consumer: it frees them when it opens its slots",
        ));
        findings.extend(self.orphans(limits));
        findings.push(found(
            "dead.lost",
            self.dead_lost,
            "dead letters are marked as replayed or parked, but nobody holds them any more",
            "`postrider dead list`, then `postrider dead discard` those that were applied meanwhile",
        ));
        findings.push(found(
            "inbox.effect",
            self.inbox_contradicted,
            "messages are done by the inbox, and held or dead for the same consumer: their effect is in doubt",
            "compare the consumer's data with these events; `postrider dead show`, then `postrider dead discard` or \
             `postrider outbox republish --again`",
        ));
        findings.push(found(
            "inbox.retention",
            self.inbox_old,
            "inbox rows are more than a day past retention.inbox",
            "`postrider run` does upkeep; look for `upkeep` in its log",
        ));
        if let Some(partitions) = &self.partitions {
            findings.extend(partitions.findings());
        }
        findings
    }

    fn parked_homeless(&self, limits: &Limits) -> Finding {
        let is_known = |destination: &&String| limits.routes.iter().any(|route| route.destination == **destination);
        let unknown: Vec<&str> =
            self.parked_destinations.iter().filter(|name| !is_known(name)).map(String::as_str).collect();
        if limits.routes.is_empty() || unknown.is_empty() {
            return Finding::ok("parked.orphaned", "none");
        }
        let text = format!("parked events of destinations that no route names: {}", unknown.join(", "));
        let remedy =
            "name the destination again in postrider.toml, or `postrider dead discard --stage relay` its events";
        Finding::warning("parked.orphaned", text, remedy)
    }

    /// Held messages and dead letters of consumers that neither the configuration nor a living instance knows.
    fn orphans(&self, limits: &Limits) -> [Finding; 2] {
        let is_alive = |name: &str| {
            let mut groups = self.instances.iter().filter(|instance| !instance.is_lost());
            groups.any(|instance| instance.group.strip_prefix("consumer/") == Some(name))
        };
        let is_unknown = |view: &&ConsumerView| {
            !limits.consumers.is_empty() && !limits.consumers.contains(&view.name) && !is_alive(&view.name)
        };
        let of = |check: &str, what: &str, remedy: &str, has: &dyn Fn(&ConsumerView) -> bool| {
            let names: Vec<&str> =
                self.consumers.iter().filter(is_unknown).filter(|view| has(view)).map(name).collect();
            match names.is_empty() {
                true => Finding::ok(check, "none"),
                false => Finding::warning(check, format!("{what}: {}", names.join(", ")), remedy),
            }
        };
        [
            of(
                "held.orphaned",
                "messages are held for consumers that nobody runs",
                "start the consumer again; its messages wait for it",
                &|view| view.retrying + view.waiting > 0,
            ),
            of(
                "dead.orphaned",
                "dead letters of consumers that nobody runs",
                "start the consumer and replay them, or `postrider dead discard --consumer <name>`",
                &|view| view.dead > 0,
            ),
        ]
    }
}

fn name(view: &ConsumerView) -> &str {
    &view.name
}

fn stale(destination: &str, backlog: &Backlog, limit: Duration) -> Finding {
    match backlog.oldest_secs {
        Some(secs) if Duration::from_secs(secs) > limit => {
            let text = format!(
                "{destination}: the oldest event waits for {} ({} pending, {} retrying, {} waiting, {} failed)",
                span(Duration::from_secs(secs)),
                backlog.pending,
                backlog.retrying,
                backlog.waiting,
                backlog.failed
            );
            let remedy = match backlog.failed {
                0 => "`postrider status` shows whether a relay runs, `postrider doctor` whether its broker answers",
                _ => "`postrider dead list --stage relay` shows what failed and why; replay or discard it",
            };
            Finding::error("outbox.stale", text, remedy)
        }
        _ => Finding::ok("outbox.stale", format!("{destination}: nothing waits longer than {}", span(limit))),
    }
}

impl Partitions {
    fn findings(&self) -> [Finding; 2] {
        [
            match self.missing.is_empty() {
                true => Finding::ok("partitions.missing", "none"),
                false => Finding::error(
                    "partitions.missing",
                    format!(
                        "the outbox has no partition for {}; its events go into the default one",
                        self.missing.join(", ")
                    ),
                    "`postrider migrate` creates them; then see that `postrider run` is always running",
                ),
            },
            match self.in_default {
                0 => Finding::ok("partitions.default", "empty"),
                count => Finding::warning(
                    "partitions.default",
                    format!("{} events are in the outbox's default partition", many(count)),
                    "`postrider run` creates partitions ahead; what is in the default one goes row by row after its \
                     retention",
                ),
            },
        ]
    }
}

fn found(check: &str, count: i64, what: &str, remedy: &str) -> Finding {
    match count {
        0 => Finding::ok(check, "none"),
        count => Finding::error(check, format!("{} {what}", many(count)), remedy),
    }
}

fn many(count: i64) -> String {
    match count >= COUNT_MAX {
        true => format!("{COUNT_MAX} or more"),
        false => count.to_string(),
    }
}

fn span(duration: Duration) -> String {
    match duration.as_secs() {
        secs if secs >= 2 * 3600 => format!("{} h", secs / 3600),
        secs if secs >= 2 * 60 => format!("{} min", secs / 60),
        secs => format!("{secs} s"),
    }
}
