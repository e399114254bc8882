//! `postrider check`: the integrity check.

use std::process::ExitCode;

use chrono::Utc;
use clap::Args;
use comfy_table::{Cell, Color};
use postrider::doctor::Severity;
use postrider::integrity::{Report, ReportView};
use postrider::store::Store;
use postrider::{Error, Kind};

use super::dead::actor;
use super::failure::Result;
use super::output;
use crate::config::Config;
use crate::integrity::Check;
use crate::wire;

/// Arguments of `check`.
#[derive(Debug, Args)]
#[command(after_help = "\
Looks for events that wait too long, leases, retries and replays that are stuck, what contradicts the inbox, dead letters
that nobody can replay, missing partitions, and rows that a [[check_sql]] returns. It changes nothing but its report.

Exit codes: 0 no errors, 1 errors were found.

Examples:
  postrider check
  postrider check --list
  postrider check --report 12 --json")]
pub struct CheckArgs {
    /// List past reports, newest first, and check nothing
    #[arg(long, conflicts_with = "report")]
    list: bool,
    /// Show a past report, and check nothing
    #[arg(long, value_name = "ID")]
    report: Option<i64>,
    /// With --list: at most this many
    #[arg(long, default_value_t = 30)]
    limit: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the check, or shows what was found before.
pub async fn run(args: CheckArgs, config: Config) -> Result<ExitCode> {
    let store = wire::open_store(&config).await?;
    let code = if args.list {
        list(&store.reports(None, args.limit).await?, args.json)?;
        if let Some(next) = config.check.daily.as_ref().and_then(|daily| daily.next(Utc::now())) {
            eprintln!("the next check by itself is at {}, if an instance runs", next.format("%Y-%m-%d %H:%M UTC"));
        }
        ExitCode::SUCCESS
    } else if let Some(id) = args.report {
        let report = store.report(id).await?.ok_or_else(|| {
            Error::new(Kind::Missing, format!("there is no report {id}"))
                .with_remedy("`postrider check --list` shows which there are")
        })?;
        show(&report, args.json)?
    } else {
        show(&check(store.as_ref(), &config).await?, args.json)?
    };
    store.close().await;
    Ok(code)
}

async fn check(store: &dyn Store, config: &Config) -> Result<Report> {
    let check = Check::new(config);
    // Only one that is scheduled can have been begun before.
    let begun = check.begin(store, &actor(), None).await?;
    let id = begun.ok_or_else(|| Error::new(Kind::Other, "the report was not begun"))?;
    Ok(check.finish(store, id).await?)
}

fn list(reports: &[ReportView], is_json: bool) -> Result<()> {
    if is_json {
        return output::json(&reports);
    }
    let mut table = output::table(&["id", "began", "by", "took", "checks", "warnings", "errors"]);
    for report in reports {
        let took = report.ended_at.map(|ended_at| (ended_at - report.began_at).to_std().unwrap_or_default());
        table.add_row(vec![
            Cell::new(report.id),
            Cell::new(report.began_at.format("%Y-%m-%d %H:%M:%S")),
            Cell::new(&report.actor),
            Cell::new(took.map_or("not ended".to_owned(), output::duration)),
            Cell::new(report.checks),
            number(report.warnings, Color::Yellow),
            number(report.errors, Color::Red),
        ]);
    }
    output::print(table)
}

fn number(count: u32, color: Color) -> Cell {
    if count == 0 { Cell::new("0") } else { output::coloured(&count.to_string(), color) }
}

fn show(report: &Report, is_json: bool) -> Result<ExitCode> {
    let ReportView { id, checks, warnings, errors, .. } = &report.view;
    if is_json {
        output::json(report)?;
    } else {
        for finding in &report.findings {
            let word = match finding.severity {
                Severity::Ok => continue,
                Severity::Warning => "warning",
                Severity::Error => "error",
            };
            output::line(&format!("{word}: {}: {}", finding.check, finding.message))?;
            output::line(&format!("  remedy: {}", finding.remedy))?;
        }
        output::line(&format!("report {id}: {checks} checks, {errors} errors, {warnings} warnings"))?;
    }
    Ok(if *errors == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
