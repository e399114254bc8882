//! What an adopted table is relayed by before: a plain worker with confirms, in Node, or in Rust where Node cannot be had.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Confirmation, ConnectionProperties};
use sqlx::{Connection as _, PgConnection};
use tempfile::TempDir;
use tokio::task::JoinHandle;

use crate::testbed::{Process, Result};

/// The worker in Node.
const SCRIPT: &str = include_str!("worker.js");
/// How long `npm` may take to fetch two packages.
const INSTALL_WAIT: Duration = Duration::from_secs(180);
/// How long the worker may take to connect.
const START_WAIT: Duration = Duration::from_secs(30);
/// Rows of one transaction.
const BATCH: i64 = 100;

/// How workers are made on this machine.
pub(super) enum Workshop {
    /// The folder with the script and its packages.
    Node(TempDir),
    /// Why there is no Node.
    Rust(String),
}

impl Workshop {
    /// Installs the packages.
    pub(super) async fn open() -> Workshop {
        match install().await {
            Ok(folder) => Workshop::Node(folder),
            Err(error) => {
                eprintln!("  no worker in Node: {error}; comparing with the same worker in Rust");
                Workshop::Rust(error.to_string())
            }
        }
    }

    /// What the worker is called.
    pub(super) fn title(&self) -> String {
        match self {
            Workshop::Node(_) => "a Node worker with confirms (pg, amqplib)".to_owned(),
            Workshop::Rust(why) => format!("the same worker in Rust, because there is none in Node ({why})"),
        }
    }

    /// A worker that is connected and waits for rows.
    pub(super) async fn start(&self, database: &str, vhost: &str, exchange: &'static str) -> Result<Worker> {
        let Workshop::Node(folder) = self else {
            let (database, vhost) = (database.to_owned(), vhost.to_owned());
            return Ok(Worker::Rust(tokio::spawn(async move { work(&database, &vhost, exchange).await })));
        };
        let log = folder.path().join("log");
        let file = File::create(&log)?;
        let mut command = Command::new("node");
        command.arg("worker.js").args([database, vhost, exchange]).current_dir(folder.path());
        let mut process = Process::spawn(command.stdout(file.try_clone()?).stderr(file))?;
        let started = Instant::now();
        while !said(&log).contains("ready") {
            if process.try_wait()?.is_some() || started.elapsed() > START_WAIT {
                return Err(format!("the worker did not start: {}", said(&log)).into());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(Worker::Node(process))
    }
}

/// A worker at work.
pub(super) enum Worker {
    Node(Process),
    Rust(JoinHandle<Result<()>>),
}

impl Worker {
    /// Ends it.
    pub(super) async fn stop(self) -> Result<()> {
        match self {
            Worker::Node(mut process) => process.kill().await,
            Worker::Rust(task) if task.is_finished() => task.await?,
            Worker::Rust(task) => {
                task.abort();
                Ok(())
            }
        }
    }
}

fn said(log: &Path) -> String {
    std::fs::read_to_string(log).unwrap_or_default()
}

/// A folder with the script and what it needs.
async fn install() -> Result<TempDir> {
    let folder = TempDir::new()?;
    std::fs::write(folder.path().join("worker.js"), SCRIPT)?;
    std::fs::write(folder.path().join("package.json"), "{\"private\": true}\n")?;
    if !Command::new("node").arg("--version").output().is_ok_and(|output| output.status.success()) {
        return Err("node is not installed".into());
    }
    let log = folder.path().join("npm.log");
    let file = File::create(&log)?;
    let mut command = Command::new("npm");
    command.args(["install", "--no-audit", "--no-fund", "pg", "amqplib"]).current_dir(folder.path());
    let mut npm = Process::spawn(command.stdout(file.try_clone()?).stderr(file))
        .map_err(|error| format!("npm cannot be started: {error}"))?;
    let exit = npm.wait(INSTALL_WAIT).await.map_err(|error| format!("npm install: {error}"))?;
    if !exit.success() {
        return Err(format!("npm install ended with {exit}").into());
    }
    Ok(folder)
}

/// The same in Rust.
async fn work(database: &str, vhost: &str, exchange: &'static str) -> Result<()> {
    let mut db = PgConnection::connect(database).await?;
    let connection = lapin::Connection::connect(vhost, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    loop {
        let mut tx = db.begin().await?;
        let rows: Vec<(i64, String, String)> = sqlx::query_as(
            "SELECT id, routing_key, payload::text FROM outbox_events WHERE status = 'pending' AND available_at <= now() \
             ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED",
        )
        .bind(BATCH)
        .fetch_all(&mut *tx)
        .await?;
        let mut confirms = Vec::with_capacity(rows.len());
        for (id, routing_key, payload) in &rows {
            let properties = BasicProperties::default()
                .with_delivery_mode(2)
                .with_content_type("application/json".into())
                .with_message_id(format!("outbox-{id}").into());
            let options = BasicPublishOptions { mandatory: true, immediate: false };
            let routing_key = routing_key.as_str().into();
            let sent = channel.basic_publish(exchange.into(), routing_key, options, payload.as_bytes(), properties);
            confirms.push(sent.await?);
        }
        for confirm in confirms {
            if !matches!(confirm.await?, Confirmation::Ack(None)) {
                return Err("the broker did not take a message".into());
            }
        }
        let ids: Vec<i64> = rows.iter().map(|(id, ..)| *id).collect();
        sqlx::query(
            "UPDATE outbox_events SET status = 'published', attempts = attempts + 1, published_at = now(), \
             updated_at = now() WHERE id = ANY($1)",
        )
        .bind(&ids)
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        if ids.is_empty() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}
