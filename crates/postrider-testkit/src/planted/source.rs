//! Sources with a bug.

use std::sync::Arc;

use async_trait::async_trait;
use postrider::error::{Error, Kind, Result};
use postrider::lease::Lease;
use postrider::source::{Opened, Page, ParkedKeys, ParkedRow, Position, Row, Settlement, Source};
use postrider::store::postgres::PostgresStore;
use sqlx::Row as _;
use sqlx::postgres::PgRow;

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceBug {
    /// Remembers the highest id: passes over what commits late.
    IdCursor,
    /// Reads the right rows, ordered by the producer's clock.
    CreatedAtOrder,
    /// Settles without comparing the epoch: a late instance overwrites its successor.
    UnfencedSettle,
}

/// A source with one bug; everything else is the real one.
pub struct PlantedSource {
    /// The real source.
    pub inner: Arc<dyn Source>,
    /// Where the rows are.
    pub store: PostgresStore,
    /// What is wrong.
    pub bug: SourceBug,
}

impl PlantedSource {
    async fn read_by_id(&self, from: &Position, limit: usize) -> Result<Page> {
        let rows =
            sqlx::query("SELECT id, key, payload::text FROM postrider.outbox WHERE id > $1 ORDER BY id LIMIT $2")
                .bind(from.last_id())
                .bind(limit as i64)
                .fetch_all(self.store.pool())
                .await
                .map_err(db)?;
        let rows = rows.iter().map(row).collect::<Result<Vec<_>>>()?;
        let last = rows.last().map_or(from.last_id(), |row| row.id);
        Ok(Page { rows, next: Position::at_id(last), has_more: false })
    }

    /// A lease with the epoch that happens to be in the database.
    async fn forge(&self, lease: &Lease) -> Result<Lease> {
        let epoch = sqlx::query("SELECT epoch FROM postrider.lane WHERE destination = 'default' AND lane = $1")
            .bind(lease.slot as i32)
            .fetch_one(self.store.pool())
            .await
            .and_then(|row| row.try_get(0))
            .map_err(db)?;
        Ok(Lease { epoch, ..lease.clone() })
    }
}

#[async_trait]
impl Source for PlantedSource {
    async fn open(&self, lease: &Lease) -> Result<Opened> {
        let mut opened = self.inner.open(lease).await?;
        if self.bug == SourceBug::IdCursor {
            opened.position = Position::at_id(0);
        }
        Ok(opened)
    }

    async fn read(&self, lease: &Lease, from: &Position, limit: usize) -> Result<Page> {
        if self.bug == SourceBug::IdCursor {
            return self.read_by_id(from, limit).await;
        }
        let mut page = self.inner.read(lease, from, limit).await?;
        if self.bug == SourceBug::CreatedAtOrder {
            page.rows.sort_by_key(|row| row.event.as_ref().ok().map(postrider::Event::time));
        }
        Ok(page)
    }

    async fn settle(&self, lease: &Lease, settlement: &Settlement) -> Result<()> {
        match self.bug {
            SourceBug::IdCursor => Ok(()),
            SourceBug::CreatedAtOrder => self.inner.settle(lease, settlement).await,
            SourceBug::UnfencedSettle => self.inner.settle(&self.forge(lease).await?, settlement).await,
        }
    }

    async fn parked(&self, lease: &Lease) -> Result<ParkedKeys> {
        self.inner.parked(lease).await
    }

    async fn due(&self, lease: &Lease, limit: usize) -> Result<Vec<ParkedRow>> {
        self.inner.due(lease, limit).await
    }

    async fn close(&self, lease: &Lease) {
        self.inner.close(lease).await;
    }

    async fn set_asleep(&self, lease: &Lease, is_asleep: bool) -> Result<()> {
        self.inner.set_asleep(lease, is_asleep).await
    }

    async fn woken(&self) {
        self.inner.woken().await;
    }

    async fn will_wake(&self, lease: &Lease, next: &Position) -> bool {
        self.inner.will_wake(lease, next).await
    }
}

fn row(row: &PgRow) -> Result<Row> {
    let payload: String = row.try_get(2).map_err(db)?;
    let key: String = row.try_get(1).map_err(db)?;
    let event = postrider::Event::builder("test.created", "created").key(&key).payload("application/json", payload);
    Ok(Row { id: row.try_get(0).map_err(db)?, key: Some(key.into()), event: event.build() })
}

fn db(error: sqlx::Error) -> Error {
    Error::new(Kind::Other, error.to_string())
}
