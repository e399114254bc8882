//! MariaDB.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;

use sqlx::{AssertSqlSafe, Connection, Executor, MySqlConnection};

use super::process::{Process, Signal};
use super::url::Url;
use super::{MYSQL_VAR, Result, START_DEADLINE, STOP_DEADLINE, free_port, guard, unique, until};

/// A MariaDB server: a private one, ended and removed with this value, or one that somebody else runs, which may be a MySQL.
#[derive(Debug)]
pub struct MariaDb {
    url: String,
    server: Option<Server>,
}

#[derive(Debug)]
struct Server {
    program: PathBuf,
    folder: PathBuf,
    port: u16,
    /// Commits reach the disk, as in production.
    is_durable: bool,
    process: Option<Process>,
}

impl MariaDb {
    /// A private durable server, whatever the environment says.
    pub async fn start_private() -> Result<MariaDb> {
        Self::create(true).await
    }

    /// The server that [`MYSQL_VAR`] names, or a private one that does not wait for the disk.
    pub async fn fast() -> Result<MariaDb> {
        match Self::from_env() {
            Some(server) => Ok(server),
            None => Self::create(false).await,
        }
    }

    async fn create(is_durable: bool) -> Result<MariaDb> {
        let mut server = Server::create(is_durable).await?;
        server.run().await?;
        Ok(MariaDb { url: server.url(), server: Some(server) })
    }

    /// The server that [`MYSQL_VAR`] names, if it names one.
    pub fn from_env() -> Option<MariaDb> {
        let url = std::env::var(MYSQL_VAR).ok().filter(|url| !url.is_empty())?;
        Some(MariaDb { url, server: None })
    }

    /// The address of a database that always exists, with a user who may do everything.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The address of a fresh, empty database whose name starts with `name`. Its default collation ignores case, as many do.
    pub async fn database(&self, name: &str) -> Result<String> {
        let name = unique(name);
        let mut connection = MySqlConnection::connect(&self.url).await?;
        // `unique` lets no character through that would need quoting.
        let create = format!("CREATE DATABASE `{name}` CHARACTER SET latin1 COLLATE latin1_swedish_ci");
        connection.execute(sqlx::raw_sql(AssertSqlSafe(create))).await?;
        connection.close().await?;
        Ok(self.url.parse::<Url>()?.with_path(&name))
    }

    /// The process id of the server.
    pub fn pid(&self) -> Result<u32> {
        let process = self.server.as_ref().and_then(|server| server.process.as_ref());
        process.map(Process::pid).ok_or_else(|| "MariaDB does not run here".into())
    }

    /// The crash: SIGKILL. Returns when the server is gone; its files stay.
    pub async fn kill(&mut self) -> Result<()> {
        match self.private_mut()?.process.take() {
            Some(mut process) => process.kill().await,
            None => Ok(()),
        }
    }

    /// The orderly shutdown: open transactions are rolled back, everything is written.
    pub async fn stop(&mut self) -> Result<()> {
        if let Some(mut process) = self.private_mut()?.process.take() {
            process.signal(Signal::Term)?;
            process.wait(STOP_DEADLINE).await?;
        }
        Ok(())
    }

    /// Starts it again on the same port with the same files; a running server is stopped first.
    pub async fn restart(&mut self) -> Result<()> {
        self.stop().await?;
        self.private_mut()?.run().await
    }

    fn private_mut(&mut self) -> Result<&mut Server> {
        self.server.as_mut().ok_or_else(|| {
            format!("{MYSQL_VAR} names a server that this process did not start: use MariaDb::start_private() for this")
                .into()
        })
    }
}

