//! `postrider adopt inspect`: looks at a table that a service has, and writes the mapping for it.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use postrider::adopt::{AdoptedTables, Clock, Format, Mapping, State, TableInfo, TableName, check, propose};
use postrider::doctor::Severity;
use postrider::{Error, Kind};

use super::failure::Result;
use super::output;
use crate::config::Config;
use crate::wire;

/// Arguments of `adopt`.
#[derive(Debug, Args)]
pub struct AdoptArgs {
    #[command(subcommand)]
    command: AdoptCommand,
}

#[derive(Debug, Subcommand)]
enum AdoptCommand {
    /// Look at a table and write the [[outbox]] section that fits it
    #[command(after_help = "\
Changes nothing. The section goes to stdout, what to look at twice to stderr.

Examples:
  postrider adopt inspect outbox_events
  postrider adopt inspect 'shop.\"OutboxMessages\"' >> postrider.toml && postrider doctor")]
    Inspect {
        /// `table` or `schema.table`; a name with dots or spaces in double quotes
        table: String,
    },
}

/// Runs one of them.
pub async fn run(args: AdoptArgs, config: Config) -> Result<ExitCode> {
    let AdoptCommand::Inspect { table } = args.command;
    let name = TableName::parse(&table).map_err(|what| Error::new(Kind::Config, format!("{table:?} {what}")))?;
    let store = wire::open_unchecked(&config).await?;
    let result = inspect(wire::adopted_tables(store.as_ref())?, &name).await;
    store.close().await;
    result
}

async fn inspect(tables: &dyn AdoptedTables, name: &TableName) -> Result<ExitCode> {
    let Some(info) = tables.table(name).await? else {
        return Err(Error::new(Kind::Missing, format!("there is no table {name}"))
            .with_remedy("names count letter by letter; the schema comes before a dot")
            .into());
    };
    let status = info.columns.iter().find(|column| ["status", "state"].contains(&column.name.to_lowercase().as_str()));
    let words = match status {
        Some(column) => tables.words(name, &column.name).await?,
        None => Vec::new(),
    };
    let mapping =
        propose(name, &info, &words).map_err(|what| Error::new(Kind::Config, what).with_remedy(columns(&info)))?;
    output::line(section(&mapping).trim_end())?;
    let findings = check(&mapping, &info, tables.is_mysql());
    for finding in &findings {
        match finding.severity {
            Severity::Ok => eprintln!("{}.", finding.message),
            Severity::Warning | Severity::Error => eprintln!("{}\n  {}", finding.message, finding.remedy),
        }
    }
    if mapping.key.is_none() {
        eprintln!("No column looks like the aggregate's id: without `key` events have no order.");
    }
    if let State::Status { pending, published, .. } = &mapping.state
        && !words.is_empty()
        && words.iter().any(|word| word != pending && word != published)
    {
        eprintln!("The status column has these words: {}.", words.join(", "));
    }
    Ok(ExitCode::SUCCESS)
}

fn columns(info: &TableInfo) -> String {
    let names: Vec<String> =
        info.columns.iter().map(|column| format!("{} ({})", column.name, column.type_name)).collect();
    format!("write [[outbox]] by hand (`postrider init -` explains it); its columns are {}", names.join(", "))
}

/// The mapping as a section of the config file, without what is as by default.
fn section(mapping: &Mapping) -> String {
    let mut lines = vec!["[[outbox]]".to_owned()];
    let mut put = |name: &str, value: &str| {
        if !value.is_empty() {
            lines.push(format!("{name} = {}", toml::Value::from(value)));
        }
    };
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    put("table", &mapping.table.to_string());
    put("id", &mapping.id);
    put("order", &text(&mapping.order));
    put("key", &text(&mapping.key));
    put("payload", &mapping.payload);
    put("headers", &text(&mapping.headers));
    put("tenant", &text(&mapping.tenant));
    put("time", &text(&mapping.time));
    put("topic", &mapping.topic.to_string());
    put("type", &mapping.kind.to_string());
    put("message_id", &mapping.message_id.to_string());
    match &mapping.state {
        State::Status { column, pending, processing, published, failed } => {
            put("status", column);
            put("status_pending", pending);
            put("status_processing", &text(processing));
            put("status_published", published);
            put("status_failed", &text(failed));
        }
        State::Flag { column } => put("published", column),
        State::PublishedAt => {}
    }
    put("published_at", &text(&mapping.published_at));
    put("updated_at", &text(&mapping.updated_at));
    put("attempts", &text(&mapping.attempts));
    put("attempts_max", &text(&mapping.attempts_max));
    put("available_at", &text(&mapping.available_at));
    put("last_error", &text(&mapping.last_error));
    put("format", if mapping.format == Format::Raw { "raw" } else { "" });
    if let Clock::Zone(zone) = &mapping.clock {
        put("clock", zone);
    }
    lines.join("\n")
}
