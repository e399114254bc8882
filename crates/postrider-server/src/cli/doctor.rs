//! `postrider doctor`: checks everything that it can reach, and says what to do.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use comfy_table::{Cell, Color};
use postrider::broker::Broker;
use postrider::broker::embedded::Embedded;
use postrider::doctor::{Finding, Severity};
use postrider::http::Request;
use postrider::store::Store;
use tokio::net::TcpStream;

use super::failure::Result;
use super::output;
use crate::config::{self, Config, ConsumerConfig, DESTINATION, OutboxConfig, StoreUrl, redact};
use crate::wire;

/// How long a service may take to accept a connection.
const CONSUMER_WAIT: Duration = Duration::from_secs(3);

/// Arguments of `doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
Changes nothing; where large payloads go it stores a small object and deletes it. Exit code 1 when a check found an
error; warnings alone are 0.

Examples:
  postrider doctor
  postrider doctor --json | jq '.[] | select(.severity != \"ok\")'")]
pub struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs all checks.
pub async fn run(args: DoctorArgs, path: Option<PathBuf>) -> Result<ExitCode> {
    let mut findings = Vec::new();
    match config::load(path.as_deref()) {
        Ok(config) => {
            findings.extend(check_config(&config));
            check_servers(&config, &mut findings).await;
            check_redis(&config, &mut findings).await;
            for consumer in &config.consumers {
                findings.push(check_consumer(&config, consumer).await);
            }
            check_claims(&config, &mut findings).await;
        }
        // The mistakes show their places better than a table could.
        Err(problems) if !args.json => return Err(problems.into()),
        Err(problems) => findings.push(Finding::error("config", problems.to_string(), "correct the config file")),
    }
    for finding in &mut findings {
        finding.message = redact(&finding.message);
    }
    let is_bad = findings.iter().any(|finding| finding.severity == Severity::Error);
    if args.json {
        output::json(&findings)?;
    } else {
        show(&findings)?;
    }
    Ok(if is_bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn check_config(config: &Config) -> Vec<Finding> {
    let origin = match &config.file {
        Some(path) => format!("{} is valid", path.display()),
        None => "no config file; defaults and environment".to_owned(),
    };
    let mut findings = vec![Finding::ok("config", origin)];
    findings.extend(config.warnings());
    findings
}

/// Stores, reads and deletes an object where large payloads go.
async fn check_claims(config: &Config, findings: &mut Vec<Finding>) {
    let inspected = match wire::claims(config) {
        Ok(None) => return,
        Ok(Some(claims)) => claims.inspect().await,
        Err(error) => Err(error),
    };
    findings.push(inspected.unwrap_or_else(|error| with_causes("claim_check", &error)));
}

async fn check_servers(config: &Config, findings: &mut Vec<Finding>) {
    let store = check_store(config, findings).await;
    for (route, broker) in config.destinations() {
        let check = match route.destination.as_str() {
            DESTINATION => "broker".to_owned(),
            name => format!("route.{name}"),
        };
        let broker: postrider::Result<Arc<dyn Broker>> = match (wire::server(broker), &store) {
            (Ok(Some(broker)), _) => Ok(broker),
            (Ok(None), Some(store)) => Ok(Arc::new(Embedded::new(store.clone()))),
            // The embedded broker lives in the store, whose trouble stands in the table already.
            (Ok(None), None) => continue,
            (Err(error), _) => Err(error),
        };
        let found = match broker {
            Ok(broker) => broker.inspect().await,
            Err(error) => Err(error),
        };
        match found {
            Ok(found) => findings.extend(found),
            Err(error) => findings.push(with_causes(&check, &error)),
        }
    }
    if let Some(store) = store {
        for outbox in &config.outboxes {
            check_outbox(outbox, store.as_ref(), findings).await;
        }
        store.close().await;
    }
}

/// The mapping against the catalogue, and rows that it does not cover.
async fn check_outbox(outbox: &OutboxConfig, store: &dyn Store, findings: &mut Vec<Finding>) {
    let mapping = &outbox.mapping;
    let check = format!("outbox.{}", mapping.name);
    let inspect = async || -> postrider::Result<Vec<Finding>> {
        let tables = wire::adopted_tables(store)?;
        match tables.adopt(mapping).await {
            Ok(table) => table.inspect().await,
            Err(error) => match tables.table(&mapping.table).await? {
                // All mistakes at once.
                Some(info) => Ok(postrider::adopt::check(mapping, &info, tables.is_mysql())),
                None => Err(error),
            },
        }
    };
    match inspect().await {
        Ok(found) => findings.extend(found),
        Err(error) => findings.push(with_causes(&check, &error)),
    }
}

async fn check_store(config: &Config, findings: &mut Vec<Finding>) -> Option<Arc<dyn Store>> {
    if let StoreUrl::Sqlite(path) = &config.store
        && !path.exists()
    {
        let message = format!("{} does not exist yet", path.display());
        findings.push(Finding::warning("store", message, "`postrider run` or `postrider migrate` creates it"));
        return None;
    }
    let store = match wire::open_unchecked(config).await {
        Ok(store) => store,
        Err(error) => {
            findings.push(with_causes("store", &error));
            return None;
        }
    };
    findings.push(Finding::ok("store", format!("{} answers", config.store)));
    match store.inspect().await {
        Ok(found) => findings.extend(found),
        Err(error) => findings.push(with_causes("store.settings", &error)),
    }
    Some(store)
}

/// Whether somebody listens. Nothing is posted: the service would take it for an event.
async fn check_consumer(config: &Config, consumer: &ConsumerConfig) -> Finding {
    let name = &consumer.spec.name;
    let check = format!("consumer.{name}");
    if let Err(error) = wire::webhook(config, consumer) {
        return with_causes(&check, &error);
    }
    let address = match Request::post(consumer.url.expose()) {
        Ok(request) => request.destination().to_owned(),
        Err(error) => return with_causes(&check, &error),
    };
    let remedy = "start the service, or correct the url of the consumer; until then its events wait";
    match tokio::time::timeout(CONSUMER_WAIT, TcpStream::connect(&address)).await {
        Ok(Ok(_)) => Finding::ok(check, format!("{name} listens at {address}")),
        Ok(Err(error)) => Finding::warning(check, format!("{name} cannot be reached at {address}: {error}"), remedy),
        Err(_) => {
            let secs = CONSUMER_WAIT.as_secs();
            Finding::warning(check, format!("{name} at {address} does not answer within {secs} s"), remedy)
        }
    }
}

async fn check_redis(config: &Config, findings: &mut Vec<Finding>) {
    let Some(url) = &config.redis else { return };
    match wire::inspect_redis(url).await {
        Ok(found) => findings.extend(found),
        Err(error) => findings.push(with_causes("redis", &error)),
    }
}

/// The finding of an error, with what led to it: the operator has no log to look at here.
fn with_causes(check: &str, error: &postrider::Error) -> Finding {
    let mut finding = Finding::of(check, error);
    for cause in super::failure::causes(error) {
        finding.message.push_str(&format!(": {cause}"));
    }
    finding
}

fn show(findings: &[Finding]) -> Result<()> {
    let mut table = output::table(&["", "check", "found", "remedy"]);
    for finding in findings {
        let (word, color) = match finding.severity {
            Severity::Ok => ("OK", Color::Green),
            Severity::Warning => ("WARN", Color::Yellow),
            Severity::Error => ("ERROR", Color::Red),
        };
        table.add_row(vec![
            output::coloured(word, color),
            Cell::new(&finding.check),
            Cell::new(&finding.message),
            Cell::new(&finding.remedy),
        ]);
    }
    output::print(table)?;
    let count = |severity| findings.iter().filter(|finding| finding.severity == severity).count();
    let plural = |count, one: &str| format!("{count} {one}{}", if count == 1 { "" } else { "s" });
    eprintln!(
        "\n{}, {}, {}",
        plural(findings.len(), "check"),
        plural(count(Severity::Warning), "warning"),
        plural(count(Severity::Error), "error")
    );
    Ok(())
}
