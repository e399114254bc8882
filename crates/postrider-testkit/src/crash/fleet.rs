//! The processes that are killed: relays and consumers, each with its command and its log.

use std::fs::File;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Mutex;

use super::Options;
use crate::testbed::{Process, Result, Signal};

/// Relays.
pub(super) const RELAYS: usize = 2;
/// Consumer groups and their number of slots: one queue, and several of them.
pub(super) const GROUPS: [(&str, u32); 2] = [("billing", 2), ("search", 1)];
/// Processes of each group.
const PROCESSES: usize = 2;
/// The signal of `abort`.
const SIGABRT: i32 = 6;
/// How long a process may take to end after SIGTERM.
const STOP_DEADLINE: Duration = Duration::from_secs(30);

/// Where everything is.
#[derive(Debug, Clone)]
pub(super) struct Places {
    /// The folder with configuration and logs.
    pub folder: PathBuf,
    /// The program under test.
    pub postrider: PathBuf,
    /// This program, whose subcommand is the consumer.
    pub crash: PathBuf,
    /// The address of the database.
    pub store: String,
    /// The address of the broker.
    pub broker: String,
    /// Lines for `[broker]` of the relays, beside the address.
    pub broker_settings: &'static str,
}

struct Member {
    name: String,
    program: PathBuf,
    arguments: Vec<String>,
    log: PathBuf,
    process: Mutex<Option<Process>>,
}

impl Member {
    fn spawn(&self) -> Result<Process> {
        let log = File::options().create(true).append(true).open(&self.log)?;
        Process::spawn(Command::new(&self.program).args(&self.arguments).stdout(log.try_clone()?).stderr(log))
    }
}

/// All of them; relays first.
pub(super) struct Fleet {
    members: Vec<Member>,
    /// Processes that ended without being asked to.
    deserted: Mutex<Vec<String>>,
    /// Consumers that poison has ended.
    aborts: AtomicU64,
    has_poison: bool,
}

impl Fleet {
    pub(super) fn new(places: &Places, options: &Options) -> Result<Fleet> {
        let config = places.folder.join("postrider.toml");
        std::fs::write(&config, relay_config(places, options))?;
        let member = |name: String, program: &Path, arguments: Vec<String>| Member {
            log: places.folder.join(format!("{name}.log")),
            name,
            program: program.to_owned(),
            arguments,
            process: Mutex::new(None),
        };
        let mut members = Vec::new();
        for n in 1..=RELAYS {
            let arguments = vec!["run".to_owned(), "-c".to_owned(), config.display().to_string()];
            members.push(member(format!("relay-{n}"), &places.postrider, arguments));
        }
        for (group, slots) in GROUPS {
            for n in 1..=PROCESSES {
                let arguments = consumer_arguments("consume", group, slots, places, options);
                members.push(member(format!("{group}-{n}"), &places.crash, arguments));
            }
        }
        let has_poison = options.poison_in > 0;
        Ok(Fleet { members, deserted: Mutex::default(), aborts: AtomicU64::new(0), has_poison })
    }

    /// How many processes there are.
    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// The name of a process.
    pub(super) fn name(&self, index: usize) -> &str {
        &self.members[index].name
    }

    /// Starts everyone.
    pub(super) async fn start(&self) -> Result<()> {
        for member in &self.members {
            *member.process.lock().await = Some(member.spawn()?);
        }
        Ok(())
    }

    /// The process id, if it runs; waits while it is being restarted.
    pub(super) async fn pid(&self, index: usize) -> Option<u32> {
        self.members[index].process.lock().await.as_ref().map(Process::pid)
    }

    /// `kill -9`, and a new start after `down`.
    pub(super) async fn kill(&self, index: usize, down: Duration) -> Result<()> {
        let member = &self.members[index];
        let mut process = member.process.lock().await;
        if let Some(mut running) = process.take() {
            running.kill().await?;
        }
        tokio::time::sleep(down).await;
        *process = Some(member.spawn()?);
        Ok(())
    }

