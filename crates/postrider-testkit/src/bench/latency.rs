//! From the return of a commit to the receipt by a consumer, at an even pace.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use hdrhistogram::Histogram;
use lapin::Channel;
use lapin::options::{BasicConsumeOptions, BasicPublishOptions};
use lapin::types::FieldTable;
use sqlx::{Connection, PgConnection};
use tokio::task::JoinSet;

use super::bare;
use super::bed::{Bed, TOPIC, TYPE, key, payload};
use super::held::Held;
use super::queue::Queue;
use super::relay::{EXCHANGE, Relay};
use super::report::{Line, Lines};
use crate::testbed::Result;

/// Events per second, and connections that insert them.
const LOADS: [(u32, u32); 2] = [(200, 4), (1000, 16)];
/// How long the last events may take.
const LAST_WAIT: Duration = Duration::from_secs(30);
/// A load that is slower than this share of what it should be has measured something else.
const PACE: f64 = 0.95;
/// The first part of each load warms up and is not counted.
const WARM_UP: Duration = Duration::from_secs(1);

pub(super) async fn measure(bed: &Bed) -> Result<Lines> {
    let relay = Relay::start(bed, "latency").await?;
    let way = Way { database: relay.database.clone(), vhost: relay.vhost.clone(), is_direct: false };
    let direct = Way {
        database: bed.database("latency_direct").await?,
        vhost: bed.rabbit.vhost("latency_direct").await?,
        is_direct: true,
    };
    let mut lines = Vec::new();
    for (rate, connections) in LOADS {
        let times = load(bed, &way, rate, connections).await?;
        lines.extend(report(&format!("commit → receipt at {rate}/s"), &times));
        let times = load(bed, &direct, rate, connections).await?;
        let (p50, p99) = (at(&times, 0.5), at(&times, 0.99));
        let what = format!("the same at {rate}/s without a relay: the producer publishes after its commit");
        lines.push(Line::shown(what, f64::NAN, format!("p50 {p50:.2} ms, p99 {p99:.2} ms")));
    }
    let (rate, connections) = LOADS[0];
    let held = Held::begin(&relay).await?;
    tokio::time::sleep(bed.scale.hold.saturating_sub(bed.scale.watch)).await;
    let times = load(bed, &way, rate, connections).await?;
    let open_s = held.began.elapsed().as_secs();
    lines.extend(report(&format!("the same at {rate}/s beside a writer's transaction, open for {open_s} s"), &times));
    held.release(&relay).await?;
    relay.stop().await?;
    Ok(lines)
}

/// How an event gets from its database to the queue.
struct Way {
    database: String,
    vhost: String,
    /// Not by a relay but by its producer: what database, broker and machine cost by themselves.
    is_direct: bool,
}

/// The latencies of a load, in microseconds.
struct Latencies {
    times: Histogram<u64>,
    /// When the slowest event was committed, in seconds since the load began: a single pause shows as one.
    slowest_at_s: u64,
}

fn at(latencies: &Latencies, quantile: f64) -> f64 {
    latencies.times.value_at_quantile(quantile) as f64 / 1000.0
}

fn report(what: &str, latencies: &Latencies) -> Lines {
    let at = |quantile| at(latencies, quantile);
    let (max, slowest_at_s) = (latencies.times.max() as f64 / 1000.0, latencies.slowest_at_s);
    let tail = format!("p99.9 {:.1} ms, max {max:.1} ms after {slowest_at_s} s", at(0.999));
    eprintln!("  {what}: p50 {:.2} ms, p99 {:.2} ms, {tail}", at(0.5), at(0.99));
    vec![
        Line::at_most(format!("{what}, p50"), 3.0, at(0.5), "ms"),
        Line::at_most(format!("{what}, p99"), 10.0, at(0.99), "ms").with(tail),
    ]
}

/// When each event was committed and received, in nanoseconds since the start; 0 while it was not.
struct Times {
    start: Instant,
    committed: Vec<AtomicU64>,
    received: Vec<AtomicU64>,
}

impl Times {
    fn new(events: usize) -> Self {
        let zeros = || std::iter::repeat_with(AtomicU64::default).take(events).collect();
        Self { start: Instant::now(), committed: zeros(), received: zeros() }
    }

    fn note(&self, place: &[AtomicU64], number: u64) {
        let now = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        if let Some(time) = usize::try_from(number).ok().and_then(|number| place.get(number)) {
            time.store(now.max(1), Ordering::Relaxed);
        }
    }
}

