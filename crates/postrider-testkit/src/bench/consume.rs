//! A queue full of messages through a consumer, compared with a bare program that does the same two inserts.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::StreamExt;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};
use postrider::broker::Broker;
use postrider::broker::rabbitmq::{RabbitMq, RabbitMqSettings};
use postrider::event::Event;
use postrider::handler::{BatchHandler, Consumer, ConsumerSpec, Handler, HandlerError};
use postrider::lease::Lease;
use postrider::store::Store;
use postrider::store::postgres::PostgresStore;
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgPool, Postgres, Transaction};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::bed::{Bed, TOPIC, TYPE, payload};
use super::relay::Relay;
use super::report::{Line, Lines, median, rate, rates};
use super::sample::Sampling;
use crate::testbed::Result;

/// Handlers at once, everywhere.
const CONCURRENCY: u16 = 16;
/// Messages at hand.
const PREFETCH: u16 = 256;
/// Batches are large, and few at once.
const BATCH: u16 = 500;
const BATCHES: u16 = 2;
const BATCH_PREFETCH: u16 = 2000;
/// Every way takes its turn this often.
const ROUNDS: usize = 2;
/// Each fiftieth event fails at its first attempt.
const FAILING: u64 = 50;
/// Different keys. Those of a failing event wait with it.
const KEYS: u64 = 10_000;
/// Nothing has been applied for this long: it never will be.
const STALL: Duration = Duration::from_secs(60);

type Tx = Transaction<'static, Postgres>;

const EFFECT: &str = "INSERT INTO effect (event_id, key, amount) VALUES ($1, $2, 120)";
const EFFECTS: &str =
    "INSERT INTO effect (event_id, key, amount) SELECT m.*, 120 FROM unnest($1::uuid[], $2::text[]) AS m (id, key)";
const ADMIT: &str = "INSERT INTO postrider.inbox (consumer, message_id, topic, key) VALUES ($1, $2, $3, $4) \
     ON CONFLICT (consumer, message_id) DO NOTHING";

/// Writes one row of effect.
#[derive(Clone, Default)]
struct Effect {
    /// Whether each fiftieth event fails at its first attempt.
    is_failing: bool,
}

#[async_trait]
impl Handler<Tx> for Effect {
    async fn handle(&self, tx: &mut Tx, event: &Event) -> Result<(), HandlerError> {
        if self.is_failing && fails_now(event) {
            return Err(HandlerError::retry("the first attempt fails"));
        }
        sqlx::query(EFFECT).bind(event.id()).bind(event.key()).execute(&mut **tx).await?;
        Ok(())
    }
}

#[async_trait]
impl BatchHandler<Tx> for Effect {
    async fn handle_all(&self, tx: &mut Tx, events: &[Arc<Event>]) -> Result<(), HandlerError> {
        let ids: Vec<Uuid> = events.iter().map(|event| event.id()).collect();
        let keys: Vec<Option<&str>> = events.iter().map(|event| event.key()).collect();
        sqlx::query(EFFECTS).bind(ids).bind(keys).execute(&mut **tx).await?;
        Ok(())
    }
}

/// The numbers of events that have failed once.
static FAILED: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

fn fails_now(event: &Event) -> bool {
    let number: u64 = event.headers().get("number").and_then(|number| number.parse().ok()).unwrap_or(1);
    if !number.is_multiple_of(FAILING) {
        return false;
    }
    FAILED.lock().unwrap_or_else(PoisonError::into_inner).insert(number)
}

pub(super) async fn measure(bed: &Bed) -> Result<Lines> {
    let ways = [Way::Bare, Way::Single, Way::Failing, Way::Batches];
    let mut all: [Vec<f64>; 4] = Default::default();
    for round in 1..=ROUNDS {
        for (way, measured) in ways.iter().zip(&mut all) {
            let rate = round_of(bed, *way, round).await?;
            measured.push(rate);
        }
        let last: Vec<f64> = all.iter().filter_map(|rates| rates.last().copied()).collect();
        eprintln!(
            "  round {round}: bare {}, inbox {}, 2 % failing {}, batches {}",
            rate(last[0]),
            rate(last[1]),
            rate(last[2]),
            rate(last[3])
        );
    }
    let [bare, single, failing, batches] = &all;
    let ratio = |ours: &[f64], theirs: &[f64]| {
        median(&ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect::<Vec<_>>())
    };
    let shown = |ours: &[f64], name: &str, theirs: &[f64]| {
        format!("{} [{}], {name} {} [{}]", rate(median(ours)), rates(ours), rate(median(theirs)), rates(theirs))
    };
    let messages = bed.scale.messages;
    let memory = memory(bed).await?;
    Ok(vec![
        Line::at_least(
            format!(
                "{messages} messages from RabbitMQ through the inbox, one row of effect each, {CONCURRENCY} at once"
            ),
            0.8,
            ratio(single, bare),
            shown(single, "a bare program", bare),
        ),
        Line::at_least(
            format!("the same in batches of up to {BATCH}"),
            5.0,
            ratio(batches, bare),
            shown(batches, "a bare program", bare),
        ),
        Line::at_least(
            format!("the same with 2 % of {KEYS} keys' messages failing once"),
            0.9,
            ratio(failing, single),
            shown(failing, "without failures", single),
        ),
        Line::at_most(
            "resident memory of a consumer beside 10,000 retries and 100,000 dead letters",
            60.0,
            memory / 1e6,
            "MB",
        ),
    ])
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Bare,
    Single,
    Failing,
    Batches,
}

