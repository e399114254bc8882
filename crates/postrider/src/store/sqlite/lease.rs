//! Leases and members, by the machine's clock.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::Row as _;

use super::{SqliteStore, now_ms};
use crate::error::Result;
use crate::lease::{Lease, LeaseView, Leases, Roll};

pub(super) fn millis(duration: Duration) -> i64 {
    // A century: beyond it additions to the clock could overflow.
    const MAX: i64 = 100 * 366 * 24 * 60 * 60 * 1000;
    i64::try_from(duration.as_millis()).unwrap_or(MAX).min(MAX)
}

#[async_trait]
impl Leases for SqliteStore {
    async fn call_in(&self, group: &str, owner: &str, held: &[Lease], ttl: Duration) -> Result<Roll> {
        const DOING: &str = "the instance did not call in";
        let named: Vec<(u32, i64)> = held.iter().map(|lease| (lease.slot, lease.epoch)).collect();
        let mut tx = self.write(DOING).await?;
        sqlx::query(concat!("DELETE FROM member WHERE group_name = ? AND expires_at <= ", now_ms!()))
            .bind(group)
            .execute(&mut *tx)
            .await
            .map_err(self.failed(DOING))?;
        sqlx::query(concat!(
            "INSERT INTO member (group_name, owner, expires_at) VALUES (?, ?, ",
            now_ms!(),
            " + ?) ON CONFLICT DO UPDATE SET expires_at = excluded.expires_at"
        ))
        .bind(group)
        .bind(owner)
        .bind(millis(ttl))
        .execute(&mut *tx)
        .await
        .map_err(self.failed(DOING))?;
        // The epoch alone says whether it is still ours; that its time is over does not matter if nobody took it.
        let renewed = sqlx::query(concat!(
            "UPDATE lease SET expires_at = ",
            now_ms!(),
            " + ?4 WHERE group_name = ?1 AND owner = ?2
               AND EXISTS (SELECT 1 FROM json_each(?3) WHERE value ->> 0 = slot AND value ->> 1 = epoch)
             RETURNING slot, epoch"
        ))
        .bind(group)
        .bind(owner)
        .bind(serde_json::to_string(&named).unwrap_or_default())
        .bind(millis(ttl))
        .fetch_all(&mut *tx)
        .await
        .map_err(self.failed(DOING))?;
        let taken = sqlx::query(concat!(
            "SELECT slot FROM lease WHERE group_name = ? AND expires_at BETWEEN 1 + ",
            now_ms!(),
            " AND ",
            now_ms!(),
            " + 3600000 ORDER BY slot"
        ))
        .bind(group)
        .fetch_all(&mut *tx)
        .await
        .map_err(self.failed(DOING))?;
        let members = sqlx::query("SELECT count(*) FROM member WHERE group_name = ?")
            .bind(group)
            .fetch_one(&mut *tx)
            .await
            .map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))?;

        let mut roll = Roll { members: members.try_get(0).map_err(self.failed(DOING))?, ..Roll::default() };
        for row in renewed {
            let slot = row.try_get(0).map_err(self.failed(DOING))?;
            let epoch = row.try_get(1).map_err(self.failed(DOING))?;
            roll.held.push(Lease { group: group.to_owned(), slot, owner: owner.to_owned(), epoch });
        }
        roll.held.sort_by_key(|lease| lease.slot);
        for row in taken {
            roll.taken.push(row.try_get(0).map_err(self.failed(DOING))?);
        }
        Ok(roll)
    }

    async fn take(&self, group: &str, slot: u32, owner: &str, ttl: Duration) -> Result<Option<Lease>> {
        const DOING: &str = "the lease was not taken";
        let mut tx = self.write(DOING).await?;
        let row = sqlx::query(concat!(
            "INSERT INTO lease (group_name, slot, owner, epoch, expires_at) VALUES (?1, ?2, ?3, 1, ",
            now_ms!(),
            " + ?4) ON CONFLICT DO UPDATE
                SET owner = excluded.owner, epoch = lease.epoch + 1, expires_at = excluded.expires_at
              WHERE lease.expires_at <= ",
            now_ms!(),
            // A lease that lasts longer than an hour was written while the clock was wrong.
            " OR lease.expires_at > ",
            now_ms!(),
            " + 3600000 RETURNING epoch"
        ))
        .bind(group)
        .bind(slot)
        .bind(owner)
        .bind(millis(ttl))
        .fetch_optional(&mut *tx)
        .await
        .map_err(self.failed(DOING))?;
        let Some(row) = row else {
            tx.rollback().await.map_err(self.failed(DOING))?;
            return Ok(None);
        };
        let epoch = row.try_get(0).map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))?;
        Ok(Some(Lease { group: group.to_owned(), slot, owner: owner.to_owned(), epoch }))
    }

    async fn give_back(&self, lease: &Lease) -> Result<()> {
        const DOING: &str = "the lease was not given back";
        let mut tx = self.write(DOING).await?;
        // Without an owner, so that a late call-in cannot renew it.
        sqlx::query(
            "UPDATE lease SET owner = '', expires_at = 0
              WHERE group_name = ? AND slot = ? AND owner = ? AND epoch = ?",
        )
        .bind(&lease.group)
        .bind(lease.slot)
        .bind(&lease.owner)
        .bind(lease.epoch)
        .execute(&mut *tx)
        .await
        .map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))
    }

    async fn leave(&self, group: &str, owner: &str) -> Result<()> {
        const DOING: &str = "the group was not left";
        let mut tx = self.write(DOING).await?;
        sqlx::query("DELETE FROM member WHERE group_name = ? AND owner = ?")
            .bind(group)
            .bind(owner)
            .execute(&mut *tx)
            .await
            .map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))
    }

    async fn leases(&self) -> Result<Vec<LeaseView>> {
        const DOING: &str = "the leases were not read";
        let rows = sqlx::query(concat!(
            "SELECT group_name, slot, owner, epoch, expires_at - ",
            now_ms!(),
            " FROM lease ORDER BY group_name, slot"
        ))
        .fetch_all(&self.inner.reader)
        .await
        .map_err(self.failed(DOING))?;
        let mut views = Vec::with_capacity(rows.len());
        for row in rows {
            views.push(view(&row).map_err(self.failed(DOING))?);
        }
        Ok(views)
    }
}

fn view(row: &sqlx::sqlite::SqliteRow) -> Result<LeaseView, sqlx::Error> {
    let lease = Lease { group: row.try_get(0)?, slot: row.try_get(1)?, owner: row.try_get(2)?, epoch: row.try_get(3)? };
    let remaining_ms: i64 = row.try_get(4)?;
    let remaining = u64::try_from(remaining_ms).ok().filter(|ms| *ms > 0).map(Duration::from_millis);
    Ok(LeaseView { lease, remaining })
}
