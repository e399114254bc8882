//! `postrider migrate`: creates or updates the tables.

use std::process::ExitCode;

use clap::Args;
use postrider::migrate::Migration;
use serde::Serialize;

use super::failure::Result;
use super::output;
use crate::config::{Config, StoreUrl};
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
        print(args.json, &config.store, wire::migrations(&config).await?)?;
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

/// What the library creates before its first migration, to remember which were applied. A DBA who runs the printed
/// statements by hand must leave the same trace, or `run` would ask for migrations that are there.
const RECORD_POSTGRES: &str = "CREATE SCHEMA IF NOT EXISTS postrider;
CREATE TABLE IF NOT EXISTS postrider.migration (
    version    int PRIMARY KEY,
    name       text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);";
const RECORD_SQLITE: &str = "CREATE TABLE IF NOT EXISTS postrider_migration (
    version    INTEGER PRIMARY KEY,
    name       TEXT NOT NULL,
    applied_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%f', 'now') || '000Z')
) STRICT;";

fn print(is_json: bool, store: &StoreUrl, migrations: &[Migration]) -> Result<()> {
    if is_json {
        let steps: Vec<Step> = migrations.iter().map(|migration| Step::of(migration, true)).collect();
        return output::json(&steps);
    }
    let (record, table) = match store {
        StoreUrl::Postgres(_) => (RECORD_POSTGRES, "postrider.migration"),
        StoreUrl::Sqlite(_) => (RECORD_SQLITE, "postrider_migration"),
    };
    output::line(&format!("-- Postrider {}, for {}\n{record}", env!("CARGO_PKG_VERSION"), kind(store)))?;
    for Migration { version, name, sql } in migrations {
        let sql = sql.trim_end();
        output::line(&format!(
            "\n-- migration {version}: {name}\nBEGIN;\n{sql}\nINSERT INTO {table} (version, name) VALUES ({version}, '{name}');\nCOMMIT;"
        ))?;
    }
    Ok(())
}

fn kind(store: &StoreUrl) -> &'static str {
    match store {
        StoreUrl::Postgres(_) => "PostgreSQL",
        StoreUrl::Sqlite(_) => "SQLite",
    }
}