/// Messages per second, from the first receipt to the last effect.
async fn round_of(bed: &Bed, way: Way, round: usize) -> Result<f64> {
    let name = format!("consume_{way:?}_{round}").to_lowercase();
    let (database, vhost) = (bed.database(&name).await?, bed.rabbit.vhost(&name).await?);
    let pool = PgPoolOptions::new().min_connections(u32::from(CONCURRENCY)).max_connections(u32::from(CONCURRENCY) + 4);
    let pool = pool.connect(&database).await?;
    sqlx::raw_sql("CREATE TABLE effect (event_id uuid PRIMARY KEY, key text, amount int)").execute(&pool).await?;
    let broker = Arc::new(RabbitMq::new(RabbitMqSettings::new(vhost.as_str()))?);
    let spec = ConsumerSpec { prefetch: PREFETCH, concurrency: CONCURRENCY, ..ConsumerSpec::new("billing", &["#"]) };
    fill(&broker, &spec, bed.scale.messages).await?;
    FAILED.lock().unwrap_or_else(PoisonError::into_inner).clear();

    let stop = CancellationToken::new();
    let store = Arc::new(PostgresStore::new(pool.clone()));
    let began = Instant::now();
    let task = match way {
        Way::Bare => tokio::spawn(bare(vhost.clone(), pool.clone(), stop.clone())),
        Way::Single | Way::Failing => {
            let handler = Effect { is_failing: way == Way::Failing };
            let consumer = Consumer::new(spec, broker, store.clone(), store.clone(), handler)?;
            let run = consumer.run(stop.clone());
            tokio::spawn(async move { Ok(run.await?) })
        }
        Way::Batches => {
            let spec = ConsumerSpec { prefetch: BATCH_PREFETCH, concurrency: BATCHES, batch: BATCH, ..spec };
            let consumer = Consumer::batched(spec, broker, store.clone(), store.clone(), Effect::default())?;
            let run = consumer.run(stop.clone());
            tokio::spawn(async move { Ok(run.await?) })
        }
    };
    applied(&pool, bed.scale.messages).await?;
    let rate = bed.scale.messages as f64 / began.elapsed().as_secs_f64();
    stop.cancel();
    task.await??;
    store.close().await;
    pool.close().await;
    Ok(rate)
}

/// Declares the consumer's queue and fills it.
async fn fill(broker: &RabbitMq, spec: &ConsumerSpec, messages: u64) -> Result<()> {
    let lease = Lease { group: spec.group(), slot: 0, owner: "bench".to_owned(), epoch: 1 };
    let mut subscription = broker.subscribe(spec, &lease).await?;
    subscription.close().await?;
    for first in (0..messages).step_by(1000) {
        let numbers = first..(first + 1000).min(messages);
        let events = numbers.map(|number| {
            let key = format!("order-{}", (number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) % KEYS);
            let builder = Event::builder(TOPIC, TYPE).key(key).header("number", number.to_string());
            Ok(Arc::new(builder.payload("application/json", payload(number)).build()?))
        });
        let batch = events.collect::<Result<Vec<_>>>()?;
        for result in broker.publish(&batch).await {
            result?;
        }
    }
    Ok(())
}

/// Waits until all effects are there.
async fn applied(pool: &PgPool, messages: u64) -> Result<()> {
    let (mut last, mut moved) = (0, Instant::now());
    loop {
        // An estimate costs nothing; the count that decides is asked for when it may be the last.
        let now: i64 = sqlx::query_scalar("SELECT count(*) FROM effect").fetch_one(pool).await?;
        let now = u64::try_from(now)?;
        match now {
            now if now > messages => return Err(format!("{now} effects of {messages} messages").into()),
            now if now == messages => return Ok(()),
            now if now != last => (last, moved) = (now, Instant::now()),
            _ => {}
        }
        if moved.elapsed() > STALL {
            return Err(format!("no effect for {} s; {last} of {messages} are there", STALL.as_secs()).into());
        }
        // Rarely while it counts much, often towards the end.
        let left = messages - now;
        tokio::time::sleep(Duration::from_millis((left / 50).clamp(10, 500))).await;
    }
}

