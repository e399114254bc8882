//! How far everything has come, read from the database.

use postrider::Result;
use postrider::store::sqlite::SqliteStore;

use super::names::{BILLING, SEARCH};
use super::shop::sql;

/// What the live view shows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Events whose transaction committed.
    pub committed: u64,
    /// Events that the relay has published and settled.
    pub relayed: u64,
    /// Effects of the group `billing`.
    pub billing: u64,
    /// Effects of the group `search`.
    pub search: u64,
    /// Whether nothing is on its way: relay and consumers have written down that they passed the last event.
    pub is_drained: bool,
}

/// The ids of the outbox have no gaps here, so the lane's position is a count.
const QUERY: &str = r#"
    SELECT (SELECT count(*) FROM ledger),
           (SELECT coalesce(min(last_id), 0) FROM lane),
           (SELECT count(*) FROM effect WHERE consumer = ?),
           (SELECT count(*) FROM effect WHERE consumer = ?),
           (SELECT coalesce(min(last_id), 0) FROM lane) >= (SELECT coalesce(max(id), 0) FROM outbox)
           AND (SELECT coalesce(min("offset"), 0) FROM cursor) >= (SELECT coalesce(max("offset"), 0) FROM message)
"#;

/// Reads the counts, all at one moment.
pub async fn read(store: &SqliteStore) -> Result<Counts> {
    let (committed, relayed, billing, search, is_drained) = sqlx::query_as(QUERY)
        .bind(BILLING.name)
        .bind(SEARCH.name)
        .fetch_one(store.reader())
        .await
        .map_err(sql("the counts were not read"))?;
    Ok(Counts { committed, relayed, billing, search, is_drained })
}
