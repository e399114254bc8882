//! The side table: what could not be published, and what waits behind it.

use std::collections::{BTreeMap, HashSet};

use sqlx::{AssertSqlSafe, MySqlConnection, Row as _};

use super::error::db;
use super::row::{self, event_columns};
use super::source::MysqlSource;
use super::{failed, list, micros, now};
use crate::error::{Error, Kind, Result};
use crate::source::{Park, ParkedKeys, ParkedRow, ParkedState};

/// What may be tried now, as a literal for `concat!`.
macro_rules! is_due {
    () => {
        "(p.state = 'waiting' OR (p.state = 'retrying' AND p.next_at <= UTC_TIMESTAMP(6)))"
    };
}

/// Keys of the lane with parked events, with how many, and how many have no key.
pub(super) async fn keys(connection: &mut MySqlConnection, source: &MysqlSource, lane: u32) -> Result<ParkedKeys> {
    let rows = sqlx::query(
        "SELECT `key`, COUNT(*) FROM postrider_parked WHERE destination = ? AND hash % ? = ? GROUP BY `key`",
    )
    .bind(&source.destination)
    .bind(source.lanes)
    .bind(lane)
    .fetch_all(connection)
    .await
    .map_err(db)?;
    let mut parked = ParkedKeys::default();
    for row in rows {
        let count = row.try_get::<i64, _>(1).map_err(db)? as u64;
        match row.try_get(0).map_err(db)? {
            Some(key) => parked.keys.push((key, count)),
            None => parked.keyless = count,
        }
    }
    Ok(parked)
}

const UPDATE: &str = concat!(
    "UPDATE postrider_parked SET state = ?, attempts = ?, next_at = ",
    now!(),
    " + INTERVAL ? MICROSECOND, failure_kind = ?, failure = ? WHERE destination = ? AND id = ?"
);

/// Copies rows of the outbox into the side table and updates those that are there already, also when their row is gone.
pub(super) async fn park(tx: &mut MySqlConnection, destination: &str, parks: &[Park]) -> Result<()> {
    let mut latest: BTreeMap<i64, &Park> = BTreeMap::new();
    for park in parks {
        if is_news(park) || !latest.contains_key(&park.id) {
            latest.insert(park.id, park);
        }
    }
    if latest.is_empty() {
        return Ok(());
    }
    let ids: Vec<i64> = latest.keys().copied().collect();
    let mut dead: Vec<i64> =
        latest.values().filter(|park| park.state == ParkedState::Failed).map(|park| park.id).collect();
    if !dead.is_empty() {
        let known = failed::known(tx, destination, &dead).await?;
        dead.retain(|id| !known.contains(id));
    }
    // As one that waits, which is all that there is to say of most.
    let copy = format!(
        "INSERT INTO postrider_parked (destination, id, hash, state, attempts, next_at, {columns}) \
         SELECT ?, o.id, o.hash, 'waiting', 0, {now}, {columns} FROM postrider_outbox o WHERE o.id IN ({ids}) ORDER BY o.id \
         ON DUPLICATE KEY UPDATE postrider_parked.attempts = postrider_parked.attempts",
        columns = event_columns!(),
        now = now!(),
        ids = list(&ids)
    );
    sqlx::query(AssertSqlSafe(copy)).persistent(false).bind(destination).execute(&mut *tx).await.map_err(db)?;
    refuse_reused(tx, destination, &ids).await?;
    let mut missing = 0;
    for park in latest.values().filter(|park| is_news(park)) {
        let updated = sqlx::query(UPDATE)
            .bind(park.state.as_str())
            .bind(park.attempts)
            .bind(micros(park.delay))
            .bind(park.failure.as_ref().map(|failure| &failure.kind))
            .bind(park.failure.as_ref().map(|failure| &failure.message))
            .bind(destination)
            .bind(park.id)
            .execute(&mut *tx)
            .await
            .map_err(db)?;
        missing += u64::from(updated.rows_affected() == 0);
    }
    if missing > 0 {
        // Upkeep deletes only what is handled, so it was a person, who must not stop the lane by it.
        tracing::warn!(destination, missing, "events to be parked are gone from the outbox");
    }
    if !dead.is_empty() {
        failed::bury(tx, destination, &dead).await?;
    }
    Ok(())
}

/// A `TRUNCATE` makes the server count from 1 again. A new event with the number of a parked one must not be taken for it.
async fn refuse_reused(tx: &mut MySqlConnection, destination: &str, ids: &[i64]) -> Result<()> {
    let query = format!(
        "SELECT p.id FROM postrider_parked p JOIN postrider_outbox o ON o.id = p.id AND o.event_id <> p.event_id \
         WHERE p.destination = ? AND p.id IN ({}) LIMIT 1",
        list(ids)
    );
    let query = sqlx::query(AssertSqlSafe(query)).persistent(false).bind(destination);
    let Some(row) = query.fetch_optional(tx).await.map_err(db)? else { return Ok(()) };
    let id: i64 = row.try_get(0).map_err(db)?;
    let text = format!("the number {id} of postrider_outbox was given to another event than the parked one");
    Err(Error::new(Kind::Mismatch, text).with_remedy(
        "the outbox was emptied by TRUNCATE or restored: raise its AUTO_INCREMENT above every number in postrider_parked, \
         and insert the events since then anew",
    ))
}