    /// SIGSTOP, and SIGCONT after `down`. It is not killed meanwhile.
    pub(super) async fn freeze(&self, index: usize, down: Duration) -> Result<()> {
        let mut process = self.members[index].process.lock().await;
        if let Some(running) = process.as_mut() {
            running.signal(Signal::Stop)?;
            tokio::time::sleep(down).await;
            running.signal(Signal::Cont)?;
        }
        Ok(())
    }

    /// Restarts whoever ended by itself, as a service manager would, and remembers that.
    pub(super) async fn sweep(&self) -> Result<()> {
        for member in &self.members {
            // Somebody who is being killed is not looked at.
            let Ok(mut process) = member.process.try_lock() else { continue };
            let Some(exit) = process.as_mut().map(Process::try_wait).transpose()?.flatten() else { continue };
            if self.has_poison && exit.signal() == Some(SIGABRT) {
                self.aborts.fetch_add(1, Ordering::Relaxed);
                *process = Some(member.spawn()?);
                continue;
            }
            let last = log_tail(&member.log, 1);
            self.deserted.lock().await.push(format!("{} ended by itself ({exit}): {last}", member.name));
            *process = Some(member.spawn()?);
        }
        Ok(())
    }

    /// How often poison has ended a consumer.
    pub(super) async fn aborts(&self) -> u64 {
        self.aborts.load(Ordering::Relaxed)
    }

    /// Ends everyone by SIGTERM, and returns all that ended otherwise than they should, now or before.
    pub(super) async fn stop(&self) -> Result<Vec<String>> {
        let mut complaints = std::mem::take(&mut *self.deserted.lock().await);
        for member in &self.members {
            if let Some(process) = member.process.lock().await.as_mut() {
                process.signal(Signal::Term)?;
            }
        }
        for member in &self.members {
            // Dropped, and so killed, when it does not end. A second SIGTERM would end it at once.
            if let Some(mut process) = member.process.lock().await.take() {
                match process.wait(STOP_DEADLINE).await {
                    Ok(exit) if exit.success() => {}
                    Ok(exit) => complaints.push(format!("{} did not stop in good order: {exit}", member.name)),
                    Err(error) => complaints.push(format!("{} did not stop in good order: {error}", member.name)),
                }
            }
        }
        Ok(complaints)
    }

    /// The last lines of everyone's log.
    pub(super) fn logs(&self) -> String {
        const LINES: usize = 8;
        let log = |member: &Member| format!("--- {}\n{}\n", member.log.display(), log_tail(&member.log, LINES));
        self.members.iter().map(log).collect()
    }
}

/// The arguments of this program's own subcommands.
pub(super) fn consumer_arguments(
    verb: &str,
    group: &str,
    slots: u32,
    places: &Places,
    options: &Options,
) -> Vec<String> {
    let (slots, lease_ms) = (slots.to_string(), options.lease.as_millis().to_string());
    let failing_in = options.failing_in.to_string();
    let (store, broker) = (options.store.word(), options.broker.word());
    [verb, "--group", group, "--slots", &slots, "--lease-ms", &lease_ms, "--failing-in", &failing_in]
        .into_iter()
        .chain(["--store", &store, "--store-url", &places.store, "--broker", &broker, "--broker-url", &places.broker])
        .map(str::to_owned)
        .collect()
}

fn relay_config(places: &Places, options: &Options) -> String {
    let Places { store, broker, broker_settings, .. } = places;
    let (lanes, lease_ms) = (options.lanes, options.lease.as_millis());
    let open_ms = options.breaker_open.as_millis();
    format!(
        "[store]\nurl = \"{store}\"\n\n[broker]\nurl = \"{broker}\"\n{broker_settings}\n\
         [relay]\nlanes = {lanes}\nlease_ms = {lease_ms}\n\n[breaker]\nopen_ms = {open_ms}\n\n\
         [http]\nlisten = \"127.0.0.1:0\"\n\n[log]\nformat = \"json\"\n"
    )
}

fn log_tail(log: &Path, lines: usize) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
