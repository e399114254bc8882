//! `postrider migrate`: creates or updates the tables.

use std::process::ExitCode;

use clap::Args;
use postrider::migrate::{Migration, Schema};
use serde::Serialize;

use super::failure::Result;
use super::output;
use crate::config::Config;
use crate::wire;

/// Arguments of `migrate`.
#[derive(Debug, Args)]
#[command(after_help = "\
Safe to run again, and from several machines at once. A database that a newer Postrider has migrated is refused.

Examples:
  postrider migrate                            apply what is missing
  postrider migrate --print > postrider.sql    the SQL for a DBA; needs no database
  POSTRIDER__STORE__URL=postgres://dba@db/shop postrider migrate")]
pub struct MigrateArgs {
    /// Print the SQL of all migrations instead of applying them; needs no database
    #[arg(long)]
    print: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    store: String,
    schema: i32,
    applied: Vec<Step>,
}

#[derive(Serialize)]
struct Step {
    version: i32,
    name: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    sql: Option<&'static str>,
}

impl Step {
    fn of(migration: &Migration, with_sql: bool) -> Self {
        Self { version: migration.version, name: migration.name, sql: with_sql.then_some(migration.sql) }
    }
}

/// Migrates, or prints.
pub async fn run(args: MigrateArgs, config: Config) -> Result<ExitCode> {
    if args.print {
        print(args.json, wire::schema(&config)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let store = wire::create_store(&config).await?;
    let applied = store.migrate().await?;
    let schema = store.schema().await?.found;
    store.close().await;
    let applied: Vec<Step> = applied.iter().map(|migration| Step::of(migration, false)).collect();
    if args.json {
        output::json(&Report { store: config.store.to_string(), schema, applied })?;
        return Ok(ExitCode::SUCCESS);
    }
    for step in &applied {
        output::line(&format!("applied {} {}", step.version, step.name))?;
    }
    match applied.len() {
        0 => eprintln!("{} has schema version {schema} already; nothing to do.", config.store),
        _ => eprintln!("{} has schema version {schema} now.", config.store),
    }
    Ok(ExitCode::SUCCESS)
}

fn print(is_json: bool, schema: &Schema) -> Result<()> {
    if is_json {
        let steps: Vec<Step> = schema.migrations.iter().map(|migration| Step::of(migration, true)).collect();
        return output::json(&steps);
    }
    output::line(schema.script().trim_end())
}
