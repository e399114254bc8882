//! A mapping against the catalogue.

use super::sql::{Dialect, Sql};
use super::{Clock, ColumnKind, Mapping, State, TableInfo};
use crate::doctor::{Finding, Severity};
use crate::error::{Error, Kind};

/// What is wrong with a mapping, or slow. No error among the findings means that it can be relayed.
pub fn check(mapping: &Mapping, info: &TableInfo, is_mysql: bool) -> Vec<Finding> {
    let dialect = if is_mysql { Dialect::Mysql } else { Dialect::Postgres };
    let mut check = Check { name: format!("outbox.{}", mapping.name), mapping, info, findings: Vec::new() };
    check.primary_key();
    check.columns();
    check.state();
    check.rights();
    check.clock();
    check.order(dialect);
    if check.findings.iter().all(|finding| finding.severity != Severity::Error) {
        check.index(dialect);
    }
    if check.findings.is_empty() {
        check.findings.push(Finding::ok(&check.name, format!("{} fits the mapping", mapping.table)));
    }
    check.findings
}

/// Rows in a state that the mapping does not name.
#[allow(dead_code)] // unused when no store is on
pub(crate) fn unknown_word(name: &str, word: &str, rows: i64) -> Finding {
    Finding::error(
        name,
        format!("{rows} rows are in the state {word:?}, which the mapping does not name; they are not relayed"),
        "correct the rows, or the words of the mapping",
    )
}

/// Rows that have no place in the order, if there are any.
#[allow(dead_code)] // unused when no store is on
pub(crate) fn orderless(name: &str, rows: i64) -> Option<Finding> {
    (rows > 0).then(|| {
        let message = format!("{rows} rows that wait have no value in the column of the order; they are not relayed");
        Finding::error(name, message, "fill the column, and give it NOT NULL")
    })
}

/// The error of rows that were to be marked and were not.
#[allow(dead_code)] // unused when no store is on
pub(crate) fn not_marked(all: usize, marked: u64) -> Error {
    Error::new(Kind::Mismatch, format!("of {all} rows only {marked} could be marked"))
        .with_remedy("look for triggers and row-level security that keep the user from updating them")
}

/// The error of a database about an adopted table: what is missing there is the service's, not ours.
#[allow(dead_code)] // unused when no store is on
pub(crate) fn table_changed(error: Error) -> Error {
    match error.kind() {
        Kind::NotMigrated => Error::new(Kind::Mismatch, error.message().to_owned())
            .with_remedy("the table has changed: look at `postrider doctor`, and correct [[outbox]]"),
        _ => error,
    }
}

/// The finest times that the databases hold: microseconds.
const SECOND_DIGITS: u32 = 6;
/// What PostgreSQL shows of defaults that do not move while a transaction, or a statement of many rows, goes on.
const TIMES_OF_TRANSACTION: [&str; 5] =
    ["now()", "current_timestamp", "localtimestamp", "transaction_timestamp()", "statement_timestamp()"];

struct Check<'a> {
    name: String,
    mapping: &'a Mapping,
    info: &'a TableInfo,
    findings: Vec<Finding>,
}

