//! An event as columns: the same sixteen, in the same order, in the outbox, the side table and the embedded broker's log.

use std::collections::BTreeMap;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use sqlx::mysql::{MySql, MySqlArguments, MySqlRow};
use sqlx::query::Query;
use sqlx::{Decode, Row as _, Type};
use uuid::Uuid;

use crate::error::{Error, Kind, Result};
use crate::event::{Event, Text, Wire};
use crate::source::Row;

/// The columns of an event, as a literal for `concat!`.
macro_rules! event_columns {
    () => {
        "event_id, topic, `key`, type, payload, payload_bytes, content_type, source, subject, tenant, correlation, \
         causation, traceparent, tracestate, headers, created_at"
    };
}
pub(super) use event_columns;

/// How many they are.
const COUNT: usize = 16;
/// Queries select the row's number first, then the event, `key` being its third column.
const KEY: usize = 3;

/// Rows per statement when many are inserted, largest first. Few sizes, so that each statement is prepared once.
const CHUNKS: [usize; 3] = [128, 16, 1];
/// Payloads of one statement; far below any server's max_allowed_packet, which must hold the largest event in any case.
const CHUNK_BYTES_MAX: usize = 1024 * 1024;
/// MariaDB's JSON functions give up below this depth, and take deeper JSON for invalid.
const JSON_DEPTH_MAX: usize = 30;

/// How many of these events the next statement takes.
pub(super) fn chunk<'a>(events: impl Iterator<Item = &'a Event> + Clone) -> usize {
    let count = events.clone().count();
    let fits = |rows: &usize| {
        *rows <= count && events.clone().take(*rows).map(|event| event.payload.len()).sum::<usize>() <= CHUNK_BYTES_MAX
    };
    CHUNKS.into_iter().find(fits).unwrap_or(1)
}

/// Whether one statement takes them all.
pub(super) fn is_one_chunk(events: &[Event]) -> bool {
    chunk(events.iter()) == events.len()
}

/// An `INSERT` of so many rows, for a table with `extra` columns in front of the event's.
pub(super) fn insert_statement(table: &str, extra: &[&str], rows: usize) -> String {
    let mut columns = extra.to_vec();
    columns.push(event_columns!());
    let row = format!("({})", super::marks(extra.len() + COUNT));
    format!("INSERT INTO {table} ({}) VALUES {}", columns.join(", "), vec![row.as_str(); rows].join(", "))
}

/// Binds the sixteen values.
pub(super) fn bind<'q>(query: Query<'q, MySql, MySqlArguments>, event: &Event) -> Query<'q, MySql, MySqlArguments> {
    // A map of strings always becomes JSON.
    let headers = (!event.headers.is_empty()).then(|| serde_json::to_string(&event.headers).unwrap_or_default());
    // Text, so that people and the server's JSON functions can read it.
    let text = std::str::from_utf8(&event.payload).ok().filter(|text| event.is_json() && depth(text) <= JSON_DEPTH_MAX);
    query
        .bind(event.id.hyphenated().to_string())
        .bind(event.topic.to_string())
        .bind(event.key.as_deref().map(str::to_owned))
        .bind(event.kind.to_string())
        .bind(text.map(str::to_owned))
        .bind(text.is_none().then(|| event.payload.to_vec()))
        .bind(event.content_type.to_string())
        .bind(event.source.as_deref().map(str::to_owned))
        .bind(event.subject.as_deref().map(str::to_owned))
        .bind(event.tenant.as_deref().map(str::to_owned))
        .bind(event.correlation.as_deref().map(str::to_owned))
        .bind(event.causation.as_deref().map(str::to_owned))
        .bind(event.traceparent.as_deref().map(str::to_owned))
        .bind(event.tracestate.as_deref().map(str::to_owned))
        .bind(headers)
        .bind(event.time.naive_utc())
}

