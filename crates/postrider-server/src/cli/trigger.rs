//! `postrider trigger`: changes of a table become events.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use postrider::adopt::TableName;
use postrider::trigger::{Trigger, Triggers};
use postrider::{Error, Kind};

use super::failure::Result;
use super::output;
use crate::config::Config;
use crate::wire;

/// Arguments of `trigger`.
#[derive(Debug, Args)]
pub struct TriggerArgs {
    #[command(subcommand)]
    command: TriggerCommand,
}

#[derive(Debug, Subcommand)]
enum TriggerCommand {
    /// Let inserts, updates and deletes of a table write events
    #[command(after_help = "\
The event says that something changed, not what it is: {\"entity\":{\"type\":\"USER\",\"id\":\"7\"},\"action\":\"UPDATE\"},
with its key USER:7, its tenant and its version if columns for them are named. No other column is copied unless it is
named with --column. Updates that change nothing write nothing; TRUNCATE writes nothing.

Examples:
  postrider trigger add users --entity USER --tenant org_id --version version
  postrider trigger add shop.orders --entity ORDER --topic orders.changed --column state")]
    Add(Box<AddArgs>),
    /// Show the statements of `add`, for people who change the database by themselves
    Print(Box<AddArgs>),
    /// Remove the triggers of a table
    Remove {
        /// `table` or `schema.table`
        table: String,
        /// Only the one of this entity
        #[arg(long, value_name = "NAME")]
        entity: Option<String>,
    },
    /// Show all triggers of ours
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Args)]
struct AddArgs {
    /// `table` or `schema.table`; a name with dots or spaces in double quotes
    table: String,
    /// What a row is, such as USER
    #[arg(long, value_name = "NAME")]
    entity: String,
    /// The column with its id [default: the primary key]
    #[arg(long, value_name = "COLUMN")]
    id: Option<String>,
    /// The column with its tenant
    #[arg(long, value_name = "COLUMN")]
    tenant: Option<String>,
    /// The column with a number that rises with every change
    #[arg(long, value_name = "COLUMN")]
    version: Option<String>,
    /// A column that is copied into the event; may be given several times
    #[arg(long = "column", value_name = "COLUMN")]
    columns: Vec<String>,
    /// The topic [default: changes.<entity>]
    #[arg(long)]
    topic: Option<String>,
}

impl AddArgs {
    fn trigger(self) -> Result<Trigger> {
        let AddArgs { table, entity, id, tenant, version, columns, topic } = self;
        let topic = topic.unwrap_or_else(|| Trigger::topic_of(&entity));
        Ok(Trigger { table: parse(&table)?, entity, id, tenant, version, columns, topic })
    }
}

fn parse(table: &str) -> Result<TableName> {
    Ok(TableName::parse(table).map_err(|what| Error::new(Kind::Config, format!("{table:?} {what}")))?)
}

/// Runs one of them.
pub async fn run(args: TriggerArgs, config: Config) -> Result<ExitCode> {
    let store = wire::open_store(&config).await?;
    let Some(triggers) = store.triggers() else {
        return Err(Error::new(Kind::Config, "triggers are for PostgreSQL, MySQL and MariaDB alone")
            .with_remedy("name the service's database as store.url")
            .into());
    };
    let result = execute(args.command, triggers).await;
    store.close().await;
    result
}

async fn execute(command: TriggerCommand, triggers: &dyn Triggers) -> Result<ExitCode> {
    match command {
        TriggerCommand::Add(args) => {
            let trigger = args.trigger()?;
            triggers.add(&trigger).await?;
            eprintln!("Changes of {} are events now, under {}.", trigger.table, trigger.topic);
        }
        TriggerCommand::Print(args) => {
            for statement in triggers.statements(&args.trigger()?).await? {
                output::line(&format!("{statement};\n"))?;
            }
        }
        TriggerCommand::Remove { table, entity } => {
            let name = parse(&table)?;
            match triggers.remove(&name, entity.as_deref()).await? {
                0 => {
                    return Err(Error::new(Kind::Missing, format!("{name} has no such trigger of ours"))
                        .with_remedy("`postrider trigger list` shows all")
                        .into());
                }
                removed => eprintln!("Removed {removed} from {name}."),
            }
        }
        TriggerCommand::List { json } => {
            let views = triggers.list().await?;
            if json {
                output::json(&views)?;
                return Ok(ExitCode::SUCCESS);
            }
            let mut table = output::table(&["table", "entity", "fires"]);
            for view in &views {
                let fires = if view.is_enabled { "yes" } else { "no" };
                table.add_row(vec![view.table.as_str(), view.entity.as_str(), fires]);
            }
            output::print(table)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
