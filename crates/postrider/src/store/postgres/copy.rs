//! Rows in the binary format of `COPY … FROM STDIN`, which writes them page by page and in the order in which they are sent.

use chrono::{DateTime, Utc};
use serde_json::Value;
use uuid::Uuid;

const SIGNATURE: &[u8] = b"PGCOPY\n\xff\r\n\0";
/// The server's timestamps begin with the year 2000.
const EPOCH_MICROS: i64 = 946_684_800_000_000;
/// What stands before the text of a `jsonb`.
const JSONB_VERSION: u8 = 1;
/// A length that says NULL.
const NULL: i32 = -1;

/// Rows of one table, as they are sent.
pub(super) struct CopyRows {
    bytes: Vec<u8>,
    columns: i16,
}

impl CopyRows {
    /// No rows yet, of that many columns, with room for that many bytes.
    pub fn new(columns: i16, capacity: usize) -> Self {
        let mut bytes = Vec::with_capacity(capacity);
        bytes.extend(SIGNATURE);
        // No flags, and no extension of the header.
        bytes.extend([0; 8]);
        Self { bytes, columns }
    }

    /// Begins a row; exactly its columns must follow.
    pub fn row(&mut self) -> &mut Self {
        self.bytes.extend(self.columns.to_be_bytes());
        self
    }

    pub fn bigint(&mut self, value: i64) -> &mut Self {
        self.raw(&value.to_be_bytes())
    }

    pub fn uuid(&mut self, value: Uuid) -> &mut Self {
        self.raw(value.as_bytes())
    }

    /// A `text` or `bytea`.
    pub fn raw(&mut self, value: &[u8]) -> &mut Self {
        // What an event may weigh is far below the two gigabytes of this number.
        self.bytes.extend((value.len() as i32).to_be_bytes());
        self.bytes.extend(value);
        self
    }

    pub fn text(&mut self, value: Option<&str>) -> &mut Self {
        match value {
            Some(text) => self.raw(text.as_bytes()),
            None => self.null(),
        }
    }

    pub fn jsonb(&mut self, value: Option<&Value>) -> &mut Self {
        let Some(value) = value else { return self.null() };
        let mut bytes = vec![JSONB_VERSION];
        bytes.extend(value.to_string().bytes());
        self.raw(&bytes)
    }

    pub fn timestamptz(&mut self, value: DateTime<Utc>) -> &mut Self {
        self.bigint(value.timestamp_micros() - EPOCH_MICROS)
    }

    fn null(&mut self) -> &mut Self {
        self.bytes.extend(NULL.to_be_bytes());
        self
    }

    /// All of it, with its end.
    pub fn finish(mut self) -> Vec<u8> {
        self.bytes.extend((-1_i16).to_be_bytes());
        self.bytes
    }
}
