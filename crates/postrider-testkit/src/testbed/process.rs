//! Child processes: start, signal, wait, and what they cost.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::{POLL_EVERY, Result, guard, until};

/// The signals that tests send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM: a polite request to end.
    Term,
    /// SIGINT: what Ctrl-C sends.
    Int,
    /// SIGQUIT: PostgreSQL's immediate shutdown.
    Quit,
    /// SIGKILL: a crash.
    Kill,
    /// SIGSTOP: a process that hangs without knowing it.
    Stop,
    /// SIGCONT: the hanging process goes on.
    Cont,
}

impl Signal {
    pub(super) fn name(self) -> &'static str {
        match self {
            Signal::Term => "TERM",
            Signal::Int => "INT",
            Signal::Quit => "QUIT",
            Signal::Kill => "KILL",
            Signal::Stop => "STOP",
            Signal::Cont => "CONT",
        }
    }
}

/// Sends `signal` to every process in `pids`; one that is gone already is no error.
///
/// The shell's own `kill` does it: the system call would need unsafe code, and minimal systems have no `kill` program.
pub fn signal(pids: &[u32], signal: Signal) -> Result<()> {
    let script = r#"signal=$1; shift; for pid; do kill -s "$signal" "$pid" 2>/dev/null; done; :"#;
    let pids = pids.iter().map(u32::to_string);
    let status = Command::new("sh").args(["-c", script, "sh", signal.name()]).args(pids).status()?;
    if status.success() { Ok(()) } else { Err(format!("sh could not send SIG{}: {status}", signal.name()).into()) }
}

/// A child process in a group of its own. It is killed when this value goes, and also when we are killed ourselves.
#[derive(Debug)]
pub struct Process {
    child: Child,
    exit: Option<ExitStatus>,
    /// What ends it when nobody else did.
    last: Signal,
}

impl Process {
    /// Starts `command`, with nothing on its standard input.
    pub fn spawn(command: &mut Command) -> Result<Process> {
        Self::spawn_ending_by(command, Signal::Kill)
    }

    /// The same for a program that, killed, would leave something behind: at the end it gets `last` first.
    pub fn spawn_ending_by(command: &mut Command, last: Signal) -> Result<Process> {
        let child = command
            .stdin(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(|error| format!("{}: {error}", command.get_program().display()))?;
        let process = Process { child, exit: None, last };
        guard::watch(process.pid(), last)?;
        Ok(process)
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The piped standard output and error streams, where the command asked for them, and such.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// How it ended, if it has.
    pub fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        if self.exit.is_none() {
            self.exit = self.child.try_wait()?;
            if self.exit.is_some() {
                guard::forget(self.child.id());
            }
        }
        Ok(self.exit)
    }

    /// Waits for its end, at most for `deadline`.
    pub async fn wait(&mut self, deadline: Duration) -> Result<ExitStatus> {
        let pid = self.pid();
        until(&format!("the end of process {pid}"), deadline, async || Ok(self.try_wait()?.is_some())).await?;
        self.exit.ok_or_else(|| format!("process {pid} ended without a status").into())
    }

    /// Sends a signal; nothing happens when the process has ended.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        if self.try_wait()?.is_some() {
            return Ok(());
        }
        self::signal(&[self.pid()], signal)
    }

    /// Kills it and everything that it started, and waits until all of that is gone.
    pub async fn kill(&mut self) -> Result<()> {
        let family = self.kill_family()?;
        self.wait(super::STOP_DEADLINE).await?;
        until("the end of its children", super::STOP_DEADLINE, async || Ok(!family.iter().any(|&pid| is_running(pid))))
            .await
    }

    /// Asks it to end with `signal` and waits; after `deadline` it is killed.
    pub async fn end(&mut self, signal: Signal, deadline: Duration) -> Result<ExitStatus> {
        self.signal(signal)?;
        match self.wait(deadline).await {
            Ok(exit) => Ok(exit),
            Err(_) => {
                self.kill().await?;
                Ok(self.exit.unwrap_or(ExitStatus::from_raw(9)))
            }
        }
    }

    /// CPU time of it and of what it started.
    pub fn cpu(&self) -> Result<Duration> {
        tree_cpu(self.pid())
    }

    /// Resident memory of it alone.
    pub fn rss_bytes(&self) -> Result<u64> {
        rss_bytes(self.pid())
    }

    /// Children that lead a session of their own (PostgreSQL's) are in no group of ours, so they are listed, while the
    /// parent is stopped and can start no more of them.
    fn kill_family(&mut self) -> Result<Vec<u32>> {
        if self.try_wait()?.is_some() {
            return Ok(Vec::new());
        }
        signal(&[self.pid()], Signal::Stop)?;
        let family = descendants(self.pid())?;
        let mut all = vec![self.pid()];
        all.extend(&family);
        signal(&all, Signal::Kill)?;
        Ok(family)
    }
}

#[expect(clippy::disallowed_methods, reason = "a destructor cannot await")]
fn pause() {
    std::thread::sleep(POLL_EVERY / 4);
}

impl Drop for Process {
    fn drop(&mut self) {
        const DEADLINE: Duration = Duration::from_secs(5);
        let started = Instant::now();
        // What fails here cannot be reported any more; the guard has the last word.
        let mut family = if self.last == Signal::Kill { self.kill_family() } else { Ok(Vec::new()) };
        if self.last != Signal::Kill {
            let _ = self.signal(self.last);
            while matches!(self.try_wait(), Ok(None)) && started.elapsed() < DEADLINE {
                pause();
            }
            family = self.kill_family();
        }
        let _ = self.child.wait();
        guard::forget(self.child.id());
        let family = family.unwrap_or_default();
        while family.iter().any(|&pid| is_running(pid)) && started.elapsed() < 2 * DEADLINE {
            pause();
        }
    }
}

