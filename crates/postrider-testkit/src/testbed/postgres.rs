//! PostgreSQL.

use std::fs::File;
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};

use super::process::{Process, Signal};
use super::url::Url;
use super::{POSTGRES_VAR, Result, START_DEADLINE, STOP_DEADLINE, free_port, guard, unique, until};

/// How a private server is set up.
#[derive(Clone, Debug)]
pub struct PostgresOptions {
    fsync: bool,
    settings: Vec<(String, String)>,
}

impl PostgresOptions {
    /// Commits reach the disk, as in production: for crash runs and benchmarks.
    pub fn durable() -> Self {
        PostgresOptions { fsync: true, settings: Vec::new() }
    }

    /// Commits reach the operating system alone: for functional tests, which then do not wait for the disk.
    pub fn fast() -> Self {
        PostgresOptions { fsync: false, settings: Vec::new() }
    }

    /// Adds a line of `postgresql.conf`.
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }
}

/// A PostgreSQL server: a private one, ended and removed with this value, or one that somebody else runs.
#[derive(Debug)]
pub struct Postgres {
    url: String,
    server: Option<Server>,
}

#[derive(Debug)]
struct Server {
    bin: PathBuf,
    folder: PathBuf,
    /// PostgreSQL refuses to run as root: the user and group that it runs as when we are root.
    owner: Option<(u32, u32)>,
    port: u16,
    process: Option<Process>,
}

impl Postgres {
    /// The server that [`POSTGRES_VAR`] names, or a private durable one.
    pub async fn start() -> Result<Postgres> {
        match Self::from_env() {
            Some(server) => Ok(server),
            None => Self::start_private().await,
        }
    }

    /// A private durable server, whatever the environment says.
    pub async fn start_private() -> Result<Postgres> {
        Self::start_with(PostgresOptions::durable()).await
    }

    /// A private server that does not wait for the disk.
    pub async fn fast() -> Result<Postgres> {
        Self::start_with(PostgresOptions::fast()).await
    }

    /// A private server with other settings.
    pub async fn start_with(options: PostgresOptions) -> Result<Postgres> {
        let mut server = Server::create(&options).await?;
        server.run().await?;
        Ok(Postgres { url: server.url(), server: Some(server) })
    }

    /// The server that [`POSTGRES_VAR`] names, if it names one.
    pub fn from_env() -> Option<Postgres> {
        let url = std::env::var(POSTGRES_VAR).ok().filter(|url| !url.is_empty())?;
        Some(Postgres { url, server: None })
    }

