//! `postrider dead`: the desk for what consumers and the relay have given up.

use std::io::{BufRead, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use postrider::dead::{DeadDetail, DeadFilter, REPLAY_RATE, Replay, Replayed, Stage};
use postrider::store::Store;
use postrider::{Error, Kind};
use serde::Serialize;
use tokio::sync::watch;

use super::failure::Result;
use super::{output, signals};
use crate::config::Config;
use crate::wire;

/// After this long without a change it is said that nothing moves.
const STILL: Duration = Duration::from_secs(10);
/// How often the progress bar turns.
const TICK: Duration = Duration::from_millis(200);
/// More characters of an error than this do not help in a list.
const ERROR_CHARS_MAX: usize = 60;

/// Arguments of `dead`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  postrider dead list --consumer billing
  postrider dead show 17
  postrider dead replay --consumer billing --dry-run
  postrider dead replay 17
  postrider dead discard 17 --reason 'test order'
  postrider dead stats --json")]
pub struct DeadArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List dead letters, oldest first
    List {
        #[command(flatten)]
        filter: Filter,
        /// At most this many
        #[arg(long, default_value_t = 100)]
        limit: usize,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show everything about one; its payload only when asked for
    Show {
        /// Its number
        id: i64,
        /// Show the payload too
        #[arg(long)]
        payload: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Give dead letters back to the consumer or relay that failed, in stages of 1, 10, 100 …
    Replay {
        #[command(flatten)]
        filter: Filter,
        /// All that there are
        #[arg(long)]
        all: bool,
        /// Only say which
        #[arg(long)]
        dry_run: bool,
        /// At most this many per second
        #[arg(long, default_value_t = REPLAY_RATE, value_parser = clap::value_parser!(u32).range(1..))]
        rate: u32,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Give dead letters up for good; they are kept until their retention ends
    Discard {
        #[command(flatten)]
        filter: Filter,
        /// All that there are
        #[arg(long)]
        all: bool,
        /// Why; it is written into the audit table
        #[arg(long)]
        reason: String,
        /// Do not ask
        #[arg(long)]
        yes: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Count dead letters by consumer and error
    Stats {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Which dead letters are meant.
#[derive(Debug, Args)]
struct Filter {
    /// Their numbers
    ids: Vec<i64>,
    /// Of this consumer
    #[arg(long)]
    consumer: Option<String>,
    /// Events of this type
    #[arg(long = "type")]
    kind: Option<String>,
    /// Errors of this type
    #[arg(long = "error")]
    error_type: Option<String>,
    /// Of this key
    #[arg(long)]
    key: Option<String>,
    /// Of this tenant
    #[arg(long)]
    tenant: Option<String>,
    /// Given up by a consumer or by the relay: `consumer` or `relay`
    #[arg(long)]
    stage: Option<Stage>,
    /// Given up at or after this time (RFC 3339, 2026-11-15T12:00:00Z)
    #[arg(long)]
    since: Option<DateTime<Utc>>,
    /// Given up before this time
    #[arg(long)]
    until: Option<DateTime<Utc>>,
}

impl Filter {
    fn into_filter(self) -> DeadFilter {
        let Filter { ids, consumer, kind, error_type, key, tenant, stage, since, until } = self;
        let ids = (!ids.is_empty()).then_some(ids);
        DeadFilter { ids, consumer, kind, error_type, key, tenant, stage, since, until }
    }

    /// For verbs that change something: everything must be meant, not just not excluded.
    fn required(self, all: bool) -> Result<DeadFilter> {
        let filter = self.into_filter();
        if filter == DeadFilter::default() && !all {
            return Err(Error::new(Kind::Config, "no dead letter is named")
                .with_remedy("give numbers, a filter such as --consumer, or --all")
                .into());
        }
        Ok(filter)
    }
}

/// Runs a verb.
pub async fn run(args: DeadArgs, config: Config) -> Result<ExitCode> {
    let store = wire::open_store(&config).await?;
    store.schema().await?.require()?;
    let code = match args.verb {
        Verb::List { filter, limit, json } => list(store.as_ref(), &filter.into_filter(), limit, json).await,
        Verb::Show { id, payload, json } => show(store.as_ref(), id, payload, json).await,
        Verb::Replay { filter, all, dry_run: true, json, .. } => {
            list(store.as_ref(), &filter.required(all)?, usize::MAX >> 1, json).await
        }
        Verb::Replay { filter, all, rate, json, .. } => replay(store.as_ref(), filter.required(all)?, rate, json).await,
        Verb::Discard { filter, all, reason, yes, json } => {
            discard(store.as_ref(), &filter.required(all)?, &reason, yes, json).await
        }
        Verb::Stats { json } => stats(store.as_ref(), json).await,
    }?;
    store.close().await;
    Ok(code)
}

/// Who asks, for the audit table.
pub(super) fn actor() -> String {
    std::env::var("SUDO_USER").or_else(|_| std::env::var("USER")).unwrap_or_else(|_| "unknown".to_owned())
}

async fn list(store: &dyn Store, filter: &DeadFilter, limit: usize, is_json: bool) -> Result<ExitCode> {
    let letters = store.dead_list(filter, 0, limit).await?;
    if is_json {
        output::json(&letters)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = output::table(&["id", "stage", "consumer", "type", "key", "tries", "died", "error"]);
    for letter in &letters {
        let age = (Utc::now() - letter.died_at).to_std().unwrap_or_default();
        let error: String = format!("{}: {}", letter.error_type, letter.error).chars().take(ERROR_CHARS_MAX).collect();
        table.add_row([
            letter.id.to_string(),
            letter.stage.to_string(),
            letter.consumer.clone(),
            letter.kind.clone().unwrap_or_else(|| "(no event)".to_owned()),
            letter.key.clone().unwrap_or_default(),
            letter.attempts.to_string(),
            format!("{} ago", output::duration(age)),
            error,
        ]);
    }
    output::print(table)?;
    if letters.len() == limit {
        eprintln!("there may be more; see --limit");
    }
    Ok(ExitCode::SUCCESS)
}

async fn show(store: &dyn Store, id: i64, has_payload: bool, is_json: bool) -> Result<ExitCode> {
    let Some(detail) = store.dead_show(id).await? else {
        return Err(Error::new(Kind::Missing, format!("there is no dead letter {id}"))
            .with_remedy("`postrider dead list` shows which there are")
            .into());
    };
    #[derive(Serialize)]
    struct Shown<'a> {
        #[serde(flatten)]
        detail: &'a DeadDetail,
        #[serde(skip_serializing_if = "Option::is_none")]
        payload: Option<String>,
    }
    let payload = if has_payload { store.dead_payload(id, &actor()).await? } else { None };
    let payload = payload.map(|payload| String::from_utf8_lossy(&payload).into_owned());
    let shown = Shown { detail: &detail, payload };
    if is_json {
        output::json(&shown)?;
    } else {
        let text = serde_json::to_string_pretty(&shown)
            .map_err(|error| Error::new(Kind::Other, "the dead letter cannot be written").with_source(error))?;
        output::line(&text)?;
        if !has_payload {
            eprintln!("the payload is shown with --payload");
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn stats(store: &dyn Store, is_json: bool) -> Result<ExitCode> {
    let counts = store.dead_stats().await?;
    if is_json {
        output::json(&counts)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = output::table(&["stage", "consumer", "error", "state", "count", "oldest"]);
    for count in counts {
        let age = (Utc::now() - count.oldest).to_std().unwrap_or_default();
        let age = format!("{} ago", output::duration(age));
        let stage = count.stage.to_string();
        table.add_row([stage, count.consumer, count.error_type, count.state, count.count.to_string(), age]);
    }
    output::print(table)?;
    Ok(ExitCode::SUCCESS)
}

async fn discard(
    store: &dyn Store,
    filter: &DeadFilter,
    reason: &str,
    is_sure: bool,
    is_json: bool,
) -> Result<ExitCode> {
    if reason.trim().is_empty() {
        return Err(Error::new(Kind::Config, "the reason is empty")
            .with_remedy("say why, for those who ask later")
            .into());
    }
    if !is_sure && !ask("discard these dead letters for good?")? {
        eprintln!("nothing was discarded");
        return Ok(ExitCode::FAILURE);
    }
    let discarded = store.dead_discard(filter, reason, &actor()).await?;
    if is_json {
        output::json(&serde_json::json!({ "discarded": discarded }))?;
    } else {
        output::line(&format!("{discarded} discarded"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Asks on a terminal; elsewhere nobody could answer.
pub(super) fn ask(question: &str) -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        return Err(Error::new(Kind::Config, "nobody is there to confirm").with_remedy("give --yes").into());
    }
    eprint!("{question} [y/N] ");
    let _ = std::io::stderr().flush();
    let mut answer = String::new();
    // An end of input is no yes.
    let _ = std::io::stdin().lock().read_line(&mut answer);
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

async fn replay(store: &dyn Store, filter: DeadFilter, rate: u32, is_json: bool) -> Result<ExitCode> {
    let stop = signals::stop_on_signal()?;
    let progress = watch::Sender::new(Replayed::default());
    let telling = tokio::spawn(tell(progress.subscribe()));
    let replayed = Replay { filter, rate, actor: actor() }.run(store, &stop, &progress).await;
    drop(progress);
    // It only prints, and ends with the sender.
    let _ = telling.await;
    let replayed = replayed?;
    if is_json {
        output::json(&replayed)?;
    } else {
        output::line(&format!("{} applied, {} failed again", replayed.applied, replayed.failed))?;
        if let Some(why) = replayed.stopped {
            eprintln!("stopped: {why}; {} taken back, {} under way", replayed.recalled, replayed.open);
        }
    }
    Ok(if replayed.failed == 0 && replayed.stopped.is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Shows how a replay fares, until it ends.
async fn tell(mut progress: watch::Receiver<Replayed>) {
    let (bar, mut is_told) = (bar(), false);
    loop {
        match tokio::time::timeout(STILL, progress.changed()).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => break,
            Err(_) if is_told => {}
            Err(_) => {
                is_told = true;
                bar.suspend(|| eprintln!("nothing has moved for {} s: does the consumer run?", STILL.as_secs()));
            }
        }
        let now = *progress.borrow_and_update();
        bar.set_message(format!(
            "{} applied, {} failed, {} under way (Ctrl-C takes back what is not begun)",
            now.applied, now.failed, now.open
        ));
    }
    bar.finish_and_clear();
}

fn bar() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new_spinner().with_style(ProgressStyle::default_spinner());
    bar.enable_steady_tick(TICK);
    bar
}
