//! Where errors of sqlx and SQLite become ours. Nobody else looks at result codes.

use std::io;
use std::path::Path;

use crate::error::{Error, Kind};

/// Primary result codes, <https://www.sqlite.org/rescode.html>.
mod code {
    pub const ERROR: i32 = 1;
    pub const PERM: i32 = 3;
    pub const BUSY: i32 = 5;
    pub const LOCKED: i32 = 6;
    pub const READONLY: i32 = 8;
    pub const IOERR: i32 = 10;
    pub const CORRUPT: i32 = 11;
    pub const FULL: i32 = 13;
    pub const CANTOPEN: i32 = 14;
    pub const PROTOCOL: i32 = 15;
    pub const SCHEMA: i32 = 17;
    pub const TOOBIG: i32 = 18;
    pub const CONSTRAINT: i32 = 19;
    pub const AUTH: i32 = 23;
    pub const NOTADB: i32 = 26;
    /// The shared memory file of the WAL could not grow. That file is sparse, so it is nearly always the disk.
    pub const IOERR_SHMSIZE: i32 = 4874;
}

/// Classifies an error. `path` is unknown for transactions that are not ours.
pub(super) fn classify(path: Option<&Path>, doing: &str, error: sqlx::Error) -> Error {
    let file = path.map_or_else(|| "the database".to_owned(), |path| format!("the database {}", path.display()));
    let classified = match &error {
        sqlx::Error::Database(database) => {
            let code = database.code().and_then(|code| code.parse().ok()).unwrap_or(code::ERROR);
            of_code(code, database.message(), &file, path)
        }
        sqlx::Error::Io(io) => of_io(io, &file),
        sqlx::Error::PoolTimedOut => Error::new(Kind::Unavailable, format!("{file} had no free connection in time"))
            .with_remedy(
                "look for a handler that holds its transaction for long, or that waits inside it for the store",
            ),
        sqlx::Error::PoolClosed | sqlx::Error::WorkerCrashed => {
            Error::new(Kind::Unavailable, format!("{file} was closed")).with_remedy("open the store again")
        }
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) | sqlx::Error::ColumnNotFound(_) => {
            Error::new(Kind::Corrupt, format!("{file} holds a row that cannot be understood"))
        }
        _ => Error::new(Kind::Other, format!("{file} failed")),
    };
    classified.context(doing).with_source(error)
}

/// Whether somebody else was writing for too long; worth another try when nothing has been done yet.
pub(super) fn is_busy(error: &sqlx::Error) -> bool {
    let sqlx::Error::Database(database) = error else { return false };
    let code: i32 = database.code().and_then(|code| code.parse().ok()).unwrap_or(code::ERROR);
    matches!(code & 0xff, code::BUSY | code::LOCKED | code::PROTOCOL)
}

fn of_code(extended: i32, message: &str, file: &str, path: Option<&Path>) -> Error {
    match extended & 0xff {
        code::BUSY | code::LOCKED | code::PROTOCOL => {
            Error::new(Kind::Unavailable, format!("{file} is locked by another process"))
                .with_remedy("end the program that holds a transaction open on the file; nothing is lost meanwhile")
        }
        code::READONLY => Error::new(Kind::ReadOnly, format!("{file} is read-only"))
            .with_remedy("make the file and its directory writable for this user, and the file system too"),
        code::FULL => Error::new(Kind::DiskFull, format!("the disk of {file} is full")),
        code::IOERR if extended == code::IOERR_SHMSIZE => {
            Error::new(Kind::DiskFull, format!("the disk of {file} is full"))
        }
        code::IOERR => Error::new(Kind::Unavailable, format!("the disk of {file} reports an error (code {extended})"))
            .with_remedy("look at the system log for disk errors, and at the free space"),
        code::CANTOPEN => cannot_open(file, path),
        code::PERM | code::AUTH => Error::new(Kind::Denied, format!("{file} may not be used by this user")),
        code::NOTADB => Error::new(Kind::Other, format!("{file} is not an SQLite database"))
            .with_remedy("name another file, or move this one away"),
        code::CORRUPT => Error::new(Kind::Other, format!("{file} is damaged")).with_remedy(
            "stop all programs that use it and restore a backup; `sqlite3 FILE .recover` saves what is left",
        ),
        code::TOOBIG => Error::new(Kind::TooLarge, format!("a value is larger than {file} accepts")),
        // SQLite's texts name constraints and columns, never values.
        code::CONSTRAINT => Error::new(Kind::Invalid, format!("{file} refuses the row: {message}")),
        code::ERROR | code::SCHEMA if message.starts_with("no such table") || message.contains("no such column") => {
            Error::new(Kind::NotMigrated, format!("{file} lacks Postrider's tables ({message})"))
        }
        _ => Error::new(Kind::Other, format!("{file} failed (code {extended})")),
    }
}

/// SQLite says only that it could not open the file; the file system says why.
fn cannot_open(file: &str, path: Option<&Path>) -> Error {
    let Some(path) = path else { return Error::new(Kind::Missing, format!("{file} cannot be opened")) };
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if path.is_dir() {
        return Error::new(Kind::Config, format!("{file} is a directory")).with_remedy("name a file inside of it");
    }
    match std::fs::metadata(parent) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Error::new(
            Kind::Missing,
            format!("{file} cannot be opened: the directory {} does not exist", parent.display()),
        )
        .with_remedy("create the directory, or correct the path"),
        _ => Error::new(Kind::Denied, format!("{file} cannot be opened or created by this user"))
            .with_remedy(format!("let this user read and write the file and the directory {}", parent.display())),
    }
}

fn of_io(io: &io::Error, file: &str) -> Error {
    match io.kind() {
        io::ErrorKind::NotFound => Error::new(Kind::Missing, format!("{file} does not exist")),
        io::ErrorKind::PermissionDenied => Error::new(Kind::Denied, format!("{file} may not be used by this user")),
        io::ErrorKind::StorageFull => Error::new(Kind::DiskFull, format!("the disk of {file} is full")),
        io::ErrorKind::ReadOnlyFilesystem => Error::new(Kind::ReadOnly, format!("{file} is read-only")),
        _ => Error::new(Kind::Unavailable, format!("{file} cannot be reached")),
    }
}
