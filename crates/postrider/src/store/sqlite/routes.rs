//! Where events go. A change of routes moves positions, so it happens in one transaction, while nobody relays.

use std::collections::BTreeMap;

use sqlx::Row as _;

use super::{SqliteStore, now_ms};
use crate::broker::topic::{self, Route};
use crate::error::Result;

const DOING: &str = "the routes were not taken over";

pub(super) async fn set(store: &SqliteStore, routes: &[Route]) -> Result<()> {
    let failed = store.failed(DOING);
    let mut tx = store.write(DOING).await?;
    let rows =
        sqlx::query("SELECT DISTINCT destination, topics FROM lane").fetch_all(&mut *tx).await.map_err(&failed)?;
    let mut known = BTreeMap::new();
    for row in &rows {
        known.insert(row.try_get(0).map_err(&failed)?, row.try_get(1).map_err(&failed)?);
    }
    let Some(change) = topic::change(&known, routes) else { return tx.rollback().await.map_err(&failed) };
    let relays = sqlx::query(concat!(
        "SELECT owner FROM lease WHERE group_name LIKE 'relay/%' AND slot >= 0 AND owner <> '' AND expires_at > ",
        now_ms!(),
        " LIMIT 1"
    ))
    .fetch_optional(&mut *tx)
    .await
    .map_err(&failed)?;
    if let Some(row) = relays {
        return Err(topic::still_relayed(&row.try_get::<String, _>(0).map_err(&failed)?));
    }
    // Where the slowest was, of all destinations: what moves from one to another is passed over by neither.
    let oldest: i64 = sqlx::query("SELECT coalesce(min(last_id), 0) FROM lane")
        .fetch_one(&mut *tx)
        .await
        .and_then(|row| row.try_get(0))
        .map_err(&failed)?;
    for gone in &change.gone {
        let parked: i64 = sqlx::query("SELECT count(*) FROM parked WHERE destination = ?")
            .bind(gone)
            .fetch_one(&mut *tx)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(&failed)?;
        if parked > 0 {
            return Err(topic::still_parked(gone, parked));
        }
        sqlx::query("DELETE FROM lane WHERE destination = ?").bind(gone).execute(&mut *tx).await.map_err(&failed)?;
    }
    for route in &change.changed {
        // The epoch moves on as well: a relay that slept through all this must not settle any more.
        sqlx::query(
            "UPDATE lane SET topics = ?2, last_id = ?3,
                    epoch = max(epoch, 1 + coalesce((SELECT max(l.epoch) FROM lease l
                      WHERE l.group_name = 'relay/' || lane.destination AND l.slot = lane.lane), 0))
              WHERE destination = ?1",
        )
        .bind(&route.destination)
        .bind(route.topics.regex())
        .bind(oldest)
        .execute(&mut *tx)
        .await
        .map_err(&failed)?;
        // One lane; the relay cuts it into as many as it has when it opens the first.
        sqlx::query(
            "INSERT INTO lane (destination, lane, lanes, last_id, topics) SELECT ?1, 0, 1, ?3, ?2
              WHERE NOT EXISTS (SELECT 1 FROM lane WHERE destination = ?1)",
        )
        .bind(&route.destination)
        .bind(route.topics.regex())
        .bind(oldest)
        .execute(&mut *tx)
        .await
        .map_err(&failed)?;
    }
    tx.commit().await.map_err(&failed)
}
