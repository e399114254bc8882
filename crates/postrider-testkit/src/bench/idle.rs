//! What a relay without work does to its database and to the processor.

use std::time::Duration;

use sqlx::PgConnection;

use super::bed::Bed;
use super::relay::Relay;
use super::report::{Line, Lines};
use crate::testbed::Result;

/// After this long every backend has written down what it did.
const WRITTEN_DOWN: Duration = Duration::from_secs(12);

pub(super) async fn measure(bed: &Bed) -> Result<Lines> {
    let relay = Relay::start(bed, "idle").await?;
    // Statistics are read over another database, so that reading them does not count. Backends write theirs down once
    // a second, those that rest after ten: what was done at the start must not count as idle.
    tokio::time::sleep(WRITTEN_DOWN).await;
    let mut connection = bed.maintenance().await?;
    let name = relay.database.rsplit('/').next().unwrap_or_default().to_owned();
    let (transactions, cpu) = (transactions(&mut connection, &name).await?, relay.cpu()?);
    let started = std::time::Instant::now();
    tokio::time::sleep(bed.scale.watch).await;
    let secs = started.elapsed().as_secs_f64();
    let transactions = self::transactions(&mut connection, &name).await? - transactions;
    let cpu = relay.cpu()?.saturating_sub(cpu).as_secs_f64();
    relay.stop().await?;
    Ok(vec![
        Line::at_most("idle: queries", 12.0, transactions as f64 / secs, "/s"),
        Line::at_most("idle: CPU of the relay", 0.5, 100.0 * cpu / secs, "% of a core"),
    ])
}

async fn transactions(connection: &mut PgConnection, database: &str) -> Result<i64> {
    Ok(sqlx::query_scalar("SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = $1")
        .bind(database)
        .fetch_one(connection)
        .await?)
}
