//! `testbed run -- <command>`: runs a command with a PostgreSQL, a MariaDB, a RabbitMQ, a Redis and a NATS that exist only for it.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use postrider_testkit::testbed::{
    self, MYSQL_VAR, MariaDb, NATS_VAR, Nats, POSTGRES_VAR, Postgres, RABBITMQ_API_VAR, RABBITMQ_VAR, REDIS_VAR,
    RabbitMq, Redis, Result, Signal, clean_up,
};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

const USAGE: &str = "usage: testbed run -- <command> [argument]...

Starts a PostgreSQL and a MariaDB (without fsync), a RabbitMQ, a Redis and a NATS on free loopback ports, runs the
command with POSTRIDER_TEST_POSTGRES, POSTRIDER_TEST_MYSQL, POSTRIDER_TEST_RABBITMQ, POSTRIDER_TEST_RABBITMQ_API,
POSTRIDER_TEST_REDIS and POSTRIDER_TEST_NATS set, ends and removes the servers, and exits as the command did. A server whose
variable is set already is used as it is.";

/// After Ctrl-C the terminal has told the command too, and it may take its time. cargo-nextest gives tests 10 s.
const INTERRUPT_GRACE: Duration = Duration::from_secs(15);

/// How long the command has after SIGTERM.
const TERM_GRACE: Duration = Duration::from_secs(15);

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let command = match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["run", "--", program, rest @ ..] => {
            let mut command = Command::new(program);
            command.args(rest);
            command
        }
        ["-h" | "--help" | "help"] => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    let code = match run(command).await {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("testbed: {error}");
            ExitCode::FAILURE
        }
    };
    clean_up();
    code
}

/// Returns the exit code, as a shell would give it.
async fn run(mut command: Command) -> Result<u8> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let mut stopped = async move || {
        tokio::select! {
            _ = interrupt.recv() => Signal::Int,
            _ = terminate.recv() => Signal::Term,
            _ = hangup.recv() => Signal::Term,
        }
    };

    let (postgres, rabbitmq, redis, mariadb, nats) = tokio::select! {
        servers = start() => servers?,
        signal = stopped() => return Ok(code_of(signal)),
    };
    command.env(POSTGRES_VAR, postgres.url()).env(RABBITMQ_VAR, rabbitmq.url()).env(REDIS_VAR, redis.url());
    command.env(MYSQL_VAR, mariadb.url()).env(NATS_VAR, nats.url());
    if !rabbitmq.api_url().is_empty() {
        command.env(RABBITMQ_API_VAR, rabbitmq.api_url());
    }
    let mut child = command.kill_on_drop(true).spawn()?;
    let ended = tokio::select! {
        status = child.wait() => Ok(status?),
        signal = stopped() => Err(signal),
    };
    match ended {
        Ok(status) => Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)),
        Err(signal) => {
            end(&mut child, signal).await?;
            Ok(code_of(signal))
        }
    }
}

async fn start() -> Result<(Postgres, RabbitMq, Redis, MariaDb, Nats)> {
    let started = Instant::now();
    let postgres = async {
        match Postgres::from_env() {
            Some(server) => Ok(server),
            None => Postgres::fast().await,
        }
    };
    let servers = tokio::try_join!(postgres, RabbitMq::start(), Redis::start(), MariaDb::fast(), Nats::start())?;
    eprintln!("testbed: servers ready after {:.1} s", started.elapsed().as_secs_f64());
    Ok(servers)
}

/// The command runs in our process group, so Ctrl-C has reached it; any other signal is ours alone to pass on.
async fn end(child: &mut Child, signal: Signal) -> Result<()> {
    if signal == Signal::Int && tokio::time::timeout(INTERRUPT_GRACE, child.wait()).await.is_ok() {
        return Ok(());
    }
    if let Some(pid) = child.id() {
        testbed::signal(&[pid], Signal::Term)?;
    }
    if tokio::time::timeout(TERM_GRACE, child.wait()).await.is_err() {
        child.kill().await?;
    }
    Ok(())
}

/// 128 plus the signal's number.
fn code_of(signal: Signal) -> u8 {
    if signal == Signal::Int { 130 } else { 143 }
}
