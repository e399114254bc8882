//! What people see when there is much to see: every endpoint of the console beside ten million events and a hundred
//! thousand dead letters.

use std::time::{Duration, Instant};

use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::bed::Bed;
use super::kept;
use super::relay::Relay;
use super::report::{Line, Lines};
use crate::testbed::Result;

/// Every page answers within this.
const LIMIT_MS: f64 = 200.0;
/// How often each endpoint is asked; the slowest counts.
const ROUNDS: usize = 5;
/// What is kept is at most this old, so every round reads anew (but for what is kept for a minute).
const BETWEEN: Duration = Duration::from_secs(6);

/// Everything that the console asks for.
const PATHS: [&str; 24] = [
    "/api/v1/session",
    "/api/v1/overview?window=hour",
    "/api/v1/overview?window=day",
    "/api/v1/outbox",
    "/api/v1/outbox/default/parked",
    "/api/v1/consumers",
    "/api/v1/instances",
    "/api/v1/errors?window=hour",
    "/api/v1/errors?window=day",
    "/api/v1/errors?window=month",
    "/api/v1/alerts?state=open",
    "/api/v1/alerts?state=all",
    "/api/v1/silences",
    "/api/v1/integrity",
    "/api/v1/audit",
    "/api/v1/health",
    "/api/v1/status",
    "/api/v1/dead-letters",
    "/api/v1/dead-letters/stats",
    "/api/v1/dead-letters?consumer=consumer-3",
    "/api/v1/dead-letters?consumer=consumer-3&error=timeout&after=50000",
    "/api/v1/dead-letters?type=order.paid&error=nothing",
    "/api/v1/dead-letters?key=order-17",
    "/api/v1/dead-letters/4711",
];

/// What an installation of some size has collected: six consumers and a relay, hours of minutes, a day of quarters, a month of hours.
const LOAD: [&str; 6] = [
    "INSERT INTO postrider.dead_letter (consumer, message_id, shard, topic, type, key, error_type, error, attempts, history, \
       origin, envelope, payload, died_at) \
     SELECT 'consumer-' || n % 6, gen_random_uuid(), n % 1024, 'orders.paid', 'order.' || (ARRAY['paid', 'sent'])[1 + n % 2], \
       'order-' || n % 5000, (ARRAY['timeout', 'http_500', 'refused'])[1 + n % 3], 'it did not work: ' || repeat('x', 200), 4, \
       '[]', '{}', '{}', convert_to(repeat('p', 300), 'UTF8'), now() - (100000 - n) * interval '5 seconds' \
     FROM generate_series(1, 100000) n",
    "INSERT INTO postrider.bucket (width, at, group_name, metric, label, count) \
     SELECT w.width, to_timestamp((floor(extract(epoch FROM now()) / w.width) - n) * w.width), g, x.metric, x.label, 100 \
     FROM (VALUES (60, 180), (900, 104), (3600, 720)) w (width, steps), generate_series(0, w.steps - 1) n, \
       (SELECT 'consumer/consumer-' || c AS g FROM generate_series(0, 5) c UNION ALL SELECT 'relay/default') groups, \
       (VALUES ('published', ''), ('applied', ''), ('failed', 'timeout'), ('failed', 'http_500'), ('dead', 'timeout'), \
         ('latency_ms', ''), ('latency', '4'), ('latency', '6'), ('latency', '8'), ('latency', '10'), ('latency', '12'), \
         ('latency', '14'), ('latency', '20')) x (metric, label)",
    "INSERT INTO postrider.audit (actor, action, detail) \
     SELECT 'token:ops', 'payload', jsonb_build_object('id', n) FROM generate_series(1, 100000) n",
    "INSERT INTO postrider.alert (rule, subject, urgency, summary, remedy, fired_at, resolved_at, is_told) \
     SELECT 'latency', 'consumer/consumer-' || n, 'warning', 'slow', 'look', now() - n * interval '1 minute', now(), true \
     FROM generate_series(1, 10000) n",
    "INSERT INTO postrider.report (actor, ended_at, checks) SELECT 'schedule', now(), 12 FROM generate_series(1, 30)",
    "INSERT INTO postrider.instance (group_name, owner, version) \
     SELECT 'consumer/consumer-' || n % 6, 'host-' || n, '0.1.0' FROM generate_series(1, 12) n",
];

pub(super) async fn measure(bed: &Bed) -> Result<Lines> {
    let database = bed.database("operate").await?;
    kept::load(&database, bed.scale.shown).await?;
    let mut connection = PgConnection::connect(&database).await?;
    for statement in LOAD {
        sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut connection).await?;
    }
    sqlx::raw_sql(
        "ANALYZE postrider.dead_letter; ANALYZE postrider.bucket; ANALYZE postrider.audit; ANALYZE postrider.alert",
    )
    .execute(&mut connection)
    .await?;
    connection.close().await?;
    let relay = Relay::start_on(bed, "operate", database).await?;
    let address = relay.address()?;
    let mut slowest = vec![0.0_f64; PATHS.len()];
    for _ in 0..ROUNDS {
        for (path, slowest) in PATHS.iter().zip(&mut slowest) {
            *slowest = slowest.max(ask(&address, path).await?);
        }
        tokio::time::sleep(BETWEEN).await;
    }
    relay.stop().await?;
    for (path, slowest) in PATHS.iter().zip(&slowest) {
        eprintln!("  {slowest:6.1} ms  {path}");
    }
    let (path, worst) = PATHS.iter().zip(&slowest).max_by(|a, b| a.1.total_cmp(b.1)).ok_or("nothing was asked")?;
    let what = format!("the slowest page with {:.0} million events", bed.scale.shown as f64 / 1e6);
    Ok(vec![
        Line::at_most(what, LIMIT_MS, *worst, "ms")
            .with(format_args!("{path}; {} endpoints, each {ROUNDS} times", PATHS.len())),
    ])
}

/// How long an answer takes, from the connection to its last byte, in milliseconds.
async fn ask(address: &str, path: &str) -> Result<f64> {
    let began = Instant::now();
    let mut stream = TcpStream::connect(address).await?;
    let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    let took = began.elapsed();
    match answer.starts_with(b"HTTP/1.1 200") {
        true => Ok(took.as_secs_f64() * 1e3),
        false => Err(format!("{path}: {}", String::from_utf8_lossy(&answer)).into()),
    }
}
