//! What could lose events or slow them down on this server.

use chrono::{DateTime, Utc};
use sqlx::{AssertSqlSafe, MySqlConnection, Row as _};

use super::MysqlStore;
use super::error::db;
use crate::doctor::Finding;
use crate::error::Result;
use crate::event::PAYLOAD_BYTES_MAX;
use crate::migrate::Migrate;

/// The first MariaDB with `SKIP LOCKED`, and the first MySQL with a collation that compares bytes and blanks.
const MARIADB_MIN: (u32, u32, u32) = (10, 6, 0);
const MYSQL_MIN: (u32, u32, u32) = (8, 0, 17);
/// Leases use the database's clock only, but people compare times across machines.
const SKEW_MAX_MS: i64 = 1_000;
/// A transaction that is open this long delays its own events, and keeps the traces of published ones in the index.
const LONG_TRANSACTION_SECS: i64 = 600;
/// Beside the largest payload an INSERT carries the rest of the event.
const PACKET_BYTES_MIN: i64 = PAYLOAD_BYTES_MAX as i64 + 1024 * 1024;

const TABLES: [&str; 13] = [
    "outbox",
    "parked",
    "lane",
    "lease",
    "member",
    "mutex",
    "inbox",
    "newest",
    "held",
    "dead_letter",
    "audit",
    "message",
    "cursor",
];

pub(super) async fn inspect(store: &MysqlStore) -> Result<Vec<Finding>> {
    let mut connection = store.own.acquire().await.map_err(db)?;
    let mut findings = vec![version(&mut connection).await?];
    let before = Utc::now();
    let row = sqlx::query("SELECT UTC_TIMESTAMP(6)").fetch_one(&mut *connection).await.map_err(db)?;
    findings.push(skew(before, row.try_get(0).map_err(db)?, Utc::now()));
    findings.extend(durability(&mut connection).await?);
    findings.push(writable(&mut connection).await?);
    findings.extend(sessions(&mut connection).await?);
    findings.push(numbers(&mut connection).await?);
    findings.push(long_transaction(&mut connection).await);
    findings.push(match store.schema().await.and_then(|schema| schema.require().map(|()| schema)) {
        Ok(schema) => Finding::ok("mysql.schema", format!("version {}", schema.found)),
        Err(error) => return Ok(with(findings, Finding::of("mysql.schema", &error))),
    });
    findings.push(rights(&mut connection).await);
    Ok(findings)
}

fn with(mut findings: Vec<Finding>, finding: Finding) -> Vec<Finding> {
    findings.push(finding);
    findings
}

/// A global variable as text; none when this server has no such variable.
async fn variable(connection: &mut MySqlConnection, name: &str) -> Result<Option<String>> {
    let row = sqlx::query("SHOW GLOBAL VARIABLES WHERE Variable_name = ?")
        .bind(name)
        .fetch_optional(connection)
        .await
        .map_err(db)?;
    row.map(|row| row.try_get(1).map_err(db)).transpose()
}

async fn version(connection: &mut MySqlConnection) -> Result<Finding> {
    let version = variable(connection, "version").await?.unwrap_or_default();
    let is_mariadb = version.to_ascii_lowercase().contains("mariadb");
    let mut numbers = version.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse::<u32>().ok());
    let found = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let (name, least) = if is_mariadb { ("MariaDB", MARIADB_MIN) } else { ("MySQL", MYSQL_MIN) };
    Ok(if found >= least {
        Finding::ok("mysql.version", format!("{name} {version}"))
    } else {
        Finding::error(
            "mysql.version",
            format!("{name} {version} is too old"),
            "upgrade to MariaDB 10.6, MySQL 8.0.17, or newer",
        )
    })
}

async fn durability(connection: &mut MySqlConnection) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let flush = variable(connection, "innodb_flush_log_at_trx_commit").await?.unwrap_or_default();
    findings.push(if flush == "1" {
        Finding::ok("mysql.flush", "a commit is on disk")
    } else {
        Finding::warning(
            "mysql.flush",
            format!("innodb_flush_log_at_trx_commit = {flush}: a crash can lose the last committed events"),
            "set innodb_flush_log_at_trx_commit = 1",
        )
    });
    if variable(connection, "innodb_doublewrite").await?.is_some_and(|value| value.eq_ignore_ascii_case("off")) {
        findings.push(Finding::warning(
            "mysql.doublewrite",
            "off: a crash of the machine can corrupt pages",
            "set innodb_doublewrite = ON",
        ));
    }
    let has_binlog = variable(connection, "log_bin").await?.is_some_and(|value| value.eq_ignore_ascii_case("on"));
    if has_binlog {
        let format = variable(connection, "binlog_format").await?.unwrap_or_default();
        findings.push(if format.eq_ignore_ascii_case("statement") {
            Finding::error(
                "mysql.binlog_format",
                "STATEMENT: a replica would make other event ids, and READ COMMITTED is refused",
                "set binlog_format = ROW (or MIXED)",
            )
        } else {
            Finding::ok("mysql.binlog_format", format)
        });
        let sync = variable(connection, "sync_binlog").await?.unwrap_or_default();
        findings.push(if sync == "1" {
            Finding::ok("mysql.sync_binlog", "1")
        } else {
            Finding::warning(
                "mysql.sync_binlog",
                format!("{sync}: after a crash replicas may have other events than the primary"),
                "set sync_binlog = 1",
            )
        });
    }
    Ok(findings)
}

