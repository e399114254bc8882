//! The relay under test: the real program on a database of its own and a virtual host, or another broker.

use std::fs::File;
use std::process::Command;
use std::time::{Duration, Instant};

use sqlx::{Connection, PgConnection};
use tempfile::TempDir;

use super::bed::Bed;
use crate::testbed::{Process, Result, Signal};

/// The exchange that the relay publishes to.
pub(super) const EXCHANGE: &str = "postrider";
/// How long the program may take until it holds its lane.
const START_WAIT: Duration = Duration::from_secs(30);
/// How long it may take to end.
const STOP_WAIT: Duration = Duration::from_secs(30);
/// After its start it does some upkeep; then it sleeps.
const SETTLE_DOWN: Duration = Duration::from_secs(3);

pub(super) struct Relay {
    process: Process,
    folder: TempDir,
    /// The database with the outbox.
    pub database: String,
    /// The virtual host; empty on another broker than RabbitMQ.
    pub vhost: String,
}

impl Relay {
    /// Starts a relay on a fresh database, and waits until it has nothing more to do.
    pub async fn start(bed: &Bed, name: &str) -> Result<Relay> {
        let database = bed.database(name).await?;
        Self::start_on(bed, name, database).await
    }

    /// The same on a database that is there.
    pub async fn start_on(bed: &Bed, name: &str, database: String) -> Result<Relay> {
        Self::start_with(bed, name, database, "").await
    }

    /// The same with more in its configuration.
    pub async fn start_with(bed: &Bed, name: &str, database: String, more: &str) -> Result<Relay> {
        let vhost = bed.rabbit.vhost(name).await?;
        let broker = format!("url = \"{vhost}\"\nexchange = \"{EXCHANGE}\"\n");
        Self::launch(bed, database, vhost, &broker, more).await
    }

    /// A relay on a fresh database to another broker, which those lines of `[broker]` name.
    pub async fn start_to(bed: &Bed, name: &str, broker: &str) -> Result<Relay> {
        let database = bed.database(name).await?;
        Self::launch(bed, database, String::new(), broker, "").await
    }

    async fn launch(bed: &Bed, database: String, vhost: String, broker: &str, more: &str) -> Result<Relay> {
        let folder = TempDir::new()?;
        let config = folder.path().join("postrider.toml");
        std::fs::write(
            &config,
            format!(
                "[store]\nurl = \"{database}\"\n[broker]\n{broker}\
                 [http]\nlisten = \"127.0.0.1:0\"\n[log]\nformat = \"json\"\n{more}"
            ),
        )?;
        let log = File::create(folder.path().join("log"))?;
        let mut command = Command::new(&bed.postrider);
        command.args(["run", "--config"]).arg(&config).current_dir(folder.path());
        // Settings of whoever runs the benchmark are not the ones to measure.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("POSTRIDER__")) {
            command.env_remove(name);
        }
        command.env_remove("RUST_LOG");
        let process = Process::spawn(command.stdout(log.try_clone()?).stderr(log))?;
        let mut relay = Relay { process, folder, database, vhost };
        relay.wait_for_lane().await.map_err(|error| format!("{error}\n{}", relay.log()))?;
        tokio::time::sleep(SETTLE_DOWN).await;
        Ok(relay)
    }

    async fn wait_for_lane(&mut self) -> Result<()> {
        let mut connection = self.connect().await?;
        let started = Instant::now();
        loop {
            if let Some(exit) = self.process.try_wait()? {
                return Err(format!("postrider ended at its start: {exit}").into());
            }
            let is_open: bool = sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM postrider.lane WHERE epoch > 0)")
                .fetch_one(&mut connection)
                .await?;
            if is_open {
                return Ok(());
            }
            if started.elapsed() > START_WAIT {
                return Err(format!("postrider has opened no lane after {} s", START_WAIT.as_secs()).into());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// A connection to its database.
    pub async fn connect(&self) -> Result<PgConnection> {
        Ok(PgConnection::connect(&self.database).await?)
    }

    /// Where its HTTP listens.
    pub fn address(&self) -> Result<String> {
        let said = |line: &str| serde_json::from_str::<serde_json::Value>(line).ok();
        let mut lines = self.log().lines().filter_map(said).collect::<Vec<_>>().into_iter();
        let line = lines.find(|line| line["message"] == "HTTP listens").ok_or("the relay does not listen")?;
        Ok(line["context"]["address"].as_str().ok_or("the relay does not say where it listens")?.to_owned())
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Its CPU time since its start.
    pub fn cpu(&self) -> Result<Duration> {
        self.process.cpu()
    }

    /// Ends it. Warnings in its log mean that something else was measured than was meant.
    pub async fn stop(mut self) -> Result<()> {
        let exit = self.process.end(Signal::Term, STOP_WAIT).await?;
        let log = self.log();
        let is_odd = |line: &&str| line.contains(r#""level":"WARN""#) || line.contains(r#""level":"ERROR""#);
        for line in log.lines().filter(is_odd) {
            eprintln!("  the relay said: {line}");
        }
        if exit.success() { Ok(()) } else { Err(format!("postrider did not stop in good order: {exit}\n{log}").into()) }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}
