//! `postrider outbox`: past events once more, and what to do after a restore.

use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use postrider::broker::topic::TopicFilter;
use postrider::dead::REPLAY_RATE;
use postrider::recovery::{Before, Evidence, Mark, NewLife, OTHER_DATABASE, Republish, Republished, Restored};
use postrider::store::Store;
use postrider::{Error, Kind};
use serde::Serialize;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::dead::{actor, ask};
use super::failure::Result;
use super::{output, signals};
use crate::config::{self, Config};
use crate::wire;

/// After this long without a change it is said that nothing moves.
const STILL: Duration = Duration::from_secs(10);
/// How often the progress bar turns.
const TICK: Duration = Duration::from_millis(200);

/// Arguments of `outbox`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  postrider outbox republish --from 2026-11-15T00:00:00Z --to 2026-11-16T00:00:00Z --consumer billing --dry-run
  postrider outbox republish --from 2026-11-15T00:00:00Z --to 2026-11-16T00:00:00Z --consumer billing --again --yes
  postrider outbox recover
  postrider outbox recover --yes")]
pub struct OutboxArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Give past events to one consumer once more, in their order
    Republish(RepublishArgs),
    /// After a restore: say what was published and is no longer there, and let the relay go on
    Recover {
        /// Begin the database's next life, so that the relay goes on
        #[arg(long)]
        yes: bool,
        /// After pg_upgrade: positions are right, only note where the database stands now
        #[arg(long, requires = "yes")]
        keep_positions: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Args)]