async fn writable(connection: &mut MySqlConnection) -> Result<Finding> {
    let is_read_only = variable(connection, "read_only").await?.is_some_and(|value| value.eq_ignore_ascii_case("on"));
    Ok(if is_read_only {
        Finding::error("mysql.writable", "the server is read-only", "connect to the primary")
    } else {
        Finding::ok("mysql.writable", "the server accepts writes")
    })
}

/// What producers' sessions begin with. Ours set what they need.
async fn sessions(connection: &mut MySqlConnection) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let mode = variable(connection, "sql_mode").await?.unwrap_or_default();
    findings.push(if mode.contains("STRICT_TRANS_TABLES") || mode.contains("STRICT_ALL_TABLES") {
        Finding::ok("mysql.sql_mode", "strict")
    } else {
        Finding::error(
            "mysql.sql_mode",
            "not strict: a key or topic that is too long is cut off without an error",
            "add STRICT_TRANS_TABLES to sql_mode",
        )
    });
    let packet = variable(connection, "max_allowed_packet").await?.and_then(|value| value.parse::<i64>().ok());
    let packet = packet.unwrap_or_default();
    findings.push(if packet >= PACKET_BYTES_MIN {
        Finding::ok("mysql.max_allowed_packet", format!("{} MiB", packet / (1024 * 1024)))
    } else {
        Finding::warning(
            "mysql.max_allowed_packet",
            format!("{} KiB: payloads up to {} MiB do not fit", packet / 1024, PAYLOAD_BYTES_MAX / (1024 * 1024)),
            "set max_allowed_packet = 64M, for the server and for clients",
        )
    });
    let isolation = match variable(connection, "transaction_isolation").await? {
        Some(isolation) => isolation,
        None => variable(connection, "tx_isolation").await?.unwrap_or_default(),
    };
    findings.push(if isolation.eq_ignore_ascii_case("serializable") {
        Finding::warning(
            "mysql.isolation",
            "SERIALIZABLE: a producer's SELECT locks what it reads, gaps included, and makes others wait",
            "use READ COMMITTED or REPEATABLE READ for producers",
        )
    } else {
        // An INSERT takes no gap lock that another INSERT waits for, at either level; ours are always READ COMMITTED.
        Finding::ok("mysql.isolation", format!("{isolation} for producers, READ-COMMITTED for Postrider"))
    });
    Ok(findings)
}

/// Order within a key comes from the ids, which several writing nodes draw in parallel.
async fn numbers(connection: &mut MySqlConnection) -> Result<Finding> {
    let step = variable(connection, "auto_increment_increment").await?.unwrap_or_default();
    let is_cluster = variable(connection, "wsrep_on").await?.is_some_and(|value| value.eq_ignore_ascii_case("on"));
    Ok(if step == "1" && !is_cluster {
        Finding::ok("mysql.auto_increment", "one server draws the numbers")
    } else {
        Finding::warning(
            "mysql.auto_increment",
            "several servers draw numbers: events of one key may get them in another order than they commit",
            "let all producers of a key write to the same server",
        )
    })
}

async fn long_transaction(connection: &mut MySqlConnection) -> Finding {
    const CHECK: &str = "mysql.long_transaction";
    let oldest = sqlx::query(
        "SELECT COALESCE(MAX(TIMESTAMPDIFF(SECOND, trx_started, NOW())), 0) FROM information_schema.innodb_trx",
    )
    .fetch_one(connection)
    .await
    .and_then(|row| row.try_get::<i64, _>(0));
    match oldest {
        Ok(secs) if secs > LONG_TRANSACTION_SECS => Finding::warning(
            CHECK,
            format!("a transaction has been open for {secs} s; its own events wait, and reading the outbox gets slow"),
            "look at information_schema.innodb_trx for the oldest trx_started",
        ),
        Ok(_) => Finding::ok(CHECK, "none"),
        // Only a user with the right PROCESS sees the others' transactions.
        Err(_) => Finding::ok(CHECK, "not known without the right PROCESS"),
    }
}

async fn rights(connection: &mut MySqlConnection) -> Finding {
    for table in TABLES {
        // Changes nothing; the server asks for the rights all the same.
        let probes =
            [format!("SELECT 1 FROM postrider_{table} LIMIT 0"), format!("DELETE FROM postrider_{table} WHERE 1 = 0")];
        for probe in probes {
            if let Err(error) = sqlx::raw_sql(AssertSqlSafe(probe)).execute(&mut *connection).await {
                let text = format!("the user may not read and write postrider_{table}: {}", db(error));
                let remedy = format!("GRANT SELECT, INSERT, UPDATE, DELETE ON <database>.postrider_{table} TO <user>");
                return Finding::error("mysql.rights", text, remedy);
            }
        }
    }
    Finding::ok("mysql.rights", "all tables can be read and written")
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
