//! The command line. One file per command; data goes to stdout, everything else to stderr.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::config::{self, Config, LogFormat};
use crate::logging;

mod adopt;
mod alerts;
mod check;
mod dead;
pub mod demo;
mod doctor;
mod failure;
mod init;
mod migrate;
mod outbox;
pub mod output;
mod run;
mod send;
mod signals;
mod status;
mod tail;
mod token;
mod trigger;

pub use failure::Result;

const EXAMPLES: &str = "\
Examples:
  postrider demo                           see the whole way of an event, nothing to install
  postrider run                            start on ./postrider.db, HTTP on 127.0.0.1:7070
  postrider send orders.created order.created --key o-1 --payload '{\"order\":\"o-1\"}'
  postrider tail                           follow the events as they are committed
  postrider doctor                         check everything, and say what to do

Exit codes: 0 done, 1 failed, 2 wrong usage.";

/// Carries events from your database to every other service: never lost, never overtaken within their key, applied once.
#[derive(Debug, Parser)]
#[command(name = "postrider", version, after_help = EXAMPLES, max_term_width = 110)]
pub struct Cli {
    /// The config file [default: ./postrider.toml when it exists]
    #[arg(short, long, global = true, value_name = "FILE", env = "POSTRIDER_CONFIG")]
    config: Option<PathBuf>,

    /// How log lines look [default: log.format for `run`, pretty for the others]
    #[arg(long, global = true, value_name = "FORMAT", value_enum)]
    log_format: Option<LogFormat>,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the whole way of an event on the embedded default, with a crash and a proof
    Demo(demo::DemoArgs),
    /// Write a config file with every setting and its default
    Init(init::InitArgs),
    /// Create or update Postrider's tables
    Migrate(migrate::MigrateArgs),
    /// Run relay, upkeep and HTTP until SIGTERM or Ctrl-C
    Run(run::RunArgs),
    /// Write one event into the outbox
    Send(Box<send::SendArgs>),
    /// Follow the events as they are committed
    Tail(tail::TailArgs),
    /// Show schema, backlog and who holds which lane
    Status(status::StatusArgs),
    /// The desk: list, show, replay and discard what consumers have given up
    Dead(Box<dead::DeadArgs>),
    /// What is wrong, and who need not be told for a while: list, silence, unsilence, test
    Alerts(alerts::AlertsArgs),
    /// Search the store for what should not be, and say what to do
    Check(check::CheckArgs),
    /// Publish past events again to one consumer; recover after a restore
    Outbox(Box<outbox::OutboxArgs>),
    /// Relay a table that a service already has: look at it, and write its mapping
    Adopt(adopt::AdoptArgs),
    /// Let changes of a table write events: add, remove, list, print
    Trigger(trigger::TriggerArgs),
    /// Make a token for HTTP
    Token(token::TokenArgs),
    /// Check config, store and broker, and say what to do
    Doctor(doctor::DoctorArgs),
    /// A relay or consumer of the demo, in a process that can be killed
    #[command(hide = true)]
    DemoWorker(demo::WorkerArgs),
}

/// Runs one command.
pub fn run(cli: Cli) -> Result<ExitCode> {
    let Cli { config, log_format, command } = cli;
    let load = || -> Result<Config> {
        let mut config = config::load(config.as_deref())?;
        config.log.format = log_format.unwrap_or(config.log.format);
        Ok(config)
    };
    // `run` logs as the config says; the others are talking to a person and stay quiet.
    if !matches!(command, Command::Run(_)) {
        logging::init_quiet(log_format);
    }
    match command {
        Command::Init(args) => init::run(&args, config),
        Command::Demo(args) => block_on(demo::run(args)),
        Command::DemoWorker(args) => block_on(demo::work(args)),
        Command::Migrate(args) => block_on(migrate::run(args, load()?)),
        Command::Run(args) => block_on(run::run(args, load()?)),
        Command::Send(args) => block_on(send::run(*args, load()?)),
        Command::Tail(args) => block_on(tail::run(args, load()?)),
        Command::Status(args) => block_on(status::run(args, load()?)),
        Command::Dead(args) => block_on(dead::run(*args, load()?)),
        Command::Alerts(args) => block_on(alerts::run(args, load()?)),
        Command::Check(args) => block_on(check::run(args, load()?)),
        Command::Outbox(args) => block_on(outbox::run(*args, load()?)),
        Command::Adopt(args) => block_on(adopt::run(args, load()?)),
        Command::Trigger(args) => block_on(trigger::run(args, load()?)),
        Command::Token(args) => token::run(args),
        Command::Doctor(args) => block_on(doctor::run(args, config)),
    }
}

fn block_on(command: impl Future<Output = Result<ExitCode>>) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| failure::io("the runtime cannot be started", error))?;
    let result = runtime.block_on(command);
    // What still runs after the command's end has nothing left to say; it is safe to leave at any point.
    runtime.shutdown_background();
    result
}
