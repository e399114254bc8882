//! Where events go. There are no positions here: a change of routes decides about every event that is still pending.

use std::collections::BTreeMap;

use sqlx::Row as _;

use super::MysqlStore;
use super::error::db;
use super::lease::is_alive;
use crate::broker::topic::{self, Route};
use crate::error::{Error, Kind, Result};

pub(super) async fn set(store: &MysqlStore, routes: &[Route]) -> Result<()> {
    if let [_, second, ..] = routes.iter().filter(|route| route.topics.is_all()).collect::<Vec<_>>().as_slice() {
        let text = format!(
            "an event goes to one destination here, and {:?} is not the first with all topics",
            second.destination
        );
        return Err(Error::new(Kind::Config, text).with_remedy("give each destination topics of its own"));
    }
    let mut tx = store.write().await?;
    super::lock(&mut tx, "routes").await?;
    let rows =
        sqlx::query("SELECT DISTINCT destination, topics FROM postrider_lane").fetch_all(&mut *tx).await.map_err(db)?;
    let mut known = BTreeMap::new();
    for row in &rows {
        known.insert(row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?);
    }
    let Some(change) = topic::change(&known, routes) else { return tx.rollback().await.map_err(db) };
    let relays = sqlx::query(concat!(
        "SELECT owner FROM postrider_lease WHERE group_name LIKE 'relay/%' AND owner <> '' AND ",
        is_alive!(),
        " LIMIT 1"
    ))
    .fetch_optional(&mut *tx)
    .await
    .map_err(db)?;
    if let Some(row) = relays {
        return Err(topic::still_relayed(&row.try_get::<String, _>(0).map_err(db)?));
    }
    for gone in &change.gone {
        let parked: i64 = sqlx::query("SELECT COUNT(*) FROM postrider_parked WHERE destination = ?")
            .bind(gone)
            .fetch_one(&mut *tx)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(db)?;
        if parked > 0 {
            return Err(topic::still_parked(gone, parked));
        }
        sqlx::query("DELETE FROM postrider_lane WHERE destination = ?")
            .bind(gone)
            .execute(&mut *tx)
            .await
            .map_err(db)?;
    }
    for route in &change.changed {
        // One lane for a new one; the relay cuts it into as many as it has when it opens the first.
        sqlx::query(
            "INSERT INTO postrider_lane (destination, lane, lanes, topics) VALUES (?, 0, 1, ?) \
             ON DUPLICATE KEY UPDATE topics = VALUES(topics)",
        )
        .bind(&route.destination)
        .bind(route.topics.regex())
        .execute(&mut *tx)
        .await
        .map_err(db)?;
        sqlx::query("UPDATE postrider_lane SET topics = ? WHERE destination = ?")
            .bind(route.topics.regex())
            .bind(&route.destination)
            .execute(&mut *tx)
            .await
            .map_err(db)?;
    }
    tx.commit().await.map_err(db)
}
