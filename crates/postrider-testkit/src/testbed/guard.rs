//! The guard: a small shell beside us that ends our servers and removes their files when we are gone.
//!
//! A destructor does not run when a process is killed, aborted or interrupted, and a test run that leaves a broker
//! behind spoils the next one. So the first server that is started also starts `sh` with its standard input connected
//! to us. It is told every process that runs; when the pipe closes, which the kernel does however we end, it ends those
//! that are still listed and removes the folder that everything lives in.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{Result, Signal};

/// `$1` is the folder. A PostgreSQL that was killed leaves its System V segment behind, named in `postmaster.pid`.
const SCRIPT: &str = r#"
trap '' HUP INT QUIT TERM
pids=
while read -r verb pid signal; do
    case $verb in
        watch) pids="$pids $pid:$signal" ;;
        forget) left=; for p in $pids; do [ "${p%:*}" = "$pid" ] || left="$left $p"; done; pids=$left ;;
    esac
done
for p in $pids; do kill -s "${p#*:}" "${p%:*}"; kill -s CONT "${p%:*}"; done
tries=0
for p in $pids; do
    while kill -s 0 "${p%:*}" && [ $tries -lt 30 ]; do sleep 0.1; tries=$((tries + 1)); done
    kill -s KILL "${p%:*}"
    kill -s KILL -- "-${p%:*}"
done
for f in "$1"/*/data/postmaster.pid; do
    [ -f "$f" ] && ipcrm -m "$(sed -n '7s/.* //p' "$f")"
done
rm -rf "$1"
"#;

struct Guard {
    shell: Child,
    pipe: ChildStdin,
    folder: PathBuf,
}

static GUARD: Mutex<Option<Guard>> = Mutex::new(None);

/// A panic elsewhere must not keep us from cleaning up.
fn lock() -> MutexGuard<'static, Option<Guard>> {
    GUARD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A new, empty folder that is gone when this process is.
pub(super) fn folder(name: &str) -> Result<PathBuf> {
    let mut guard = lock();
    let root = match &mut *guard {
        Some(guard) => guard.folder.clone(),
        none => none.insert(start()?).folder.clone(),
    };
    drop(guard);
    let folder = root.join(super::unique(name));
    std::fs::create_dir(&folder)?;
    Ok(folder)
}

fn start() -> Result<Guard> {
    let folder = tempfile::Builder::new().prefix("postrider-testbed-").tempdir()?.keep();
    // PostgreSQL refuses to run as root, so its user must be able to pass through.
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o711))?;
    let mut shell = Command::new("sh")
        .args(["-c", SCRIPT, "postrider-testbed-guard"])
        .arg(&folder)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // An own group, so that what interrupts us does not end the guard.
        .process_group(0)
        .spawn()?;
    let pipe = shell.stdin.take().ok_or("the guard has no standard input")?;
    Ok(Guard { shell, pipe, folder })
}

/// Has the guard end `pid` by `signal`, and by force if that does not help, unless we do it ourselves. Only for the
/// leader of a process group of its own.
pub(super) fn watch(pid: u32, signal: Signal) -> Result<()> {
    let line = format!("watch {pid} {}", signal.name());
    match &mut *lock() {
        Some(guard) => Ok(writeln!(guard.pipe, "{line}")?),
        none => Ok(writeln!(none.insert(start()?).pipe, "{line}")?),
    }
}

/// Takes `pid` off the list, because it has ended and was waited for.
pub(super) fn forget(pid: u32) {
    if let Some(guard) = &mut *lock() {
        // If the guard is gone there is nothing that it could end.
        let _ = writeln!(guard.pipe, "forget {pid}");
    }
}

/// Ends what still runs, removes all files and waits until that is done. A process that is about to exit may call it to
/// be sure that nothing is left when it has; otherwise the same happens a moment later.
pub fn clean_up() {
    if let Some(Guard { mut shell, pipe, .. }) = lock().take() {
        drop(pipe);
        let _ = shell.wait();
    }
}

/// Removes the System V segment of a PostgreSQL that was killed, which nothing else does once its files are gone.
pub(super) fn remove_segment(postmaster_pid: &Path) {
    let Ok(text) = std::fs::read_to_string(postmaster_pid) else { return };
    if let Some(id) = text.lines().nth(6).and_then(|line| line.split_whitespace().nth(1)) {
        let _ = Command::new("ipcrm").args(["-m", id]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
}
