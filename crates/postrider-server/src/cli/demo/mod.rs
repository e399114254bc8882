//! `postrider demo`: the whole way of an event on the embedded default, with two crashes and a proof.
//!
//! This process is the service: its producers (`shop`) write business rows and events into a SQLite file. Relays and
//! consumers are processes of their own (`crew`, `worker`), so that killing one is a real crash. `story` kills them at
//! the right moments, `view` shows the counts meanwhile, and `proof` asks the database what came of it all. `stage` holds them together.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use postrider::migrate::Migrate;
use postrider::store::sqlite::SqliteStore;
use tempfile::TempDir;

use self::names::{DATABASE, DIRECTORY_PREFIX};
use self::stage::Stage;
use super::failure::{Result, io};
use super::signals;

mod count;
mod crew;
mod names;
mod proof;
mod shop;
mod stage;
mod story;
mod view;
mod worker;

pub use worker::WorkerArgs;
pub use worker::run as work;

/// Arguments of `demo`.
#[derive(Debug, Args)]
#[command(after_help = "\
Four producers, two relays and two consumer groups share one SQLite file in a temporary directory. A relay and a
consumer are killed with SIGKILL in the middle; at the end the database itself is asked what was lost, doubled or
reordered; a phantom is an effect of an event whose transaction was rolled back.

Examples:
  postrider demo                    watch it; after the proof events trickle on until Ctrl-C
  postrider demo --exit             end by itself; exit code 0 only when the proof holds
  postrider demo --exit --json      the proof as JSON
  postrider demo --events 50000     as fast as this machine can")]
pub struct DemoArgs {
    /// End by itself, with exit code 0 only when nothing was lost, doubled or reordered
    #[arg(long)]
    exit: bool,
    /// How many events to commit, 100 to 1,000,000 [default: what the disk can do in good time, at most 6,000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(100..=1_000_000))]
    events: Option<u64>,
    /// Print the proof as JSON
    #[arg(long)]
    json: bool,
    /// Where to put the database [default: the system's temporary directory]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Runs the demo.
pub async fn run(args: DemoArgs) -> Result<ExitCode> {
    let stop = signals::stop_on_signal()?;
    let directory = directory(&args)?;
    let store = SqliteStore::open(&directory.path().join(DATABASE)).await?;
    store.migrate().await?;
    let commits_per_second = shop::create(&store).await?;
    let events = args.events.unwrap_or_else(|| events_for(commits_per_second));
    let mut stage = Stage::new(args, events, store, stop, directory.path())?;
    let result = stage.perform().await;
    stage.clear().await;
    directory.close().map_err(|error| io("the demo's directory cannot be removed", error))?;
    result
}

/// Every event costs a commit in each group, so a slow disk gets fewer: nobody should watch for a minute.
fn events_for(commits_per_second: f64) -> u64 {
    let events = (commits_per_second * 6.0) as u64 / 100 * 100;
    events.clamp(600, 6_000)
}

fn directory(args: &DemoArgs) -> Result<TempDir> {
    let parent = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let directory = tempfile::Builder::new().prefix(DIRECTORY_PREFIX).tempdir_in(&parent);
    directory.map_err(|error| {
        let error = io(format!("there is no room for the demo in {}", parent.display()), error);
        error.with_remedy("name another directory with --dir").into()
    })
}
