//! Rows to events and back: one list of columns for the log, the side table and the embedded broker.

use std::collections::BTreeMap;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use serde_json::Value;
use sqlx::Row as _;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use crate::error::{Error, Kind, Result};
use crate::event::{Event, Text, Wire};

/// Reads the event whose columns begin at `first`: event_id, topic, key, type, payload as text, payload_bytes,
/// content_type, source, subject, tenant, correlation, causation, traceparent, tracestate, headers, created_at.
pub(super) fn event(row: &PgRow, first: usize) -> Result<Event> {
    let payload: Bytes = match row.try_get::<Option<String>, _>(first + 4).map_err(super::error::db)? {
        Some(text) => text.into(),
        None => row.try_get::<Option<Vec<u8>>, _>(first + 5).map_err(super::error::db)?.unwrap_or_default().into(),
    };
    read(row, first, payload).map_err(super::error::db)?
}

fn read(row: &PgRow, first: usize, payload: Bytes) -> sqlx::Result<Result<Event>> {
    let headers = match row.try_get::<Option<Value>, _>(first + 14)? {
        None => BTreeMap::new(),
        Some(value) => match headers(value) {
            Ok(headers) => headers,
            Err(error) => return Ok(Err(error)),
        },
    };
    Ok(Ok(Event {
        id: row.try_get::<Uuid, _>(first)?,
        topic: text(row, first + 1)?,
        key: optional_text(row, first + 2)?,
        kind: text(row, first + 3)?,
        payload,
        content_type: text(row, first + 6)?,
        source: optional_text(row, first + 7)?,
        subject: optional_text(row, first + 8)?,
        tenant: optional_text(row, first + 9)?,
        correlation: optional_text(row, first + 10)?,
        causation: optional_text(row, first + 11)?,
        traceparent: optional_text(row, first + 12)?,
        tracestate: optional_text(row, first + 13)?,
        headers,
        time: row.try_get::<DateTime<Utc>, _>(first + 15)?,
        wire: Wire::default(),
    }))
}

fn text(row: &PgRow, index: usize) -> sqlx::Result<Text> {
    row.try_get::<&str, _>(index).map(Text::from)
}

pub(super) fn optional_text(row: &PgRow, index: usize) -> sqlx::Result<Option<Text>> {
    Ok(row.try_get::<Option<&str>, _>(index)?.map(Text::from))
}

/// A plain INSERT may have put anything into the column; only strings can be sent.
fn headers(value: Value) -> Result<BTreeMap<String, String>> {
    let Value::Object(map) = value else {
        return Err(Error::new(Kind::Invalid, "the headers are not a JSON object"));
    };
    map.into_iter()
        .map(|(name, value)| match value {
            Value::String(text) => Ok((name, text)),
            _ => {
                Err(Error::new(Kind::Invalid, format!("the header {name:?} cannot be sent: its value is not a string")))
            }
        })
        .collect()
}

/// The columns of many events, as arrays for `unnest`.
#[derive(Default)]
pub(super) struct Columns<'a> {
    pub id: Vec<Uuid>,
    pub topic: Vec<&'a str>,
    pub key: Vec<Option<&'a str>>,
    pub kind: Vec<&'a str>,
    pub content_type: Vec<&'a str>,
    pub source: Vec<Option<&'a str>>,
    pub subject: Vec<Option<&'a str>>,
    pub tenant: Vec<Option<&'a str>>,
    pub correlation: Vec<Option<&'a str>>,
    pub causation: Vec<Option<&'a str>>,
    pub traceparent: Vec<Option<&'a str>>,
    pub tracestate: Vec<Option<&'a str>>,
    pub headers: Vec<Option<Value>>,
    pub time: Vec<DateTime<Utc>>,
}

impl<'a> Columns<'a> {
    pub fn of(events: impl Iterator<Item = &'a Event>) -> Self {
        let mut columns = Self::default();
        for event in events {
            columns.id.push(event.id);
            columns.topic.push(&event.topic);
            columns.key.push(event.key.as_deref());
            columns.kind.push(&event.kind);
            columns.content_type.push(&event.content_type);
            columns.source.push(event.source.as_deref());
            columns.subject.push(event.subject.as_deref());
            columns.tenant.push(event.tenant.as_deref());
            columns.correlation.push(event.correlation.as_deref());
            columns.causation.push(event.causation.as_deref());
            columns.traceparent.push(event.traceparent.as_deref());
            columns.tracestate.push(event.tracestate.as_deref());
            columns.headers.push(headers_json(&event.headers));
            columns.time.push(event.time);
        }
        columns
    }
}

/// The column `headers`: NULL when there are none.
pub(super) fn headers_json(headers: &BTreeMap<String, String>) -> Option<Value> {
    let json = || headers.iter().map(|(name, value)| (name.clone(), Value::String(value.clone()))).collect();
    (!headers.is_empty()).then(json)
}
