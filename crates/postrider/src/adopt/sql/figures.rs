//! What waits and what is wrong, for people; and the index that a table should have.

use super::{Dialect, Sql};
use crate::adopt::State;
use crate::upkeep::BACKLOG_COUNT_MAX;

impl Sql {
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
