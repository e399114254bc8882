//! The one place that knows PostgreSQL's error codes.

use crate::error::{Error, Kind};

/// Turns a driver error into ours. Keeps SQLSTATE, message and constraint; never DETAIL, which carries row values.
pub(super) fn classify(error: &sqlx::Error) -> Error {
    match error {
        sqlx::Error::Database(database) => {
            let code = database.code().unwrap_or_default();
            let constraint = database.constraint().map(|name| format!(", constraint {name}")).unwrap_or_default();
            let text = format!("{} (SQLSTATE {code}{constraint})", database.message());
            of_code(&code, text)
        }
        sqlx::Error::PoolTimedOut => Error::new(Kind::Unavailable, "no database connection became free in time"),
        sqlx::Error::PoolClosed | sqlx::Error::WorkerCrashed => {
            Error::new(Kind::Unavailable, "the database connection is closed")
        }
        sqlx::Error::Io(io) => Error::new(Kind::Unavailable, format!("the database cannot be reached: {io}")),
        sqlx::Error::Tls(tls) => Error::new(Kind::Unavailable, format!("TLS to the database failed: {tls}"))
            .with_remedy("check sslmode in the URL and the server's certificate"),
        sqlx::Error::Configuration(config) => Error::new(Kind::Config, format!("the database URL is wrong: {config}")),
        sqlx::Error::Protocol(text) => Error::new(Kind::Unavailable, format!("the database connection broke: {text}")),
        sqlx::Error::ColumnDecode { index, source } => {
            Error::new(Kind::Corrupt, format!("column {index} cannot be read: {source}"))
        }
        other => Error::new(Kind::Other, other.to_string()),
    }
}

fn of_code(code: &str, text: String) -> Error {
    let kind = match code {
        // The schema or a table is missing, or a column that a newer schema has.
        "3F000" | "42P01" | "42703" | "42883" => Kind::NotMigrated,
        "42501" => Kind::Denied,
        "3D000" => Kind::Missing,
        "25006" => Kind::ReadOnly,
        "53100" => Kind::DiskFull,
        "23514" | "23502" | "22P02" | "22P05" | "22021" => Kind::Invalid,
        _ => match code.get(..2).unwrap_or_default() {
            "28" => Kind::Denied,
            // Connection trouble, resources, shutdown and start-up, serialization and deadlock: try again.
            "08" | "53" | "57" | "40" | "55" => Kind::Unavailable,
            _ => Kind::Other,
        },
    };
    let error = Error::new(kind, text);
    match (kind, code) {
        (Kind::Missing, _) => error.with_remedy("create the database, or correct its name in store.url"),
        (Kind::Denied, "42501") => {
            error.with_remedy("grant the rights listed in docs/reference/postgres.md to the user")
        }
        (Kind::Denied, _) => error.with_remedy("correct the user or the password in store.url"),
        (Kind::Unavailable, "57P03") => error.with_remedy("wait: the server is starting up or shutting down"),
        _ => error,
    }
}

/// `map_err(db)` for every query.
pub(super) fn db(error: sqlx::Error) -> Error {
    classify(&error)
}