/// After a crash the relay may read rows again that it had parked, and lets them wait behind their key. That must not undo
/// what was known of them.
fn is_news(park: &Park) -> bool {
    park.state != ParkedState::Waiting || park.attempts > 0
}

/// Removes what was published, with its dead letters.
pub(super) async fn remove(tx: &mut MySqlConnection, destination: &str, ids: &[i64]) -> Result<()> {
    if ids.is_empty() {
        return Ok(());
    }
    let find =
        format!("SELECT event_id FROM postrider_parked WHERE destination = ? AND id IN ({}) FOR UPDATE", list(ids));
    let rows =
        sqlx::query(AssertSqlSafe(find)).persistent(false).bind(destination).fetch_all(&mut *tx).await.map_err(db)?;
    let events = rows.iter().map(|row| row.try_get(0).map_err(db)).collect::<Result<Vec<String>>>()?;
    let delete = format!("DELETE FROM postrider_parked WHERE destination = ? AND id IN ({})", list(ids));
    sqlx::query(AssertSqlSafe(delete)).persistent(false).bind(destination).execute(&mut *tx).await.map_err(db)?;
    failed::published(tx, destination, &events).await
}

/// The oldest row of each key of the lane, and every row without a key, if it may be tried now; oldest first.
const HEADS: &str = concat!(
    "SELECT p.id, p.`key` IS NULL FROM postrider_parked p \
       JOIN (SELECT MIN(id) AS id FROM postrider_parked \
              WHERE destination = ? AND `key` IS NOT NULL AND hash % ? = ? GROUP BY `key`) h ON h.id = p.id \
      WHERE p.destination = ? AND ",
    is_due!(),
    " UNION ALL \
     SELECT p.id, p.`key` IS NULL FROM postrider_parked p \
      WHERE p.destination = ? AND p.`key` IS NULL AND p.hash % ? = ? AND ",
    is_due!(),
    " ORDER BY 1 LIMIT ?"
);

/// See [`crate::source::Source::due`].
pub(super) async fn due(
    connection: &mut MySqlConnection,
    source: &MysqlSource,
    lane: u32,
    limit: usize,
) -> Result<Vec<ParkedRow>> {
    let (destination, limit) = (&source.destination, i64::try_from(limit).unwrap_or(i64::MAX));
    let heads = sqlx::query(HEADS)
        .bind(destination)
        .bind(source.lanes)
        .bind(lane)
        .bind(destination)
        .bind(destination)
        .bind(source.lanes)
        .bind(lane)
        .bind(limit)
        .fetch_all(&mut *connection)
        .await
        .map_err(db)?;
    let (mut ids, mut keyed) = (Vec::new(), Vec::new());
    for head in &heads {
        let id: i64 = head.try_get(0).map_err(db)?;
        ids.push(id);
        if !head.try_get::<bool, _>(1).map_err(db)? {
            keyed.push(id);
        }
    }
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    if !keyed.is_empty() {
        // The queues behind those that have a key.
        let behind = format!(
            "SELECT p.id FROM postrider_parked h JOIN postrider_parked p \
               ON p.destination = h.destination AND p.`key` = h.`key` AND p.id > h.id \
             WHERE h.destination = ? AND h.id IN ({}) ORDER BY p.id LIMIT ?",
            list(&keyed)
        );
        let rows = sqlx::query(AssertSqlSafe(behind))
            .persistent(false)
            .bind(destination)
            .bind(limit)
            .fetch_all(&mut *connection)
            .await
            .map_err(db)?;
        for row in &rows {
            ids.push(row.try_get(0).map_err(db)?);
        }
    }
    ids.sort_unstable();
    ids.truncate(limit as usize);
    let query = format!(
        "SELECT id, {}, attempts, state FROM postrider_parked WHERE destination = ? AND id IN ({}) ORDER BY id",
        event_columns!(),
        list(&ids)
    );
    let found = sqlx::query(AssertSqlSafe(query))
        .persistent(false)
        .bind(destination)
        .fetch_all(connection)
        .await
        .map_err(db)?;
    let mut begun = HashSet::new();
    let mut stopped = HashSet::new();
    let mut due = Vec::with_capacity(found.len());
    for found in &found {
        let row = row::read_row(found).map_err(db)?;
        if let Some(key) = &row.key {
            // Behind the head follow only rows that wait; one that failed by itself stops its key.
            let is_waiting = found.try_get::<&str, _>("state").map_err(db)? == ParkedState::Waiting.as_str();
            if stopped.contains(key) || (!begun.insert(key.clone()) && !is_waiting) {
                stopped.insert(key.clone());
                continue;
            }
        }
        due.push(ParkedRow { row, attempts: found.try_get::<i32, _>("attempts").map_err(db)? as u32 });
    }
    Ok(due)
}
