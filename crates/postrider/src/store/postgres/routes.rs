//! Where events go. A change of routes moves positions, so it happens in one transaction, while nobody relays.

use std::collections::BTreeMap;

use sqlx::{PgConnection, Row as _};

use super::PostgresStore;
use super::error::db;
use crate::broker::topic::{self, Route};
use crate::error::Result;

pub(super) async fn set(store: &PostgresStore, routes: &[Route]) -> Result<()> {
    let mut tx = store.own.begin().await.map_err(db)?;
    sqlx::query("SELECT pg_advisory_xact_lock(7062611490211870001)").execute(&mut *tx).await.map_err(db)?;
    let known = known(&mut tx).await?;
    let Some(change) = topic::change(&known, routes) else { return tx.rollback().await.map_err(db) };
    let relays = sqlx::query(
        "SELECT owner FROM postrider.lease WHERE group_name LIKE 'relay/%' AND slot >= 0 AND owner <> '' \
         AND expires_at > clock_timestamp() LIMIT 1",
    )
    .fetch_optional(&mut *tx)
    .await
    .map_err(db)?;
    if let Some(row) = relays {
        return Err(topic::still_relayed(&row.try_get::<String, _>(0).map_err(db)?));
    }
    for gone in &change.gone {
        let parked: i64 = sqlx::query("SELECT count(*) FROM postrider.parked WHERE destination = $1")
            .bind(gone)
            .fetch_one(&mut *tx)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(db)?;
        if parked > 0 {
            return Err(topic::still_parked(gone, parked));
        }
    }
    // Where the slowest was, of all destinations: what moves from one to another is passed over by neither.
    let oldest = sqlx::query(
        "SELECT done::text FROM postrider.lane \
         ORDER BY pg_snapshot_xmax(done), (SELECT count(*) FROM pg_snapshot_xip(done)) DESC LIMIT 1",
    )
    .fetch_optional(&mut *tx)
    .await
    .map_err(db)?;
    let oldest: String = match oldest {
        Some(row) => row.try_get(0).map_err(db)?,
        None => super::source::start().done,
    };
    for gone in &change.gone {
        sqlx::query("DELETE FROM postrider.lane WHERE destination = $1")
            .bind(gone)
            .execute(&mut *tx)
            .await
            .map_err(db)?;
    }
    for route in &change.changed {
        let moved = sqlx::query(
            // The epoch moves on as well: a relay that slept through all this must not settle any more.
            "UPDATE postrider.lane n SET topics = $2, done = $3::text::pg_snapshot, target = NULL, last_id = 0, \
               epoch = greatest(n.epoch, coalesce((SELECT max(l.epoch) FROM postrider.lease l \
                 WHERE l.group_name = 'relay/' || n.destination AND l.slot = n.lane), 0) + 1) \
             WHERE destination = $1",
        )
        .bind(&route.destination)
        .bind(route.topics.regex())
        .bind(&oldest)
        .execute(&mut *tx)
        .await
        .map_err(db)?;
        if moved.rows_affected() == 0 {
            // One lane; the relay cuts it into as many as it has when it opens the first.
            sqlx::query(
                "INSERT INTO postrider.lane (destination, lane, lanes, epoch, done, topics) \
                 VALUES ($1, 0, 1, 0, $2::text::pg_snapshot, $3)",
            )
            .bind(&route.destination)
            .bind(&oldest)
            .bind(route.topics.regex())
            .execute(&mut *tx)
            .await
            .map_err(db)?;
        }
    }
    tx.commit().await.map_err(db)
}

/// The destinations that the database knows, with their topics.
async fn known(tx: &mut PgConnection) -> Result<BTreeMap<String, Option<String>>> {
    let rows =
        sqlx::query("SELECT DISTINCT destination, topics FROM postrider.lane").fetch_all(tx).await.map_err(db)?;
    let mut known = BTreeMap::new();
    for row in &rows {
        known.insert(row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?);
    }
    Ok(known)
}
