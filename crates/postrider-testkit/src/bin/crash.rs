//! `crash`: kills everything at random and proves that nothing was lost, doubled or reordered.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use postrider_testkit::crash::{self, BrokerKind, ConsumeOptions, Options, StoreKind};
use postrider_testkit::testbed::{Result, clean_up};

/// Runs producers, relays and consumers on a private database and broker, kills all of them at random, and checks the
/// history. Exits with 0 only when it is clean.
#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    role: Option<Role>,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Subcommand)]
enum Role {
    /// A consumer process of the run
    #[command(hide = true)]
    Consume(ConsumeArgs),
    /// Declares a consumer's queues
    #[command(hide = true)]
    Declare(ConsumeArgs),
}

#[derive(Args)]
struct RunArgs {
    /// The broker that carries the events
    #[arg(long, value_enum, default_value_t)]
    broker: BrokerKind,
    /// The database with outbox, inboxes and effects
    #[arg(long, value_enum, default_value_t)]
    store: StoreKind,
    /// Events to commit
    #[arg(long, default_value_t = 200_000)]
    events: u64,
    /// `kill -9` of relays and consumers, in total
    #[arg(long, default_value_t = 20)]
    kills: usize,
    /// `kill -9` of consumers alone, beside those
    #[arg(long, default_value_t = 0)]
    consumer_kills: usize,
    /// Of so many attempts at an event, one fails; 0 for none
    #[arg(long, default_value_t = 0)]
    failing_in: u32,
    /// Of so many events, one ends every process that has it; 0 for none
    #[arg(long, default_value_t = 0)]
    poison_in: u32,
    /// Of so many applied events, one is published once more; 0 for none
    #[arg(long, default_value_t = 0)]
    duplicate_in: u32,
    /// Restarts of the broker, by `kill -9` and by an orderly stop in turn
    #[arg(long, default_value_t = 3)]
    broker_restarts: usize,
    /// `kill -9` and restart of the database
    #[arg(long, default_value_t = 2)]
    store_restarts: usize,
    /// SIGSTOPs of a relay for twice its lease
    #[arg(long, default_value_t = 1)]
    freezes: usize,
    /// Lanes of the relays
    #[arg(long, default_value_t = 2)]
    lanes: u32,
    /// Repeats the faults of an earlier run
    #[arg(long)]
    seed: Option<u64>,
    /// The run fails when it is not over after this many seconds
    #[arg(long, default_value_t = 1500)]
    deadline_s: u64,
    /// Keep configuration and logs in this folder
    #[arg(long)]
    logs: Option<PathBuf>,
}

#[derive(Args)]
struct ConsumeArgs {
    #[arg(long)]
    group: String,
    #[arg(long)]
    slots: u32,
    #[arg(long)]
    lease_ms: u64,
    #[arg(long)]
    store: StoreKind,
    #[arg(long)]
    store_url: String,
    #[arg(long)]
    broker: BrokerKind,
    #[arg(long)]
    broker_url: String,
    #[arg(long)]
    failing_in: u32,
}

#[tokio::main]
async fn main() -> ExitCode {
    let Cli { role, run } = Cli::parse();
    let result = match role {
        Some(Role::Consume(args)) => {
            log();
            crash::consume(args.options()).await.map(|()| true)
        }
        Some(Role::Declare(args)) => crash::declare(args.options()).await.map(|()| true),
        None => show(run.options()).await,
    };
    clean_up();
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("crash: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn show(options: Options) -> Result<bool> {
    eprintln!("seed {}", options.seed);
    let outcome = crash::run(options).await?;
    println!("{outcome}");
    Ok(outcome.is_clean())
}

fn log() {
    tracing_subscriber::fmt()
        .with_max_level(tracing::level_filters::LevelFilter::INFO)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
}

impl RunArgs {
    fn options(self) -> Options {
        let defaults = Options::default();
        Options {
            events: self.events,
            kills: self.kills,
            consumer_kills: self.consumer_kills,
            failing_in: self.failing_in,
            poison_in: self.poison_in,
            duplicate_in: self.duplicate_in,
            broker: self.broker,
            store: self.store,
            broker_restarts: self.broker_restarts,
            store_restarts: self.store_restarts,
            freezes: self.freezes,
            lanes: self.lanes,
            seed: self.seed.unwrap_or(defaults.seed),
            deadline: Duration::from_secs(self.deadline_s),
            logs: self.logs,
            ..defaults
        }
    }
}

impl ConsumeArgs {
    fn options(self) -> ConsumeOptions {
        let lease = Duration::from_millis(self.lease_ms);
        let ConsumeArgs { group, slots, store, store_url, broker, broker_url, failing_in, .. } = self;
        ConsumeOptions { group, slots, store, store_url, broker, broker_url, lease, failing_in }
    }
}
