//! The child processes: relays and consumers.
//!
//! Each child has a pipe from us as its stdin. A byte on it asks for a graceful stop; its end means that we died, and
//! the child ends too. So nobody is left over, however this process ends.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use postrider::{Error, Kind};
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};

use super::names::{GROUPS, Group, RELAYS};
use crate::cli::failure::{Result, io};

/// A child that has not stopped by then is killed, which is equally safe.
const STOP_WAIT: Duration = Duration::from_secs(10);

enum Role {
    Relay,
    Consumer(&'static Group),
}

struct Member {
    name: &'static str,
    role: Role,
    /// `None` after it was killed.
    child: Option<Child>,
}

/// Everybody who works on the demo's database, except this process.
pub struct Crew {
    directory: PathBuf,
    members: Vec<Member>,
}

impl Crew {
    /// Starts all relays and consumers.
    pub fn start(directory: &Path) -> Result<Self> {
        let relays = RELAYS.iter().map(|name| Member { name, role: Role::Relay, child: None });
        let consumers = GROUPS.iter().flat_map(|group| {
            group.members.iter().map(|name| Member { name, role: Role::Consumer(group), child: None })
        });
        let mut crew = Self { directory: directory.to_owned(), members: relays.chain(consumers).collect() };
        for member in &mut crew.members {
            member.child = Some(spawn(&crew.directory, member)?);
        }
        Ok(crew)
    }

    /// Kills a process with SIGKILL and waits for its end. Returns its process id.
    pub async fn kill(&mut self, name: &str) -> Result<u32> {
        let member = self.member(name)?;
        let Some(mut child) = member.child.take() else { return Err(unknown(name)) };
        let id = child.id().unwrap_or_default();
        child.kill().await.map_err(|error| io(format!("{name} cannot be killed"), error))?;
        Ok(id)
    }

    /// Starts a killed process again.
    pub fn restart(&mut self, name: &str) -> Result<()> {
        let directory = self.directory.clone();
        let member = self.member(name)?;
        member.child = Some(spawn(&directory, member)?);
        Ok(())
    }

    /// An error when a process has ended that nobody killed, with its last words.
    pub fn check(&mut self) -> Result<()> {
        for member in &mut self.members {
            let Some(child) = &mut member.child else { continue };
            let ended = child.try_wait().map_err(|error| io(format!("{} cannot be watched", member.name), error))?;
            if let Some(status) = ended {
                return Err(died(&self.directory, member.name, status));
            }
        }
        Ok(())
    }

    /// Asks everybody to stop, and waits for it.
    pub async fn stop(&mut self) {
        for member in &mut self.members {
            if let Some(mut stdin) = member.child.as_mut().and_then(|child| child.stdin.take()) {
                // A child that is gone already needs no asking.
                let _ = stdin.write_all(b".").await;
            }
        }
        for mut child in self.members.iter_mut().filter_map(|member| member.child.take()) {
            if tokio::time::timeout(STOP_WAIT, child.wait()).await.is_err() {
                let _ = child.kill().await;
            }
        }
    }

    fn member(&mut self, name: &str) -> Result<&mut Member> {
        self.members.iter_mut().find(|member| member.name == name).ok_or_else(|| unknown(name))
    }
}

fn unknown(name: &str) -> crate::cli::failure::Failure {
    Error::new(Kind::Other, format!("{name:?} is not running")).into()
}

fn log_path(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{}.log", name.replace(' ', "-")))
}

fn spawn(directory: &Path, member: &Member) -> Result<Child> {
    let doing = || format!("{} cannot be started", member.name);
    let program = std::env::current_exe().map_err(|error| io(doing(), error))?;
    let log = File::options()
        .create(true)
        .append(true)
        .open(log_path(directory, member.name))
        .map_err(|error| io(doing(), error))?;
    let mut command = Command::new(program);
    command.arg("demo-worker").arg("--dir").arg(directory).args(["--name", member.name]);
    match member.role {
        Role::Relay => command.arg("relay"),
        Role::Consumer(group) => {
            command.args(["consumer", "--group", group.name, "--slots", &group.members.len().to_string()])
        }
    };
    let child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(log)
        // Ctrl-C is for us alone; we stop them in good order.
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| io(doing(), error))?;
    Ok(child)
}

fn died(directory: &Path, name: &str, status: ExitStatus) -> crate::cli::failure::Failure {
    let log = std::fs::read_to_string(log_path(directory, name)).unwrap_or_default();
    let words = log.trim().lines().next_back().unwrap_or("it said nothing").to_owned();
    Error::new(Kind::Other, format!("{name} ended by itself ({status}): {words}"))
        .with_remedy("run the demo again; if it happens again, please report it")
        .into()
}
