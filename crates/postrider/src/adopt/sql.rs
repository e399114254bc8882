//! The statements for an adopted table, in both dialects. Names come from the catalogue and are quoted; words are
//! literals, so that partial indexes fit.

use super::{Clock, ColumnKind, Mapping, Part, State, TableInfo};
use crate::error::{Error, Kind, Result};
use crate::upkeep::BACKLOG_COUNT_MAX;

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

    /// The rows of a part that may be published now. A row without a key goes by its id.
    fn due_in(&self, part: Part) -> String {
        let Part { number, of } = part;
        if of <= 1 {
            return self.due();
        }
        let text = |column: &String| match self.dialect {
            // Two columns may have collations that cannot be compared.
            Dialect::Postgres => format!("t.{}::text COLLATE \"C\"", self.name(column)),
            Dialect::Mysql => format!("CAST(t.{} AS CHAR)", self.name(column)),
        };
        let id = text(&self.mapping.id);
        // An empty text is no key.
        let key =
            self.mapping.key.as_ref().map_or(id.clone(), |key| format!("coalesce(nullif({}, ''), {id})", text(key)));
        let hash = match self.dialect {
            Dialect::Postgres => format!("(hashtext({key}) & 2147483647)"),
            Dialect::Mysql => format!("crc32({key})"),
        };
        format!("{} AND {hash} % {of} = {number}", self.due())
    }

    /// The ids of rows that may be published now, not locked. MySQL locks what it sorts, not what it returns, so it is
    /// asked twice. Binds: keys to leave out, and the limit.
    #[allow(dead_code)] // unused without MySQL
    pub fn candidates(&self, part: Part, without_keys: usize) -> String {
        let (id, mut condition) = (self.text(&self.mapping.id), self.due_in(part));
        if let (Some(key), 1..) = (&self.mapping.key, without_keys) {
            let (key, places) = (self.name(key), vec!["?"; without_keys].join(", "));
            condition.push_str(&format!(" AND (t.{key} IS NULL OR CAST(t.{key} AS CHAR) NOT IN ({places}))"));
        }
        format!("SELECT {id} FROM {} t WHERE {condition} ORDER BY {} LIMIT ?", self.table, self.order_by())
    }

    /// Locks rows: the payload, the attempts of the side table, then [`Mapping::columns_read`]. Binds: on PostgreSQL the
    /// limit and keys to leave out, on MySQL the ids of `candidates`. On PostgreSQL `candidates` is how many of the oldest
    /// are looked at, 0 for all: what is locked is sorted whole, with its payload, and that is much when much waits. On MySQL
    /// the candidates are of the part already.
    pub fn lock(&self, part: Part, candidates: usize) -> String {
        let (mut condition, side) = (self.due_in(part), self.dialect.side_table());
        let (table, id, order) = (&self.table, self.name(&self.mapping.id), self.order_by());
        let (mut with, mut from) = (String::new(), format!("{table} t"));
        if self.dialect == Dialect::Postgres {
            match &self.mapping.key {
                Some(key) => {
                    let key = self.name(key);
                    condition.push_str(&format!(" AND (t.{key} IS NULL OR NOT t.{key}::text = ANY ($2::text[]))"));
                }
                None => condition.push_str(" AND $2::text[] IS NOT NULL"),
            }
            if candidates > 0 {
                // Joined, not listed: a row that another worker has just marked is looked at again with the whole list.
                // Its column has a name that no column of the table has.
                let candidate = "\"a candidate of postrider\"";
                with = format!(
                    "WITH c AS MATERIALIZED (SELECT t.{id} AS {candidate} FROM {table} t WHERE {condition} \
                     ORDER BY {order} LIMIT {candidates}) "
                );
                from.push_str(&format!(" JOIN c ON t.{id} = c.{candidate}"));
            }
            // A process that hangs, or whose machine is gone, must not hold its rows for hours.
            condition.push_str(" AND (SELECT set_config('idle_in_transaction_session_timeout', '120s', true)) <> ''");
        }
        let side_attempts = match self.mapping.needs_side_table() {
            true => format!("coalesce((SELECT s.attempts FROM {side} s WHERE {}), 0)", self.side()),
            false => "0".to_owned(),
        };
        let columns: Vec<String> = self.mapping.columns_read().iter().map(|column| self.text(column)).collect();
        let (payload, columns) = (self.payload(), columns.join(", "));
        let select = format!("{with}SELECT {payload}, {side_attempts}, {columns} FROM {from} WHERE {condition}");
        match self.dialect {
            Dialect::Postgres => format!("{select} ORDER BY {order} LIMIT $1 FOR UPDATE OF t SKIP LOCKED"),
            Dialect::Mysql => {
                let ids = self.ids(0, candidates);
                format!("{select} AND t.{id} {ids} ORDER BY {order} FOR UPDATE SKIP LOCKED")
            }
        }
    }

    /// Of the locked rows, those behind an earlier one of their key that is not among them. Binds: the last locked id, then
    /// the locked ids, twice.
    pub fn behind(&self, count: usize) -> Option<String> {
        let key = self.name(self.mapping.key.as_ref()?);
        let (table, id) = (&self.table, self.name(&self.mapping.id));
        // As a table of their own, because PostgreSQL would search a list anew for every row that it joins.
        let own = format!("unnest($2::text[]::{}[]) o(own)", self.id_type);
        let (last, is_among) = match self.dialect {
            Dialect::Postgres => {
                (format!("$1::text::{}", self.id_type), format!("EXISTS (SELECT 1 FROM {own} WHERE o.own = b.{id})"))
            }
            Dialect::Mysql => ("?".to_owned(), format!("b.{id} {}", self.ids(0, count))),
        };
        let mut needed = vec![key.clone()];
        needed.extend(self.order().into_iter().filter(|column| *column != key));
        let needed = needed.iter().map(|column| format!("b.{column}")).collect::<Vec<_>>().join(", ");
        let before: Vec<String> = self
            .unpublished()
            .iter()
            .map(|state| {
                format!(
                    "SELECT {needed} FROM {table} b WHERE {} AND {} < (SELECT {} FROM {table} l WHERE l.{id} = {last}) \
                     AND b.{key} IS NOT NULL AND NOT {is_among}",
                    qualified(state, "b"),
                    self.order_of("b"),
                    self.order_of("l").trim_matches(['(', ')']),
                )
            })
            .collect();
        let found = self.text(&self.mapping.id).replacen(&id, &format!("r.{id}"), 1);
        let is_earlier = format!(
            "{} AND {} < {}",
            self.same_key(self.mapping.key.as_deref().unwrap_or_default(), "r"),
            self.order_of("b"),
            self.order_of("r"),
        );
        let before = before.join(" UNION ALL ");
        Some(match self.dialect {
            Dialect::Postgres => format!(
                "SELECT {found} FROM {own} JOIN {table} r ON r.{id} = o.own \
                 WHERE EXISTS (SELECT 1 FROM ({before}) b WHERE {is_earlier})"
            ),
            Dialect::Mysql => format!(
                "SELECT DISTINCT {found} FROM {table} r JOIN ({before}) b ON {is_earlier} WHERE r.{id} {}",
                self.ids(0, count)
            ),
        })
    }

    /// How often the ids are bound in [`Sql::behind`] on MySQL, after the last one each.
    #[allow(dead_code)] // unused without MySQL
    pub fn behind_parts(&self) -> usize {
        self.unpublished().len()
    }

    /// Marks rows as published. Bind: their ids.
    pub fn publish(&self, count: usize) -> String {
        let mut set = match &self.mapping.state {
            State::Status { column, published, .. } => {
                vec![format!("{} = {}", self.name(column), self.dialect.literal(published))]
            }
            State::Flag { column } => vec![format!("{} = TRUE", self.name(column))],
            State::PublishedAt => Vec::new(),
        };
        for column in [&self.mapping.published_at, &self.mapping.updated_at].into_iter().flatten() {
            set.push(format!("{} = {}", self.name(column), self.now(column)));
        }
        let id = self.name(&self.mapping.id);
        format!("UPDATE {} SET {} WHERE {id} {}", self.table, set.join(", "), self.ids(1, count))
    }

    /// Forgets what the side table knows of rows. Bind: their ids as text.
    pub fn forget(&self, count: usize) -> Option<String> {
        let list = match self.dialect {
            Dialect::Postgres => "= ANY ($1::text[])".to_owned(),
            Dialect::Mysql => format!("IN ({})", vec!["?"; count].join(", ")),
        };
        let (side, name) = (self.dialect.side_table(), self.dialect.literal(&self.mapping.name));
        self.mapping.needs_side_table().then(|| format!("DELETE FROM {side} WHERE outbox = {name} AND row_id {list}"))
    }

    fn place(&self, binds: &mut Vec<Bind>, bind: Bind) -> String {
        binds.push(bind);
        match self.dialect {
            Dialect::Postgres => format!("${}", binds.len()),
            Dialect::Mysql => "?".to_owned(),
        }
    }

    /// Writes a failure into the columns that the table has for it.
    pub fn fail(&self, is_failed: bool) -> Option<Statement> {
        let (mapping, mut binds, mut set) = (&self.mapping, Vec::new(), Vec::new());
        if let Some(attempts) = &mapping.attempts {
            let place = self.place(&mut binds, Bind::Attempts);
            let column = self.name(attempts);
            match &mapping.attempts_max {
                // Nothing else in this table says that a row was given up.
                Some(max) if is_failed => set.push(format!("{column} = greatest({place}, {})", self.name(max))),
                _ => set.push(format!("{column} = {place}")),
            }
        }
        if let Some(available) = &mapping.available_at {
            let place = self.place(&mut binds, Bind::Delay);
            set.push(format!("{} = {}", self.name(available), self.later(available, &place)));
        }
        if let Some(last_error) = &mapping.last_error {
            let place = self.place(&mut binds, Bind::Failure);
            set.push(format!("{} = {place}", self.name(last_error)));
        }
        if let State::Status { column, failed: Some(failed), .. } = &mapping.state
            && is_failed
        {
            set.push(format!("{} = {}", self.name(column), self.dialect.literal(failed)));
        }
        if set.is_empty() {
            return None;
        }
        if let Some(updated_at) = &mapping.updated_at {
            set.push(format!("{} = {}", self.name(updated_at), self.now(updated_at)));
        }
        let place = self.place(&mut binds, Bind::Id);
        let place = match self.dialect {
            Dialect::Postgres => format!("{place}::text::{}", self.id_type),
            Dialect::Mysql => place,
        };
        let sql = format!("UPDATE {} SET {} WHERE {} = {place}", self.table, set.join(", "), self.name(&mapping.id));
        Some(Statement { sql, binds, may_miss: false })
    }

    /// Writes a failure into the side table. A row whose own table says that it was given up is forgotten there: when a
    /// person puts it back, nothing else must keep it.
    pub fn fail_aside(&self, is_failed: bool) -> Option<Statement> {
        if !self.mapping.needs_side_table() {
            return None;
        }
        let mut binds = Vec::new();
        let (side, name) = (self.dialect.side_table(), self.dialect.literal(&self.mapping.name));
        if is_failed && self.mapping.can_fail() {
            let id = self.place(&mut binds, Bind::Id);
            let sql = format!("DELETE FROM {side} WHERE outbox = {name} AND row_id = {id}");
            return Some(Statement { sql, binds, may_miss: true });
        }
        let (now, is_failed) = (self.dialect.instant(), if is_failed { "TRUE" } else { "FALSE" });
        let id = self.place(&mut binds, Bind::Id);
        let attempts = self.place(&mut binds, Bind::Attempts);
        let delay = self.place(&mut binds, Bind::Delay);
        let kind = self.place(&mut binds, Bind::FailureKind);
        let failure = self.place(&mut binds, Bind::Failure);
        let next_at = match self.dialect {
            Dialect::Postgres => format!("{now} + {delay}::float8 * interval '1 second'"),
            Dialect::Mysql => format!("{now} + INTERVAL CAST({delay} * 1000000 AS SIGNED) MICROSECOND"),
        };
        let columns = "outbox, row_id, attempts, next_at, is_failed, failure_kind, failure";
        let values = format!("{name}, {id}, {attempts}, {next_at}, {is_failed}, {kind}, {failure}");
        let update = ["attempts", "next_at", "is_failed", "failure_kind", "failure"];
        let sql = match self.dialect {
            Dialect::Postgres => {
                let set: Vec<String> = update.iter().map(|column| format!("{column} = excluded.{column}")).collect();
                format!(
                    "INSERT INTO {side} ({columns}) VALUES ({values}) ON CONFLICT (outbox, row_id) DO UPDATE SET {}",
                    set.join(", ")
                )
            }
            Dialect::Mysql => {
                let set: Vec<String> = update.iter().map(|column| format!("{column} = VALUES({column})")).collect();
                format!("INSERT INTO {side} ({columns}) VALUES ({values}) ON DUPLICATE KEY UPDATE {}", set.join(", "))
            }
        };
        Some(Statement { sql, binds, may_miss: false })
    }

    /// Locks rows that a worker of the service took and left: their ids. Bind: seconds.
    pub fn abandoned(&self) -> Option<String> {
        let State::Status { column, processing: Some(processing), .. } = &self.mapping.state else { return None };
        let updated_at = self.mapping.updated_at.as_ref()?;
        let (status, changed, now) = (self.name(column), self.name(updated_at), self.now(updated_at));
        let since = match self.dialect {
            Dialect::Postgres => format!("{now} - $1::float8 * interval '1 second'"),
            Dialect::Mysql => format!("{now} - INTERVAL ? SECOND"),
        };
        Some(format!(
            "SELECT {} FROM {} WHERE {status} = {} AND {changed} < {since} LIMIT 1000 FOR UPDATE SKIP LOCKED",
            self.text(&self.mapping.id),
            self.table,
            self.dialect.literal(processing),
        ))
    }

    /// Gives rows back. Bind: their ids.
    pub fn free(&self, count: usize) -> Option<String> {
        let State::Status { column, pending, .. } = &self.mapping.state else { return None };
        let updated_at = self.mapping.updated_at.as_ref()?;
        Some(format!(
            "UPDATE {} SET {} = {}, {} = {} WHERE {} {}",
            self.table,
            self.name(column),
            self.dialect.literal(pending),
            self.name(updated_at),
            self.now(updated_at),
            self.name(&self.mapping.id),
            self.ids(1, count),
        ))
    }

    /// Counts up to [`BACKLOG_COUNT_MAX`] rows of a state.
    fn count(&self, condition: &str) -> String {
        format!(
            "SELECT count(*) FROM (SELECT 1 AS one FROM {} WHERE {condition} LIMIT {BACKLOG_COUNT_MAX}) c",
            self.table
        )
    }

    /// Counts what waits.
    pub fn count_pending(&self) -> String {
        self.count(&self.pending())
    }

    /// Counts what was given up, if that is found without looking at every row.
    pub fn count_failed(&self) -> Option<String> {
        let State::Status { column, failed: Some(failed), .. } = &self.mapping.state else { return None };
        let is_indexed =
            self.info.indexes.iter().any(|index| index.condition.is_none() && index.columns.first() == Some(column));
        let condition = format!("{} = {}", self.name(column), self.dialect.literal(failed));
        is_indexed.then(|| self.count(&condition))
    }

    /// What the side table knows: how many are tried again, how many were given up.
    pub fn count_aside(&self) -> Option<String> {
        let (side, name) = (self.dialect.side_table(), self.dialect.literal(&self.mapping.name));
        self.mapping.needs_side_table().then(|| {
            format!(
                "SELECT count(CASE WHEN is_failed THEN NULL ELSE 1 END), count(CASE WHEN is_failed THEN 1 END) \
                 FROM {side} WHERE outbox = {name}"
            )
        })
    }

    /// The age in seconds of the oldest row that waits.
    pub fn oldest(&self) -> Option<String> {
        let time = self.mapping.time.as_ref()?;
        let (column, now) = (self.name(time), self.now(time));
        let age = match self.dialect {
            Dialect::Postgres => format!("extract(epoch FROM {now} - {column})::bigint"),
            Dialect::Mysql => format!("timestampdiff(SECOND, {column}, {now})"),
        };
        let order = self.order().join(", ");
        Some(format!("SELECT {age} FROM {} WHERE {} ORDER BY {order} LIMIT 1", self.table, self.pending()))
    }

    /// The column of the order, when it may be null: such a row has no place among the others.
    fn nullable_order(&self) -> Option<&str> {
        let order = self.mapping.order.as_deref()?;
        self.info.column(order).filter(|column| column.is_nullable).map(|column| column.name.as_str())
    }

    /// Counts rows that wait and have no place in the order.
    pub fn count_orderless(&self) -> Option<String> {
        let order = self.name(self.nullable_order()?);
        Some(self.count(&format!("{} AND {order} IS NULL", self.pending())))
    }

    /// A row whose state is none of those that the mapping names.
    pub fn unknown_state(&self) -> Option<String> {
        let (column, words) = match &self.mapping.state {
            State::Status { column, pending, processing, published, failed } => {
                let words = [Some(pending), processing.as_ref(), Some(published), failed.as_ref()];
                let words: Vec<String> = words.into_iter().flatten().map(|word| self.dialect.literal(word)).collect();
                (column, words.join(", "))
            }
            State::Flag { column } => (column, "TRUE, FALSE".to_owned()),
            State::PublishedAt => return None,
        };
        let name = self.name(column);
        Some(format!(
            "SELECT coalesce({}, 'null'), count(*) FROM {} WHERE {name} IS NULL OR {name} NOT IN ({words}) GROUP BY 1 LIMIT 10",
            self.text(column),
            self.table
        ))
    }

    /// The statement that creates the index that a look needs.
    pub fn index(&self) -> String {
        let order = self.order();
        let name = format!("{}_unpublished", self.info.name);
        match self.dialect {
            Dialect::Postgres => format!(
                "CREATE INDEX CONCURRENTLY {} ON {} ({}) WHERE {}",
                self.name(&name),
                self.table,
                order.join(", "),
                self.unpublished().first().cloned().unwrap_or_default(),
            ),
            Dialect::Mysql => {
                let state = match &self.mapping.state {
                    State::Status { column, .. } | State::Flag { column } => column,
                    State::PublishedAt => self.mapping.published_at.as_ref().unwrap_or(&self.mapping.id),
                };
                format!(
                    "CREATE INDEX {} ON {} ({}, {})",
                    self.name(&name),
                    self.table,
                    self.name(state),
                    order.join(", ")
                )
            }
        }
    }
}

/// The condition on another name of the table.
fn qualified(condition: &str, alias: &str) -> String {
    format!("{alias}.{condition}")
}
