//! A producer's transactions, at the isolation that sessions have by default.

use async_trait::async_trait;
use postrider::Outbox;
use sqlx::{Connection as _, MySqlConnection};

use super::super::super::producer::event;
use super::super::{Draft, End, Teller};
use crate::testbed::Result;

pub(super) struct MysqlTeller(pub(super) MySqlConnection);

#[async_trait]
impl Teller for MysqlTeller {
    async fn transact(&mut self, draft: &Draft) -> Result<End> {
        let mut tx = self.0.begin().await?;
        if let (Some(hold), true) = (draft.hold, draft.is_held_first) {
            // An old view of the data under young events.
            sqlx::query("SELECT max(version) FROM crash_account").execute(&mut *tx).await?;
            tokio::time::sleep(hold).await;
        }
        let (mut events, mut versions) = (Vec::new(), Vec::new());
        for entry in &draft.entries {
            let updated = sqlx::query("UPDATE crash_account SET version = LAST_INSERT_ID(version + 1) WHERE `key` = ?")
                .bind(&entry.key)
                .execute(&mut *tx)
                .await?;
            let version = i64::try_from(updated.last_insert_id())?;
            events.push(event(entry.id, &entry.key, version, entry.is_poison)?);
            versions.push(version);
        }
        Outbox::new().append_all(&mut *tx, &events).await?;
        for (entry, version) in draft.entries.iter().zip(versions) {
            sqlx::query("INSERT INTO crash_ledger (event_id, `key`, version, is_poison) VALUES (?, ?, ?, ?)")
                .bind(entry.id.to_string())
                .bind(&entry.key)
                .bind(version)
                .bind(entry.is_poison)
                .execute(&mut *tx)
                .await?;
        }
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
