//! A producer's transactions.

use async_trait::async_trait;
use postrider::Outbox;
use sqlx::{Connection as _, PgConnection};

use super::super::super::producer::event;
use super::super::{Draft, End, Teller};
use crate::testbed::Result;

pub(super) struct PostgresTeller(pub(super) PgConnection);

#[async_trait]
impl Teller for PostgresTeller {
    async fn transact(&mut self, draft: &Draft) -> Result<End> {
        let mut tx = self.0.begin().await?;
        if let (Some(hold), true) = (draft.hold, draft.is_held_first) {
            // An old transaction id on young events: whoever orders by it gets them wrong.
            sqlx::query("SELECT pg_current_xact_id()").execute(&mut *tx).await?;
            tokio::time::sleep(hold).await;
        }
        let (mut events, mut versions) = (Vec::new(), Vec::new());
        for entry in &draft.entries {
            let version: i64 =
                sqlx::query_scalar("UPDATE crash.account SET version = version + 1 WHERE key = $1 RETURNING version")
                    .bind(&entry.key)
                    .fetch_one(&mut *tx)
                    .await?;
            events.push(event(entry.id, &entry.key, version, entry.is_poison)?);
            versions.push(version);
        }
        Outbox::new().append_all(&mut *tx, &events).await?;
        sqlx::query(
            "INSERT INTO crash.ledger (event_id, key, version, is_poison) \
             SELECT * FROM unnest($1::uuid[], $2::text[], $3::bigint[], $4::boolean[])",
        )
        .bind(draft.entries.iter().map(|entry| entry.id).collect::<Vec<_>>())
        .bind(draft.entries.iter().map(|entry| entry.key.as_str()).collect::<Vec<_>>())
        .bind(versions)
        .bind(draft.entries.iter().map(|entry| entry.is_poison).collect::<Vec<_>>())
        .execute(&mut *tx)
        .await?;
        if let (Some(hold), false) = (draft.hold, draft.is_held_first) {
            tokio::time::sleep(hold).await;
        }
        if draft.is_regretted {
            // Rolled back also when the answer does not come.
            tx.rollback().await?;
            return Ok(End::RolledBack);
        }
        Ok(if tx.commit().await.is_ok() { End::Committed } else { End::Unknown })
    }
}
