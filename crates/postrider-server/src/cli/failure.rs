//! What a command fails with, and how that is told.

use std::io::IsTerminal;
use std::process::ExitCode;

use postrider::{Error, Kind};

use crate::config::{Problems, redact};

/// `Result` with our [`Failure`].
pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// Why a command ended early.
#[derive(Debug)]
pub enum Failure {
    /// Mistakes in the configuration.
    Config(Box<Problems>),
    /// Anything else.
    Library(Error),
    /// Whoever read our output has seen enough (`postrider tail | head`).
    OutputClosed,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Library(error)
    }
}

impl From<Box<Problems>> for Failure {
    fn from(problems: Box<Problems>) -> Self {
        Failure::Config(problems)
    }
}

/// A failed operation on a file or socket.
pub fn io(doing: impl Into<String>, error: std::io::Error) -> Error {
    let kind = match error.kind() {
        std::io::ErrorKind::PermissionDenied => Kind::Denied,
        std::io::ErrorKind::NotFound => Kind::Missing,
        std::io::ErrorKind::ReadOnlyFilesystem => Kind::ReadOnly,
        std::io::ErrorKind::StorageFull => Kind::DiskFull,
        _ => Kind::Other,
    };
    Error::new(kind, doing).with_source(error)
}

impl Failure {
    /// Tells it on stderr and gives the exit code.
    pub fn report(self) -> ExitCode {
        let is_coloured = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        match self {
            Failure::OutputClosed => return ExitCode::SUCCESS,
            Failure::Config(problems) => eprintln!("{}", problems.render(is_coloured)),
            Failure::Library(error) => eprintln!("{}", tell(&error, is_coloured)),
        }
        ExitCode::FAILURE
    }
}

/// The error, its causes and its remedy, without passwords.
pub fn tell(error: &Error, is_coloured: bool) -> String {
    let (red, bold, plain) = if is_coloured { ("\x1b[1;31m", "\x1b[1m", "\x1b[0m") } else { ("", "", "") };
    let mut text = format!("{red}error{plain}: {}", redact(error.message()));
    for cause in causes(error) {
        text.push_str(&format!("\n  cause: {}", redact(&cause)));
    }
    text.push_str(&format!("\n {bold}remedy{plain}: {}", error.remedy()));
    text
}

/// The causes that say something new: many errors repeat their cause in their own message.
pub fn causes(error: &Error) -> Vec<String> {
    let mut told = vec![error.message().to_owned()];
    for cause in error.causes() {
        if !told.iter().any(|text| text.contains(&cause)) {
            told.push(cause);
        }
    }
    told.remove(0);
    told
}