impl Check<'_> {
    fn wrong(&mut self, what: String, remedy: impl Into<String>) {
        self.findings.push(Finding::error(&self.name, what, remedy));
    }

    fn primary_key(&mut self) {
        let (table, id) = (&self.mapping.table, &self.mapping.id);
        let is_key = self.info.primary_key == [id.as_str()];
        let is_unique = self
            .info
            .indexes
            .iter()
            .any(|index| index.is_unique && index.condition.is_none() && index.columns == [id.as_str()]);
        let is_nullable = self.info.column(id).is_some_and(|column| column.is_nullable);
        match (is_key || (is_unique && !is_nullable), self.info.primary_key.is_empty()) {
            (true, _) => {}
            (false, true) => self.wrong(
                format!("{table} has no primary key, so a published row could not be told from others"),
                "give the table a primary key of one column, and name it as id",
            ),
            (false, false) => self.wrong(
                format!("id = {id:?} is not the primary key of {table} ({})", self.info.primary_key.join(", ")),
                "name the primary key as id; one of several columns cannot be adopted",
            ),
        }
    }

    /// Whether a column is there and holds what it should.
    fn column(&mut self, setting: &str, name: &str, kinds: &[ColumnKind]) {
        let Some(column) = self.info.column(name) else {
            let names: Vec<&str> = self.info.columns.iter().map(|column| column.name.as_str()).collect();
            let remedy = match names.iter().find(|other| other.eq_ignore_ascii_case(name)) {
                Some(other) => format!("write {other:?}: names count letter by letter"),
                None => format!("its columns are {}", names.join(", ")),
            };
            return self.wrong(format!("{setting} = {name:?}: {} has no such column", self.mapping.table), remedy);
        };
        if !kinds.is_empty() && !kinds.contains(&column.kind) {
            let what = format!("{setting} = {name:?} is of type {}, which cannot be used for it", column.type_name);
            self.wrong(what, "name another column, or leave the setting out");
        }
    }

    fn columns(&mut self) {
        use ColumnKind::{Boolean, Bytes, DateTime, Instant, Integer, Json, Text, Uuid};
        let mapping = self.mapping;
        self.column("id", &mapping.id, &[Integer, Uuid, Text]);
        self.column("payload", &mapping.payload, &[Json, Text, Bytes]);
        let optional: [(&str, &Option<String>, &[ColumnKind]); 11] = [
            ("order", &mapping.order, &[Integer, Uuid, Text, Instant, DateTime]),
            ("key", &mapping.key, &[Integer, Uuid, Text]),
            ("headers", &mapping.headers, &[Json, Text]),
            ("tenant", &mapping.tenant, &[Integer, Uuid, Text]),
            ("time", &mapping.time, &[Instant, DateTime]),
            ("published_at", &mapping.published_at, &[Instant, DateTime]),
            ("updated_at", &mapping.updated_at, &[Instant, DateTime]),
            ("attempts", &mapping.attempts, &[Integer]),
            ("attempts_max", &mapping.attempts_max, &[Integer]),
            ("available_at", &mapping.available_at, &[Instant, DateTime]),
            ("last_error", &mapping.last_error, &[Text]),
        ];
        for (setting, column, kinds) in optional {
            if let Some(column) = column {
                self.column(setting, column, kinds);
            }
        }
        let templates = [("topic", &mapping.topic), ("type", &mapping.kind), ("message_id", &mapping.message_id)];
        for (setting, template) in templates {
            for column in template.columns() {
                self.column(setting, column, &[Integer, Uuid, Text, Boolean]);
            }
        }
    }

    fn state(&mut self) {
        match &self.mapping.state {
            State::Status { column, pending, processing, published, failed } => {
                self.column("status", column, &[ColumnKind::Text]);
                let words = [Some(pending), processing.as_ref(), Some(published), failed.as_ref()];
                self.words(column, &words.into_iter().flatten().collect::<Vec<_>>());
                if processing.is_some() && self.mapping.updated_at.is_none() {
                    self.findings.push(Finding::warning(
                        &self.name,
                        "rows that a worker has taken and left stay where they are, and their keys behind them",
                        "name the column that says when a row was changed as updated_at",
                    ));
                }
            }
            State::Flag { column } => self.column("published", column, &[ColumnKind::Boolean]),
            State::PublishedAt if self.mapping.published_at.is_none() => self.wrong(
                "nothing says whether a row is published".to_owned(),
                "name a column as status, published or published_at",
            ),
            State::PublishedAt => {}
        }
        let is_number = self.info.column(&self.mapping.id).is_some_and(|id| id.kind == ColumnKind::Integer);
        if self.mapping.order.is_none() && !is_number {
            self.wrong(
                format!("{:?} is no number, so it gives no order", self.mapping.id),
                "name the column that rows are ordered by as order, such as the time of their creation",
            );
        }
    }

    /// Words that cannot be written, or that mean two things, would let rows be published again and again.
    fn words(&mut self, column: &str, words: &[&String]) {
        let allowed = self.info.column(column).map(|column| column.words.clone()).unwrap_or_default();
        for (n, word) in words.iter().enumerate() {
            if !allowed.is_empty() && !allowed.contains(word) {
                let what = format!("the status {word:?} is not among those that {column:?} allows");
                self.wrong(what, format!("they are {}", allowed.join(", ")));
            }
            if words[..n].contains(word) {
                self.wrong(format!("the status {word:?} stands for two states"), "give each state its own word");
            }
        }
    }

    fn rights(&mut self) {
        if !self.info.missing_rights.is_empty() {
            let rights = self.info.missing_rights.join(", ");
            let table = &self.mapping.table;
            self.wrong(format!("the user lacks {rights} on {table}"), format!("GRANT {rights} ON {table} TO the user"));
        }
    }

    /// Times without a zone mean what the mapping says.
    fn clock(&mut self) {
        let times = [&self.mapping.available_at, &self.mapping.updated_at];
        let is_plain =
            |name: &&String| self.info.column(name).is_some_and(|column| column.kind == ColumnKind::DateTime);
        let Some(name) = times.into_iter().flatten().find(is_plain).cloned() else { return };
        if self.mapping.clock == Clock::Utc && !name.to_lowercase().ends_with("utc") {
            self.findings.push(Finding::warning(
                &self.name,
                format!("{name:?} has no time zone and is taken as UTC"),
                "if the service writes local times, set clock to its time zone, such as \"Asia/Ho_Chi_Minh\"",
            ));
        }
    }

    /// Rows of one key with the same time come in the order of their ids, which is none where ids are no numbers.
    fn order(&mut self, dialect: Dialect) {
        let (Some(order), Some(_)) = (&self.mapping.order, &self.mapping.key) else { return };
        if self.info.column(&self.mapping.id).is_none_or(|id| id.kind == ColumnKind::Integer) {
            return;
        }
        let Some((column, digits)) = self.info.column(order).and_then(|column| Some((column, column.second_digits?)))
        else {
            return;
        };
        let default = column.default.as_deref().unwrap_or_default().to_lowercase();
        let is_of_transaction =
            dialect == Dialect::Postgres && TIMES_OF_TRANSACTION.iter().any(|time| default.contains(time));
        let why = match (digits, is_of_transaction) {
            (0, _) => "holds whole seconds".to_owned(),
            (..SECOND_DIGITS, _) => format!("holds {digits} digits of a second"),
            (_, true) => format!("is the same for all rows of a transaction (default {default})"),
            (_, false) => return,
        };
        let type_name = match dialect {
            Dialect::Postgres => "a timestamp(6) with the default clock_timestamp()",
            Dialect::Mysql => "a DATETIME(6) with the default CURRENT_TIMESTAMP(6)",
        };
        self.findings.push(Finding::warning(
            &self.name,
            format!("order = {order:?} {why}: rows of a key with the same time have no order among themselves"),
            format!("name a number that rises with every insert as order, or make the column {type_name}"),
        ));
    }

    /// A look must not read rows that were published long ago.
    fn index(&mut self, dialect: Dialect) {
        let Ok(sql) = Sql::new(dialect, self.mapping, self.info) else { return };
        let order = self.mapping.order.as_ref().unwrap_or(&self.mapping.id);
        let state = match &self.mapping.state {
            State::Status { column, .. } | State::Flag { column } => Some(column),
            State::PublishedAt => self.mapping.published_at.as_ref(),
        };
        let Some(state) = state else { return };
        let is_partial =
            |condition: &Option<String>| condition.as_ref().is_some_and(|text| text.contains(state.as_str()));
        let is_good = self.info.indexes.iter().any(|index| {
            let first = index.columns.first();
            let by_state = first == Some(state) && index.columns.get(1) == Some(order);
            by_state || (is_partial(&index.condition) && first == Some(order))
        });
        let is_found =
            self.info.indexes.iter().any(|index| index.columns.first() == Some(state) || is_partial(&index.condition));
        let slow = match (is_good, is_found) {
            (true, _) => return,
            (false, true) => "sorts everything that waits",
            (false, false) => "reads the whole table",
        };
        self.findings.push(Finding::warning(
            &self.name,
            format!("no index of {} fits, so every look {slow}", self.mapping.table),
            sql.index(),
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{campus, campus_table};
    use super::*;

    fn errors(mapping: &Mapping, info: &TableInfo) -> Vec<String> {
        let wrong = |finding: &Finding| finding.severity == Severity::Error;
        let said = |finding: Finding| format!("{} | {}", finding.message, finding.remedy);
        check(mapping, info, false).into_iter().filter(wrong).map(said).collect()
    }

    #[test]
    fn a_mapping_that_fits_has_no_error() {
        assert_eq!(errors(&campus(), &campus_table()), Vec::<String>::new());
    }

    #[test]
    fn each_mistake_is_named() {
        let mut mapping = campus();
        mapping.payload = "Payload".to_owned();
        mapping.attempts = Some("last_error".to_owned());
        mapping.key = Some("nothing".to_owned());
        let errors = errors(&mapping, &campus_table()).join("\n");
        for part in
            ["write \"payload\"", "attempts = \"last_error\" is of type", "key = \"nothing\"", "its columns are"]
        {
            assert!(errors.contains(part), "{part} is missing in {errors}");
        }
    }

    #[test]
    fn a_table_needs_a_primary_key_and_rights() {
        let mut info = campus_table();
        info.primary_key.clear();
        info.indexes.clear();
        info.missing_rights = vec!["UPDATE".to_owned()];
        let errors = errors(&campus(), &info).join("\n");
        assert!(errors.contains("no primary key") && errors.contains("lacks UPDATE"), "{errors}");
    }

    #[test]
    fn an_order_by_a_time_that_cannot_tell_rows_apart_is_named() {
        let mut mapping = campus();
        mapping.order = Some("created_at".to_owned());
        let said = |id: ColumnKind, digits: u32, default: Option<&str>, is_mysql: bool| {
            let mut info = campus_table();
            for column in &mut info.columns {
                match column.name.as_str() {
                    "id" => column.kind = id,
                    "created_at" => {
                        column.second_digits = Some(digits);
                        column.default = default.map(str::to_owned);
                    }
                    _ => {}
                }
            }
            let found = check(&mapping, &info, is_mysql).into_iter();
            found
                .filter(|finding| finding.message.starts_with("order"))
                .map(|finding| finding.message)
                .collect::<String>()
        };
        let (uuid, number) = (ColumnKind::Uuid, ColumnKind::Integer);
        assert!(said(uuid, 0, None, true).contains("whole seconds"));
        assert!(said(uuid, 3, None, false).contains("3 digits"));
        assert!(said(uuid, 6, Some("now()"), false).contains("all rows of a transaction"));
        assert!(said(uuid, 6, Some("CURRENT_TIMESTAMP"), false).contains("all rows of a transaction"));
        for fine in [
            said(number, 0, None, true),
            said(uuid, 6, None, false),
            said(uuid, 6, Some("clock_timestamp()"), false),
            said(uuid, 6, Some("current_timestamp(6)"), true),
        ] {
            assert_eq!(fine, "");
        }
    }

    #[test]
    fn a_missing_index_comes_with_its_statement() {
        let found = check(&campus(), &campus_table(), false);
        assert_eq!(found[0].severity, Severity::Warning);
        assert_eq!(
            found[0].remedy,
            "CREATE INDEX CONCURRENTLY \"outbox_events_unpublished\" ON \"public\".\"outbox_events\" (\"id\") \
             WHERE \"status\" = 'pending'"
        );
    }
}
