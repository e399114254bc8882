//! NATS with JetStream.

use std::fs::File;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

use super::process::{Process, Signal};
use super::{NATS_VAR, Result, START_DEADLINE, STOP_DEADLINE, free_port, guard, until};

/// A NATS server: a private one, ended and removed with this value, or one that somebody else runs.
#[derive(Debug)]
pub struct Nats {
    url: String,
    server: Option<Server>,
}

#[derive(Debug)]
struct Server {
    program: PathBuf,
    folder: PathBuf,
    port: u16,
    config: String,
    process: Option<Process>,
}

impl Nats {
    /// The server that [`NATS_VAR`] names, or a private one.
    pub async fn start() -> Result<Nats> {
        match Self::from_env() {
            Some(server) => Ok(server),
            None => Self::start_private().await,
        }
    }

    /// A private server that writes everything to disk before it confirms, whatever the environment says. A version that
    /// does not know that setting gives what it writes to the kernel at once, which survives every kill.
    pub async fn start_private() -> Result<Nats> {
        Self::start_with("").await
    }

    /// The same with more lines in its configuration.
    pub async fn start_with(config: &str) -> Result<Nats> {
        let folder = guard::folder("nats")?;
        let config = config.to_owned();
        let mut server = Server { program: find_program()?, folder, port: free_port()?, config, process: None };
        server.run().await?;
        Ok(Nats { url: format!("nats://127.0.0.1:{}", server.port), server: Some(server) })
    }

    /// The server that [`NATS_VAR`] names, if it names one.
    pub fn from_env() -> Option<Nats> {
        let url = std::env::var(NATS_VAR).ok().filter(|url| !url.is_empty())?;
        Some(Nats { url, server: None })
    }

    /// Its address.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The process id of the server.
    pub fn pid(&self) -> Result<u32> {
        let process = self.server.as_ref().and_then(|server| server.process.as_ref());
        process.map(Process::pid).ok_or_else(|| "NATS does not run here".into())
    }

    /// The crash: SIGKILL. Returns when the server is gone; its files stay.
    pub async fn kill(&mut self) -> Result<()> {
        match self.private_mut()?.process.take() {
            Some(mut process) => process.kill().await,
            None => Ok(()),
        }
    }

    /// The orderly shutdown.
    pub async fn stop(&mut self) -> Result<()> {
        if let Some(mut process) = self.private_mut()?.process.take() {
            process.signal(Signal::Term)?;
            process.wait(STOP_DEADLINE).await?;
        }
        Ok(())
    }

    /// Lets it hang without knowing it (SIGSTOP) or go on (SIGCONT).
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        match &mut self.private_mut()?.process {
            Some(process) => process.signal(signal),
            None => Err("NATS is stopped".into()),
        }
    }

    /// Starts it again on the same port with the same files; a running server is stopped first.
    pub async fn restart(&mut self) -> Result<()> {
        self.stop().await?;
        self.private_mut()?.run().await
    }

    fn private_mut(&mut self) -> Result<&mut Server> {
        self.server.as_mut().ok_or_else(|| {
            format!("{NATS_VAR} names a server that this process did not start: use Nats::start_private() for this")
                .into()
        })
    }
}

impl Server {
    async fn run(&mut self) -> Result<()> {
        if self.process.is_some() {
            return Ok(());
        }
        let config = self.configure()?;
        let log_path = self.folder.join("log");
        let log = File::options().create(true).append(true).open(&log_path)?;
        let mut command = Command::new(&self.program);
        command.arg("-c").arg(config).current_dir(&self.folder).stdout(log.try_clone()?).stderr(log);
        let process = self.process.insert(Process::spawn(&mut command)?);
        let port = self.port;
        let mut exit = None;
        let ready = until("the start of NATS", START_DEADLINE, async || {
            exit = process.try_wait()?;
            Ok(exit.is_some() || greets(port).await)
        })
        .await;
        let ready = ready.and_then(|()| match exit {
            Some(exit) => Err(format!("NATS ended at its start: {exit}").into()),
            None => Ok(()),
        });
        ready.map_err(|error| {
            self.process = None;
            format!("{error}\n{}", super::tail(&log_path)).into()
        })
    }

    /// Writes the configuration, and asks the server whether it understands it.
    fn configure(&self) -> Result<PathBuf> {
        let path = self.folder.join("nats.conf");
        for sync in ["  sync_interval: always\n", ""] {
            let store = self.folder.join("store");
            let text = format!(
                "listen: \"127.0.0.1:{}\"\njetstream {{\n  store_dir: {store:?}\n{sync}}}\n{}",
                self.port, self.config
            );
            std::fs::write(&path, text)?;
            let checked = Command::new(&self.program).arg("-t").arg("-c").arg(&path).output()?;
            if checked.status.success() {
                return Ok(path);
            }
        }
        Err("nats-server does not understand its configuration".into())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process = None;
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Whether it says who it is, which it does when JetStream has read its files.
async fn greets(port: u16) -> bool {
    const INFO: &[u8; 5] = b"INFO ";
    let greeting = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
        let mut answer = [0; INFO.len()];
        stream.read_exact(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    matches!(tokio::time::timeout(Duration::from_secs(5), greeting).await, Ok(Ok(answer)) if answer == *INFO)
}

/// `nats-server` in `POSTRIDER_TEST_NATS_BIN`, else on the path, else where Debian puts it.
fn find_program() -> Result<PathBuf> {
    const NAME: &str = "nats-server";
    if let Some(folder) = std::env::var_os("POSTRIDER_TEST_NATS_BIN") {
        return Ok(PathBuf::from(folder).join(NAME));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
    folders.map(|folder| folder.join(NAME)).find(|program| program.exists()).ok_or_else(|| {
        "NATS is not installed: run `make setup`, or set POSTRIDER_TEST_NATS_BIN to the folder of nats-server".into()
    })
}
