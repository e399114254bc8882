//! An event as columns: the same fifteen, in the same order, in `outbox`, `parked` and `message`.

use std::collections::BTreeMap;

use bytes::Bytes;
use chrono::{DateTime, SecondsFormat, Utc};
use sqlx::query::Query;
use sqlx::sqlite::{Sqlite, SqliteArguments, SqliteRow};
use sqlx::{Decode, Row as _, Type};
use uuid::Uuid;

use crate::error::{Error, Kind, Result};
use crate::event::{Event, Text, Wire};
use crate::source::Row;

/// The columns of an event, as a literal for `concat!`.
macro_rules! event_columns {
    () => {
        "event_id, topic, key, type, content_type, source, subject, tenant, correlation, causation, traceparent, \
         tracestate, headers, created_at, payload"
    };
}
pub(super) use event_columns;

/// How many they are.
const COUNT: usize = 15;
/// Queries select the row's number first, then the event, `key` being its third column.
const KEY: usize = 3;

/// Rows per statement when many are inserted, largest first. Few sizes, so that each statement is prepared once; the
/// largest stays far below SQLite's 32,766 variables.
pub(super) const CHUNKS: [usize; 3] = [128, 16, 1];

/// `INSERT` statements for each of [`CHUNKS`], for a table with `extra` columns in front of the event's.
pub(super) fn insert_statements(table: &str, extra: &[&str]) -> [String; CHUNKS.len()] {
    let mut columns = extra.to_vec();
    columns.push(event_columns!());
    let row = format!("({})", vec!["?"; extra.len() + COUNT].join(", "));
    CHUNKS.map(|rows| {
        format!("INSERT INTO {table} ({}) VALUES {}", columns.join(", "), vec![row.as_str(); rows].join(", "))
    })
}

/// Binds the fifteen values.
pub(super) fn bind<'q>(query: Query<'q, Sqlite, SqliteArguments>, event: &Event) -> Query<'q, Sqlite, SqliteArguments> {
    // A map of strings always becomes JSON.
    let headers = (!event.headers.is_empty()).then(|| serde_json::to_string(&event.headers).unwrap_or_default());
    let query = query
        .bind(event.id.hyphenated().to_string())
        .bind(event.topic.to_string())
        .bind(event.key.as_deref().map(str::to_owned))
        .bind(event.kind.to_string())
        .bind(event.content_type.to_string())
        .bind(event.source.as_deref().map(str::to_owned))
        .bind(event.subject.as_deref().map(str::to_owned))
        .bind(event.tenant.as_deref().map(str::to_owned))
        .bind(event.correlation.as_deref().map(str::to_owned))
        .bind(event.causation.as_deref().map(str::to_owned))
        .bind(event.traceparent.as_deref().map(str::to_owned))
        .bind(event.tracestate.as_deref().map(str::to_owned))
        .bind(headers)
        .bind(event.time.to_rfc3339_opts(SecondsFormat::Micros, true));
    match std::str::from_utf8(&event.payload) {
        // Text, so that people and SQLite's JSON functions can read it.
        Ok(text) if event.is_json() => query.bind(text.to_owned()),
        _ => query.bind(event.payload.to_vec()),
    }
}

/// Reads `id, <event columns>, …`. A row that is no event is still a row.
pub(super) fn read_row(row: &SqliteRow) -> Result<Row, sqlx::Error> {
    let id: i64 = row.try_get(0)?;
    Ok(Row { id, key: text_lossy(row, KEY)?.map(Text::from), event: read_event(row) })
}

/// A text that plain SQL may have filled with something other than UTF-8. Keys are read like this: also the events of
/// such a key must wait for each other.
pub(super) fn text_lossy(row: &SqliteRow, index: usize) -> Result<Option<String>, sqlx::Error> {
    let bytes: Option<&[u8]> = row.try_get(index)?;
    Ok(bytes.map(|bytes| String::from_utf8_lossy(bytes).into_owned()))
}

/// Reads the event of `id, <event columns>, …`.
pub(super) fn read_event(row: &SqliteRow) -> Result<Event> {
    let mut values = Values { row, next: 1 };
    Ok(Event {
        id: values.parsed("event_id", |text| Uuid::try_parse(text).ok())?,
        topic: values.text("topic")?,
        key: values.optional_text("key")?,
        kind: values.text("type")?,
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
        time: values.parsed("created_at", time)?,
        payload: Bytes::from(values.take::<Vec<u8>>("payload")?),
        wire: Wire::default(),
    })
}

fn time(text: &str) -> Option<DateTime<Utc>> {
    DateTime::parse_from_rfc3339(text).ok().map(|time| time.with_timezone(&Utc))
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
    row: &'r SqliteRow,
    next: usize,
}

impl<'r> Values<'r> {
    fn take<T: Decode<'r, Sqlite> + Type<Sqlite>>(&mut self, name: &str) -> Result<T> {
        let index = self.next;
        self.next += 1;
        self.row.try_get(index).map_err(|_| self.unreadable(name))
    }

    fn parsed<T>(&mut self, name: &str, parse: impl Fn(&str) -> Option<T>) -> Result<T> {
        let text: &str = self.take(name)?;
        parse(text).ok_or_else(|| self.unreadable(name))
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
