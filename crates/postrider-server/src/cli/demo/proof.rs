//! The proof: what the database says after everything has been killed, started again and drained.

use comfy_table::{Cell, CellAlignment, Color, Table};
use postrider::store::sqlite::SqliteStore;
use serde::Serialize;

use super::names::{GROUPS, TOPIC};
use super::shop::sql;
use super::story::Takeover;
use super::view::grouped;
use crate::cli::failure::Result;
use crate::cli::output;

/// Everything that the demo claims, from SQL over the tables that were written in the transactions themselves.
#[derive(Debug, Serialize)]
pub struct Proof {
    /// Whether everything arrived, once, in order, and nothing else did.
    pub holds: bool,
    /// Events whose business transaction committed.
    pub committed: u64,
    /// Events whose business transaction was rolled back on purpose.
    pub rolled_back: u64,
    /// Events that the relay published a second time after the crash, because it died before it had settled.
    pub republished: u64,
    /// One row per consumer group.
    pub groups: Vec<GroupProof>,
    /// Who was killed, and who went on.
    pub takeovers: Vec<Takeover>,
    /// How long it took until everything was applied.
    pub seconds: f64,
}

/// What came of the events in one consumer group.
#[derive(Debug, Serialize)]
pub struct GroupProof {
    group: &'static str,
    /// Committed events with an effect.
    applied: u64,
    /// Committed events without one.
    lost: u64,
    /// Effects beyond the first of their event.
    doubled: u64,
    /// Effects whose version is not above the version of the account's effect before it.
    reordered: u64,
    /// Effects of events that no committed transaction has written.
    phantom: u64,
}

/// A business row without an event, or an event without its business row, would already be a broken promise.
const TOTALS: &str = "
    SELECT (SELECT count(*) FROM ledger),
           (SELECT count(*) FROM rolled_back),
           (SELECT count(*) - count(DISTINCT event_id) FROM message),
           (SELECT count(*) FROM outbox WHERE topic = ?),
           (SELECT count(*) FROM ledger l JOIN outbox o ON o.event_id = l.event_id)
";

const GROUP: &str = "
    WITH mine AS (SELECT id, event_id, account, version FROM effect WHERE consumer = ?),
         ranked AS (SELECT version, lag(version) OVER (PARTITION BY account ORDER BY id) AS before FROM mine)
    SELECT (SELECT count(*) FROM ledger WHERE event_id IN (SELECT event_id FROM mine)),
           (SELECT count(*) FROM ledger WHERE event_id NOT IN (SELECT event_id FROM mine)),
           (SELECT count(*) - count(DISTINCT event_id) FROM mine),
           (SELECT count(*) FROM ranked WHERE version <= before),
           (SELECT count(*) FROM mine WHERE event_id NOT IN (SELECT event_id FROM ledger))
";

/// Asks the database.
pub async fn ask(store: &SqliteStore, takeovers: Vec<Takeover>, seconds: f64) -> Result<Proof> {
    const DOING: &str = "the proof was not read";
    let (committed, rolled_back, republished, outbox, paired): (u64, u64, u64, u64, u64) =
        sqlx::query_as(TOTALS).bind(TOPIC).fetch_one(store.reader()).await.map_err(sql(DOING))?;
    let mut groups = Vec::new();
    for group in GROUPS {
        let (applied, lost, doubled, reordered, phantom) =
            sqlx::query_as(GROUP).bind(group.name).fetch_one(store.reader()).await.map_err(sql(DOING))?;
        groups.push(GroupProof { group: group.name, applied, lost, doubled, reordered, phantom });
    }
    let is_paired = committed == outbox && committed == paired;
    let holds = is_paired && committed > 0 && groups.iter().all(|group| group.holds(committed));
    Ok(Proof { holds, committed, rolled_back, republished, groups, takeovers, seconds })
}

impl GroupProof {
    fn holds(&self, committed: u64) -> bool {
        self.applied == committed && [self.lost, self.doubled, self.reordered, self.phantom] == [0; 4]
    }
}

impl Proof {
    /// Prints the proof on stdout.
    pub fn print(&self, is_json: bool) -> Result<()> {
        if is_json {
            return output::json(self);
        }
        output::print(self.table())
    }

    fn table(&self) -> Table {
        let rows: Vec<[(&str, Cell); 8]> = self.groups.iter().map(|group| self.row(group)).collect();
        let mut table =
            output::table(&rows.first().map(|row| row.each_ref().map(|(name, _)| *name)).unwrap_or_default());
        for row in rows {
            table.add_row(row.map(|(_, cell)| cell));
        }
        table
    }

    /// A group's figures, each with its name, so that none can stand under another's.
    fn row(&self, group: &GroupProof) -> [(&'static str, Cell); 8] {
        [
            ("group", Cell::new(group.group)),
            ("committed", number(self.committed)),
            ("rolled back", number(self.rolled_back)),
            ("applied", number(group.applied)),
            ("lost", verdict(group.lost)),
            ("doubled", verdict(group.doubled)),
            ("reordered", verdict(group.reordered)),
            ("phantom", verdict(group.phantom)),
        ]
    }
}

fn number(count: u64) -> Cell {
    Cell::new(grouped(count)).set_alignment(CellAlignment::Right)
}

/// Nothing is good.
fn verdict(count: u64) -> Cell {
    let color = if count == 0 { Color::Green } else { Color::Red };
    output::coloured(&grouped(count), color).set_alignment(CellAlignment::Right)
}

#[cfg(test)]
mod tests {
    use super::{GroupProof, Proof};

    #[test]
    fn every_figure_stands_under_its_name() {
        let group = GroupProof { group: "billing", applied: 3, lost: 4, doubled: 5, reordered: 6, phantom: 7 };
        let proof = Proof {
            holds: false,
            committed: 1,
            rolled_back: 2,
            republished: 0,
            groups: vec![group],
            takeovers: Vec::new(),
            seconds: 0.0,
        };
        let text = proof.table().to_string();
        let lines: Vec<&str> = text.lines().collect();
        for (name, figure) in
            ["COMMITTED", "ROLLED BACK", "APPLIED", "LOST", "DOUBLED", "REORDERED", "PHANTOM"].iter().zip(1..)
        {
            let end = lines[0].find(name).expect(name) + name.len();
            assert_eq!(
                lines[1][..end].split_whitespace().next_back(),
                Some(figure.to_string().as_str()),
                "{name}\n{text}"
            );
        }
    }
}