/// How deep this JSON is.
fn depth(json: &str) -> usize {
    let (mut now, mut deepest) = (0usize, 0);
    let (mut is_text, mut is_escaped) = (false, false);
    for byte in json.bytes() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = is_text,
            b'"' => is_text = !is_text,
            b'{' | b'[' if !is_text => now += 1,
            b'}' | b']' if !is_text => now = now.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(now);
    }
    deepest
}

/// Reads `id, <event columns>, …`. A row that is no event is still a row.
pub(super) fn read_row(row: &MySqlRow) -> Result<Row, sqlx::Error> {
    let key: Option<&str> = row.try_get(KEY)?;
    Ok(Row { id: row.try_get(0)?, key: key.map(Text::from), event: read_event(row) })
}

/// Reads the event of `id, <event columns>, …`.
pub(super) fn read_event(row: &MySqlRow) -> Result<Event> {
    let mut values = Values { row, next: 1 };
    let id: &str = values.take("event_id")?;
    Ok(Event {
        id: Uuid::try_parse(id).map_err(|_| values.unreadable("event_id"))?,
        topic: values.text("topic")?,
        key: values.optional_text("key")?,
        kind: values.text("type")?,
        payload: match (values.take::<Option<String>>("payload")?, values.take::<Option<Vec<u8>>>("payload_bytes")?) {
            (Some(text), _) => Bytes::from(text),
            (None, bytes) => Bytes::from(bytes.unwrap_or_default()),
        },
        content_type: values.text("content_type")?,
        source: values.optional_text("source")?,
        subject: values.optional_text("subject")?,
        tenant: values.optional_text("tenant")?,
        correlation: values.optional_text("correlation")?,
        causation: values.optional_text("causation")?,
        traceparent: values.optional_text("traceparent")?,
        tracestate: values.optional_text("tracestate")?,
        headers: match values.take::<Option<String>>("headers")? {
            Some(text) => headers(&text).ok_or_else(|| values.unreadable("headers"))?,
            None => BTreeMap::new(),
        },
        time: values.take::<DateTime<Utc>>("created_at")?,
        wire: Wire::default(),
    })
}

/// Plain SQL may write numbers and booleans as header values; they travel as their text.
fn headers(text: &str) -> Option<BTreeMap<String, String>> {
    let values: BTreeMap<String, serde_json::Value> = serde_json::from_str(text).ok()?;
    let text_of = |value| match value {
        serde_json::Value::String(text) => Some(text),
        serde_json::Value::Number(number) => Some(number.to_string()),
        serde_json::Value::Bool(is) => Some(is.to_string()),
        _ => None,
    };
    values.into_iter().map(|(name, value)| Some((name, text_of(value)?))).collect()
}

/// Walks over the columns of a row, naming what cannot be read, never its value.
struct Values<'r> {
    row: &'r MySqlRow,
    next: usize,
}

impl<'r> Values<'r> {
    fn take<T: Decode<'r, MySql> + Type<MySql>>(&mut self, name: &str) -> Result<T> {
        let index = self.next;
        self.next += 1;
        self.row.try_get(index).map_err(|_| self.unreadable(name))
    }

    fn text(&mut self, name: &str) -> Result<Text> {
        Ok(Text::from(self.take::<&str>(name)?))
    }

    fn optional_text(&mut self, name: &str) -> Result<Option<Text>> {
        Ok(self.take::<Option<&str>>(name)?.map(Text::from))
    }

    fn unreadable(&self, name: &str) -> Error {
        let id = self.row.try_get::<i64, _>(0).unwrap_or_default();
        Error::new(Kind::Corrupt, format!("the column {name} of row {id} cannot be understood"))
    }
}

#[cfg(test)]
mod tests {
    use super::depth;

    #[test]
    fn brackets_in_texts_are_no_depth() {
        assert_eq!(depth(r#"{"a": [1, {"b": 2}], "c": []}"#), 3);
        assert_eq!(depth(r#"["[[", "\"[", "\\", [1]]"#), 2);
        assert_eq!(depth(&format!("{}\"]]]]\"{}", "[".repeat(40), "]".repeat(40))), 40);
    }
}