struct RepublishArgs {
    /// Created at or after this time (RFC 3339, 2026-11-15T12:00:00Z)
    #[arg(long)]
    from: DateTime<Utc>,
    /// Created before this time
    #[arg(long)]
    to: DateTime<Utc>,
    /// The consumer that gets them; all others get nothing
    #[arg(long)]
    consumer: String,
    /// Of topics that match this pattern (`orders.*`, `#`); else of those that the config says the consumer wants
    #[arg(long)]
    topic: Option<String>,
    /// Of this key
    #[arg(long)]
    key: Option<String>,
    /// With numbers above this one: where an earlier run ended
    #[arg(long, default_value_t = 0)]
    after: i64,
    /// Also those that the consumer has applied: it applies them once more
    #[arg(long)]
    again: bool,
    /// At most this many per second
    #[arg(long, default_value_t = REPLAY_RATE, value_parser = clap::value_parser!(u32).range(1..))]
    rate: u32,
    /// The config whose store has the consumer's inbox, when it is not this one's
    #[arg(long, value_name = "FILE")]
    into: Option<PathBuf>,
    /// Only count
    #[arg(long)]
    dry_run: bool,
    /// Do not ask
    #[arg(long)]
    yes: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs a verb.
pub async fn run(args: OutboxArgs, config: Config) -> Result<ExitCode> {
    let store = wire::open_store(&config).await?;
    store.schema().await?.require()?;
    let code = match args.verb {
        Verb::Republish(args) => republish(&config, store.as_ref(), args).await,
        Verb::Recover { yes, keep_positions, json } => {
            recover(&config, store.as_ref(), Sure { is_yes: yes, keeps: keep_positions }, json).await
        }
    }?;
    store.close().await;
    Ok(code)
}

/// The topics that are asked for, else those of the consumer. A service subscribes in its own code: of such a consumer the
/// config knows nothing, and it must not get what it does not handle.
fn topics(args: &RepublishArgs, config: &Config) -> Result<TopicFilter> {
    if let Some(topic) = &args.topic {
        return Ok(TopicFilter::new([topic.clone()], []));
    }
    let consumer = config.consumers.iter().find(|consumer| consumer.spec.name == args.consumer);
    let consumer = consumer.ok_or_else(|| {
        Error::new(Kind::Config, format!("the config does not say which topics {:?} wants", args.consumer))
            .with_remedy("name the topics that the consumer subscribes to with --topic ('orders.*', '#' for all)")
    })?;
    Ok(TopicFilter::new(consumer.spec.topics.clone(), []))
}

async fn republish(config: &Config, store: &dyn Store, args: RepublishArgs) -> Result<ExitCode> {
    if args.from >= args.to {
        return Err(Error::new(Kind::Config, "--from is not before --to")
            .with_remedy("--from is the first moment that counts, --to the first that does not")
            .into());
    }
    let into = args.into.as_deref().map(|file| config::load(Some(file))).transpose()?;
    let topics = topics(&args, into.as_ref().unwrap_or(config))?;
    let other = match &into {
        Some(config) => {
            let other = wire::open_store(config).await?;
            other.schema().await?.require()?;
            Some(other)
        }
        None => None,
    };
    let target = other.as_deref().unwrap_or(store);
    if !target.knows_consumer(&args.consumer).await? {
        let known: Vec<String> = target.consumers().await?.into_iter().map(|view| view.name).collect();
        let text = format!("the store has never heard of a consumer {:?}", args.consumer);
        let remedy = match known.is_empty() {
            true => "name the config of the store that has its inbox with --into".to_owned(),
            false => format!("known are: {}; another store is named with --into", known.join(", ")),
        };
        return Err(Error::new(Kind::Missing, text).with_remedy(remedy).into());
    }
    let republish = Republish {
        consumer: args.consumer.clone(),
        from: args.from,
        to: args.to,
        after: args.after,
        topics,
        key: args.key.clone(),
        is_again: args.again,
        rate: args.rate,
        is_dry_run: args.dry_run,
        actor: actor(),
    };
    if !args.dry_run && !args.yes {
        let question = match args.again {
            true => format!("let {:?} apply these events once more, also those that it has applied?", args.consumer),
            false => format!("give these events to {:?}?", args.consumer),
        };
        if !ask(&question)? {
            eprintln!("nothing was republished");
            return Ok(ExitCode::FAILURE);
        }
    }
    let stop = signals::stop_on_signal()?;
    let progress = watch::Sender::new(Republished { last_id: args.after, ..Republished::default() });
    let telling = tokio::spawn(tell(progress.subscribe(), stop.clone()));
    let done = republish.run(store, target, &stop, &progress).await;
    let last_id = progress.borrow().last_id;
    drop(progress);
    // It only prints, and ends with the sender.
    let _ = telling.await;
    let done = done.inspect_err(|_| {
        if !args.dry_run {
            eprintln!("{}", go_on(last_id));
        }
    })?;
    if let Some(other) = other {
        other.close().await;
    }
    if args.json {
        output::json(&done)?;
    } else {
        let verb = if args.dry_run { "would be given" } else { "given" };
        output::line(&format!(
            "{} found, {} {verb}, {} skipped because the consumer has them, {} applied, {} failed",
            done.found, done.given, done.skipped, done.applied, done.failed
        ))?;
    }
    if done.unreadable > 0 {
        eprintln!("{} rows of the outbox are no events and were left out", done.unreadable);
    }
    if done.is_stopped {
        eprintln!("stopped; {} are under way; go on with --after {}", done.open, done.last_id);
    }
    Ok(if done.failed == 0 && !done.is_stopped { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Where to go on. What was given is the consumer's: with `--again` it would be applied once more from an earlier place.
fn go_on(last_id: i64) -> String {
    format!("pages up to number {last_id} were given to the consumer; go on with --after {last_id}")
}

/// Shows how it fares, until it ends; on a stop also the place, because a second Ctrl-C ends the process at once.
async fn tell(mut progress: watch::Receiver<Republished>, stop: CancellationToken) {
    let bar = match std::io::stderr().is_terminal() {
        true => ProgressBar::new_spinner().with_style(ProgressStyle::default_spinner()),
        false => ProgressBar::hidden(),
    };
    bar.enable_steady_tick(TICK);
    let (mut is_told, mut is_stopping) = (false, false);
    loop {
        let changed = tokio::select! {
            changed = tokio::time::timeout(STILL, progress.changed()) => changed,
            () = stop.cancelled(), if !is_stopping => {
                is_stopping = true;
                let text = go_on(progress.borrow().last_id);
                bar.suspend(|| eprintln!("stopping; {text}"));
                continue;
            }
        };
        match changed {
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
            "{} found, {} applied, {} skipped, {} failed, {} under way (Ctrl-C stops)",
            now.found, now.applied, now.skipped, now.failed, now.open
        ));
    }
    bar.finish_and_clear();
}

/// What a look at one destination found.
#[derive(Debug, Serialize)]
struct Found {
    destination: String,
    life: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    restored: Option<Restored>,
    /// A relay that stands still, when only it knows.
    #[serde(skip_serializing_if = "Option::is_none")]
    told_by: Option<String>,
    #[serde(skip)]
    text: String,
}

/// What the person has agreed to.
#[derive(Debug, Clone, Copy)]
struct Sure {
    is_yes: bool,
    keeps: bool,
}

async fn recover(config: &Config, store: &dyn Store, sure: Sure, is_json: bool) -> Result<ExitCode> {
    let file = wire::witness_file(config, store).await?;
    let marks: BTreeMap<String, Mark> = file.map(|file| file.load()).unwrap_or_default();
    let mut found = Vec::new();
    for route in config.destination_routes() {
        let destination = route.destination.clone();
        let look = store.source(&route, config.relay.lanes).look_back(marks.get(&destination)).await?;
        let text = look.restored.as_ref().map_or_else(
            || "the database is the one that the relay knows; nothing is to be done".to_owned(),
            ToString::to_string,
        );
        found.push(Found { destination, life: look.life, restored: look.restored, told_by: None, text });
    }
    let mut before = Before::of(marks.values());
    let instances = store.instances().await?;
    for found in &mut found {
        let group = format!("relay/{}", found.destination);
        let standing = instances.iter().filter(|instance| instance.group == group && !instance.is_lost());
        for (owner, reason) in standing.filter_map(|one| Some((&one.owner, one.breaker.as_deref()?))) {
            let Some(told) = Before::told(reason) else { continue };
            before = before.and(told);
            // It may know more than the database and the file.
            let is_news = match found.restored.as_ref().map(|restored| restored.evidence) {
                None => true,
                Some(Evidence::OtherDatabase) => !reason.contains(OTHER_DATABASE),
                Some(Evidence::PositionAhead | Evidence::PublishedIsGone) => false,
            };
            if is_news {
                found.text =
                    format!("{reason} (says {owner}, which stands still; the witness here does not know of it)");
                found.told_by = Some(owner.clone());
            }
        }
    }
    let is_restored = found.iter().any(|found| found.restored.is_some() || found.told_by.is_some());
    let is_moved = |found: &Found| {
        found.told_by.is_none() && found.restored.as_ref().is_none_or(|it| it.evidence == Evidence::OtherDatabase)
    };
    let is_kept = is_restored && sure.keeps;
    if is_kept {
        if let Some(lost) = found.iter().find(|found| !is_moved(found)) {
            return Err(Error::new(Kind::Mismatch, format!("{}: {}", lost.destination, lost.text))
                .with_remedy("positions cannot be kept; see \"After a restore\" in docs/operations/runbook.md")
                .into());
        }
        store.keep_positions(&actor()).await?;
    }
    let begun: Option<NewLife> = match is_restored && sure.is_yes && !sure.keeps {
        true => Some(store.begin_life(before, &actor()).await?),
        false => None,
    };
    if is_json {
        output::json(&serde_json::json!({ "destinations": found, "begun": begun, "kept": is_kept }))?;
    } else {
        for Found { destination, text, .. } in &found {
            output::line(&format!("{destination}: {text}"))?;
        }
        if let Some(NewLife { life, moved }) = &begun {
            output::line(&format!("life {life} has begun; {moved} events that wait were brought into it"))?;
        }
        if is_kept {
            output::line("positions were kept; where the database stands now is noted")?;
        }
    }
    if is_restored && begun.is_none() && !is_kept {
        eprintln!("nothing was changed; `postrider outbox recover --yes` lets the relay go on");
        if found.iter().all(is_moved) {
            eprintln!("after pg_upgrade, which loses nothing: `postrider outbox recover --yes --keep-positions`");
        }
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}
