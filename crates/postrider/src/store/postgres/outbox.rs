//! Appending events: in the caller's transaction, or in one of our own.

use async_trait::async_trait;
use sqlx::{PgConnection, Postgres, Row as _, Transaction};

use super::PostgresStore;
use super::error::db;
use super::row::Columns;
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::outbox::{Outbox, OutboxStore, OutboxWriter};
use crate::source::{Page, Position};

/// `unnest … WITH ORDINALITY ORDER BY` keeps the order of the batch in the ids.
const INSERT: &str = "INSERT INTO postrider.outbox (event_id, topic, key, type, payload, payload_bytes, content_type, \
     source, subject, tenant, correlation, causation, traceparent, tracestate, headers, created_at) \
     SELECT e.id, e.topic, e.key, e.type, e.payload::json, e.bytes, e.content_type, e.source, e.subject, e.tenant, \
     e.correlation, e.causation, e.traceparent, e.tracestate, e.headers, e.created_at \
     FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bytea[], $7::text[], $8::text[], \
     $9::text[], $10::text[], $11::text[], $12::text[], $13::text[], $14::text[], $15::jsonb[], $16::timestamptz[]) \
     WITH ORDINALITY AS e(id, topic, key, type, payload, bytes, content_type, source, subject, tenant, correlation, \
     causation, traceparent, tracestate, headers, created_at, n) ORDER BY n";

#[async_trait]
impl OutboxWriter for PgConnection {
    async fn insert(&mut self, events: &[Event]) -> Result<()> {
        if events.is_empty() {
            return Ok(());
        }
        let columns = Columns::of(events.iter());
        let mut json = Vec::with_capacity(events.len());
        let mut bytes = Vec::with_capacity(events.len());
        for event in events {
            if event.is_json() {
                let text = std::str::from_utf8(&event.payload).map_err(|_| {
                    Error::new(Kind::Invalid, format!("the payload of event {} is not UTF-8", event.id))
                })?;
                json.push(Some(text));
                bytes.push(None);
            } else {
                json.push(None);
                bytes.push(Some(event.payload.as_ref()));
            }
        }
        sqlx::query(INSERT)
            .bind(columns.id)
            .bind(columns.topic)
            .bind(columns.key)
            .bind(columns.kind)
            .bind(json)
            .bind(bytes)
            .bind(columns.content_type)
            .bind(columns.source)
            .bind(columns.subject)
            .bind(columns.tenant)
            .bind(columns.correlation)
            .bind(columns.causation)
            .bind(columns.traceparent)
            .bind(columns.tracestate)
            .bind(columns.headers)
            .bind(columns.time)
            .execute(self)
            .await
            .map_err(db)?;
        Ok(())
    }
}

#[async_trait]
impl OutboxWriter for Transaction<'_, Postgres> {
    async fn insert(&mut self, events: &[Event]) -> Result<()> {
        OutboxWriter::insert(&mut **self, events).await
    }
}

#[async_trait]
impl OutboxStore for PostgresStore {
    async fn enqueue(&self, events: &[Event]) -> Result<()> {
        let mut tx = self.pool.begin().await.map_err(db)?;
        Outbox::new().append_all(&mut tx, events).await?;
        tx.commit().await.map_err(db)
    }

    async fn position(&self, from_start: bool) -> Result<Position> {
        if from_start {
            return Ok(super::source::start());
        }
        let row = sqlx::query("SELECT pg_current_snapshot()::text").fetch_one(&self.own).await.map_err(db)?;
        Ok(Position { done: row.try_get(0).map_err(db)?, target: None, last_id: 0 })
    }

    async fn tail(&self, from: &Position, limit: usize) -> Result<Page> {
        let mut reader = self.own.acquire().await.map_err(db)?;
        super::source::read(&mut reader, &super::source::LaneFilter::ALL, from, limit).await
    }
}
