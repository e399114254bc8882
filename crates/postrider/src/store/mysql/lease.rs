//! Leases and members, on the database's clock. Single statements, each a transaction of its own.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Row as _};

use super::error::{db, is_duplicate};
use super::{MysqlStore, micros, now};
use crate::error::Result;
use crate::lease::{Lease, LeaseView, Leases, Roll};

/// A lease that lasts longer than an hour was written while the clock was wrong; waiting for its end could take years.
macro_rules! is_alive {
    () => {
        "expires_at > UTC_TIMESTAMP(6) AND expires_at <= UTC_TIMESTAMP(6) + INTERVAL 1 HOUR"
    };
}
pub(super) use is_alive;

const JOIN: &str = concat!(
    "INSERT INTO postrider_member (group_name, owner, expires_at) VALUES (?, ?, ",
    now!(),
    " + INTERVAL ? MICROSECOND) ON DUPLICATE KEY UPDATE expires_at = VALUES(expires_at)"
);

/// The new epoch comes back as the statement's insert id.
const TAKE: &str = concat!(
    "UPDATE postrider_lease SET owner = ?, epoch = LAST_INSERT_ID(epoch + 1), expires_at = ",
    now!(),
    " + INTERVAL ? MICROSECOND WHERE group_name = ? AND slot = ? AND NOT (",
    is_alive!(),
    ")"
);

const TAKE_FIRST: &str = concat!(
    "INSERT INTO postrider_lease (group_name, slot, owner, epoch, expires_at) VALUES (?, ?, ?, 1, ",
    now!(),
    " + INTERVAL ? MICROSECOND)"
);

#[async_trait]
impl Leases for MysqlStore {
    async fn call_in(&self, group: &str, owner: &str, held: &[Lease], ttl: Duration) -> Result<Roll> {
        sqlx::query(JOIN).bind(group).bind(owner).bind(micros(ttl)).execute(&self.own).await.map_err(db)?;
        if !held.is_empty() {
            // The epoch alone says whether it is still ours; that its time is over does not matter if nobody took it.
            let named: Vec<String> = held.iter().map(|lease| format!("({}, {})", lease.slot, lease.epoch)).collect();
            let renew = format!(
                "UPDATE postrider_lease SET expires_at = {} + INTERVAL ? MICROSECOND \
                 WHERE group_name = ? AND owner = ? AND (slot, epoch) IN ({})",
                now!(),
                named.join(", ")
            );
            sqlx::query(AssertSqlSafe(renew))
                .persistent(false)
                .bind(micros(ttl))
                .bind(group)
                .bind(owner)
                .execute(&self.own)
                .await
                .map_err(db)?;
        }
        let rows = sqlx::query(concat!(
            "SELECT slot, owner, epoch, ",
            is_alive!(),
            " FROM postrider_lease WHERE group_name = ? ORDER BY slot"
        ))
        .bind(group)
        .fetch_all(&self.own)
        .await
        .map_err(db)?;
        let others: i64 = sqlx::query(concat!(
            "SELECT COUNT(*) FROM postrider_member WHERE group_name = ? AND owner <> ? AND expires_at > ",
            now!()
        ))
        .bind(group)
        .bind(owner)
        .fetch_one(&self.own)
        .await
        .and_then(|row| row.try_get(0))
        .map_err(db)?;
        let mut roll = Roll { members: 1 + others as u32, ..Roll::default() };
        for row in &rows {
            let slot = row.try_get::<i32, _>(0).map_err(db)? as u32;
            let lease = Lease {
                group: group.to_owned(),
                slot,
                owner: row.try_get(1).map_err(db)?,
                epoch: row.try_get(2).map_err(db)?,
            };
            if row.try_get(3).map_err(db)? {
                roll.taken.push(slot);
            }
            if lease.owner == owner && held.contains(&lease) {
                roll.held.push(lease);
            }
        }
        Ok(roll)
    }

    async fn take(&self, group: &str, slot: u32, owner: &str, ttl: Duration) -> Result<Option<Lease>> {
        let lease = |epoch| Lease { group: group.to_owned(), slot, owner: owner.to_owned(), epoch };
        let taken = sqlx::query(TAKE)
            .bind(owner)
            .bind(micros(ttl))
            .bind(group)
            .bind(slot)
            .execute(&self.own)
            .await
            .map_err(db)?;
        if taken.rows_affected() == 1 {
            return Ok(Some(lease(taken.last_insert_id().cast_signed())));
        }
        // Somebody has it, or nobody ever had.
        let first = sqlx::query(TAKE_FIRST).bind(group).bind(slot).bind(owner).bind(micros(ttl)).execute(&self.own);
        match first.await {
            Ok(_) => Ok(Some(lease(1))),
            Err(error) if is_duplicate(&error) => Ok(None),
            Err(error) => Err(db(error)),
        }
    }

    async fn give_back(&self, lease: &Lease) -> Result<()> {
        // Without an owner, so that a late call-in cannot renew it.
        sqlx::query(
            "UPDATE postrider_lease SET owner = '', expires_at = '1970-01-01' \
             WHERE group_name = ? AND slot = ? AND owner = ? AND epoch = ?",
        )
        .bind(&lease.group)
        .bind(lease.slot)
        .bind(&lease.owner)
        .bind(lease.epoch)
        .execute(&self.own)
        .await
        .map_err(db)?;
        Ok(())
    }

    async fn leave(&self, group: &str, owner: &str) -> Result<()> {
        sqlx::query("DELETE FROM postrider_member WHERE group_name = ? AND owner = ?")
            .bind(group)
            .bind(owner)
            .execute(&self.own)
            .await
            .map_err(db)?;
        Ok(())
    }

    async fn leases(&self) -> Result<Vec<LeaseView>> {
        let rows = sqlx::query(concat!(
            "SELECT group_name, slot, owner, epoch, TIMESTAMPDIFF(MICROSECOND, ",
            now!(),
            ", expires_at) FROM postrider_lease ORDER BY group_name, slot"
        ))
        .fetch_all(&self.own)
        .await
        .map_err(db)?;
        rows.iter()
            .map(|row| {
                let remaining: i64 = row.try_get(4).map_err(db)?;
                Ok(LeaseView {
                    lease: Lease {
                        group: row.try_get(0).map_err(db)?,
                        slot: row.try_get::<i32, _>(1).map_err(db)? as u32,
                        owner: row.try_get(2).map_err(db)?,
                        epoch: row.try_get(3).map_err(db)?,
                    },
                    remaining: u64::try_from(remaining).ok().filter(|left| *left > 0).map(Duration::from_micros),
                })
            })
            .collect()
    }
}
