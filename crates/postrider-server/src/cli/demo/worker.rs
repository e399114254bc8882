//! One child process of the demo: a relay or a consumer, as a service would run it.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use clap::{Args, Subcommand};
use postrider::Route;
use postrider::broker::embedded::Embedded;
use postrider::handler::HandlerError;
use postrider::lease::LeaseTimes;
use postrider::store::Store;
use postrider::store::sqlite::SqliteStore;
use postrider::{Consumer, ConsumerSpec, Event, Handler, Relay, RelaySettings};
use sqlx::{Sqlite, Transaction};
use tokio_util::sync::CancellationToken;

use super::names::{DATABASE, DIRECTORY_PREFIX, LEASE, TOPIC};
use super::shop::Change;
use crate::cli::failure::Result;
use crate::config::DESTINATION;

/// Arguments of `demo-worker`.
#[derive(Debug, Args)]
pub struct WorkerArgs {
    /// The demo's directory
    #[arg(long)]
    dir: PathBuf,
    /// The name under which this process holds leases
    #[arg(long)]
    name: String,
    #[command(subcommand)]
    role: Role,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Carries events from the outbox to the embedded broker
    Relay,
    /// Applies events for a group
    Consumer {
        #[arg(long)]
        group: String,
        #[arg(long)]
        slots: u32,
    },
}

/// Works until the parent says stop, or is gone.
pub async fn run(args: WorkerArgs) -> Result<ExitCode> {
    let stop = CancellationToken::new();
    let (token, directory) = (stop.clone(), args.dir.clone());
    std::thread::spawn(move || obey(&token, &directory));

    let store = SqliteStore::open(&args.dir.join(DATABASE)).await?;
    let shared = Arc::new(store.clone());
    let broker = Arc::new(Embedded::new(shared.clone()));
    let times = LeaseTimes { ttl: LEASE };
    match args.role {
        Role::Relay => {
            let settings = RelaySettings { lease: times, ..RelaySettings::default() };
            let source = store.source(&Route::all(DESTINATION), settings.lanes);
            Relay::new(DESTINATION, source, shared, broker, settings).owner(args.name).run(stop).await?;
        }
        Role::Consumer { group, slots } => {
            let spec = ConsumerSpec { slots, ..ConsumerSpec::new(&group, &[TOPIC]) };
            let handler = Book { group, worker: args.name.clone() };
            let consumer = Consumer::new(spec, broker, shared.clone(), shared, handler)?;
            consumer.owner(args.name).lease_times(times).run(stop).await?;
        }
    }
    store.close().await;
    Ok(ExitCode::SUCCESS)
}

/// Waits for the parent's byte. Without one the parent has died, and cannot clean up any more.
fn obey(stop: &CancellationToken, directory: &Path) {
    let mut byte = [0];
    if std::io::stdin().read_exact(&mut byte).is_ok() {
        stop.cancel();
        return;
    }
    let is_ours = directory.file_name().is_some_and(|name| name.to_string_lossy().starts_with(DIRECTORY_PREFIX));
    if is_ours {
        let _ = std::fs::remove_dir_all(directory);
    }
    std::process::exit(1);
}

/// The handler of both groups: books the change, in the transaction that also admits it.
struct Book {
    group: String,
    worker: String,
}

#[async_trait]
impl Handler<Transaction<'static, Sqlite>> for Book {
    async fn handle(&self, tx: &mut Transaction<'static, Sqlite>, event: &Event) -> Result<(), HandlerError> {
        let change: Change = event.decode()?;
        // Nothing here would keep a second or an early effect out: that is the inbox's and the relay's work to prove.
        sqlx::query("INSERT INTO effect (consumer, event_id, account, version, worker) VALUES (?, ?, ?, ?, ?)")
            .bind(&self.group)
            .bind(event.id().to_string())
            .bind(change.account)
            .bind(change.version)
            .bind(&self.worker)
            .execute(&mut **tx)
            .await?;
        Ok(())
    }
}
