//! The drain when millions of published events are still in the table.

use chrono::{Days, NaiveDate, Utc};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use super::bed::{Bed, KEYS, TOPIC, TYPE, payload};
use super::drain::{Keep, drain};
use super::relay::Relay;
use super::report::{Line, Lines, median, rate, rates};
use crate::testbed::Result;

/// The events are spread over this many days before today: one less than they are kept.
const DAYS: u64 = 6;
/// Events of one transaction.
const CHUNK: u64 = 50_000;
/// Empty and full table take turns this often.
const ROUNDS: usize = 2;

pub(super) async fn measure(bed: &Bed) -> Result<Lines> {
    let full = bed.database("kept").await?;
    load(&full, bed.scale.kept).await?;
    let full = Relay::start_on(bed, "kept", full).await?;
    let empty = Relay::start(bed, "empty").await?;
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        let one = drain(bed, &empty, Keep::Nothing).await?;
        let other = drain(bed, &full, Keep::Everything).await?;
        eprintln!("  round {round}: empty {one}; full {other}");
        without.push(one.rate);
        with.push(other.rate);
    }
    full.stop().await?;
    empty.stop().await?;
    let (full, empty) = (median(&with), median(&without));
    Ok(vec![Line::at_least(
        format!("the same drain with {:.1} million published rows kept", bed.scale.kept as f64 / 1e6),
        0.9,
        full / empty,
        format!("{} [{}], empty {} [{}]", rate(full), rates(&with), rate(empty), rates(&without)),
    )])
}

/// Fills the table with so many events that count as published.
pub(super) async fn load(database: &str, events: u64) -> Result<()> {
    let mut connection = PgConnection::connect(database).await?;
    let mut partitions = Vec::new();
    for back in 1..=DAYS {
        let day = Utc::now().date_naive().checked_sub_days(Days::new(back)).ok_or("no such day")?;
        partitions.push(create_partition(&mut connection, day).await?);
    }
    let mut left = events;
    let chunks = left.div_ceil(CHUNK);
    for chunk in 0..chunks {
        let rows = left.min(CHUNK);
        left -= rows;
        fill(&mut connection, rows, chunk as f64 / chunks as f64).await?;
        if chunk % 20 == 19 {
            eprintln!("  {} of {events} rows", events - left);
        }
    }
    // As if a relay had published them all.
    sqlx::query(
        "INSERT INTO postrider.lane (destination, lane, lanes, epoch, done) \
         VALUES ('default', 0, 1, 0, pg_current_snapshot())",
    )
    .execute(&mut connection)
    .await?;
    // In six days autovacuum would have come by; like it, this does not analyse the partitioned table as a whole.
    for partition in partitions {
        let sql = format!("VACUUM (ANALYZE) postrider.{partition}");
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await?;
    }
    sqlx::raw_sql("CHECKPOINT").execute(&mut connection).await?;
    connection.close().await?;
    Ok(())
}

/// As the upkeep makes them.
async fn create_partition(connection: &mut PgConnection, day: NaiveDate) -> Result<String> {
    let name = day.format("outbox_%Y%m%d").to_string();
    let next = day.checked_add_days(Days::new(1)).ok_or("no such day")?;
    // The name is made of digits.
    let sql = format!(
        "CREATE TABLE postrider.{name} (LIKE postrider.outbox INCLUDING DEFAULTS INCLUDING CONSTRAINTS); \
         ALTER TABLE postrider.outbox ATTACH PARTITION postrider.{name} \
         FOR VALUES FROM ('{day} 00:00:00+00') TO ('{next} 00:00:00+00')"
    );
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(connection).await?;
    Ok(name)
}

/// Inserts a chunk at its place (0 to 1) in the days, oldest first, as time would have.
async fn fill(connection: &mut PgConnection, rows: u64, place: f64) -> Result<()> {
    sqlx::query(
        "INSERT INTO postrider.outbox (topic, key, type, payload, created_at) \
         SELECT $2, 'order-' || abs(hashint8(n)) % $3, $4, $5::text::json, \
           date_trunc('day', now(), 'UTC') - $6 * interval '1 day' + $7 * $6 * interval '1 day' \
         FROM generate_series(1, $1) n",
    )
    .bind(i64::try_from(rows)?)
    .bind(TOPIC)
    .bind(i64::try_from(KEYS)?)
    .bind(TYPE)
    .bind(payload(0))
    .bind(DAYS as f64)
    .bind(place)
    .execute(connection)
    .await?;
    Ok(())
}
