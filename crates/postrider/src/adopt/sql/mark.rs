//! Marking rows as published or failed, and giving back what a worker of the service has left.

use super::{Bind, Dialect, Sql, Statement};
use crate::adopt::State;

impl Sql {
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
}
