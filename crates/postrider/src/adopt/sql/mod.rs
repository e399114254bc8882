//! The statements for an adopted table, in both dialects. Names come from the catalogue and are quoted; words are
//! literals, so that partial indexes fit.

mod figures;
mod look;
mod mark;

use super::{Clock, ColumnKind, Mapping, State, TableInfo};
use crate::error::{Error, Kind, Result};

/// Whose SQL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// PostgreSQL.
    Postgres,
    /// MySQL and MariaDB.
    #[allow(dead_code)] // unused without the feature
    Mysql,
}

impl Dialect {
    /// A name in quotes.
    pub fn name(self, name: &str) -> String {
        match self {
            Dialect::Postgres => format!("\"{}\"", name.replace('"', "\"\"")),
            Dialect::Mysql => format!("`{}`", name.replace('`', "``")),
        }
    }

    /// A text as a literal.
    pub fn literal(self, text: &str) -> String {
        match self {
            // Backslashes are plain in standard strings, which `doctor` asks for.
            Dialect::Postgres => format!("'{}'", text.replace('\'', "''")),
            Dialect::Mysql => {
                let hex: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
                format!("_utf8mb4 0x{}", if hex.is_empty() { "00" } else { &hex })
            }
        }
    }

    fn side_table(self) -> &'static str {
        match self {
            Dialect::Postgres => "postrider.adopted",
            Dialect::Mysql => "postrider_adopted",
        }
    }

    /// The database's clock.
    fn instant(self) -> &'static str {
        match self {
            Dialect::Postgres => "clock_timestamp()",
            Dialect::Mysql => "utc_timestamp(6)",
        }
    }
}

/// A value that a statement needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bind {
    /// How often the row was tried.
    Attempts,
    /// Seconds until the next attempt.
    Delay,
    /// The error's kind.
    FailureKind,
    /// The error.
    Failure,
    /// The row's id.
    Id,
}

/// A statement with the values it needs, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Statement {
    pub sql: String,
    pub binds: Vec<Bind>,
    /// Whether it is well when it writes nothing.
    pub may_miss: bool,
}

/// Writes the statements of one table.
#[derive(Debug, Clone)]
pub(crate) struct Sql {
    pub dialect: Dialect,
    pub mapping: Mapping,
    table: String,
    id_type: String,
    id_kind: ColumnKind,
    info: TableInfo,
}

impl Sql {
    /// For a mapping that [`super::check`] has found right.
    pub fn new(dialect: Dialect, mapping: &Mapping, info: &TableInfo) -> Result<Self> {
        let Some(id) = info.column(&mapping.id) else {
            return Err(Error::new(Kind::Config, format!("{} has no column {:?}", mapping.table, mapping.id)));
        };
        let table = format!("{}.{}", dialect.name(&info.schema), dialect.name(&info.name));
        Ok(Self {
            dialect,
            table,
            id_type: id.type_name.clone(),
            id_kind: id.kind,
            mapping: mapping.clone(),
            info: info.clone(),
        })
    }

    /// What events say they come from.
    pub fn source(&self) -> String {
        let TableInfo { database, schema, name, .. } = &self.info;
        match (&self.mapping.source, self.dialect) {
            (Some(source), _) => source.clone(),
            (None, Dialect::Postgres) => format!("{database}.{schema}.{name}"),
            (None, Dialect::Mysql) => format!("{schema}.{name}"),
        }
    }

    /// How much of an error fits into its column.
    pub fn error_chars_max(&self) -> usize {
        let column = self.mapping.last_error.as_ref().and_then(|name| self.info.column(name));
        column.and_then(|column| column.chars_max).map_or(4_000, |chars| chars as usize)
    }

    #[allow(dead_code)] // unused without MySQL
    pub fn is_integer_id(&self) -> bool {
        self.id_kind == ColumnKind::Integer
    }

    fn name(&self, column: &str) -> String {
        self.dialect.name(column)
    }

    fn text(&self, column: &str) -> String {
        let is_local = self.info.column(column).is_some_and(|column| column.kind == ColumnKind::DateTime);
        if let (Clock::Zone(zone), true) = (&self.mapping.clock, is_local) {
            let (name, zone) = (self.name(column), self.dialect.literal(zone));
            return match self.dialect {
                Dialect::Postgres => format!("({name} AT TIME ZONE {zone})::text"),
                Dialect::Mysql => format!("CAST(convert_tz({name}, {zone}, '+00:00') AS CHAR)"),
            };
        }
        match self.dialect {
            Dialect::Postgres => format!("{}::text", self.name(column)),
            Dialect::Mysql => format!("CAST({} AS CHAR)", self.name(column)),
        }
    }

    fn payload(&self) -> String {
        let column = self.name(&self.mapping.payload);
        let is_bytes = self.info.column(&self.mapping.payload).is_some_and(|column| column.kind == ColumnKind::Bytes);
        match (self.dialect, is_bytes) {
            (_, true) => column,
            (Dialect::Postgres, false) => format!("convert_to({column}::text, 'UTF8')"),
            (Dialect::Mysql, false) => format!("CAST(CONVERT({column} USING utf8mb4) AS BINARY)"),
        }
    }

    /// Now, as it is compared with and written to a column.
    fn now(&self, column: &str) -> String {
        let kind = self.info.column(column).map_or(ColumnKind::Instant, |column| column.kind);
        match (self.dialect, kind, &self.mapping.clock) {
            (Dialect::Postgres, ColumnKind::DateTime, Clock::Utc) => {
                "(clock_timestamp() AT TIME ZONE 'UTC')".to_owned()
            }
            (Dialect::Postgres, ColumnKind::DateTime, Clock::Zone(zone)) => {
                format!("(clock_timestamp() AT TIME ZONE {})", self.dialect.literal(zone))
            }
            (Dialect::Mysql, ColumnKind::DateTime, Clock::Zone(zone)) => {
                format!("convert_tz(utc_timestamp(6), '+00:00', {})", self.dialect.literal(zone))
            }
            (dialect, _, _) => dialect.instant().to_owned(),
        }
    }

