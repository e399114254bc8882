//! RabbitMQ.

use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::api::Api;
use super::process::{Process, Signal};
use super::url::Url;
use super::{RABBITMQ_API_VAR, RABBITMQ_VAR, Result, START_DEADLINE, STOP_DEADLINE, free_port, guard, unique, until};

/// A RabbitMQ broker: a private node, ended and removed with this value, or one that somebody else runs.
#[derive(Debug)]
pub struct RabbitMq {
    url: String,
    api_url: String,
    api: Api,
    node: Option<Node>,
}

#[derive(Debug)]
struct Node {
    bin: PathBuf,
    folder: PathBuf,
    name: String,
    port: u16,
    dist_port: u16,
    api_port: u16,
    epmd_port: u16,
    process: Option<Process>,
    /// Erlang's name server. An Erlang machine would start one as a daemon that nobody ends; this one is ours.
    _epmd: Process,
}

impl RabbitMq {
    /// The broker that [`RABBITMQ_VAR`] names, or a private one.
    pub async fn start() -> Result<RabbitMq> {
        match Self::from_env() {
            Some(broker) => broker,
            None => Self::start_private().await,
        }
    }

    /// A private broker, whatever the environment says.
    pub async fn start_private() -> Result<RabbitMq> {
        let mut node = Node::create()?;
        node.run().await?;
        let api_url = format!("http://guest:guest@127.0.0.1:{}", node.api_port);
        Ok(RabbitMq {
            url: format!("amqp://guest:guest@127.0.0.1:{}/%2f", node.port),
            api: Api::new(&api_url.parse()?)?,
            api_url,
            node: Some(node),
        })
    }

    /// The broker that [`RABBITMQ_VAR`] names, if it names one.
    pub fn from_env() -> Option<Result<RabbitMq>> {
        let url = std::env::var(RABBITMQ_VAR).ok().filter(|url| !url.is_empty())?;
        Some(Self::existing(url, std::env::var(RABBITMQ_API_VAR).ok()))
    }

    fn existing(url: String, api_url: Option<String>) -> Result<RabbitMq> {
        let api = match &api_url {
            Some(api_url) => Api::new(&api_url.parse()?)?,
            None => Api::beside(&url.parse()?),
        };
        Ok(RabbitMq { url, api_url: api_url.unwrap_or_default(), api, node: None })
    }

    /// The address of the default virtual host.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The address of the management API, for [`RABBITMQ_API_VAR`]; empty when it is the usual one.
    pub fn api_url(&self) -> &str {
        &self.api_url
    }

    /// The address of a fresh virtual host whose name starts with `name`.
    pub async fn vhost(&self, name: &str) -> Result<String> {
        let name = unique(name);
        self.api.add_vhost(&name).await?;
        Ok(self.url.parse::<Url>()?.with_path(&name))
    }

    /// Runs `rabbitmqctl` and returns what it printed.
    pub async fn ctl(&self, arguments: &[&str]) -> Result<String> {
        let mut command = self.private()?.command("rabbitmqctl");
        command.arg("--quiet").args(arguments);
        let output = tokio::task::spawn_blocking(move || command.output()).await??;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            return Ok(text);
        }
        let error = String::from_utf8_lossy(&output.stderr);
        Err(format!("rabbitmqctl {}: {text}{error}", arguments.join(" ")).into())
    }

    /// The process id of the Erlang machine.
    pub fn pid(&self) -> Result<u32> {
        Ok(self.private()?.running()?.pid())
    }

    /// The port on 127.0.0.1, for a proxy in front of it.
    pub fn port(&self) -> Result<u16> {
        Ok(self.private()?.port)
    }

    /// CPU time since the last start.
    pub fn cpu(&self) -> Result<Duration> {
        self.private()?.running()?.cpu()
    }

    /// Resident memory of the Erlang machine.
    pub fn rss_bytes(&self) -> Result<u64> {
        self.private()?.running()?.rss_bytes()
    }

    /// The crash: SIGKILL. Returns when the node is gone; its files stay.
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

    /// Starts it again on the same port with the same files; a running node is stopped first.
    pub async fn restart(&mut self) -> Result<()> {
        self.stop().await?;
        self.private_mut()?.run().await
    }

    fn private(&self) -> Result<&Node> {
        self.node.as_ref().ok_or_else(|| not_ours().into())
    }

    fn private_mut(&mut self) -> Result<&mut Node> {
        self.node.as_mut().ok_or_else(|| not_ours().into())
    }
}

fn not_ours() -> String {
    format!("{RABBITMQ_VAR} names a broker that this process did not start: use RabbitMq::start_private() for this")
}

impl Node {
    fn create() -> Result<Node> {
        let bin = find_programs()?;
        let folder = guard::folder("rabbitmq")?;
        let epmd_port = free_port()?;
        let (port, dist_port, api_port) = (free_port()?, free_port()?, free_port()?);
        let config = format!(
            "listeners.tcp.1 = 127.0.0.1:{port}\n\
             management.tcp.ip = 127.0.0.1\n\
             management.tcp.port = {api_port}\n\
             # The API serves to make virtual hosts; statistics would cost CPU time that benchmarks count.\n\
             management_agent.disable_metrics_collector = true\n\
             # A machine with little disk left must not block publishers.\n\
             disk_free_limit.absolute = 10MB\n"
        );
        std::fs::write(folder.join("rabbitmq.conf"), config)?;
        std::fs::write(folder.join("enabled_plugins"), "[rabbitmq_management].\n")?;
        std::fs::write(folder.join("rabbitmq-env.conf"), "")?;
        let cookie = folder.join(".erlang.cookie");
        std::fs::write(&cookie, std::iter::repeat_with(fastrand::alphanumeric).take(32).collect::<String>())?;
        // Erlang refuses a cookie that others can read.
        std::fs::set_permissions(&cookie, std::fs::Permissions::from_mode(0o400))?;
        let log = File::create(folder.join("epmd.log"))?;
        let mut epmd = Command::new("epmd");
        epmd.args(["-address", "127.0.0.1", "-port", &epmd_port.to_string()]).current_dir(&folder);
        let _epmd = Process::spawn(epmd.stdout(log.try_clone()?).stderr(log))?;
        let name = format!("{}@localhost", unique("postrider"));
        Ok(Node { bin, folder, name, port, dist_port, api_port, epmd_port, process: None, _epmd })
    }