/// The fields of `/proc/<pid>/stat` from the third one (the state) on. The second is the program's name in
/// parentheses, which may itself hold spaces and parentheses.
fn stat(pid: u32) -> Result<Vec<String>> {
    let text =
        std::fs::read_to_string(format!("/proc/{pid}/stat")).map_err(|error| format!("process {pid}: {error}"))?;
    let fields = text.rsplit_once(')').map(|(_, fields)| fields).ok_or("unreadable /proc stat")?;
    Ok(fields.split_whitespace().map(str::to_owned).collect())
}

/// Whether the process exists and is more than an exit status that nobody has read.
pub fn is_running(pid: u32) -> bool {
    stat(pid).is_ok_and(|fields| !matches!(fields.first().map(String::as_str), Some("Z" | "X") | None))
}

/// The processes that `pid` started and that still run.
pub fn children(pid: u32) -> Result<Vec<u32>> {
    Ok(parents()?.into_iter().filter(|&(_, parent)| parent == pid).map(|(child, _)| child).collect())
}

fn descendants(pid: u32) -> Result<Vec<u32>> {
    let parents = parents()?;
    let mut found = vec![pid];
    let mut next = 0;
    while next < found.len() {
        let parent = found[next];
        found.extend(parents.iter().filter(|&&(_, of)| of == parent).map(|&(child, _)| child));
        next += 1;
    }
    found.remove(0);
    Ok(found)
}

/// Every process with its parent.
fn parents() -> Result<Vec<(u32, u32)>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // Processes come and go while we read.
        let Ok(fields) = stat(pid) else { continue };
        if let Some(parent) = fields.get(1).and_then(|field| field.parse().ok()) {
            all.push((pid, parent));
        }
    }
    Ok(all)
}

/// The unit of the times in `/proc`: USER_HZ, which is 100 on every Linux that this runs on.
const TICK: Duration = Duration::from_millis(10);

/// CPU time that everything on this machine has used, on all its cores.
pub fn machine_cpu() -> Result<Duration> {
    // user, nice, system, (idle, iowait,) irq, softirq
    machine_times(&[0, 1, 2, 5, 6])
}

/// CPU time that this machine asked for and did not get, because its host gave it to others.
pub fn stolen_cpu() -> Result<Duration> {
    machine_times(&[7])
}

fn machine_times(places: &[usize]) -> Result<Duration> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    let line = stat.lines().next().ok_or("/proc/stat is empty")?;
    let times: Vec<u32> = line.split_whitespace().skip(1).map(str::parse).collect::<Result<_, _>>()?;
    Ok(TICK * places.iter().filter_map(|place| times.get(*place)).sum())
}

/// CPU time, user and system, of a process and of those of its children that it has waited for.
pub fn cpu(pid: u32) -> Result<Duration> {
    let fields = stat(pid)?;
    // utime, stime, cutime, cstime are fields 14 to 17, counted from 1 with the two that `stat` leaves out.
    let ticks: u32 = fields.iter().skip(11).take(4).filter_map(|field| field.parse::<u32>().ok()).sum();
    Ok(TICK * ticks)
}

/// CPU time of a process, of all that it started, and of all that those have waited for.
pub fn tree_cpu(pid: u32) -> Result<Duration> {
    let living: Duration = descendants(pid)?.into_iter().filter_map(|pid| cpu(pid).ok()).sum();
    Ok(cpu(pid)? + living)
}

/// Resident memory of a process.
pub fn rss_bytes(pid: u32) -> Result<u64> {
    let status =
        std::fs::read_to_string(format!("/proc/{pid}/status")).map_err(|error| format!("process {pid}: {error}"))?;
    let kibibytes = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
        .ok_or_else(|| format!("process {pid} has no memory"))?;
    Ok(kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn killing_a_process_takes_its_children_along() {
        let mut process = Process::spawn(Command::new("sh").args(["-c", "sleep 1000 & sleep 1001 & wait"])).unwrap();
        until("two children", Duration::from_secs(10), async || Ok(children(process.pid())?.len() == 2)).await.unwrap();
        let family = descendants(process.pid()).unwrap();
        process.kill().await.unwrap();
        assert!(!family.into_iter().any(is_running));
        assert_eq!(process.try_wait().unwrap().unwrap().signal(), Some(9));
    }

    #[tokio::test]
    async fn a_stopped_process_uses_no_cpu_until_it_goes_on() {
        let mut process = Process::spawn(Command::new("sh").args(["-c", "while :; do :; done"])).unwrap();
        until("CPU time", Duration::from_secs(10), async || Ok(!process.cpu()?.is_zero())).await.unwrap();
        process.signal(Signal::Stop).unwrap();
        until("the stop", Duration::from_secs(10), async || Ok(stat(process.pid())?[0] == "T")).await.unwrap();
        let then = process.cpu().unwrap();
        assert_eq!(process.cpu().unwrap(), then);
        assert!(process.rss_bytes().unwrap() > 0);
        process.signal(Signal::Cont).unwrap();
        until("more CPU time", Duration::from_secs(10), async || Ok(process.cpu()? > then)).await.unwrap();
        assert_eq!(process.end(Signal::Term, Duration::from_secs(10)).await.unwrap().signal(), Some(15));
    }
}