    /// Whether the database knows the time zone: null or an error when not.
    pub fn zone_check(&self) -> Option<String> {
        let Clock::Zone(zone) = &self.mapping.clock else { return None };
        let zone = self.dialect.literal(zone);
        Some(match self.dialect {
            Dialect::Postgres => format!("SELECT (clock_timestamp() AT TIME ZONE {zone})::text"),
            Dialect::Mysql => format!("SELECT CAST(convert_tz(utc_timestamp(6), '+00:00', {zone}) AS CHAR)"),
        })
    }

    fn later(&self, column: &str, seconds: &str) -> String {
        match self.dialect {
            Dialect::Postgres => format!("{} + {seconds}::float8 * interval '1 second'", self.now(column)),
            Dialect::Mysql => {
                format!("{} + INTERVAL CAST({seconds} * 1000000 AS SIGNED) MICROSECOND", self.now(column))
            }
        }
    }

    /// A list of ids: one array on PostgreSQL, `count` values on MySQL.
    fn ids(&self, place: usize, count: usize) -> String {
        match self.dialect {
            Dialect::Postgres => format!("= ANY (${place}::text[]::{}[])", self.id_type),
            Dialect::Mysql => format!("IN ({})", vec!["?"; count].join(", ")),
        }
    }

    /// The order of rows, as one expression list.
    fn order(&self) -> Vec<String> {
        let id = self.name(&self.mapping.id);
        match &self.mapping.order {
            Some(order) if *order != self.mapping.id => vec![self.name(order), id],
            _ => vec![id],
        }
    }

    fn order_of(&self, alias: &str) -> String {
        let columns: Vec<String> = self.order().iter().map(|column| format!("{alias}.{column}")).collect();
        format!("({})", columns.join(", "))
    }

    /// A row that is to be published, as the table says.
    pub fn pending(&self) -> String {
        let mut condition = match &self.mapping.state {
            State::Status { column, pending, .. } => {
                format!("{} = {}", self.name(column), self.dialect.literal(pending))
            }
            State::Flag { column } => format!("{} = FALSE", self.name(column)),
            State::PublishedAt => {
                let column = self.mapping.published_at.as_deref().unwrap_or_default();
                format!("{} IS NULL", self.name(column))
            }
        };
        if let (Some(attempts), Some(max)) = (&self.mapping.attempts, &self.mapping.attempts_max) {
            let (attempts, max) = (self.name(attempts), self.name(max));
            condition.push_str(&format!(" AND coalesce({attempts}, 0) < coalesce({max}, 2147483647)"));
        }
        condition
    }

    /// Every state in which a row keeps later ones of its key back, each with an index of its own.
    fn unpublished(&self) -> Vec<String> {
        match &self.mapping.state {
            State::Status { column, pending, processing, failed, .. } => {
                let words = [Some(pending), processing.as_ref(), failed.as_ref()];
                let is = |word: &String| format!("{} = {}", self.name(column), self.dialect.literal(word));
                words.into_iter().flatten().map(is).collect()
            }
            State::Flag { column } => vec![format!("{} = FALSE", self.name(column))],
            State::PublishedAt => {
                let column = self.mapping.published_at.as_deref().unwrap_or_default();
                vec![format!("{} IS NULL", self.name(column))]
            }
        }
    }

    /// The row of the side table that belongs to a row of the table.
    fn side(&self) -> String {
        let (name, id) = (self.dialect.literal(&self.mapping.name), self.name(&self.mapping.id));
        let id = match self.dialect {
            Dialect::Postgres => format!("t.{id}::text"),
            Dialect::Mysql => format!("CAST(t.{id} AS CHAR)"),
        };
        format!("s.outbox = {name} AND s.row_id = {id}")
    }

    /// Rows that may be published now.
    fn due(&self) -> String {
        let mut condition = self.pending();
        if let Some(available) = &self.mapping.available_at {
            let column = self.name(available);
            condition.push_str(&format!(" AND ({column} IS NULL OR {column} <= {})", self.now(available)));
        }
        if let Some(order) = self.nullable_order() {
            condition.push_str(&format!(" AND {} IS NOT NULL", self.name(order)));
        }
        if self.mapping.needs_side_table() {
            let (side, now, same) = (self.dialect.side_table(), self.dialect.instant(), self.side());
            condition.push_str(&format!(
                " AND NOT EXISTS (SELECT 1 FROM {side} s WHERE {same} AND (s.is_failed OR s.next_at > {now}))"
            ));
        }
        condition
    }

    /// Whether `b` has the key of another row. An empty text is no key.
    fn same_key(&self, key: &str, other: &str) -> String {
        let is_text = self.info.column(key).is_some_and(|column| column.kind == ColumnKind::Text);
        let key = self.name(key);
        match is_text {
            true => format!("b.{key} = {other}.{key} AND b.{key} <> ''"),
            false => format!("b.{key} = {other}.{key}"),
        }
    }

    /// The order with the table's name: a column alone would mean the text of the same name among the results.
    fn order_by(&self) -> String {
        self.order().iter().map(|column| format!("t.{column}")).collect::<Vec<_>>().join(", ")
    }

    /// The column of the order, when it may be null: such a row has no place among the others.
    fn nullable_order(&self) -> Option<&str> {
        let order = self.mapping.order.as_deref()?;
        self.info.column(order).filter(|column| column.is_nullable).map(|column| column.name.as_str())
    }
}
