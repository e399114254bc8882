//! `postrider tail`: shows events as they are committed.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use postrider::broker::topic;
use postrider::source::Row;
use postrider::{Event, Kind};
use serde::Serialize;
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;

use super::failure::{Failure, Result};
use super::{output, signals};
use crate::config::Config;
use crate::wire;

/// How long to wait after finding nothing new.
const POLL: Duration = Duration::from_millis(150);
/// Rows per read.
const PAGE: usize = 500;
/// While the database is away, ask again this often.
const RETRY: Duration = Duration::from_secs(1);

/// Arguments of `tail`.
#[derive(Debug, Args)]
#[command(after_help = "\
Shows committed events whether they are published or not. Payloads may be personal, so they are shown on request only.

Examples:
  postrider tail                              what happens from now on
  postrider tail --from-start --limit 10      the oldest ten that are kept
  postrider tail --topic 'orders.#' --payload
  postrider tail --json | jq .topic")]
pub struct TailArgs {
    /// Begin with the oldest event that is kept, not with the next one
    #[arg(long)]
    from_start: bool,
    /// Only topics that match: * is one word, # any number of words; may be given several times
    #[arg(short, long = "topic", value_name = "PATTERN")]
    topics: Vec<String>,
    /// Show payloads
    #[arg(short, long)]
    payload: bool,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
    /// End after this many events
    #[arg(short = 'n', long, value_name = "N")]
    limit: Option<u64>,
    /// End when there are no more, instead of waiting for new ones
    #[arg(long)]
    no_follow: bool,
}

/// Follows the log.
pub async fn run(args: TailArgs, config: Config) -> Result<ExitCode> {
    let store = wire::open_store(&config).await?;
    let stop = signals::stop_on_signal()?;
    let mut position = store.position(args.from_start).await?;
    let mut left = args.limit.unwrap_or(u64::MAX);
    let mut is_away = false;
    while left > 0 && !stop.is_cancelled() {
        let page = match store.tail(&position, PAGE).await {
            Ok(page) => page,
            Err(error) if error.kind() == Kind::Unavailable && !args.no_follow => {
                if !std::mem::replace(&mut is_away, true) {
                    eprintln!("{}", super::failure::tell(&error, false));
                }
                wait(RETRY, &stop).await;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        is_away = false;
        position = page.next;
        for row in page.rows.iter().filter(|row| wants(&args.topics, row)) {
            if left == 0 {
                break;
            }
            show(row, &args)?;
            left -= 1;
        }
        if !page.has_more {
            if args.no_follow {
                break;
            }
            if left > 0 {
                wait(POLL, &stop).await;
            }
        }
    }
    store.close().await;
    Ok(ExitCode::SUCCESS)
}

async fn wait(time: Duration, stop: &CancellationToken) {
    tokio::select! {
        () = stop.cancelled() => {}
        () = tokio::time::sleep(time) => {}
    }
}

/// A row that is no event has no topic to compare; it is always shown.
fn wants(topics: &[String], row: &Row) -> bool {
    match &row.event {
        Ok(event) => topics.is_empty() || topics.iter().any(|pattern| topic::matches(pattern, event.topic())),
        Err(_) => true,
    }
}

fn show(row: &Row, args: &TailArgs) -> Result<(), Failure> {
    match &row.event {
        Ok(event) if args.json => output::json(&Shown::of(row.id, event, args.payload)),
        Ok(event) => output::line(&text(event, args.payload)),
        Err(error) if args.json => output::json(&serde_json::json!({ "row": row.id, "error": error.to_string() })),
        Err(error) => output::line(&format!("row {} is no event: {error}", row.id)),
    }
}

fn text(event: &Event, with_payload: bool) -> String {
    let time = event.time().format("%Y-%m-%d %H:%M:%S%.3fZ");
    let key = event.key().map(|key| format!("  key={key}")).unwrap_or_default();
    let bytes = event.payload().len();
    let mut line = format!("{time}  {}  {}  {}{key}  {bytes} B", event.id(), event.topic(), event.kind());
    if with_payload {
        match std::str::from_utf8(event.payload()) {
            Ok(payload) => line.push_str(&format!("  {}", payload.escape_debug().to_string().replace("\\\"", "\""))),
            Err(_) => line.push_str(&format!("  ({}, not text)", event.content_type())),
        }
    }
    line
}

/// An event as a JSON line. A JSON payload stands in it as it is, another text as a string, anything else in hex.
#[derive(Serialize)]
struct Shown<'a> {
    row: i64,
    id: uuid::Uuid,
    topic: &'a str,
    r#type: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a str>,
    time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    subject: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    correlation: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    causation: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    traceparent: Option<&'a str>,
    content_type: &'a str,
    payload_bytes: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    headers: Option<&'a std::collections::BTreeMap<String, String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_hex: Option<String>,
}

impl<'a> Shown<'a> {
    fn of(row: i64, event: &'a Event, with_payload: bool) -> Self {
        let payload = with_payload.then(|| payload(event)).flatten();
        let payload_hex = (with_payload && payload.is_none())
            .then(|| event.payload().iter().map(|byte| format!("{byte:02x}")).collect::<String>());
        Self {
            row,
            id: event.id(),
            topic: event.topic(),
            r#type: event.kind(),
            key: event.key(),
            time: event.time().to_rfc3339_opts(chrono::SecondsFormat::Micros, true),
            source: event.source(),
            subject: event.subject(),
            tenant: event.tenant(),
            correlation: event.correlation(),
            causation: event.causation(),
            traceparent: event.traceparent(),
            content_type: event.content_type(),
            payload_bytes: event.payload().len(),
            // Headers are the producer's own and may hold anything, as payloads may.
            headers: Some(event.headers()).filter(|headers| with_payload && !headers.is_empty()),
            payload,
            payload_hex,
        }
    }
}

fn payload(event: &Event) -> Option<Box<RawValue>> {
    let text = std::str::from_utf8(event.payload()).ok()?;
    if event.is_json()
        && let Ok(raw) = RawValue::from_string(text.to_owned())
        // One object a line: JSON with line breaks of its own is written anew.
        && !text.contains('\n')
    {
        return Some(raw);
    }
    if event.is_json()
        && let Ok(value) = serde_json::from_str::<serde_json::Value>(text)
    {
        return serde_json::value::to_raw_value(&value).ok();
    }
    serde_json::value::to_raw_value(text).ok()
}
