//! What could lose events or slow them down on this server.

use chrono::{DateTime, Utc};
use sqlx::{PgPool, Row as _};

use super::PostgresStore;
use super::error::db;
use crate::doctor::Finding;
use crate::error::Result;
use crate::migrate::Migrate;

/// `server_version_num` of PostgreSQL 13: the first with `xid8` and `pg_snapshot`.
const VERSION_MIN: i32 = 130_000;
/// Leases use the database's clock only, but people compare times across machines.
const SKEW_MAX_MS: i64 = 1_000;
/// A transaction that is open this long delays its own events and vacuum.
const LONG_TRANSACTION_SECS: i64 = 600;

const SETTINGS: &str = "SELECT current_setting('server_version_num')::int, current_setting('server_version'), \
     current_setting('fsync'), current_setting('synchronous_commit'), current_setting('full_page_writes'), \
     current_setting('default_transaction_read_only'), pg_is_in_recovery(), clock_timestamp(), \
     current_setting('default_transaction_isolation'), \
     (SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::bigint FROM pg_stat_activity \
      WHERE datname = current_database() AND backend_xid IS NOT NULL)";

pub(super) async fn inspect(store: &PostgresStore) -> Result<Vec<Finding>> {
    let pool = &store.own;
    let before = Utc::now();
    let row = sqlx::query(SETTINGS).fetch_one(pool).await.map_err(db)?;
    let after = Utc::now();
    let mut findings = Vec::new();

    let version: String = row.try_get(1).map_err(db)?;
    findings.push(if row.try_get::<i32, _>(0).map_err(db)? >= VERSION_MIN {
        Finding::ok("postgres.version", version)
    } else {
        Finding::error("postgres.version", format!("{version} is too old"), "upgrade to PostgreSQL 13 or newer")
    });
    let settings = [
        (2, "postgres.fsync", "a crash of the machine can lose or corrupt committed events"),
        (3, "postgres.synchronous_commit", "a crash of the server can lose the last committed events"),
        (4, "postgres.full_page_writes", "a crash of the machine can corrupt pages"),
    ];
    for (index, check, risk) in settings {
        let value: String = row.try_get(index).map_err(db)?;
        findings.push(if value == "off" {
            let name = check.trim_start_matches("postgres.");
            Finding::warning(check, format!("off: {risk}"), format!("set {name} = on in postgresql.conf"))
        } else {
            Finding::ok(check, value)
        });
    }
    let is_read_only = row.try_get::<bool, _>(6).map_err(db)? || row.try_get::<String, _>(5).map_err(db)? == "on";
    findings.push(if is_read_only {
        Finding::error("postgres.writable", "the server accepts no writes", "connect to the primary")
    } else {
        Finding::ok("postgres.writable", "the server accepts writes")
    });
    findings.push(skew(before, row.try_get(7).map_err(db)?, after));
    findings.push(long_transaction(row.try_get(9).map_err(db)?));
    findings.push(match store.schema().await.and_then(|schema| schema.require().map(|()| schema)) {
        Ok(schema) => Finding::ok("postgres.schema", format!("version {}", schema.found)),
        Err(error) => Finding::of("postgres.schema", &error),
    });
    findings.extend(rights(pool).await?);
    Ok(findings)
}

/// The database's clock lies between our two readings when both agree.
fn skew(before: DateTime<Utc>, database: DateTime<Utc>, after: DateTime<Utc>) -> Finding {
    let millis = if database < before {
        (before - database).num_milliseconds()
    } else if database > after {
        (database - after).num_milliseconds()
    } else {
        0
    };
    if millis > SKEW_MAX_MS {
        let text = format!("{millis} ms between this machine and the database");
        return Finding::warning("clock", text, "run NTP on both; order and leases are safe, shown times are not");
    }
    Finding::ok("clock", format!("within {} ms of the database", millis.max(1)))
}

fn long_transaction(secs: i64) -> Finding {
    if secs > LONG_TRANSACTION_SECS {
        let text = format!("a writing transaction has been open for {secs} s; its own events wait for its end");
        return Finding::warning(
            "postgres.long_transaction",
            text,
            "look at pg_stat_activity for the oldest xact_start",
        );
    }
    Finding::ok("postgres.long_transaction", "none")
}

async fn rights(pool: &PgPool) -> Result<Vec<Finding>> {
    let tables = [
        "outbox",
        "parked",
        "lane",
        "lease",
        "inbox",
        "newest",
        "message",
        "cursor",
        "dead_letter",
        "held",
        "audit",
        "instance",
        "bucket",
        "alert",
        "delivery",
        "silence",
        "report",
        "origin",
    ];
    let mut findings = Vec::new();
    for table in tables {
        let row = sqlx::query(
            "SELECT CASE WHEN to_regclass('postrider.' || $1) IS NULL THEN NULL \
             ELSE has_table_privilege('postrider.' || $1, 'SELECT') \
              AND has_table_privilege('postrider.' || $1, 'INSERT') \
              AND ($1 = 'outbox' OR has_table_privilege('postrider.' || $1, 'UPDATE')) END",
        )
        .bind(table)
        .fetch_one(pool)
        .await
        .map_err(db)?;
        match row.try_get::<Option<bool>, _>(0).map_err(db)? {
            Some(true) => {}
            Some(false) => findings.push(Finding::error(
                "postgres.rights",
                format!("the user may not read and write postrider.{table}"),
                match table {
                    "outbox" => "GRANT SELECT, INSERT ON postrider.outbox TO <user>".to_owned(),
                    _ => format!("GRANT SELECT, INSERT, UPDATE, DELETE ON postrider.{table} TO <user>"),
                },
            )),
            // The schema check says what to do.
            None => return Ok(findings),
        }
    }
    if findings.is_empty() {
        findings.push(Finding::ok("postgres.rights", "all tables can be read and written"));
    }
    Ok(findings)
}
