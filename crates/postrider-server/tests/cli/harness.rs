//! Runs the binary and talks HTTP to it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// Everything that should happen soon happens within this, also on a busy machine.
pub const SOON: Duration = Duration::from_secs(30);

/// A folder of its own to run commands in.
pub struct Place {
    folder: TempDir,
}

/// What a command did.
pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    /// Asserts success and returns stdout.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!(self.code, 0, "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self.stdout
    }

    /// Asserts success and reads stdout as one JSON value.
    #[track_caller]
    pub fn json(self) -> Value {
        let text = self.ok();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// Asserts failure with this exit code and that stderr says all the parts.
    #[track_caller]
    pub fn fails(self, code: i32, parts: &[&str]) -> String {
        assert_eq!(self.code, code, "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        for part in parts {
            assert!(self.stderr.contains(part), "{part:?} is missing in:\n{}", self.stderr);
        }
        self.stderr
    }
}

impl Place {
    pub fn new() -> Self {
        Self { folder: TempDir::new().unwrap() }
    }

    /// A place with a migrated database.
    pub fn migrated() -> Self {
        let place = Self::new();
        place.run(&["migrate"]).ok();
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    /// A command in this folder, without the settings of whoever runs the tests.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_postrider"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("POSTRIDER") {
                command.env_remove(name);
            }
        }
        command.env_remove("RUST_LOG").current_dir(self.folder.path()).args(args);
        command
    }

    pub fn run(&self, args: &[&str]) -> Ran {
        finish(&mut self.command(args), None)
    }

    pub fn run_with(&self, args: &[&str], environment: &[(&str, &str)]) -> Ran {
        finish(self.command(args).envs(environment.iter().copied()), None)
    }

    pub fn run_fed(&self, args: &[&str], input: &str) -> Ran {
        finish(&mut self.command(args), Some(input))
    }

    /// Starts `postrider run` on a free port and waits until it listens.
    pub fn daemon(&self, environment: &[(&str, &str)]) -> Daemon {
        let mut command = self.command(&["run"]);
        command.env("POSTRIDER__HTTP__LISTEN", "127.0.0.1:0").envs(environment.iter().copied());
        Daemon::start(&mut command)
    }
}

pub fn finish(command: &mut Command, input: Option<&str>) -> Ran {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(input.unwrap_or_default().as_bytes()).unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    Ran {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// A running `postrider run`.
pub struct Daemon {
    child: Child,
    address: String,
    log: Arc<Mutex<Vec<Value>>>,
}

impl Daemon {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let (lines, kept) = (BufReader::new(child.stderr.take().unwrap()).lines(), log.clone());
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                // Every line must be JSON; a plain one would break whoever collects the log.
                let line = serde_json::from_str(&line).unwrap_or(Value::String(line));
                kept.lock().unwrap().push(line);
            }
        });
        let mut daemon = Self { child, address: String::new(), log };
        let line = daemon.logged("HTTP listens");
        daemon.address = line["context"]["address"].as_str().unwrap().to_owned();
        daemon
    }

    /// Where it listens, `127.0.0.1:12345`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The log so far.
    pub fn log(&self) -> Vec<Value> {
        self.log.lock().unwrap().clone()
    }

    /// Waits for a log line with this message.
    #[track_caller]
    pub fn logged(&self, message: &str) -> Value {
        let is_it = |line: &&Value| line["message"].as_str().is_some_and(|text| text.contains(message));
        eventually(&format!("the log line {message:?}"), || self.log().iter().find(is_it).cloned())
    }

    /// Waits until `/readyz` says so.
    #[track_caller]
    pub fn ready(self) -> Self {
        eventually("readiness", || (self.get("/readyz").status == 200).then_some(()));
        self
    }

    pub fn get(&self, path: &str) -> Answer {
        self.request("GET", path, &[], "")
    }

    pub fn post(&self, body: &str) -> Answer {
        self.post_to("/api/v1/events", body)
    }

    /// A JSON body to any path.
    pub fn post_to(&self, path: &str, body: &str) -> Answer {
        self.request("POST", path, &[("content-type", "application/json")], body)
    }

    pub fn request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        self.request_as("localhost", method, path, headers, body)
    }

    /// A request that believes to talk to another host.
    pub fn request_as(&self, host: &str, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        // A server that refuses a large body answers before it has read all of it.
        let _ = stream.write_all(body.as_bytes());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        Answer::parse(&String::from_utf8(answer).unwrap())
    }

    /// The value of a metric, 0 when it is not there yet.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").body;
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or("0");
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Sends a signal by name.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    /// Waits for the end.
    #[track_caller]
    pub fn ended(&mut self) -> ExitStatus {
        eventually("the end of the process", || self.child.try_wait().unwrap())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An HTTP response.
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    fn parse(text: &str) -> Self {
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((text, ""));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        Self { status, head: head.to_lowercase(), body: body.to_owned() }
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}\n{}", self.head, self.body))
    }
}

/// Polls until there is a value.
#[track_caller]
pub fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + SOON;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < until, "{what} did not come");
        // Another process cannot signal us; polling at the edge is all there is.
        std::thread::park_timeout(Duration::from_millis(20));
    }
}
