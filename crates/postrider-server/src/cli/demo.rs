//! `postrider demo`: the whole way of an event on the embedded default.

use std::process::ExitCode;

use clap::Args;
use postrider::{Error, Kind};

use super::failure::Result;

/// Arguments of `demo`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  postrider demo            run it and keep the last screen until Ctrl-C
  postrider demo --exit     end by itself; exit code 0 only when the proof holds")]
pub struct DemoArgs {
    /// End by itself, with exit code 0 only when nothing was lost, doubled or reordered
    #[arg(long)]
    pub exit: bool,
}

/// Runs the demo.
pub async fn run(_args: DemoArgs) -> Result<ExitCode> {
    Err(Error::new(Kind::Other, "the demo is not built yet").into())
}
