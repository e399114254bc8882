//! The benchmark: what carrying events costs, each figure beside what it is compared with, measured in the same run.
//!
//! The relay is the real program, `postrider run`, between a private PostgreSQL that waits for its disk and a private
//! RabbitMQ, both with their default settings. The machine is shared by everything that is measured and by what
//! measures, so absolute figures say something about this machine alone; the ratios are what to compare.

mod adopted;
mod bare;
mod bed;
mod brokers;
mod carrier;
mod consume;
mod drain;
mod held;
mod idle;
mod insert;
mod kept;
mod latency;
mod machine;
mod operate;
mod queue;
mod relay;
mod report;
mod sample;

pub use report::{Line, Report, Verdict};

use std::path::PathBuf;
use std::time::Duration;

use crate::testbed::Result;
use bed::Bed;
use report::Lines;

/// Everything together takes about half an hour on two cores; a run that takes this long hangs.
const DEADLINE: Duration = Duration::from_secs(60 * 60);
/// What `quick` divides amounts and times by.
const QUICK: u32 = 10;

/// One measurement, which gives one or several lines of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figure {
    /// A large backlog through the relay, compared with a bare publisher; what it costs.
    Drain,
    /// From a commit to a consumer's receipt.
    Latency,
    /// What a relay without work does.
    Idle,
    /// The drain with millions of published events in the table.
    Kept,
    /// The drain beside transactions that stay open.
    Held,
    /// What the outbox costs its producers.
    Insert,
    /// A full queue through a consumer, compared with a bare program.
    Consume,
    /// The drain to every other broker, compared with a bare publisher.
    Brokers,
    /// A table that a service already has, compared with its own worker.
    Adopted,
    /// What people see beside ten million events.
    Operate,
}

impl Figure {
    /// All of them, in the order of the table.
    pub const ALL: [Figure; 10] = [
        Figure::Drain,
        Figure::Latency,
        Figure::Idle,
        Figure::Kept,
        Figure::Held,
        Figure::Insert,
        Figure::Consume,
        Figure::Brokers,
        Figure::Adopted,
        Figure::Operate,
    ];

    /// The word on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Figure::Drain => "drain",
            Figure::Latency => "latency",
            Figure::Idle => "idle",
            Figure::Kept => "kept",
            Figure::Held => "held",
            Figure::Insert => "insert",
            Figure::Consume => "consume",
            Figure::Brokers => "brokers",
            Figure::Adopted => "adopted",
            Figure::Operate => "operate",
        }
    }

    async fn measure(self, bed: &Bed) -> Result<Lines> {
        match self {
            Figure::Drain => drain::measure(bed).await,
            Figure::Latency => latency::measure(bed).await,
            Figure::Idle => idle::measure(bed).await,
            Figure::Kept => kept::measure(bed).await,
            Figure::Held => held::measure(bed).await,
            Figure::Insert => insert::measure(bed).await,
            Figure::Consume => consume::measure(bed).await,
            Figure::Brokers => brokers::measure(bed).await,
            Figure::Adopted => adopted::measure(bed).await,
            Figure::Operate => operate::measure(bed).await,
        }
    }
}

/// What to measure.
#[derive(Debug, Clone)]
pub struct Options {
    /// These figures alone.
    pub figures: Vec<Figure>,
    /// Ten times smaller: to see that it works, not to quote.
    pub is_quick: bool,
    /// The program under test.
    pub postrider: PathBuf,
}

/// The amounts of a run.
#[derive(Debug, Clone, Copy)]
struct Scale {
    /// Events of one drain.
    events: u64,
    /// Published events that stay in the table.
    kept: u64,
    /// The same, while people look.
    shown: u64,
    /// Messages of one round of consuming.
    messages: u64,
    /// Rows of an adopted table.
    rows: u64,
    /// How long a paced load lasts, and how long the idle relay is watched.
    watch: Duration,
    /// How long a transaction is held open.
    hold: Duration,
    /// How long one round of inserts lasts.
    insert: Duration,
}

impl Scale {
    fn new(is_quick: bool) -> Self {
        let by = if is_quick { QUICK } else { 1 };
        Self {
            events: 200_000 / u64::from(by),
            kept: 5_000_000 / u64::from(by),
            shown: 10_000_000 / u64::from(by),
            messages: 100_000 / u64::from(by),
            rows: 50_000 / u64::from(by),
            // A shorter watch of an idle relay would count nothing.
            watch: if is_quick { Duration::from_secs(5) } else { Duration::from_secs(20) },
            hold: Duration::from_secs(60) / by,
            insert: Duration::from_secs(8) / by,
        }
    }
}

/// Measures. An error means that it could not be done; missed targets are in the report.
pub async fn run(options: Options) -> Result<Report> {
    tokio::time::timeout(DEADLINE, measure(options))
        .await
        .map_err(|_| format!("the benchmark is not over after {} minutes", DEADLINE.as_secs() / 60))?
}

async fn measure(options: Options) -> Result<Report> {
    eprintln!("starting PostgreSQL and RabbitMQ");
    let bed = Bed::start(options.postrider, Scale::new(options.is_quick)).await?;
    let machine = machine::describe(&bed).await?;
    let (mut lines, mut stolen) = (Vec::new(), Vec::new());
    for figure in options.figures {
        eprintln!("{}:", figure.name());
        let since = machine::Stolen::start()?;
        lines.extend(figure.measure(&bed).await.map_err(|error| format!("{}: {error}", figure.name()))?);
        stolen.push(format!("{} {:.0} %", figure.name(), since.percent()?));
    }
    let machine = format!("{machine} CPU time that the host gave to others: {}.", stolen.join(", "));
    Ok(Report { machine, is_quick: options.is_quick, lines })
}
