//! The embedded broker, compared with a program that inserts into a copy of the log's table, a batch per transaction.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use chrono::Utc;
use sqlx::{Connection as _, PgConnection};
use tokio::sync::Mutex;
use uuid::Uuid;

use super::super::bed::{Bed, TOPIC, TYPE, key, payload};
use super::Carrier;
use crate::testbed::Result;

/// Events of one transaction: a page of the relay.
const BATCH: u64 = 1000;

const INSERT: &str = "INSERT INTO bare_message (hash, event_id, topic, key, type, payload, content_type, created_at) \
     SELECT hash, id, topic, key, type, payload, content_type, created_at FROM unnest($1::uuid[], $2::text[], $3::text[], \
     $4::text[], $5::bytea[], $6::text[], $7::timestamptz[], $8::bigint[]) \
     e(id, key, topic, type, payload, content_type, created_at, hash)";

pub(super) struct Log {
    /// The relay's database, once it is known.
    database: String,
    /// A connection to it that counts: to connect each time would cost what is to be measured.
    counting: Mutex<Option<PgConnection>>,
}

impl Log {
    pub(super) fn new(bed: &Bed) -> Log {
        Log { database: bed.postgres.url().to_owned(), counting: Mutex::default() }
    }

    async fn connect(&self) -> Result<PgConnection> {
        Ok(PgConnection::connect(&self.database).await?)
    }
}

#[async_trait(?Send)]
impl Carrier for Log {
    fn name(&self) -> &'static str {
        "the embedded broker"
    }

    fn config(&self) -> String {
        "url = \"embedded\"\n".to_owned()
    }

    fn cpu(&self) -> Option<Duration> {
        None
    }

    fn set_database(&mut self, database: &str) {
        database.clone_into(&mut self.database);
    }

    async fn bare(&self, events: u64) -> Result<f64> {
        let mut connection = self.connect().await?;
        sqlx::raw_sql(
            "DROP TABLE IF EXISTS bare_message; CREATE TABLE bare_message (LIKE postrider.message INCLUDING ALL)",
        )
        .execute(&mut connection)
        .await?;
        let payload = payload(0).into_bytes();
        let started = Instant::now();
        let mut number = 0;
        while number < events {
            let end = (number + BATCH).min(events);
            let ids: Vec<Uuid> = (number..end).map(|_| Uuid::now_v7()).collect();
            let keys: Vec<String> = (number..end).map(key).collect();
            let hashes: Vec<i64> = (number..end).map(|number| (number % 32) as i64).collect();
            let rows = ids.len();
            sqlx::query(INSERT)
                .bind(ids)
                .bind(keys)
                // Events differ in all of it, so a publisher sends it with each.
                .bind(vec![TOPIC; rows])
                .bind(vec![TYPE; rows])
                .bind(vec![payload.as_slice(); rows])
                .bind(vec!["application/json"; rows])
                .bind(vec![Utc::now(); rows])
                .bind(hashes)
                .execute(&mut connection)
                .await?;
            number = end;
        }
        let rate = events as f64 / started.elapsed().as_secs_f64();
        sqlx::raw_sql("DROP TABLE bare_message").execute(&mut connection).await?;
        Ok(rate)
    }

    async fn count(&self) -> Result<u64> {
        let mut counting = self.counting.lock().await;
        let connection = match counting.take() {
            Some(connection) => connection,
            None => self.connect().await?,
        };
        let connection = counting.insert(connection);
        // So would counting rows. A batch that was rolled back would leave a gap, and the drain then fails for having too
        // many.
        let end: Option<i64> =
            sqlx::query_scalar("SELECT max(\"offset\") FROM postrider.message").fetch_one(connection).await?;
        Ok(end.unwrap_or(0) as u64)
    }

    async fn empty(&self) -> Result<()> {
        sqlx::raw_sql("TRUNCATE postrider.message RESTART IDENTITY").execute(&mut self.connect().await?).await?;
        Ok(())
    }
}