/// The two inserts and the commit for each message, that many at once, and nothing else.
async fn bare(vhost: String, pool: PgPool, stop: CancellationToken) -> Result<()> {
    let connection = Connection::connect(&vhost, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel.basic_qos(PREFETCH, BasicQosOptions::default()).await?;
    let mut messages = channel
        .basic_consume("billing".into(), "bare".into(), BasicConsumeOptions::default(), FieldTable::default())
        .await?;
    let turns = Arc::new(Semaphore::new(usize::from(CONCURRENCY)));
    let has_failed = Arc::new(AtomicBool::new(false));
    loop {
        let message = tokio::select! {
            () = stop.cancelled() => break,
            message = messages.next() => message.ok_or("the subscription ended")??,
        };
        let (turn, pool, failing) = (turns.clone().acquire_owned().await?, pool.clone(), has_failed.clone());
        tokio::spawn(async move {
            let apply = async {
                let id: Uuid = message.properties.message_id().as_ref().ok_or("no id")?.as_str().parse()?;
                let key = message
                    .properties
                    .headers()
                    .as_ref()
                    .and_then(|headers| headers.inner().get("cloudEvents:partitionkey"));
                let key = key.and_then(|key| key.as_long_string()).map(ToString::to_string);
                let mut tx = pool.begin().await?;
                let admit = sqlx::query(ADMIT).bind("billing").bind(id).bind(message.routing_key.as_str()).bind(&key);
                if admit.execute(&mut *tx).await?.rows_affected() == 1 {
                    sqlx::query(EFFECT).bind(id).bind(&key).execute(&mut *tx).await?;
                }
                tx.commit().await?;
                message.acker.ack(BasicAckOptions::default()).await?;
                Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
            };
            if apply.await.is_err() {
                failing.store(true, Ordering::Relaxed);
            }
            drop(turn);
        });
        if has_failed.load(Ordering::Relaxed) {
            return Err("the bare program failed".into());
        }
    }
    connection.close(200, "done".into()).await?;
    Ok(())
}

const HELD: &str = "INSERT INTO postrider.held (consumer, shard, message_id, key, state, attempts, next_at, origin, envelope, payload) \
     SELECT 'billing', n % 32, gen_random_uuid(), 'held-' || n, 'retrying', 1, clock_timestamp() + interval '1 hour', '{\"topic\":\"t\",\"queue\":\"q\"}', \
       '{}', convert_to(repeat('x', 300), 'UTF8') FROM generate_series(1, 10000) n";
const DEAD: &str = "INSERT INTO postrider.dead_letter (consumer, message_id, shard, topic, type, key, error_type, error, attempts, history, origin, envelope, payload, sent_at) \
     SELECT 'billing', gen_random_uuid(), n % 32, 't', 't', 'dead-' || n, 'handler', 'no', 4, '[]', '{\"topic\":\"t\",\"queue\":\"q\"}', '{}', \
       convert_to(repeat('x', 300), 'UTF8'), clock_timestamp() FROM generate_series(1, 100000) n";

/// The most memory of `postrider run` with a consumer that delivers over HTTP.
async fn memory(bed: &Bed) -> Result<f64> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let server = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(stream));
        }
    });
    let database = bed.database("consume_memory").await?;
    let more = format!("[[consumer]]\nname = \"billing\"\nurl = \"http://127.0.0.1:{port}/\"\n");
    let pool = PgPool::connect(&database).await?;
    sqlx::raw_sql(HELD).execute(&pool).await?;
    sqlx::raw_sql(DEAD).execute(&pool).await?;
    let relay = Relay::start_with(bed, "consume_memory", database, &more).await?;
    let sampling = Sampling::start(bed, &relay)?;
    let events = bed.scale.messages / 10;
    super::bed::fill(&mut relay.connect().await?, events).await?;
    let deadline = Instant::now() + STALL * 2;
    loop {
        let done: i64 = sqlx::query_scalar("SELECT count(*) FROM postrider.inbox").fetch_one(&pool).await?;
        if u64::try_from(done)? == events {
            break;
        }
        if Instant::now() > deadline {
            return Err(format!("{done} of {events} events were delivered over HTTP").into());
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let cost = sampling.stop().await?;
    pool.close().await;
    relay.stop().await?;
    server.abort();
    Ok(cost.rss_bytes as f64)
}

/// Answers 204 to every request of a connection.
async fn answer(mut stream: tokio::net::TcpStream) {
    let (mut head, mut buffer) = (Vec::new(), [0u8; 16 * 1024]);
    loop {
        let Ok(count @ 1..) = stream.read(&mut buffer).await else { return };
        head.extend_from_slice(&buffer[..count]);
        while let Some(length) = whole_request(&head) {
            head.drain(..length);
            if stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.is_err() {
                return;
            }
        }
    }
}

/// How long the request at the beginning is, once all of it is there.
fn whole_request(bytes: &[u8]) -> Option<usize> {
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")? + 4;
    let head = std::str::from_utf8(&bytes[..end]).ok()?;
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "))?.parse::<usize>().ok()?;
    (bytes.len() >= end + length).then_some(end + length)
}
