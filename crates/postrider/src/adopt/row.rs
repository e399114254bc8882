//! From the columns of a row to an event.

use std::collections::BTreeMap;
use std::fmt;

use bytes::Bytes;
use chrono::{DateTime, NaiveDateTime, Utc};
use serde_json::Value;

use super::{Format, Mapping};
use crate::error::{Error, Kind, Result};
use crate::event::Event;

/// A locked row: its columns as text, those that are null left out.
#[derive(Clone, PartialEq, Eq)]
pub struct AdoptedRow {
    /// The primary key.
    pub id: String,
    /// The payload; `None` when it is null.
    pub payload: Option<Bytes>,
    /// The other columns.
    pub values: BTreeMap<String, String>,
    /// How often it was tried.
    pub attempts: u32,
    /// How often it may be tried, if the row says so.
    pub attempts_max: Option<u32>,
}

/// Shows no value, so that a row may stand in a log line.
impl fmt::Debug for AdoptedRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdoptedRow").field("id", &self.id).field("attempts", &self.attempts).finish_non_exhaustive()
    }
}

impl AdoptedRow {
    /// A row as it was read; `side_attempts` count where the table has no column for attempts.
    #[allow(dead_code)] // unused when no store is on
    pub(crate) fn new(
        mapping: &Mapping,
        payload: Option<Bytes>,
        values: BTreeMap<String, String>,
        side_attempts: u32,
    ) -> Self {
        let number = |column: &Option<String>| {
            column.as_ref().and_then(|column| values.get(column)).and_then(|text| text.parse().ok())
        };
        let attempts = match &mapping.attempts {
            Some(_) => number(&mapping.attempts).unwrap_or_default(),
            None => side_attempts,
        };
        let attempts_max = number(&mapping.attempts_max);
        let id = values.get(&mapping.id).cloned().unwrap_or_default();
        Self { id, payload, values, attempts, attempts_max }
    }

    /// The key whose order counts.
    pub(crate) fn key(&self, mapping: &Mapping) -> Option<&str> {
        let column = mapping.key.as_ref()?;
        self.values.get(column).map(String::as_str).filter(|key| !key.is_empty())
    }

    /// The event, or why it is none.
    pub(super) fn event(&self, mapping: &Mapping, source: &str) -> Result<Event> {
        let Some(payload) = &self.payload else {
            return Err(Error::new(Kind::Invalid, format!("the payload (column {:?}) is null", mapping.payload)));
        };
        let topic = mapping.topic.fill("topic", &self.values)?;
        let kind = mapping.kind.fill("type", &self.values)?;
        let message_id = mapping.message_id.fill("message id", &self.values)?;
        let mut builder = Event::builder(topic, kind)
            .source(source)
            .message_id(message_id)
            .payload(mapping.content_type.as_str(), payload.clone());
        if let Some(key) = self.key(mapping) {
            builder = builder.key(key);
        }
        if let Some(tenant) = mapping.tenant.as_ref().and_then(|column| self.values.get(column)) {
            builder = builder.tenant(tenant.as_str());
        }
        if let Some(time) = mapping.time.as_ref().and_then(|column| self.values.get(column)).and_then(|text| time(text))
        {
            builder = builder.time(time);
        }
        if let Some(text) = mapping.headers.as_ref().and_then(|column| self.values.get(column)) {
            for (name, value) in headers(text)? {
                builder = builder.header(name, value);
            }
        }
        if mapping.format == Format::Raw {
            builder = builder.raw();
        }
        builder.build()
    }
}

/// A column of headers: a JSON object whose values are texts, numbers, true or false.
fn headers(text: &str) -> Result<Vec<(String, String)>> {
    let wrong = || Error::new(Kind::Invalid, "the headers are not a JSON object of texts and numbers");
    let Ok(Value::Object(object)) = serde_json::from_str(text) else { return Err(wrong()) };
    let mut headers = Vec::new();
    for (name, value) in object {
        match value {
            Value::String(text) => headers.push((name, text)),
            Value::Number(number) => headers.push((name, number.to_string())),
            Value::Bool(flag) => headers.push((name, flag.to_string())),
            Value::Null => {}
            Value::Array(_) | Value::Object(_) => return Err(wrong()),
        }
    }
    Ok(headers)
}