    /// The address of the maintenance database, with a user who may do everything.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The address of a fresh, empty database whose name starts with `name`.
    pub async fn database(&self, name: &str) -> Result<String> {
        let name = unique(name);
        let mut connection = PgConnection::connect(&self.url).await?;
        // `unique` lets no character through that would need quoting.
        connection.execute(sqlx::raw_sql(AssertSqlSafe(format!(r#"CREATE DATABASE "{name}""#)))).await?;
        connection.close().await?;
        Ok(self.url.parse::<Url>()?.with_path(&name))
    }

    /// The process id of the postmaster.
    pub fn pid(&self) -> Result<u32> {
        Ok(self.private()?.running()?.pid())
    }

    /// The port on 127.0.0.1, for a proxy in front of it.
    pub fn port(&self) -> Result<u16> {
        Ok(self.private()?.port)
    }

    /// CPU time since the last start: the postmaster, its backends and those that have ended.
    pub fn cpu(&self) -> Result<Duration> {
        self.private()?.running()?.cpu()
    }

    /// Resident memory of the postmaster and its backends, in which shared memory counts once per process.
    pub fn rss_bytes(&self) -> Result<u64> {
        let postmaster = self.private()?.running()?.pid();
        let backends = super::children(postmaster)?;
        Ok(backends.into_iter().chain([postmaster]).filter_map(|pid| super::rss_bytes(pid).ok()).sum())
    }

    /// The crash: SIGKILL for every process of the server. Returns when all of them are gone; the files stay.
    pub async fn kill(&mut self) -> Result<()> {
        match self.private_mut()?.process.take() {
            Some(mut process) => process.kill().await,
            None => Ok(()),
        }
    }

    /// The fast shutdown: open transactions are rolled back, everything is written.
    pub async fn stop(&mut self) -> Result<()> {
        if let Some(mut process) = self.private_mut()?.process.take() {
            process.signal(Signal::Int)?;
            process.wait(STOP_DEADLINE).await?;
        }
        Ok(())
    }

    /// Starts it again on the same port with the same files; a running server is stopped first.
    pub async fn restart(&mut self) -> Result<()> {
        self.stop().await?;
        self.private_mut()?.run().await
    }

    fn private(&self) -> Result<&Server> {
        self.server.as_ref().ok_or_else(|| not_ours().into())
    }

    fn private_mut(&mut self) -> Result<&mut Server> {
        self.server.as_mut().ok_or_else(|| not_ours().into())
    }
}

fn not_ours() -> String {
    format!("{POSTGRES_VAR} names a server that this process did not start: use Postgres::start_private() for this")
}

impl Server {
    async fn create(options: &PostgresOptions) -> Result<Server> {
        let bin = find_programs()?;
        let owner = unprivileged_user()?;
        let folder = guard::folder("postgres")?;
        if let Some((user, group)) = owner {
            chown(&folder, Some(user), Some(group))?;
        }
        let server = Server { bin, folder, owner, port: free_port()?, process: None };
        let mut initdb = server.command("initdb");
        initdb.arg("--pgdata").arg(server.data());
        // The files need not survive the machine, only the server's processes.
        initdb.args(["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]);
        let log = File::create(server.log())?;
        let exit = Process::spawn(initdb.stdout(log.try_clone()?).stderr(log))?.wait(START_DEADLINE).await?;
        if !exit.success() {
            return Err(format!("initdb: {exit}\n{}", super::tail(&server.log())).into());
        }
        let mut config = std::fs::read_to_string(server.data().join("postgresql.conf"))?;
        let switch = |on: bool| if on { "on" } else { "off" }.to_owned();
        let ours = [
            ("listen_addresses", "127.0.0.1".to_owned()),
            ("port", server.port.to_string()),
            ("unix_socket_directories", String::new()),
            ("wal_level", "logical".to_owned()),
            ("max_connections", "200".to_owned()),
            ("fsync", switch(options.fsync)),
            ("full_page_writes", switch(options.fsync)),
            // In files of the data folder, so that a killed server leaves nothing in /dev/shm.
            ("dynamic_shared_memory_type", "mmap".to_owned()),
        ];
        let ours = ours.into_iter().map(|(name, value)| (name.to_owned(), value));
        for (name, value) in ours.chain(options.settings.iter().cloned()) {
            config.push_str(&format!("{name} = '{}'\n", value.replace('\'', "''")));
        }
        std::fs::write(server.data().join("postgresql.conf"), config)?;
        Ok(server)
    }

    async fn run(&mut self) -> Result<()> {
        if self.process.is_some() {
            return Ok(());
        }
        let log = File::options().create(true).append(true).open(self.log())?;
        let mut command = self.command("postgres");
        command.arg("-D").arg(self.data()).stdout(log.try_clone()?).stderr(log);
        // Immediate shutdown: quick, and it gives shared memory back.
        let process = self.process.insert(Process::spawn_ending_by(&mut command, Signal::Quit)?);
        let url = format!("postgres://postgres@127.0.0.1:{}/postgres", self.port);
        let mut exit = None;
        let ready = until("the start of PostgreSQL", START_DEADLINE, async || {
            exit = process.try_wait()?;
            if exit.is_some() {
                return Ok(true);
            }
            match PgConnection::connect(&url).await {
                Ok(connection) => Ok(connection.close().await.is_ok()),
                Err(_) => Ok(false),
            }
        })
        .await;
        let ready = ready.and_then(|()| match exit {
            Some(exit) => Err(format!("PostgreSQL ended at its start: {exit}").into()),
            None => Ok(()),
        });
        ready.map_err(|error| {
            self.process = None;
            format!("{error}\n{}", super::tail(&self.log())).into()
        })
    }

    fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    fn log(&self) -> PathBuf {
        self.folder.join("log")
    }

    fn running(&self) -> Result<&Process> {
        self.process.as_ref().ok_or_else(|| "PostgreSQL is stopped".into())
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.bin.join(program));
        command.current_dir(&self.folder).env_remove("PGDATA").env("LC_ALL", "C");
        if let Some((user, group)) = self.owner {
            command.uid(user).gid(group);
        }
        command
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process = None;
        guard::remove_segment(&self.data().join("postmaster.pid"));
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// The folder that holds `initdb` and `postgres`: `POSTRIDER_TEST_PG_BIN`, else the newest of Debian's, else the path.
fn find_programs() -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("POSTRIDER_TEST_PG_BIN") {
        return Ok(folder.into());
    }
    let debian = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().filter_map(|entry| {
        let folder = entry.ok()?.path();
        let version: u32 = folder.file_name()?.to_str()?.parse().ok()?;
        folder.join("bin/postgres").exists().then(|| (version, folder.join("bin")))
    });
    let path = || std::env::split_paths(&std::env::var_os("PATH")?).find(|folder| has_programs(folder));
    debian.max().map(|(_, folder)| folder).or_else(path).ok_or_else(|| {
        "PostgreSQL is not installed: run `make setup`, or set POSTRIDER_TEST_PG_BIN to the folder of initdb and postgres"
            .into()
    })
}

fn has_programs(folder: &Path) -> bool {
    folder.join("initdb").exists() && folder.join("postgres").exists()
}

/// The `postgres` user of the package (else `nobody`) when we are root, nobody else when we are not.
fn unprivileged_user() -> Result<Option<(u32, u32)>> {
    if std::fs::metadata("/proc/self")?.uid() != 0 {
        return Ok(None);
    }
    let users = std::fs::read_to_string("/etc/passwd")?;
    let find = |name: &str| {
        let mut fields = users.lines().find(|line| line.split(':').next() == Some(name))?.split(':').skip(2);
        Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
    };
    match find("postgres").or_else(|| find("nobody")) {
        Some(owner) => Ok(Some(owner)),
        None => Err("PostgreSQL does not run as root, and there is no user `postgres` or `nobody`".into()),
    }
}

#[cfg(test)]
mod own_servers {
    use super::*;

    #[tokio::test]
    async fn what_was_committed_survives_a_kill() {
        let mut server = Postgres::start_private().await.unwrap();
        let url = server.database("survives").await.unwrap();
        let mut connection = PgConnection::connect(&url).await.unwrap();
        connection.execute("CREATE TABLE t AS SELECT 1 AS n").await.unwrap();
        assert!(!server.cpu().unwrap().is_zero() && server.rss_bytes().unwrap() > 0);
        let backends = super::super::children(server.pid().unwrap()).unwrap();
        assert!(!backends.is_empty());

        server.kill().await.unwrap();
        assert!(!backends.into_iter().any(super::super::is_running));
        assert!(connection.execute("SELECT 1").await.is_err());
        assert!(server.pid().is_err());

        server.restart().await.unwrap();
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let (n, level, fsync): (i32, String, String) =
            sqlx::query_as("SELECT n, current_setting('wal_level'), current_setting('fsync') FROM t")
                .fetch_one(&mut connection)
                .await
                .unwrap();
        assert_eq!((n, level.as_str(), fsync.as_str()), (1, "logical", "on"));

        let folder = server.private().unwrap().folder.clone();
        server.kill().await.unwrap();
        drop(server);
        assert!(!folder.exists());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_server_of_others_cannot_be_killed() {
        let mut server = Postgres { url: "postgres://elsewhere/x".to_owned(), server: None };
        assert!(server.kill().await.unwrap_err().to_string().contains("start_private"));
        assert!(server.restart().await.is_err() && server.cpu().is_err());
    }
}
