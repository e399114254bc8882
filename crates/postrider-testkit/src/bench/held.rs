//! The drain beside transactions that stay open: one that has written events, and one that only looks.

use std::time::Instant;

use sqlx::{Connection, PgConnection};

use super::bed::{Bed, fill};
use super::drain::{Keep, drain};
use super::queue::Queue;
use super::relay::{EXCHANGE, Relay};
use super::report::{Line, Lines, median, rate, rates};
use crate::testbed::Result;

/// Drains while the transactions are open; as many are done without them.
const ROUNDS: usize = 2;
/// Events of the transaction that stays open.
const HELD: u64 = 10;

pub(super) async fn measure(bed: &Bed) -> Result<Lines> {
    let relay = Relay::start(bed, "held").await?;
    let quiet_before = drain(bed, &relay, Keep::Everything).await?;
    eprintln!("  quiet {quiet_before}");

    let held = Held::begin(&relay).await?;
    let mut beside = Vec::new();
    for round in 1..=ROUNDS {
        let drained = drain(bed, &relay, Keep::Everything).await?;
        eprintln!("  round {round} beside open transactions: {drained}");
        beside.push(drained.rate);
    }
    tokio::time::sleep(bed.scale.hold.saturating_sub(held.began.elapsed())).await;
    let open_s = held.began.elapsed().as_secs_f64();
    let waited = held.release(&relay).await?;

    let quiet_after = drain(bed, &relay, Keep::Everything).await?;
    eprintln!("  quiet {quiet_after}");
    relay.stop().await?;
    let quiet = [quiet_before.rate, quiet_after.rate];
    let (with, without) = (median(&beside), median(&quiet));
    Ok(vec![
        Line::at_least(
            format!("the same drain beside a writing and a REPEATABLE READ transaction, open for {open_s:.0} s"),
            0.9,
            with / without,
            format!("{} [{}], without {} [{}]", rate(with), rates(&beside), rate(without), rates(&quiet)),
        ),
        Line::shown(
            "events of the open transaction, after its commit",
            f64::NAN,
            format!("{HELD} of {HELD} in {waited:.0} ms"),
        ),
    ])
}

/// A transaction that has written [`HELD`] events, and one that only looks.
pub(super) struct Held {
    writer: PgConnection,
    reader: PgConnection,
    pub began: Instant,
}

impl Held {
    pub async fn begin(relay: &Relay) -> Result<Held> {
        let mut writer = relay.connect().await?;
        let mut reader = relay.connect().await?;
        sqlx::raw_sql("BEGIN").execute(&mut writer).await?;
        fill(&mut writer, HELD).await?;
        sqlx::raw_sql("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM postrider.lane")
            .execute(&mut reader)
            .await?;
        Ok(Held { writer, reader, began: Instant::now() })
    }

    /// Ends both, and returns how many milliseconds the held events took to arrive.
    pub async fn release(mut self, relay: &Relay) -> Result<f64> {
        let queue = Queue::create(&relay.vhost, EXCHANGE).await?;
        sqlx::raw_sql("COMMIT").execute(&mut self.writer).await?;
        let committed = Instant::now();
        queue.fill_up(HELD).await?;
        let waited = committed.elapsed().as_secs_f64() * 1000.0;
        sqlx::raw_sql("COMMIT").execute(&mut self.reader).await?;
        self.writer.close().await?;
        self.reader.close().await?;
        queue.delete().await?;
        Ok(waited)
    }
}
