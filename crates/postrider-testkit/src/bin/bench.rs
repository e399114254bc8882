//! `bench`: measures throughput, latency and cost of the real program, and prints one table.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use postrider_testkit::bench::{self, Figure, Options, Report};
use postrider_testkit::testbed::{Result, clean_up};

/// Measures `postrider` (the one beside this program) on a private PostgreSQL and RabbitMQ. The table is on stdout,
/// progress on stderr. Exits with 0 when everything could be measured, whether or not targets were missed.
#[derive(Parser)]
struct Cli {
    /// Measure this figure alone; may be given several times
    #[arg(long, value_parser = figure, value_name = "FIGURE")]
    only: Vec<Figure>,
    /// Ten times smaller: to see that it works, not to quote
    #[arg(long)]
    quick: bool,
    /// Print JSON
    #[arg(long, conflicts_with = "markdown")]
    json: bool,
    /// Print the table as docs/benchmarks.md has it
    #[arg(long)]
    markdown: bool,
    /// Measure this program instead
    #[arg(long, value_name = "PATH")]
    postrider: Option<PathBuf>,
}

fn figure(name: &str) -> Result<Figure, String> {
    let names = || Figure::ALL.map(Figure::name).join(", ");
    Figure::ALL.into_iter().find(|figure| figure.name() == name).ok_or_else(|| format!("the figures are {}", names()))
}

#[tokio::main]
async fn main() -> ExitCode {
    let result = run(Cli::parse()).await;
    clean_up();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(cli: Cli) -> Result<()> {
    let postrider = match &cli.postrider {
        Some(path) => path.clone(),
        None => std::env::current_exe()?.with_file_name("postrider"),
    };
    let figures = if cli.only.is_empty() { Figure::ALL.to_vec() } else { cli.only.clone() };
    let report = bench::run(Options { figures, is_quick: cli.quick, postrider }).await?;
    print(&cli, &report)
}

fn print(cli: &Cli, report: &Report) -> Result<()> {
    if cli.json {
        println!("{}", serde_json::to_string_pretty(report)?);
    } else if cli.markdown {
        print!("{}", report.markdown());
    } else {
        println!("{report}");
    }
    Ok(())
}
