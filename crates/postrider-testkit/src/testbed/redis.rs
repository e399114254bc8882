//! Redis.

use std::fs::File;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::process::{Process, Signal};
use super::{REDIS_VAR, Result, START_DEADLINE, STOP_DEADLINE, free_port, guard, until};

/// A Redis server: a private one, ended and removed with this value, or one that somebody else runs.
#[derive(Debug)]
pub struct Redis {
    url: String,
    server: Option<Server>,
}

#[derive(Debug)]
struct Server {
    program: PathBuf,
    folder: PathBuf,
    port: u16,
    process: Option<Process>,
}

impl Redis {
    /// The server that [`REDIS_VAR`] names, or a private one.
    pub async fn start() -> Result<Redis> {
        match Self::from_env() {
            Some(server) => Ok(server),
            None => Self::start_private().await,
        }
    }

    /// A private server that writes everything to disk before it confirms, whatever the environment says.
    pub async fn start_private() -> Result<Redis> {
        let folder = guard::folder("redis")?;
        let mut server = Server { program: find_program()?, folder, port: free_port()?, process: None };
        server.run().await?;
        Ok(Redis { url: format!("redis://127.0.0.1:{}/0", server.port), server: Some(server) })
    }

    /// The server that [`REDIS_VAR`] names, if it names one.
    pub fn from_env() -> Option<Redis> {
        let url = std::env::var(REDIS_VAR).ok().filter(|url| !url.is_empty())?;
        Some(Redis { url, server: None })
    }

    /// The address of its first database.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The process id of the server.
    pub fn pid(&self) -> Result<u32> {
        let process = self.server.as_ref().and_then(|server| server.process.as_ref());
        process.map(Process::pid).ok_or_else(|| "Redis does not run here".into())
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
            None => Err("Redis is stopped".into()),
        }
    }

    /// Starts it again on the same port with the same files; a running server is stopped first.
    pub async fn restart(&mut self) -> Result<()> {
        self.stop().await?;
        self.private_mut()?.run().await
    }

    fn private_mut(&mut self) -> Result<&mut Server> {
        self.server.as_mut().ok_or_else(|| {
            format!("{REDIS_VAR} names a server that this process did not start: use Redis::start_private() for this")
                .into()
        })
    }
}

impl Server {
    async fn run(&mut self) -> Result<()> {
        if self.process.is_some() {
            return Ok(());
        }
        let log_path = self.folder.join("log");
        let log = File::options().create(true).append(true).open(&log_path)?;
        let mut command = Command::new(&self.program);
        command
            .args(["--bind", "127.0.0.1", "--port", &self.port.to_string(), "--appendonly", "yes", "--save", ""])
            .args(["--appendfsync", "always"])
            .arg("--dir")
            .arg(&self.folder)
            .current_dir(&self.folder)
            .stdout(log.try_clone()?)
            .stderr(log);
        let process = self.process.insert(Process::spawn(&mut command)?);
        let port = self.port;
        let mut exit = None;
        let ready = until("the start of Redis", START_DEADLINE, async || {
            exit = process.try_wait()?;
            Ok(exit.is_some() || answers_ping(port).await)
        })
        .await;
        let ready = ready.and_then(|()| match exit {
            Some(exit) => Err(format!("Redis ended at its start: {exit}").into()),
            None => Ok(()),
        });
        ready.map_err(|error| {
            self.process = None;
            format!("{error}\n{}", super::tail(&log_path)).into()
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process = None;
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Whether it answers, and has read its files: until then it says LOADING.
async fn answers_ping(port: u16) -> bool {
    const PONG: &[u8; 7] = b"+PONG\r\n";
    let ping = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.write_all(b"PING\r\n").await?;
        let mut answer = [0; PONG.len()];
        stream.read_exact(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    matches!(tokio::time::timeout(Duration::from_secs(5), ping).await, Ok(Ok(answer)) if answer == *PONG)
}

/// `redis-server` in `POSTRIDER_TEST_REDIS_BIN`, else on the path.
fn find_program() -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("POSTRIDER_TEST_REDIS_BIN") {
        return Ok(PathBuf::from(folder).join("redis-server"));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join("redis-server")).find(|program| program.exists()).ok_or_else(
        || {
            "Redis is not installed: run `make setup`, or set POSTRIDER_TEST_REDIS_BIN to the folder of redis-server"
                .into()
        },
    )
}
