//! `postrider status`: schema, backlog, lanes.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use comfy_table::Color;
use postrider::lease::LeaseView;
use postrider::store::Store;
use postrider::upkeep::{BACKLOG_COUNT_MAX, Backlog};
use serde::Serialize;

use super::failure::Result;
use super::{output, signals};
use crate::config::Config;
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

#[derive(Serialize)]
struct Status {
    store: String,
    schema: i32,
    /// Of everything together.
    backlog: Backlog,
    outboxes: Vec<OutboxLine>,
    leases: Vec<LeaseLine>,
}

/// The events of one outbox for one destination.
#[derive(Serialize)]
struct OutboxLine {
    /// The adopted table; none for Postrider's own outbox.
    table: Option<String>,
    destination: String,
    broker: String,
    backlog: Backlog,
}

#[derive(Serialize)]
struct LeaseLine {
    group: String,
    slot: u32,
    owner: Option<String>,
    epoch: i64,
    remaining_ms: Option<u64>,
}

impl LeaseLine {
    fn of(view: LeaseView) -> Self {
        let LeaseView { lease, remaining } = view;
        Self {
            group: lease.group,
            slot: lease.slot,
            owner: remaining.map(|_| lease.owner),
            epoch: lease.epoch,
            remaining_ms: remaining.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
        }
    }
}

/// Shows the status, once or until Ctrl-C.
pub async fn run(args: StatusArgs, config: Config) -> Result<ExitCode> {
    let store = wire::open_store(&config).await?;
    if args.watch {
        let stop = signals::stop_on_signal()?;
        while !stop.is_cancelled() {
            let status = read(&config, store.as_ref()).await?;
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
        show(&read(&config, store.as_ref()).await?, args.json)?;
    }
    store.close().await;
    Ok(ExitCode::SUCCESS)
}

async fn read(config: &Config, store: &dyn Store) -> Result<Status> {
    let mut outboxes = Vec::new();
    for (route, broker) in config.destinations() {
        let backlog = store.backlog(&route).await?;
        let (destination, broker) = (route.destination, broker.url.to_string());
        outboxes.push(OutboxLine { table: None, destination, broker, backlog });
    }
    for outbox in &config.outboxes {
        let table = wire::adopted_tables(store)?.adopt(&outbox.mapping).await?;
        let broker = config.destinations().into_iter().find(|(route, _)| route.destination == outbox.destination);
        outboxes.push(OutboxLine {
            table: Some(outbox.mapping.table.to_string()),
            destination: outbox.destination.clone(),
            broker: broker.map(|(_, broker)| broker.url.to_string()).unwrap_or_default(),
            backlog: table.backlog().await?,
        });
    }
    Ok(Status {
        store: config.store.to_string(),
        schema: store.schema().await?.found,
        backlog: sum(&outboxes),
        outboxes,
        leases: store.leases().await?.into_iter().map(LeaseLine::of).collect(),
    })
}

fn sum(outboxes: &[OutboxLine]) -> Backlog {
    let mut sum = Backlog::default();
    for OutboxLine { backlog, .. } in outboxes {
        sum.pending += backlog.pending;
        sum.oldest_secs = sum.oldest_secs.max(backlog.oldest_secs);
        sum.retrying += backlog.retrying;
        sum.waiting += backlog.waiting;
        sum.failed += backlog.failed;
    }
    sum
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
    for OutboxLine { table: adopted, destination, broker, backlog } in &status.outboxes {
        table.add_row(vec![
            comfy_table::Cell::new(adopted.as_deref().unwrap_or("postrider")),
            comfy_table::Cell::new(destination),
            comfy_table::Cell::new(broker),
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
