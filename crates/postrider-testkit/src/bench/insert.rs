//! What the outbox costs its producers: defaults, constraints, indexes, partitions and the trigger, compared with a
//! table that has none of them and gets the same values from its producer.

use std::time::{Duration, Instant};

use chrono::Utc;
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{Connection, PgConnection, Postgres};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::bed::{Bed, TOPIC, TYPE, key, payload};
use super::report::{Line, Lines, median, rate, rates};
use crate::testbed::Result;

/// Connections that insert at once.
const CONNECTIONS: u64 = 4;
/// The two tables take turns this often.
const ROUNDS: usize = 5;
/// Rows of a large statement.
const MANY: u64 = 1000;

const OUTBOX: &str = "INSERT INTO postrider.outbox (topic, key, type, payload) SELECT $1, $2, $3, $4::text::json FROM generate_series(1, $5)";
const OUTBOX_ONE: &str = "INSERT INTO postrider.outbox (topic, key, type, payload) VALUES ($1, $2, $3, $4::text::json)";
const PLAIN: &str = "INSERT INTO plain (topic, key, type, payload, id, tx, event_id, content_type, created_at) \
     SELECT $1, $2, $3, $4::text::json, $6, $7::text::xid8, $8, $9, $10 FROM generate_series(1, $5)";
const PLAIN_ONE: &str = "INSERT INTO plain (topic, key, type, payload, id, tx, event_id, content_type, created_at) \
     VALUES ($1, $2, $3, $4::text::json, $5, $6::text::xid8, $7, $8, $9)";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Table {
    Outbox,
    Plain,
}

pub(super) async fn measure(bed: &Bed) -> Result<Lines> {
    let database = bed.database("insert").await?;
    let mut connection = PgConnection::connect(&database).await?;
    sqlx::raw_sql("CREATE TABLE plain (LIKE postrider.outbox)").execute(&mut connection).await?;
    let mut lines = Vec::new();
    for rows in [1, MANY] {
        let (mut plain, mut outbox) = (Vec::new(), Vec::new());
        for round in 1..=ROUNDS {
            for table in [Table::Plain, Table::Outbox] {
                let events = load(&database, table, rows, bed.scale.insert).await?;
                match table {
                    Table::Plain => plain.push(events),
                    Table::Outbox => outbox.push(events),
                }
                sqlx::raw_sql("TRUNCATE postrider.outbox, plain; CHECKPOINT").execute(&mut connection).await?;
            }
            eprintln!(
                "  {rows} per statement, round {round}: plain {}, outbox {}",
                rate(plain[round - 1]),
                rate(outbox[round - 1])
            );
        }
        let (ours, bare) = (median(&outbox), median(&plain));
        // Of the rounds, not of the medians: the machine is faster at one time than at another.
        let ratio = median(&outbox.iter().zip(&plain).map(|(ours, bare)| ours / bare).collect::<Vec<_>>());
        let measured = format!("{} [{}], plain table {} [{}]", rate(ours), rates(&outbox), rate(bare), rates(&plain));
        lines.push(if rows == 1 {
            Line::at_least("insert of an event by plain SQL, one per transaction", 0.8, ratio, measured)
        } else {
            Line::shown(format!("insert of {rows} events per statement"), ratio, measured)
        });
    }
    connection.close().await?;
    Ok(lines)
}

/// Inserts for a while over several connections; returns rows per second.
async fn load(database: &str, table: Table, rows: u64, time: Duration) -> Result<f64> {
    let mut connections = Vec::new();
    for number in 0..CONNECTIONS {
        let mut connection = PgConnection::connect(database).await?;
        // Connecting and preparing is not what is measured.
        insert(&mut connection, table, rows, number).await?;
        connections.push(connection);
    }
    let mut producers: JoinSet<Result<u64>> = JoinSet::new();
    let started = Instant::now();
    for (first, mut connection) in connections.into_iter().enumerate() {
        producers.spawn(async move {
            let mut count = 0;
            while started.elapsed() < time {
                insert(&mut connection, table, rows, first as u64 + count * CONNECTIONS).await?;
                count += 1;
            }
            connection.close().await?;
            Ok(count * rows)
        });
    }
    let mut inserted = 0;
    while let Some(count) = producers.join_next().await {
        inserted += count??;
    }
    Ok(inserted as f64 / started.elapsed().as_secs_f64())
}

/// One statement, which is one transaction.
async fn insert(connection: &mut PgConnection, table: Table, rows: u64, number: u64) -> Result<()> {
    let is_one = rows == 1;
    let statement = match (table, is_one) {
        (Table::Outbox, true) => OUTBOX_ONE,
        (Table::Outbox, false) => OUTBOX,
        (Table::Plain, true) => PLAIN_ONE,
        (Table::Plain, false) => PLAIN,
    };
    let mut query = sqlx::query(statement).bind(TOPIC).bind(key(number)).bind(TYPE).bind(payload(number));
    if !is_one {
        query = query.bind(i64::try_from(rows)?);
    }
    if table == Table::Plain {
        query = explicit(query, number)?;
    }
    query.execute(connection).await?;
    Ok(())
}

/// The values that the outbox finds by itself.
fn explicit(query: Query<'_, Postgres, PgArguments>, number: u64) -> Result<Query<'_, Postgres, PgArguments>> {
    Ok(query
        .bind(i64::try_from(number)?)
        .bind((1000 + number).to_string())
        .bind(Uuid::now_v7())
        .bind("application/json")
        .bind(Utc::now()))
}
