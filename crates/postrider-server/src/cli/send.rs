//! `postrider send`: writes one event into the outbox, as a service would.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use postrider::event::{JSON, PAYLOAD_BYTES_MAX};
use postrider::{Error, Event, Kind};
use uuid::Uuid;

use super::failure::{Result, io};
use super::output;
use crate::config::Config;
use crate::wire;

/// Arguments of `send`.
#[derive(Debug, Args)]
#[command(after_help = "\
The event is on disk when the id is printed; a relay (`postrider run`) publishes it.

Examples:
  postrider send orders.created order.created --key o-1 --payload '{\"order\":\"o-1\"}'
  postrider send files.scanned scan.done --file report.pdf --content-type application/pdf
  echo '{\"n\":1}' | postrider send ticks tick --file -")]
pub struct SendArgs {
    /// Where it is published, words between dots: orders.created
    topic: String,
    /// What happened, for the consumer's choice of a handler: order.created
    #[arg(value_name = "TYPE")]
    kind: String,
    /// The aggregate whose events stay in order
    #[arg(short, long)]
    key: Option<String>,
    /// The payload [default: {}]
    #[arg(short, long, value_name = "TEXT", conflicts_with = "file")]
    payload: Option<String>,
    /// Read the payload from a file; - for stdin
    #[arg(short, long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// The payload's media type
    #[arg(long, value_name = "TYPE", default_value = JSON)]
    content_type: String,
    /// A header of your own; may be given several times
    #[arg(short = 'H', long = "header", value_name = "NAME=VALUE", value_parser = header)]
    headers: Vec<(String, String)>,
    /// The event's id, a UUID [default: a new one]
    #[arg(long)]
    id: Option<Uuid>,
    /// The system it comes from
    #[arg(long)]
    source: Option<String>,
    /// What it is about
    #[arg(long)]
    subject: Option<String>,
    /// The tenant it belongs to
    #[arg(long)]
    tenant: Option<String>,
    /// What joins all events of one business process
    #[arg(long)]
    correlation: Option<String>,
    /// The id of what caused it
    #[arg(long)]
    causation: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Sends the event.
pub async fn run(args: SendArgs, config: Config) -> Result<ExitCode> {
    let is_json = args.json;
    let event = event(args)?;
    wire::check_weight(&event, config.payload_bytes_max())?;
    let store = wire::open_store(&config).await?;
    store.enqueue(std::slice::from_ref(&event)).await?;
    store.close().await;
    if is_json {
        output::json(&serde_json::json!({ "id": event.id() }))?;
    } else {
        output::line(&event.id().to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn event(args: SendArgs) -> Result<Event> {
    let payload = match (&args.payload, &args.file) {
        (Some(text), _) => text.clone().into_bytes(),
        (None, Some(path)) => read(path)?,
        (None, None) => b"{}".to_vec(),
    };
    let mut builder = Event::builder(args.topic, args.kind).payload(args.content_type, payload);
    if let Some(id) = args.id {
        builder = builder.id(id);
    }
    if let Some(key) = args.key {
        builder = builder.key(key);
    }
    if let Some(source) = args.source {
        builder = builder.source(source);
    }
    if let Some(subject) = args.subject {
        builder = builder.subject(subject);
    }
    if let Some(tenant) = args.tenant {
        builder = builder.tenant(tenant);
    }
    if let Some(correlation) = args.correlation {
        builder = builder.correlation(correlation);
    }
    if let Some(causation) = args.causation {
        builder = builder.causation(causation);
    }
    for (name, value) in args.headers {
        builder = builder.header(name, value);
    }
    Ok(builder.build()?)
}

/// Reads at most one byte more than a payload may have: validation then says that it is too large.
fn read(path: &Path) -> Result<Vec<u8>> {
    let unreadable =
        |error| io(format!("the payload {} cannot be read", path.display()), error).with_remedy("name a readable file");
    let limit = PAYLOAD_BYTES_MAX as u64 + 1;
    let mut payload = Vec::new();
    if path.as_os_str() == "-" {
        std::io::stdin().lock().take(limit).read_to_end(&mut payload).map_err(unreadable)?;
    } else {
        let file = std::fs::File::open(path).map_err(unreadable)?;
        file.take(limit).read_to_end(&mut payload).map_err(unreadable)?;
    }
    if payload.len() as u64 == limit {
        let message = format!("the payload {} has more than {PAYLOAD_BYTES_MAX} bytes", path.display());
        return Err(Error::new(Kind::TooLarge, message).into());
    }
    Ok(payload)
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("a header is written as NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}