    async fn run(&mut self) -> Result<()> {
        if self.process.is_some() {
            return Ok(());
        }
        let log = File::options().create(true).append(true).open(self.log())?;
        let mut command = self.command("rabbitmq-server");
        command.stdout(log.try_clone()?).stderr(log);
        let process = self.process.insert(Process::spawn(&mut command)?);
        let port = self.port;
        let mut exit = None;
        let ready = until("the start of RabbitMQ", START_DEADLINE, async || {
            exit = process.try_wait()?;
            Ok(exit.is_some() || speaks_amqp(port).await)
        })
        .await;
        let ready = ready.and_then(|()| match exit {
            Some(exit) => Err(format!("RabbitMQ ended at its start: {exit}").into()),
            None => Ok(()),
        });
        ready.map_err(|error| {
            self.process = None;
            format!("{error}\n{}", super::tail(&self.log())).into()
        })
    }

    fn log(&self) -> PathBuf {
        self.folder.join("log")
    }

    fn running(&self) -> Result<&Process> {
        self.process.as_ref().ok_or_else(|| "RabbitMQ is stopped".into())
    }

    fn command(&self, program: &str) -> Command {
        /// For every Erlang machine that the scripts start: listen on loopback alone, and never start a name server.
        const ERLANG: &str = "-kernel inet_dist_use_interface {127,0,0,1} -start_epmd false";
        let mut command = Command::new(self.bin.join(program));
        command
            .current_dir(&self.folder)
            .env("HOME", &self.folder)
            .env("ERL_EPMD_ADDRESS", "127.0.0.1")
            .env("ERL_EPMD_PORT", self.epmd_port.to_string())
            .env("RABBITMQ_NODENAME", &self.name)
            .env("RABBITMQ_NODE_PORT", self.port.to_string())
            .env("RABBITMQ_DIST_PORT", self.dist_port.to_string())
            .env("RABBITMQ_MNESIA_BASE", self.folder.join("mnesia"))
            .env("RABBITMQ_LOG_BASE", self.folder.join("logs"))
            .env("RABBITMQ_CONFIG_FILE", self.folder.join("rabbitmq.conf"))
            .env("RABBITMQ_CONF_ENV_FILE", self.folder.join("rabbitmq-env.conf"))
            .env("RABBITMQ_ENABLED_PLUGINS_FILE", self.folder.join("enabled_plugins"))
            .env("ERL_AFLAGS", ERLANG)
            // The start script then becomes the Erlang machine instead of standing beside it.
            .env("detached", "true");
        command
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.process = None;
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Whether a broker answers the protocol header with `Connection.Start`. It opens its port when all else is ready.
async fn speaks_amqp(port: u16) -> bool {
    /// A method frame (1) on channel 0, its length, then class 10, method 10.
    const START_BYTES: usize = 11;
    let handshake = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.write_all(b"AMQP\x00\x00\x09\x01").await?;
        let mut frame = [0; START_BYTES];
        stream.read_exact(&mut frame).await?;
        std::io::Result::Ok(frame)
    };
    match tokio::time::timeout(Duration::from_secs(5), handshake).await {
        Ok(Ok(frame)) => frame[0] == 1 && frame[7..] == [0, 10, 0, 10],
        _ => false,
    }
}

/// The folder that holds `rabbitmq-server` and `rabbitmqctl`. Debian's programs on the path are wrappers that change the
/// user and forget the environment, so those that they call come first.
fn find_programs() -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("POSTRIDER_TEST_RABBITMQ_BIN") {
        return Ok(folder.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::iter::once(PathBuf::from("/usr/lib/rabbitmq/bin"))
        .chain(std::env::split_paths(&path))
        .find(|folder| folder.join("rabbitmq-server").exists() && folder.join("rabbitmqctl").exists())
        .ok_or_else(|| {
            "RabbitMQ is not installed: run `make setup`, or set POSTRIDER_TEST_RABBITMQ_BIN to the folder of \
             rabbitmq-server and rabbitmqctl"
                .into()
        })
}

#[cfg(test)]
mod own_servers {
    use super::*;

    #[tokio::test]
    async fn a_virtual_host_survives_a_kill() {
        let mut broker = RabbitMq::start_private().await.unwrap();
        let url = broker.vhost("survives").await.unwrap();
        let name = url.rsplit('/').next().unwrap().to_owned();
        let pid = broker.pid().unwrap();
        assert!(!broker.cpu().unwrap().is_zero() && broker.rss_bytes().unwrap() > 0);

        broker.kill().await.unwrap();
        assert!(!super::super::is_running(pid) && !speaks_amqp(broker.port().unwrap()).await);

        broker.restart().await.unwrap();
        assert!(broker.ctl(&["list_vhosts"]).await.unwrap().lines().any(|line| line == name));
        assert!(broker.ctl(&["no_such_verb"]).await.is_err());

        let folder = broker.private().unwrap().folder.clone();
        drop(broker);
        assert!(!folder.exists());
    }
}