/// A time as databases write it; one without a zone is taken as UTC.
fn time(text: &str) -> Option<DateTime<Utc>> {
    let text = text.replacen(' ', "T", 1);
    if let Ok(time) = DateTime::parse_from_rfc3339(&text) {
        return Some(time.with_timezone(&Utc));
    }
    // PostgreSQL leaves the minutes of a whole zone away.
    if let Ok(time) = DateTime::parse_from_str(&format!("{text}00"), "%Y-%m-%dT%H:%M:%S%.f%z") {
        return Some(time.with_timezone(&Utc));
    }
    NaiveDateTime::parse_from_str(&text, "%Y-%m-%dT%H:%M:%S%.f").ok().map(|time| time.and_utc())
}

#[cfg(test)]
mod tests {
    use super::super::tests::campus;
    use super::*;

    fn row() -> AdoptedRow {
        let values = [
            ("id", "17"),
            ("routing_key", "course.enrolled"),
            ("aggregate_type", "course"),
            ("aggregate_id", "c-1"),
            ("created_at", "2026-11-16 07:00:00.25+00"),
        ];
        AdoptedRow {
            id: "17".to_owned(),
            payload: Some(Bytes::from_static(b"{\"a\": 1}")),
            values: values.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
            attempts: 0,
            attempts_max: None,
        }
    }

    #[test]
    fn a_row_becomes_an_event_with_a_stable_id() {
        let event = row().event(&campus(), "campus.public.outbox_events").unwrap();
        assert_eq!((event.topic(), event.key(), &*event.message_id()), ("course.enrolled", Some("c-1"), "outbox-17"));
        assert_eq!(event.time().to_rfc3339(), "2026-11-16T07:00:00.250+00:00");
        assert_eq!(event.payload().as_ref(), b"{\"a\": 1}");
        assert_eq!(event.id(), row().event(&campus(), "campus.public.outbox_events").unwrap().id());
        let elsewhere = row().event(&campus(), "shop.public.outbox_events").unwrap();
        assert_ne!(event.id(), elsewhere.id(), "two tables count their rows alike");
    }

    #[test]
    fn what_is_wrong_with_a_row_is_named() {
        let mut null = row();
        null.payload = None;
        assert!(null.event(&campus(), "s").unwrap_err().to_string().contains("\"payload\""));
        let mut topicless = row();
        topicless.values.remove("routing_key");
        assert!(topicless.event(&campus(), "s").unwrap_err().to_string().contains("\"routing_key\""));
        let mut broken = row();
        broken.payload = Some(Bytes::from_static(b"{"));
        assert_eq!(broken.event(&campus(), "s").unwrap_err().kind(), Kind::Invalid);
        let mut keyless = row();
        keyless.values.remove("aggregate_id");
        assert_eq!(keyless.event(&campus(), "s").unwrap().key(), None);
    }

    #[test]
    fn times_are_read_as_databases_write_them() {
        for text in
            ["2026-11-16 07:00:00", "2026-11-16 07:00:00+00", "2026-11-16 09:30:00+02:30", "2026-11-16T07:00:00Z"]
        {
            assert_eq!(time(text).unwrap().to_rfc3339(), "2026-11-16T07:00:00+00:00", "{text}");
        }
        assert_eq!(time("yesterday"), None);
    }

    #[test]
    fn headers_are_texts() {
        assert_eq!(headers(r#"{"a": "b", "n": 1, "x": null}"#).unwrap().len(), 2);
        assert!(headers("[1]").is_err() && headers(r#"{"a": {}}"#).is_err());
    }
}
