//! A table that a service already has, drained by the relay and by the worker that such services have.

mod worker;

use std::time::{Duration, Instant};

use sqlx::{Connection as _, PgConnection};

use super::bed::{Bed, KEYS, payload};
use super::queue::Queue;
use super::relay::{EXCHANGE, Relay};
use super::report::{Line, Lines, median, rate, rates};
use crate::testbed::Result;
use worker::Workshop;

/// Worker and relay take turns this often.
const ROUNDS: usize = 3;
/// How long whoever drains may take to mark the last rows.
const MARK_WAIT: Duration = Duration::from_secs(30);

/// The table of a service that publishes changes of courses.
const TABLE: &str = "
CREATE TABLE outbox_events (
    id             bigserial   PRIMARY KEY,
    routing_key    text        NOT NULL,
    aggregate_type text        NOT NULL,
    aggregate_id   text        NOT NULL,
    payload        jsonb       NOT NULL,
    status         text        NOT NULL DEFAULT 'pending',
    attempts       int         NOT NULL DEFAULT 0,
    available_at   timestamptz NOT NULL DEFAULT now(),
    published_at   timestamptz,
    last_error     text,
    created_at     timestamptz NOT NULL DEFAULT now(),
    updated_at     timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX outbox_events_status_available_at ON outbox_events (status, available_at);
CREATE INDEX outbox_events_aggregate_id ON outbox_events (aggregate_id);
";

/// What `postrider adopt inspect outbox_events` says of it.
const SECTION: &str = r#"
[[outbox]]
table = "outbox_events"
id = "id"
key = "aggregate_id"
payload = "payload"
time = "created_at"
topic = "{routing_key}"
message_id = "outbox-{id}"
status = "status"
status_processing = "processing"
status_failed = "failed"
published_at = "published_at"
updated_at = "updated_at"
attempts = "attempts"
available_at = "available_at"
last_error = "last_error"
"#;

/// One statement, and so one commit, that makes `$1` rows pending.
const FILL: &str = "INSERT INTO outbox_events (routing_key, aggregate_type, aggregate_id, payload) \
     SELECT 'course.changed', 'course', 'course-' || abs(hashint8(n)) % $2, $3::text::jsonb FROM generate_series(1, $1) n";

pub(super) async fn measure(bed: &Bed) -> Result<Lines> {
    let workshop = Workshop::open().await;
    let (mut theirs, mut ours) = (Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        theirs.push(by_worker(bed, &workshop).await?);
        ours.push(by_relay(bed).await?);
        let last = |rates: &[f64]| rate(rates.last().copied().unwrap_or(f64::NAN));
        eprintln!("  round {round}: worker {}, relay {}", last(&theirs), last(&ours));
    }
    let ratios: Vec<f64> = ours.iter().zip(&theirs).map(|(ours, theirs)| ours / theirs).collect();
    let (ours_rate, theirs_rate) = (rate(median(&ours)), rate(median(&theirs)));
    Ok(vec![Line::at_least(
        format!("{} pending rows of an adopted table, PostgreSQL → RabbitMQ, confirmed", bed.scale.rows),
        3.0,
        median(&ratios),
        format!("{ours_rate} [{}], {} {theirs_rate} [{}]", rates(&ours), workshop.title(), rates(&theirs)),
    )])
}

async fn by_worker(bed: &Bed, workshop: &Workshop) -> Result<f64> {
    let database = database(bed).await?;
    let vhost = bed.rabbit.vhost("worker").await?;
    let queue = Queue::create(&vhost, EXCHANGE).await?;
    let worker = workshop.start(&database, &vhost, EXCHANGE).await?;
    let rate = drain(bed, &database, &queue).await?;
    worker.stop().await?;
    queue.delete().await?;
    Ok(rate)
}

async fn by_relay(bed: &Bed) -> Result<f64> {
    let database = database(bed).await?;
    let relay = Relay::start_with(bed, "adopted", database, SECTION).await?;
    let queue = Queue::create(&relay.vhost, EXCHANGE).await?;
    let rate = drain(bed, &relay.database, &queue).await?;
    relay.stop().await?;
    queue.delete().await?;
    Ok(rate)
}

/// A fresh database with both outboxes: that of the service, and ours.
async fn database(bed: &Bed) -> Result<String> {
    let url = bed.database("adopted").await?;
    let mut connection = PgConnection::connect(&url).await?;
    sqlx::raw_sql(TABLE).execute(&mut connection).await?;
    connection.close().await?;
    Ok(url)
}

/// Commits the rows at once and waits until all of them are in the queue and marked: rows per second until they were in
/// the queue.
async fn drain(bed: &Bed, database: &str, queue: &Queue) -> Result<f64> {
    let rows = bed.scale.rows;
    let mut connection = PgConnection::connect(database).await?;
    let fill = sqlx::query(FILL).bind(i64::try_from(rows)?).bind(i64::try_from(KEYS)?).bind(payload(0));
    fill.execute(&mut connection).await?;
    let committed = Instant::now();
    queue.fill_up(rows).await?;
    let rate = rows as f64 / committed.elapsed().as_secs_f64();
    let waiting = Instant::now();
    loop {
        let left: i64 = sqlx::query_scalar("SELECT count(*) FROM outbox_events WHERE status <> 'published'")
            .fetch_one(&mut connection)
            .await?;
        if left == 0 {
            break;
        }
        if waiting.elapsed() > MARK_WAIT {
            return Err(format!("{left} rows are in the queue and not marked as published").into());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // What was published after the queue had all that it should have was published twice.
    queue.fill_up(rows).await?;
    Ok(rate)
}
