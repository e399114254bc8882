//! A backlog of events through a relay that was idle, compared with a bare publisher.

use std::time::{Duration, Instant};

use sqlx::PgConnection;

use super::bare;
use super::bed::{Bed, fill};
use super::queue::Queue;
use super::relay::{EXCHANGE, Relay};
use super::report::{Line, Lines, median, rate, rates, short};
use super::sample::{Cost, Sampling};
use crate::testbed::Result;

/// Bare publisher and relay take turns this often.
const ROUNDS: usize = 5;
/// How long the relay may take to write down that it is done.
const SETTLE_WAIT: Duration = Duration::from_secs(10);
/// The unit of the costs, in events.
const PER: f64 = 100_000.0;

pub(super) async fn measure(bed: &Bed) -> Result<Lines> {
    let relay = Relay::start(bed, "drain").await?;
    let vhost = bed.rabbit.vhost("bare").await?;
    let (mut bare, mut bare_cpu) = (Vec::new(), Vec::new());
    let (mut ours, mut costs) = (Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        let published = bare::drain(&vhost, bed.scale.events).await?;
        let drained = drain(bed, &relay, Keep::Nothing).await?;
        eprintln!("  round {round}: bare {} (CPU {:.2} s), relay {drained}", rate(published.rate), published.cpu_s);
        bare.push(published.rate);
        bare_cpu.push(published.cpu_s * PER / bed.scale.events as f64);
        ours.push(drained.rate);
        costs.push(drained.cost);
    }
    relay.stop().await?;

    let (ours_rate, bare_rate) = (median(&ours), median(&bare));
    // Of the rounds, not of the medians: the machine is faster at one time than at another.
    let ratios: Vec<f64> = ours.iter().zip(&bare).map(|(ours, bare)| ours / bare).collect();
    let per = |value: fn(&Cost) -> f64| {
        let values: Vec<f64> = costs.iter().map(|cost| value(cost) * PER / bed.scale.events as f64).collect();
        (median(&values), values.iter().map(|&value| short(value)).collect::<Vec<_>>().join(" "))
    };
    let (relay_cpu, relay_all) = per(|cost| cost.relay_s);
    let (postgres_cpu, postgres_all) = per(|cost| cost.postgres_s);
    let peak = costs.iter().map(|cost| cost.rss_bytes).max().unwrap_or_default() as f64 / 1e6;
    Ok(vec![
        Line::at_least(
            format!("drain {} events, PostgreSQL → RabbitMQ, confirmed", bed.scale.events),
            0.9,
            median(&ratios),
            format!("{} [{}], bare publisher {} [{}]", rate(ours_rate), rates(&ours), rate(bare_rate), rates(&bare)),
        ),
        Line::at_most("relay CPU per 100,000 events", 1.0, relay_cpu, "s")
            .with(format!("{relay_all}; the bare publisher {}", short(median(&bare_cpu)))),
        Line::at_most("PostgreSQL CPU per 100,000 events", 1.2, postgres_cpu, "s").with(postgres_all),
        Line::at_most("resident memory of the relay while draining", 40.0, peak, "MB"),
    ])
}

/// What stays in the table after a drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keep {
    Everything,
    Nothing,
}

/// One drain.
#[derive(Debug, Clone, Copy)]
pub(super) struct Drained {
    /// Events per second, from the commit to the queue.
    pub rate: f64,
    pub cost: Cost,
}

impl std::fmt::Display for Drained {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Cost { relay_s, postgres_s, rss_bytes } = self.cost;
        write!(
            f,
            "{} (CPU: relay {relay_s:.2} s, PostgreSQL {postgres_s:.2} s; relay's memory {:.1} MB)",
            rate(self.rate),
            rss_bytes as f64 / 1e6
        )
    }
}

/// Commits the backlog at once and waits until all of it is in a fresh queue.
pub(super) async fn drain(bed: &Bed, relay: &Relay, keep: Keep) -> Result<Drained> {
    let events = bed.scale.events;
    let queue = Queue::create(&relay.vhost, EXCHANGE).await?;
    let mut connection = relay.connect().await?;
    fill(&mut connection, events).await?;
    let committed = Instant::now();
    let sampling = Sampling::start(bed, relay)?;
    queue.fill_up(events).await?;
    let rate = events as f64 / committed.elapsed().as_secs_f64();
    let cost = sampling.stop().await?;
    settled(&mut connection).await?;
    // What was published after the queue had all that it should have was published twice.
    queue.fill_up(events).await?;
    if keep == Keep::Nothing {
        sqlx::query("TRUNCATE postrider.outbox").execute(&mut connection).await?;
    }
    queue.delete().await?;
    Ok(Drained { rate, cost })
}

/// Waits until the relay has written down that everything committed is published.
pub(super) async fn settled(connection: &mut PgConnection) -> Result<()> {
    let now: String = sqlx::query_scalar("SELECT pg_current_snapshot()::text").fetch_one(&mut *connection).await?;
    let started = Instant::now();
    loop {
        // Between settles the position may lag behind by idle transactions; by events it does not.
        let is_settled: bool = sqlx::query_scalar(
            "SELECT bool_and(target IS NULL AND settled_at < clock_timestamp() - interval '300 ms') FROM postrider.lane",
        )
        .fetch_one(&mut *connection)
        .await?;
        if is_settled {
            return Ok(());
        }
        if started.elapsed() > SETTLE_WAIT {
            return Err(format!(
                "the relay has not settled {} s after the last event, snapshot {now}",
                SETTLE_WAIT.as_secs()
            )
            .into());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
