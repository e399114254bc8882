//! `postrider status`: schema, backlog, lanes.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use comfy_table::Color;
use postrider::upkeep::BACKLOG_COUNT_MAX;

use super::failure::Result;
use super::{output, signals};
use crate::config::Config;
use crate::status::{self, OutboxLine, Status};
use crate::wire;

const WATCH_EVERY: Duration = Duration::from_secs(1);

/// Arguments of `status`.
#[derive(Debug, Args)]
#[command(after_help = "\
pending   committed, not published yet
retrying  refused by the broker, tried again by themselves
waiting   behind an earlier event of their key
failed    attempts spent; a person decides

Examples:
  postrider status
  postrider status --watch
  postrider status --json | jq .backlog.pending")]
pub struct StatusArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Show it again every second
    #[arg(short, long)]
    watch: bool,
}

/// Shows the status, once or until Ctrl-C.
pub async fn run(args: StatusArgs, config: Config) -> Result<ExitCode> {
    let store = wire::open_store(&config).await?;
    if args.watch {
        let stop = signals::stop_on_signal()?;
        while !stop.is_cancelled() {
            let status = status::read(&config, store.as_ref()).await?;
            if !args.json && std::io::stdout().is_terminal() {
                // Clear the screen and go home.
                output::line("\x1b[2J\x1b[H")?;
            }
            show(&status, args.json)?;
            tokio::select! {
                () = stop.cancelled() => {}
                () = tokio::time::sleep(WATCH_EVERY) => {}
            }
        }
    } else {
        show(&status::read(&config, store.as_ref()).await?, args.json)?;
    }
    store.close().await;
    Ok(ExitCode::SUCCESS)
}

fn show(status: &Status, is_json: bool) -> Result<()> {
    if is_json {
        return output::json(status);
    }
    output::line(&format!("store    {} (schema {})\n", status.store, status.schema))?;
    let mut table =
        output::table(&["outbox", "destination", "broker", "pending", "oldest", "retrying", "waiting", "failed"]);
    let alarm = |count: u64, color| match count {
        0 => comfy_table::Cell::new("0"),
        _ => output::coloured(&count.to_string(), color),
    };
    for OutboxLine { outbox, backlog } in &status.outboxes {
        table.add_row(vec![
            comfy_table::Cell::new(outbox.table.as_deref().unwrap_or("postrider")),
            comfy_table::Cell::new(&outbox.destination),
            comfy_table::Cell::new(&outbox.broker),
            comfy_table::Cell::new(if backlog.pending >= BACKLOG_COUNT_MAX {
                format!("{BACKLOG_COUNT_MAX}+")
            } else {
                backlog.pending.to_string()
            }),
            comfy_table::Cell::new(
                backlog.oldest_secs.map_or("-".to_owned(), |secs| output::duration(Duration::from_secs(secs))),
            ),
            alarm(backlog.retrying, Color::Yellow),
            alarm(backlog.waiting, Color::Yellow),
            alarm(backlog.failed, Color::Red),
        ]);
    }
    output::print(table)?;
    output::line("")?;

    if !status.leases.iter().any(|lease| lease.group.starts_with("relay/") && lease.owner.is_some()) {
        eprintln!("No relay is running: events stay in the outbox. Start one with `postrider run`.\n");
    }
    if status.leases.is_empty() {
        return Ok(());
    }
    let mut table = output::table(&["group", "slot", "holder", "epoch", "lease"]);
    for lease in &status.leases {
        let left = lease.remaining_ms.map(Duration::from_millis);
        table.add_row(vec![
            lease.group.clone(),
            lease.slot.to_string(),
            lease.owner.clone().unwrap_or_else(|| "nobody".to_owned()),
            lease.epoch.to_string(),
            left.map_or("-".to_owned(), |left| format!("{:.1}s left", left.as_secs_f64())),
        ]);
    }
    output::print(table)
}