impl Server {
    async fn create(is_durable: bool) -> Result<Server> {
        let (program, install) = (find_program("mariadbd")?, find_program("mariadb-install-db")?);
        let folder = guard::folder("mariadb")?;
        let server = Server { program, folder, port: free_port()?, is_durable, process: None };
        let mut command = Command::new(install);
        command.arg("--no-defaults").arg(format!("--datadir={}", server.data().display()));
        command.args(["--auth-root-authentication-method=normal", "--skip-test-db", "--innodb-flush-method=nosync"]);
        server.as_our_user(&mut command)?;
        let log = File::create(server.log())?;
        command.current_dir(&server.folder).env("TMPDIR", &server.folder).stdout(log.try_clone()?).stderr(log);
        let exit = Process::spawn(&mut command)?.wait(START_DEADLINE).await?;
        if !exit.success() {
            return Err(format!("mariadb-install-db: {exit}\n{}", super::tail(&server.log())).into());
        }
        Ok(server)
    }

    async fn run(&mut self) -> Result<()> {
        if self.process.is_some() {
            return Ok(());
        }
        let log = File::options().create(true).append(true).open(self.log())?;
        let mut command = Command::new(&self.program);
        command
            .arg("--no-defaults")
            .arg(format!("--datadir={}", self.data().display()))
            // Of its own: a server that starts removes every temporary table that it finds there, also those of another.
            .arg(format!("--tmpdir={}", self.folder.display()))
            .arg(format!("--socket={}", self.folder.join("socket").display()))
            .arg(format!("--pid-file={}", self.folder.join("pid").display()))
            .args(["--bind-address=127.0.0.1", &format!("--port={}", self.port), "--skip-name-resolve"])
            .args(["--max-connections=1000", "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=32M"])
            // A binary log, as nearly every server has: its two-phase commit is part of what is tested.
            .args(["--log-bin=binlog", "--binlog-format=MIXED", "--server-id=1"]);
        match self.is_durable {
            true => command.args(["--innodb-flush-log-at-trx-commit=1", "--sync-binlog=1"]),
            false => command.args([
                "--innodb-flush-log-at-trx-commit=0",
                "--innodb-flush-method=nosync",
                "--innodb-doublewrite=OFF",
                "--sync-binlog=0",
            ]),
        };
        self.as_our_user(&mut command)?;
        command.current_dir(&self.folder).stdout(log.try_clone()?).stderr(log);
        let process = self.process.insert(Process::spawn(&mut command)?);
        let url = format!("mysql://root@127.0.0.1:{}/mysql", self.port);
        let mut exit = None;
        let ready = until("the start of MariaDB", START_DEADLINE, async || {
            exit = process.try_wait()?;
            if exit.is_some() {
                return Ok(true);
            }
            match MySqlConnection::connect(&url).await {
                Ok(connection) => Ok(connection.close().await.is_ok()),
                Err(_) => Ok(false),
            }
        })
        .await;
        let ready = ready.and_then(|()| match exit {
            Some(exit) => Err(format!("MariaDB ended at its start: {exit}").into()),
            None => Ok(()),
        });
        ready.map_err(|error| {
            self.process = None;
            format!("{error}\n{}", super::tail(&self.log())).into()
        })
    }

    /// MariaDB runs as root only when it is told to.
    fn as_our_user(&self, command: &mut Command) -> Result<()> {
        if std::fs::metadata("/proc/self")?.uid() == 0 {
            command.arg("--user=root");
        }
        Ok(())
    }

    fn url(&self) -> String {
        format!("mysql://root@127.0.0.1:{}/mysql", self.port)
    }

    fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    fn log(&self) -> PathBuf {
        self.folder.join("log")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process = None;
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// In `POSTRIDER_TEST_MYSQL_BIN`, else on the path, else where Debian has servers.
fn find_program(name: &str) -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("POSTRIDER_TEST_MYSQL_BIN") {
        return Ok(PathBuf::from(folder).join(name));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin"), PathBuf::from("/usr/bin")]);
    folders.map(|folder| folder.join(name)).find(|program| program.exists()).ok_or_else(|| {
        format!("MariaDB is not installed: run `make setup`, or set POSTRIDER_TEST_MYSQL_BIN to the folder of {name}")
            .into()
    })
}