/// Inserts `rate` events per second.
async fn load(bed: &Bed, way: &Way, rate: u32, connections: u32) -> Result<Latencies> {
    let queue = Queue::create(&way.vhost, EXCHANGE).await?;
    let warm_up = u64::from(rate) * WARM_UP.as_secs();
    let events = warm_up + u64::from(rate) * bed.scale.watch.as_secs();
    let times = Arc::new(Times::new(usize::try_from(events)?));
    let consumer = consume(&queue, times.clone(), events).await?;

    let mut producers = JoinSet::new();
    for number in 0..connections {
        let connection = PgConnection::connect(&way.database).await?;
        let direct = way.is_direct.then(|| queue.parts().0.clone());
        producers.spawn(produce(connection, direct, times.clone(), events, rate, (number, connections)));
    }
    let began = Instant::now();
    while let Some(producer) = producers.join_next().await {
        producer??;
    }
    let pace = events as f64 / began.elapsed().as_secs_f64() / f64::from(rate);
    tokio::time::timeout(LAST_WAIT, consumer).await.map_err(|_| "not all events have arrived")???;
    queue.delete().await?;
    if pace < PACE {
        eprintln!("  the producers reached {:.0} % of {rate}/s", pace * 100.0);
    }

    let mut latencies = Latencies { times: Histogram::new(3)?, slowest_at_s: 0 };
    for (committed, received) in times.committed.iter().zip(&times.received).skip(usize::try_from(warm_up)?) {
        // An event may arrive before the producer has learnt that its commit is done.
        let committed = committed.load(Ordering::Relaxed);
        let micros = received.load(Ordering::Relaxed).saturating_sub(committed) / 1000;
        if micros > latencies.times.max() {
            latencies.slowest_at_s = Duration::from_nanos(committed).as_secs();
        }
        latencies.times.record(micros)?;
    }
    Ok(latencies)
}

/// Takes its turns of the even pace: every `of.1`-th event, beginning with `of.0`.
async fn produce(
    mut connection: PgConnection,
    direct: Option<Channel>,
    times: Arc<Times>,
    events: u64,
    rate: u32,
    of: (u32, u32),
) -> Result<()> {
    let start = tokio::time::Instant::now() + Duration::from_secs(of.0.into()) / rate;
    let mut turns = tokio::time::interval_at(start, Duration::from_secs(of.1.into()) / rate);
    for number in (u64::from(of.0)..events).step_by(usize::try_from(of.1)?) {
        turns.tick().await;
        let mut transaction = connection.begin().await?;
        sqlx::query("INSERT INTO postrider.outbox (topic, key, type, payload) VALUES ($1, $2, $3, $4::text::json)")
            .bind(TOPIC)
            .bind(key(number))
            .bind(TYPE)
            .bind(payload(number))
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await?;
        times.note(&times.committed, number);
        if let Some(channel) = &direct {
            let (exchange, options) = (EXCHANGE.into(), BasicPublishOptions::default());
            let payload = payload(number);
            channel
                .basic_publish(exchange, TOPIC.into(), options, payload.as_bytes(), bare::properties(number))
                .await?;
        }
    }
    connection.close().await?;
    Ok(())
}

/// Notes when each event comes; ends when all have come.
async fn consume(queue: &Queue, times: Arc<Times>, events: u64) -> Result<tokio::task::JoinHandle<Result<()>>> {
    let (channel, name) = queue.parts();
    let options = BasicConsumeOptions { no_ack: true, ..Default::default() };
    let mut consumer = channel.basic_consume(name, "bench".into(), options, FieldTable::default()).await?;
    Ok(tokio::spawn(async move {
        for _ in 0..events {
            let delivery = consumer.next().await.ok_or("the consumer was cancelled")??;
            times.note(&times.received, number(&delivery.data).ok_or("a message without a number")?);
        }
        Ok(())
    }))
}

/// The number in a payload, read without a parser: the consumer shares the processor with what is measured.
fn number(payload: &[u8]) -> Option<u64> {
    let rest = payload.strip_prefix(br#"{"number":"#)?;
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&rest[..digits]).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_in_a_payload_is_found() {
        assert_eq!(number(payload(4711).as_bytes()), Some(4711));
        assert_eq!(number(b"{}"), None);
    }
}
