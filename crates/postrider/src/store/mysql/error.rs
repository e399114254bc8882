//! The one place that knows error numbers of MySQL and MariaDB.

use sqlx::mysql::MySqlDatabaseError;

use crate::error::{Error, Kind};

/// Numbers, <https://dev.mysql.com/doc/mysql-errors/8.0/en/server-error-reference.html>.
mod number {
    pub const DUP_ENTRY: u16 = 1062;
    pub const SAVEPOINT_MISSING: u16 = 1305;
    /// MariaDB's number for a CHECK that does not hold; MySQL's is 3819.
    pub const CONSTRAINT_MARIADB: u16 = 4025;
}

/// Turns a driver error into ours. A server's text names columns and constraints; where it would carry a value it is left out.
pub(super) fn classify(error: &sqlx::Error) -> Error {
    match error {
        sqlx::Error::Database(_) => match database(error) {
            Some(database) => of_number(database),
            None => Error::new(Kind::Other, "the database failed"),
        },
        sqlx::Error::PoolTimedOut => Error::new(Kind::Unavailable, "no database connection became free in time"),
        sqlx::Error::PoolClosed | sqlx::Error::WorkerCrashed => {
            Error::new(Kind::Unavailable, "the database connection is closed")
        }
        sqlx::Error::Io(io) => Error::new(Kind::Unavailable, format!("the database cannot be reached: {io}")),
        sqlx::Error::Tls(tls) => Error::new(Kind::Unavailable, format!("TLS to the database failed: {tls}"))
            .with_remedy("check ssl-mode in the URL and the server's certificate"),
        sqlx::Error::Configuration(config) => Error::new(Kind::Config, format!("the database URL is wrong: {config}")),
        sqlx::Error::Protocol(text) => Error::new(Kind::Unavailable, format!("the database connection broke: {text}")),
        // The server went away, or rolled back, in the middle of BEGIN.
        sqlx::Error::BeginFailed => Error::new(Kind::Unavailable, "the database did not begin a transaction"),
        sqlx::Error::ColumnDecode { index, source } => {
            Error::new(Kind::Corrupt, format!("column {index} cannot be read: {source}"))
        }
        other => Error::new(Kind::Other, other.to_string()),
    }
}

fn of_number(database: &MySqlDatabaseError) -> Error {
    let (number, state) = (database.number(), database.code().unwrap_or_default());
    let said = |text: &str| format!("{text} (error {number}, SQLSTATE {state})");
    let whole = || said(database.message());
    match number {
        1045 | 1698 | 1251 | 2061 => Error::new(Kind::Denied, whole())
            .with_remedy("correct the user or the password in store.url; MySQL's caching_sha2_password needs TLS"),
        1044 | 1142 | 1143 | 1227 | 1370 => Error::new(Kind::Denied, whole())
            .with_remedy("grant the rights listed in docs/reference/mysql.md to the user"),
        1049 => Error::new(Kind::Missing, whole()).with_remedy("create the database, or correct its name in store.url"),
        // A table, column or procedure is missing.
        1146 | 1054 | 1051 | 1305 => Error::new(Kind::NotMigrated, whole()),
        1290 | 1792 | 1836 => Error::new(Kind::ReadOnly, whole()),
        1021 | 1114 => Error::new(Kind::DiskFull, whole()),
        1153 | 1301 => Error::new(Kind::TooLarge, said("a value is larger than max_allowed_packet"))
            .with_remedy("raise max_allowed_packet on the server, or send a smaller payload"),
        1213 => Error::new(Kind::Unavailable, said("a deadlock: the server rolled the transaction back"))
            .with_remedy("nothing: it is tried again"),
        1205 => Error::new(Kind::Unavailable, said("a lock was not free in time"))
            .with_remedy("end the transaction that holds it: SELECT * FROM information_schema.innodb_trx"),
        number::DUP_ENTRY => Error::new(Kind::Other, said("a row with this key is there already")),
        number::CONSTRAINT_MARIADB | 3819 => Error::new(Kind::Invalid, whole()),
        // Null, too long, not in the character set, out of range, no default. Their texts may quote the value.
        1048 | 1264 | 1265 | 1292 | 1364 | 1366 | 1406 | 3140 | 3141 => {
            Error::new(Kind::Invalid, said("a value does not fit its column"))
        }
        // Changed since the snapshot, too many connections or statements, shutdown, killed, and what a cluster says while it
        // is not ready.
        1020
        | 1461
        | 1040
        | 1047
        | 1053
        | 1077
        | 1078
        | 1079
        | 1152
        | 1158..=1161
        | 1180
        | 1203
        | 1226
        | 1317
        | 1927
        | 3024
        | 4031 => Error::new(Kind::Unavailable, whole()),
        _ if state.starts_with("08") || state.starts_with("40") => Error::new(Kind::Unavailable, whole()),
        _ => Error::new(Kind::Other, whole()),
    }
}

fn database(error: &sqlx::Error) -> Option<&MySqlDatabaseError> {
    match error {
        sqlx::Error::Database(database) => database.try_downcast_ref::<MySqlDatabaseError>(),
        _ => None,
    }
}

/// The server's number, if it was the server.
pub(super) fn number_of(error: &sqlx::Error) -> Option<u16> {
    database(error).map(MySqlDatabaseError::number)
}

/// Whether a row with this key is there already. The statement had no effect, and its transaction goes on.
pub(super) fn is_duplicate(error: &sqlx::Error) -> bool {
    database(error).is_some_and(|database| database.number() == number::DUP_ENTRY)
}

/// Whether the savepoint is gone, and so the transaction that it stood in.
pub(super) fn is_without_savepoint(error: &sqlx::Error) -> bool {
    database(error).is_some_and(|database| database.number() == number::SAVEPOINT_MISSING)
}

/// Whether the server has rolled back to let another transaction go on.
pub(super) fn is_deadlock(error: &Error) -> bool {
    error.kind() == Kind::Unavailable && error.message().contains("(error 1213,")
}

/// `map_err(db)` for every query.
pub(super) fn db(error: sqlx::Error) -> Error {
    classify(&error)
}
