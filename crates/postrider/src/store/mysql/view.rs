//! What people see of parked events and consumers: through indexes, and counted up to a limit.

use std::collections::BTreeSet;

use sqlx::Row as _;
use sqlx::mysql::MySqlRow;
use uuid::Uuid;

use super::error::db;
use super::{MysqlStore, now};
use crate::error::Result;
use crate::upkeep::{BACKLOG_COUNT_MAX, ConsumerView, ParkedView};

/// Waiting events are counted up to this for each that holds its key.
const WAITING_MAX: i64 = 1_000;

macro_rules! parked {
    ($state:literal) => {
        concat!(
            "(SELECT p.id, p.destination, p.event_id, p.topic, p.type, p.`key`, p.state, p.attempts, p.next_at, \
               p.failure_kind, p.failure, p.created_at FROM postrider_parked p FORCE INDEX (postrider_parked_holder) \
             WHERE p.destination = ? AND p.state = '",
            $state,
            "' AND p.id > ? ORDER BY p.id LIMIT ?)"
        )
    };
}

const PARKED: &str = concat!(parked!("failed"), " UNION ALL ", parked!("retrying"), " ORDER BY id LIMIT ?");

const WAITING: &str = "SELECT COUNT(*) FROM (SELECT 1 FROM postrider_parked w WHERE w.destination = ? AND w.`key` = ? \
     AND w.id > ? LIMIT ?) w";

/// The next name after one: there are few, and many rows of each.
const NEXT_HELD: &str = "SELECT MIN(consumer) FROM postrider_held WHERE consumer > ?";
const NEXT_DEAD: &str = "SELECT MIN(consumer) FROM postrider_dead_letter FORCE INDEX (postrider_dead_letter_stats) \
     WHERE stage = 'consumer' AND consumer > ?";

const FIGURES: &str = concat!(
    "SELECT (SELECT COUNT(*) FROM (SELECT 1 FROM postrider_held WHERE consumer = ? AND next_at IS NOT NULL LIMIT ?) h), \
       (SELECT COUNT(*) FROM (SELECT 1 FROM postrider_held WHERE consumer = ? AND next_at IS NULL LIMIT ?) h), \
       (SELECT TIMESTAMPDIFF(SECOND, held_at, ",
    now!(),
    ") FROM postrider_held FORCE INDEX (postrider_held_order) WHERE consumer = ? ORDER BY id LIMIT 1), \
       (SELECT COUNT(*) FROM (SELECT 1 FROM postrider_dead_letter WHERE consumer = ? AND state = 'dead' LIMIT ?) d), \
       (SELECT TIMESTAMPDIFF(SECOND, MIN(died_at), ",
    now!(),
    ") FROM postrider_dead_letter FORCE INDEX (postrider_dead_letter_open) WHERE consumer = ? AND state = 'dead'), \
       (SELECT GREATEST(COALESCE((SELECT MAX(`offset`) FROM postrider_message), 0) - MIN(`offset`), 0) \
          FROM postrider_cursor WHERE consumer = ?)"
);

pub(super) async fn parked(store: &MysqlStore, destination: &str, after: i64, limit: usize) -> Result<Vec<ParkedView>> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let rows = sqlx::query(PARKED)
        .bind(destination)
        .bind(after)
        .bind(limit)
        .bind(destination)
        .bind(after)
        .bind(limit)
        .bind(limit)
        .fetch_all(&store.own)
        .await
        .map_err(db)?;
    let mut views = Vec::with_capacity(rows.len());
    for row in &rows {
        let mut view = holder(row).map_err(db)?;
        if let Some(key) = &view.key {
            let query = sqlx::query(WAITING).bind(destination).bind(key).bind(view.id).bind(WAITING_MAX);
            let count: i64 = query.fetch_one(&store.own).await.and_then(|row| row.try_get(0)).map_err(db)?;
            view.waiting = count as u64;
        }
        views.push(view);
    }
    Ok(views)
}

fn holder(row: &MySqlRow) -> Result<ParkedView, sqlx::Error> {
    let state: String = row.try_get(6)?;
    Ok(ParkedView {
        id: row.try_get(0)?,
        destination: row.try_get(1)?,
        event_id: Uuid::try_parse(row.try_get(2)?).unwrap_or_default(),
        topic: row.try_get(3)?,
        kind: row.try_get(4)?,
        key: row.try_get(5)?,
        attempts: row.try_get::<i32, _>(7)? as u32,
        next_at: if state == "retrying" { Some(row.try_get(8)?) } else { None },
        state,
        error_type: row.try_get(9)?,
        error: row.try_get(10)?,
        waiting: 0,
        created_at: row.try_get(11)?,
    })
}

pub(super) async fn consumers(store: &MysqlStore) -> Result<Vec<ConsumerView>> {
    let rows = sqlx::query(
        "SELECT consumer FROM postrider_cursor \
         UNION SELECT SUBSTR(group_name, 10) FROM postrider_instance WHERE group_name LIKE 'consumer/%'",
    )
    .fetch_all(&store.own)
    .await
    .map_err(db)?;
    let mut names = rows.iter().map(|row| row.try_get(0).map_err(db)).collect::<Result<BTreeSet<String>>>()?;
    for sql in [NEXT_HELD, NEXT_DEAD] {
        let mut last = String::new();
        loop {
            let next: Option<String> =
                sqlx::query(sql).bind(&last).fetch_one(&store.own).await.and_then(|row| row.try_get(0)).map_err(db)?;
            let Some(next) = next else { break };
            names.insert(next.clone());
            last = next;
        }
    }
    let mut views = Vec::with_capacity(names.len());
    for name in names {
        let max = BACKLOG_COUNT_MAX as i64;
        let row = sqlx::query(FIGURES)
            .bind(&name)
            .bind(max)
            .bind(&name)
            .bind(max)
            .bind(&name)
            .bind(&name)
            .bind(max)
            .bind(&name)
            .bind(&name)
            .fetch_one(&store.own)
            .await
            .map_err(db)?;
        let number = |index: usize| -> Result<Option<u64>> {
            let number: Option<i64> = row.try_get(index).map_err(db)?;
            Ok(number.map(|number| u64::try_from(number).unwrap_or(0)))
        };
        views.push(ConsumerView {
            retrying: number(0)?.unwrap_or(0),
            waiting: number(1)?.unwrap_or(0),
            oldest_secs: number(2)?,
            dead: number(3)?.unwrap_or(0),
            oldest_dead_secs: number(4)?,
            behind: number(5)?,
            name,
        });
    }
    Ok(views)
}
