//! What `doctor` checks of an SQLite file.

use std::path::Path;

use sqlx::Row as _;

use super::{BUSY_TIMEOUT, SqliteStore};
use crate::doctor::Finding;
use crate::error::Result;
use crate::migrate::Migrate;

/// Checking a larger file would keep people waiting.
const QUICK_CHECK_BYTES_MAX: i64 = 64 * 1024 * 1024;

pub(super) async fn inspect(store: &SqliteStore) -> Result<Vec<Finding>> {
    let path = store.path().display();
    let mut findings = vec![version(store).await?];

    let bytes = number(store, "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()").await?;
    findings.push(Finding::ok("sqlite.file", format!("{path}, {} KiB", bytes / 1024)));
    findings.push(writable(store).await);
    findings.push(match text(store, "PRAGMA journal_mode").await?.as_str() {
        "wal" => Finding::ok("sqlite.journal_mode", "wal: readers and the writer do not wait for each other"),
        other => Finding::warning(
            "sqlite.journal_mode",
            format!("{other}: readers and the writer wait for each other"),
            "put the file on a local disk, and run `PRAGMA journal_mode = wal` on it",
        ),
    });
    findings.push(match number(store, "PRAGMA synchronous").await? {
        mode if mode >= 2 => Finding::ok("sqlite.synchronous", "full: a commit survives a loss of power"),
        _ => Finding::error(
            "sqlite.synchronous",
            "a commit may be lost with the power",
            "open the store with SqliteStore::options, which sets synchronous = FULL",
        ),
    });
    findings.push(match store.schema().await.and_then(|schema| schema.require().map(|()| schema)) {
        Ok(schema) => Finding::ok("sqlite.schema", format!("version {}", schema.found)),
        Err(error) => Finding::of("sqlite.schema", &error),
    });
    findings.push(file_system(store.path()));
    if bytes <= QUICK_CHECK_BYTES_MAX {
        findings.push(match text(store, "PRAGMA quick_check(1)").await?.as_str() {
            "ok" => Finding::ok("sqlite.integrity", "quick_check found nothing wrong"),
            // The text names pages and indexes, not rows.
            wrong => Finding::error(
                "sqlite.integrity",
                format!("the file is damaged: {wrong}"),
                "stop all programs that use it and restore a backup; `sqlite3 FILE .recover` saves what is left",
            ),
        });
    }
    Ok(findings)
}

async fn version(store: &SqliteStore) -> Result<Finding> {
    Ok(Finding::ok("sqlite.version", format!("SQLite {}", text(store, "SELECT sqlite_version()").await?)))
}

/// Writes something and takes it back. `BEGIN IMMEDIATE` alone succeeds on a read-only file too.
async fn writable(store: &SqliteStore) -> Finding {
    const DOING: &str = "nothing could be written";
    let try_it = async || -> Result<()> {
        let mut tx = store.write(DOING).await?;
        sqlx::query("CREATE TABLE postrider_probe (x)").execute(&mut *tx).await.map_err(store.failed(DOING))?;
        tx.rollback().await.map_err(store.failed(DOING))
    };
    match try_it().await {
        Ok(()) => Finding::ok("sqlite.writable", "the file can be written"),
        Err(error) if error.kind() == crate::Kind::Unavailable => {
            Finding::error("sqlite.writable", format!("{error} for {} seconds", BUSY_TIMEOUT.as_secs()), error.remedy())
        }
        Err(error) => Finding::of("sqlite.writable", &error),
    }
}

/// SQLite's locks and its shared memory do not work between machines.
fn file_system(path: &Path) -> Finding {
    const REMOTE: &[&str] =
        &["nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "glusterfs", "lustre", "afs", "fuse.sshfs", "fuse.s3fs"];
    const CHECK: &str = "sqlite.file_system";
    match path.canonicalize().ok().and_then(|path| file_system_type(&path)) {
        Some(kind) if REMOTE.contains(&kind.as_str()) => Finding::error(
            CHECK,
            format!("{} is on a network file system ({kind})", path.display()),
            "move the file to a local disk, or use PostgreSQL",
        ),
        Some(kind) => Finding::ok(CHECK, format!("local ({kind})")),
        None => Finding::ok(CHECK, "unknown; it must be a local disk"),
    }
}

/// The type of the file system that holds the path, where the system tells it (Linux).
fn file_system_type(path: &Path) -> Option<String> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
    let mount = |line: &str| {
        let mut words = line.split(' ').skip(1);
        // Blanks in mount points are written as octal.
        let point = words.next()?.replace("\\040", " ");
        Some((point, words.next()?.to_owned()))
    };
    let holding = mounts.lines().filter_map(mount).filter(|(point, _)| path.starts_with(point));
    // The longest mount point wins, and of equal ones the last mounted.
    holding.max_by_key(|(point, _)| point.len()).map(|(_, kind)| kind)
}

/// Settings belong to a connection; the writer's are the ones that matter.
async fn text(store: &SqliteStore, sql: &'static str) -> Result<String> {
    let read = async { sqlx::query(sql).fetch_one(store.writer()).await?.try_get(0) };
    read.await.map_err(store.failed("the database was not inspected"))
}

async fn number(store: &SqliteStore, sql: &'static str) -> Result<i64> {
    let read = async { sqlx::query(sql).fetch_one(store.writer()).await?.try_get(0) };
    read.await.map_err(store.failed("the database was not inspected"))
}
