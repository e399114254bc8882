//! Leases on the database's clock.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::{PgConnection, Row as _};

use super::PostgresStore;
use super::error::db;
use crate::error::Result;
use crate::lease::{Lease, LeaseView, Leases, Roll};

const CALL_IN: &str = "WITH me AS ( \
       INSERT INTO postrider.lease AS l (group_name, slot, owner, expires_at) \
       VALUES ($1, -1, $2, clock_timestamp() + $5 * interval '1 ms') \
       ON CONFLICT (group_name, owner) WHERE slot = -1 DO UPDATE SET expires_at = excluded.expires_at \
     ), renewed AS ( \
       UPDATE postrider.lease l SET expires_at = clock_timestamp() + $5 * interval '1 ms' \
       FROM unnest($3::int[], $4::bigint[]) AS h(slot, epoch) \
       WHERE l.group_name = $1 AND l.owner = $2 AND l.slot = h.slot AND l.epoch = h.epoch \
       RETURNING l.slot, l.epoch \
     ) \
     SELECT 'held', slot, epoch FROM renewed \
     UNION ALL SELECT 'taken', slot, epoch FROM postrider.lease \
       WHERE group_name = $1 AND slot >= 0 \
         AND expires_at > clock_timestamp() AND expires_at <= clock_timestamp() + interval '1 hour' \
     UNION ALL SELECT 'member', slot, epoch FROM postrider.lease \
       WHERE group_name = $1 AND slot = -1 AND owner <> $2 AND expires_at > clock_timestamp()";

/// A lease that lasts longer than an hour was written while the clock was wrong; waiting for its end could take years.
const TAKE: &str = "INSERT INTO postrider.lease AS l (group_name, slot, owner, epoch, expires_at) \
     VALUES ($1, $2, $3, 1, clock_timestamp() + $4 * interval '1 ms') \
     ON CONFLICT (group_name, slot) WHERE slot >= 0 \
     DO UPDATE SET owner = excluded.owner, epoch = l.epoch + 1, expires_at = excluded.expires_at \
     WHERE l.expires_at <= clock_timestamp() OR l.expires_at > clock_timestamp() + interval '1 hour' RETURNING epoch";

#[async_trait]
impl Leases for PostgresStore {
    async fn call_in(&self, group: &str, owner: &str, held: &[Lease], ttl: Duration) -> Result<Roll> {
        let slots: Vec<i32> = held.iter().map(|lease| lease.slot as i32).collect();
        let epochs: Vec<i64> = held.iter().map(|lease| lease.epoch).collect();
        let rows = sqlx::query(CALL_IN)
            .bind(group)
            .bind(owner)
            .bind(slots)
            .bind(epochs)
            .bind(ttl.as_millis() as f64)
            .fetch_all(&self.own)
            .await
            .map_err(db)?;
        let mut roll = Roll { members: 1, ..Roll::default() };
        for row in rows {
            let what: &str = row.try_get(0).map_err(db)?;
            let slot = row.try_get::<i32, _>(1).map_err(db)?;
            match what {
                "held" => {
                    let epoch = row.try_get(2).map_err(db)?;
                    roll.taken.push(slot as u32);
                    roll.held.push(Lease {
                        group: group.to_owned(),
                        slot: slot as u32,
                        owner: owner.to_owned(),
                        epoch,
                    });
                }
                "taken" => roll.taken.push(slot as u32),
                _ => roll.members += 1,
            }
        }
        Ok(roll)
    }

    async fn take(&self, group: &str, slot: u32, owner: &str, ttl: Duration) -> Result<Option<Lease>> {
        let row = sqlx::query(TAKE)
            .bind(group)
            .bind(slot as i32)
            .bind(owner)
            .bind(ttl.as_millis() as f64)
            .fetch_optional(&self.own)
            .await
            .map_err(db)?;
        row.map(|row| {
            Ok(Lease { group: group.to_owned(), slot, owner: owner.to_owned(), epoch: row.try_get(0).map_err(db)? })
        })
        .transpose()
    }

    async fn give_back(&self, lease: &Lease) -> Result<()> {
        sqlx::query(
            "UPDATE postrider.lease SET expires_at = '-infinity' \
             WHERE group_name = $1 AND slot = $2 AND owner = $3 AND epoch = $4",
        )
        .bind(&lease.group)
        .bind(lease.slot as i32)
        .bind(&lease.owner)
        .bind(lease.epoch)
        .execute(&self.own)
        .await
        .map_err(db)?;
        Ok(())
    }

    async fn leave(&self, group: &str, owner: &str) -> Result<()> {
        sqlx::query("DELETE FROM postrider.lease WHERE group_name = $1 AND owner = $2 AND slot = -1")
            .bind(group)
            .bind(owner)
            .execute(&self.own)
            .await
            .map_err(db)?;
        Ok(())
    }

    async fn leases(&self) -> Result<Vec<LeaseView>> {
        let rows = sqlx::query(
            "SELECT group_name, slot, owner, epoch, \
             CASE WHEN expires_at > clock_timestamp() \
                  THEN (extract(epoch FROM expires_at - clock_timestamp()) * 1000)::bigint END \
             FROM postrider.lease WHERE slot >= 0 ORDER BY group_name, slot",
        )
        .fetch_all(&self.own)
        .await
        .map_err(db)?;
        rows.iter()
            .map(|row| {
                let remaining: Option<i64> = row.try_get(4).map_err(db)?;
                Ok(LeaseView {
                    lease: Lease {
                        group: row.try_get(0).map_err(db)?,
                        slot: row.try_get::<i32, _>(1).map_err(db)? as u32,
                        owner: row.try_get(2).map_err(db)?,
                        epoch: row.try_get(3).map_err(db)?,
                    },
                    remaining: remaining.map(|millis| Duration::from_millis(millis.max(0) as u64)),
                })
            })
            .collect()
    }
}

/// Whether no other owner holds a living lease of the group.
pub(super) async fn is_alone(connection: &mut PgConnection, lease: &Lease) -> Result<bool> {
    sqlx::query(
        "SELECT NOT EXISTS (SELECT 1 FROM postrider.lease \
         WHERE group_name = $1 AND slot >= 0 AND owner <> $2 AND expires_at > clock_timestamp())",
    )
    .bind(&lease.group)
    .bind(&lease.owner)
    .fetch_one(connection)
    .await
    .and_then(|row| row.try_get(0))
    .map_err(db)
}
