//! What a run has shown, and how it is told.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use super::Options;
use super::broker::Outages;
use super::faults::Record;
use crate::checker::Report;

/// Issue 2: a lane whose relay was killed has another one within this time.
const TAKEOVER_MAX: Duration = Duration::from_secs(10);

/// The outcome of a run.
#[derive(Debug)]
pub struct Outcome {
    options: Options,
    report: Report,
    record: Record,
    problems: Vec<String>,
    worked: Duration,
    unknown: u64,
    failed: u64,
}

impl Outcome {
    pub(super) fn new(
        options: Options,
        report: Report,
        record: Record,
        mut problems: Vec<String>,
        worked: Duration,
        unknown: u64,
        failed: u64,
    ) -> Self {
        for (slot, took) in record.takeovers.iter().filter(|(_, took)| *took > TAKEOVER_MAX) {
            problems.push(format!("{slot} was without a holder for {:.1} s", took.as_secs_f64()));
        }
        Outcome { options, report, record, problems, worked, unknown, failed }
    }

    /// Whether the history is clean and nothing else went wrong.
    pub fn is_clean(&self) -> bool {
        self.report.is_clean() && self.problems.is_empty()
    }

    /// The logs of a clean run are of no use, unless someone asked for them.
    pub(super) fn keep_or_remove(&self, folder: &Path) {
        if self.is_clean() && self.options.logs.is_none() {
            // A folder that stays in the temporary directory does no harm.
            let _ = std::fs::remove_dir_all(folder);
        } else {
            eprintln!("logs are kept in {}", folder.display());
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Outcome { options, report, record, problems, worked, unknown, failed } = self;
        let Options { seed, producers, keys, lanes, lease, breaker_open, .. } = options;
        writeln!(f, "seed {seed}; {producers} producers, {keys} keys, 2 relays with {lanes} lanes, 2 consumer groups")?;
        writeln!(f, "unlike the defaults: relay and consumer lease {lease:?}, breaker open for {breaker_open:?}")?;
        let (broker, store) = (options.broker.title(), options.store.title());
        let (killed, stopped) = match options.broker.outages() {
            Outages::KillAndStop => (
                format!("{broker} {}, ", record.broker_kills),
                format!("{broker} stopped and started {}; ", record.broker_stops),
            ),
            Outages::Stop => (String::new(), format!("{broker} down and up again {}; ", record.broker_stops)),
            Outages::None => Default::default(),
        };
        if let Some(note) = options.broker.note() {
            writeln!(f, "{note}")?;
        }
        writeln!(
            f,
            "kill -9: relays {}, consumers {}, {killed}{store} {}; {stopped}relay stopped by SIGSTOP {}",
            record.relay_kills, record.consumer_kills, record.store_kills, record.freezes
        )?;
        if options.poison_in + options.failing_in + options.duplicate_in > 0 {
            let share = |one_in: u32| if one_in == 0 { 0.0 } else { 100.0 / f64::from(one_in) };
            let (failing, poison) = (share(options.failing_in), share(options.poison_in));
            let (aborts, duplicates) = (record.aborts, record.duplicates);
            writeln!(
                f,
                "{failing} % of attempts fail; {poison} % of events are poison, which ended consumers {aborts} times; \
                 {duplicates} events were published once more"
            )?;
        }
        writeln!(f, "transactions ended by an outage: {failed} before their commit, {unknown} during it")?;
        let mut takeovers = record.takeovers.clone();
        takeovers.sort_by_key(|(_, took)| *took);
        if let Some((slot, longest)) = takeovers.last() {
            let median = takeovers[takeovers.len() / 2].1;
            let (count, median, longest) = (takeovers.len(), median.as_secs_f64(), longest.as_secs_f64());
            writeln!(f, "takeovers: {count}, median {median:.1} s, longest {longest:.1} s ({slot})")?;
        }
        writeln!(f, "time: {:.0} s", worked.as_secs_f64())?;
        write!(f, "{report}")?;
        for problem in problems {
            write!(f, "\nproblem: {problem}")?;
        }
        Ok(())
    }
}
