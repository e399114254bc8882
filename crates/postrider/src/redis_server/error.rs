//! The one place that knows Redis's error codes.

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::error::{Error, Kind};

/// Turns a driver error into ours.
pub(super) fn classify(shown: &str, error: RedisError) -> Error {
    of(shown, &error).with_source(error)
}

fn of(shown: &str, error: &RedisError) -> Error {
    match error.kind() {
        ErrorKind::Io => Error::new(Kind::Unavailable, format!("Redis at {shown} cannot be reached")),
        ErrorKind::AuthenticationFailed => denied(shown),
        ErrorKind::InvalidClientConfig => {
            Error::new(Kind::Config, format!("Redis at {shown} cannot be used like this"))
                .with_remedy("correct the URL")
        }
        ErrorKind::Server(
            ServerErrorKind::BusyLoading
            | ServerErrorKind::TryAgain
            | ServerErrorKind::ClusterDown
            | ServerErrorKind::MasterDown,
        ) => Error::new(Kind::Unavailable, format!("Redis at {shown} is not ready")),
        ErrorKind::Server(ServerErrorKind::ReadOnly) => {
            Error::new(Kind::ReadOnly, format!("Redis at {shown} is a replica and accepts no writes"))
                .with_remedy("connect to the primary")
        }
        ErrorKind::Server(ServerErrorKind::NoPerm) => denied(shown),
        ErrorKind::Server(ServerErrorKind::Moved | ServerErrorKind::Ask | ServerErrorKind::CrossSlot) => {
            Error::new(Kind::Mismatch, format!("Redis at {shown} is one node of a cluster"))
                .with_remedy("use a Redis that is not a cluster")
        }
        _ => of_code(shown, error),
    }
}

fn of_code(shown: &str, error: &RedisError) -> Error {
    match code(error) {
        "NOAUTH" | "WRONGPASS" => denied(shown),
        "OOM" => Error::new(Kind::Unavailable, format!("the memory of Redis at {shown} is full"))
            .with_remedy("raise maxmemory or remove other keys; nothing is lost meanwhile"),
        "MISCONF" => Error::new(Kind::DiskFull, format!("Redis at {shown} cannot write its data to disk"))
            .with_remedy("look at Redis's log, and at the free space of its disk; nothing is lost meanwhile"),
        "NOREPLICAS" => Error::new(Kind::Unavailable, format!("Redis at {shown} misses its replicas")),
        "WRONGTYPE" => Error::new(Kind::Corrupt, "a key in Redis has another type than ours")
            .with_remedy("find out who else uses keys with this prefix"),
        _ => Error::new(Kind::Other, format!("Redis at {shown} failed")),
    }
}

/// The code of a server's error. Before version 7 that of a command in a script stands somewhere in the text.
fn code(error: &RedisError) -> &str {
    const IN_SCRIPTS: [&str; 3] = ["OOM", "MISCONF", "WRONGTYPE"];
    let text = error.detail().unwrap_or_default();
    let inner = IN_SCRIPTS.into_iter().find(|code| text.split_whitespace().any(|word| word.trim_matches('-') == *code));
    inner.or(error.code()).unwrap_or_default()
}

fn denied(shown: &str) -> Error {
    Error::new(Kind::Denied, format!("Redis at {shown} does not let this user in, or not do this"))
        .with_remedy("correct the user and the password, or the user's rights: the guide lists them (ACL SETUSER)")
}
