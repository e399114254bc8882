//! Looking for rows to publish, and locking them.

use super::{Dialect, Sql};
use crate::adopt::Part;

impl Sql {
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

    /// Locks rows: the payload, the attempts of the side table, then the columns that the mapping reads. Binds: on PostgreSQL the
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
}

/// The condition on another name of the table.
fn qualified(condition: &str, alias: &str) -> String {
    format!("{alias}.{condition}")
}
