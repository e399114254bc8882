//! Admission in the transaction of the effect.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Row as _};

use super::error::{db, is_duplicate, is_without_savepoint};
use super::{MysqlStore, Tx, marks};
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::inbox::{Admission, Held, Inbox, Retries};

/// The savepoint stands for the transaction: a deadlock, an implicit commit and a `ROLLBACK` of the handler's own remove it.
/// The first rollback is for what a call that was cut off may have left: `START TRANSACTION` would commit it.
const BEGIN: &str = "ROLLBACK; START TRANSACTION; SAVEPOINT postrider_effect";
const RELEASE: &str = "RELEASE SAVEPOINT postrider_effect";

const ADMIT: &str = "INSERT INTO postrider_inbox (consumer, message_id, topic, `key`, fingerprint) \
     SELECT ?, ?, ?, ?, ? FROM DUAL \
      WHERE NOT EXISTS (SELECT 1 FROM postrider_held h WHERE h.consumer = ? AND h.`key` = ?)";

#[async_trait]
impl Inbox for MysqlStore {
    type Tx = Tx;

    async fn begin(&self) -> Result<Tx> {
        self.effects.begin_with(BEGIN).await.map_err(db)
    }

    async fn admit(&self, tx: &mut Tx, consumer: &str, event: &Event) -> Result<Admission> {
        let id = event.id().hyphenated().to_string();
        let admitted = sqlx::query(ADMIT)
            .bind(consumer)
            .bind(&id)
            .bind(event.topic())
            .bind(event.key())
            .bind(event.fingerprint())
            .bind(consumer)
            .bind(event.key())
            .execute(&mut **tx)
            .await;
        match admitted {
            Ok(result) if result.rows_affected() == 1 => return Ok(Admission::New),
            Ok(_) => {}
            Err(error) if is_duplicate(&error) => {}
            Err(error) => return Err(db(error)),
        }
        let row = sqlx::query("SELECT fingerprint FROM postrider_inbox WHERE consumer = ? AND message_id = ?")
            .bind(consumer)
            .bind(&id)
            .fetch_optional(&mut **tx)
            .await
            .map_err(db)?;
        let fingerprint = row.map(|row| row.try_get(0)).transpose().map_err(db)?;
        Ok(Admission::of_row(event, fingerprint))
    }

    async fn admit_all(&self, tx: &mut Tx, consumer: &str, events: &[Arc<Event>]) -> Result<Vec<Admission>> {
        if events.is_empty() {
            return Ok(Vec::new());
        }
        let held = self.held_keys(tx, consumer, events).await?;
        let known = self.fingerprints(tx, consumer, events).await?;
        let is_free = |event: &Event| !event.key().is_some_and(|key| held.contains(key));
        // The first of several with the same id; in the order of their ids, so that two batches with the same messages wait
        // for each other in the same order.
        let mut new: HashMap<String, usize> = HashMap::new();
        for (index, event) in events.iter().enumerate() {
            let id = event.id().hyphenated().to_string();
            if is_free(event) && !known.contains_key(&id) {
                new.entry(id).or_insert(index);
            }
        }
        let mut sorted: Vec<(&String, &usize)> = new.iter().collect();
        sorted.sort_unstable();
        if !sorted.is_empty() {
            let values = vec!["(?, ?, ?, ?, ?)"; sorted.len()].join(", ");
            let insert = format!(
                "INSERT INTO postrider_inbox (consumer, message_id, topic, `key`, fingerprint) VALUES {values}"
            );
            let insert =
                sorted.iter().fold(sqlx::query(AssertSqlSafe(insert)).persistent(false), |query, (id, index)| {
                    let event = &events[**index];
                    query.bind(consumer).bind(*id).bind(event.topic()).bind(event.key()).bind(event.fingerprint())
                });
            match insert.execute(&mut **tx).await {
                Ok(_) => {}
                // Another instance was faster with one of them; the statement had no effect.
                Err(error) if is_duplicate(&error) => return self.admit_singly(tx, consumer, events).await,
                Err(error) => return Err(db(error)),
            }
        }
        let admission = |(index, event): (usize, &Arc<Event>)| {
            let id = event.id().hyphenated().to_string();
            match new.get(&id) {
                Some(first) if *first == index => Admission::New,
                Some(first) => Admission::of_row(event, Some(events[*first].fingerprint())),
                None => Admission::of_row(event, known.get(&id).copied()),
            }
        };
        Ok(events.iter().enumerate().map(admission).collect())
    }

    async fn look(&self, consumer: &str, event: &Event) -> Result<Admission> {
        let row = sqlx::query(
            "SELECT i.message_id IS NOT NULL, i.fingerprint, \
                    EXISTS (SELECT 1 FROM postrider_held h WHERE h.consumer = ? AND h.`key` = ?) \
               FROM (SELECT 1 AS one) o LEFT JOIN postrider_inbox i ON i.consumer = ? AND i.message_id = ?",
        )
        .bind(consumer)
        .bind(event.key())
        .bind(consumer)
        .bind(event.id().hyphenated().to_string())
        .fetch_one(&self.own)
        .await
        .map_err(db)?;
        let (has_row, fingerprint, is_held): (bool, Option<i64>, bool) =
            (row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?, row.try_get(2).map_err(db)?);
        Ok(match has_row {
            true => Admission::of_row(event, Some(fingerprint)),
            false if is_held => Admission::Behind,
            false => Admission::New,
        })
    }

    async fn has_applied(&self, held: &Held) -> Result<bool> {
        let row = sqlx::query(
            "SELECT EXISTS (SELECT 1 FROM postrider_inbox WHERE consumer = ? AND message_id = ? AND state <> 'dead') = 1",
        )
        .bind(&held.consumer)
        .bind(held.event.id().hyphenated().to_string())
        .fetch_one(&self.own)
        .await;
        row.and_then(|row| row.try_get(0)).map_err(db)
    }

    async fn admit_held(&self, tx: &mut Tx, held: &Held) -> Result<Admission> {
        self.release(tx, held).await
    }

    async fn skip(&self, tx: &mut Tx, consumer: &str, event: &Event) -> Result<()> {
        sqlx::query("UPDATE postrider_inbox SET state = 'skipped' WHERE consumer = ? AND message_id = ?")
            .bind(consumer)
            .bind(event.id().hyphenated().to_string())
            .execute(&mut **tx)
            .await
            .map_err(db)?;
        Ok(())
    }

    async fn commit(&self, mut tx: Tx) -> Result<()> {
        if let Err(error) = sqlx::raw_sql(RELEASE).execute(&mut *tx).await {
            let ended = is_without_savepoint(&error);
            // What the handler wrote since is in another transaction, which nobody may commit.
            tx.rollback().await.map_err(db)?;
            return Err(match ended {
                true => Error::new(
                    Kind::Other,
                    "the handler went on after its transaction had ended, so nothing can be committed",
                )
                .with_remedy("return errors of the database from the handler; no DDL, COMMIT or ROLLBACK in it"),
                false => db(error),
            });
        }
        tx.commit().await.map_err(db)?;
        // The effect may have appended events.
        self.rings.enqueued.notify_waiters();
        Ok(())
    }

    async fn rollback(&self, tx: Tx) -> Result<()> {
        tx.rollback().await.map_err(db)
    }

    fn retries(&self) -> &dyn Retries {
        self
    }
}

impl MysqlStore {
    async fn admit_singly(&self, tx: &mut Tx, consumer: &str, events: &[Arc<Event>]) -> Result<Vec<Admission>> {
        let mut admissions = Vec::with_capacity(events.len());
        for event in events {
            admissions.push(self.admit(tx, consumer, event).await?);
        }
        Ok(admissions)
    }

    /// Which of the events' keys have held messages.
    async fn held_keys(&self, tx: &mut Tx, consumer: &str, events: &[Arc<Event>]) -> Result<HashSet<String>> {
        let keys: HashSet<&str> = events.iter().filter_map(|event| event.key()).collect();
        if keys.is_empty() {
            return Ok(HashSet::new());
        }
        let query = format!(
            "SELECT DISTINCT `key` FROM postrider_held WHERE consumer = ? AND `key` IN ({})",
            marks(keys.len())
        );
        let query = sqlx::query(AssertSqlSafe(query)).persistent(false).bind(consumer);
        let rows = keys.iter().fold(query, |query, key| query.bind(*key)).fetch_all(&mut **tx).await.map_err(db)?;
        rows.iter().map(|row| row.try_get(0).map_err(db)).collect()
    }

    /// The inbox rows of these events, by their ids.
    async fn fingerprints(
        &self,
        tx: &mut Tx,
        consumer: &str,
        events: &[Arc<Event>],
    ) -> Result<HashMap<String, Option<i64>>> {
        let query = format!(
            "SELECT message_id, fingerprint FROM postrider_inbox WHERE consumer = ? AND message_id IN ({})",
            marks(events.len())
        );
        let query = sqlx::query(AssertSqlSafe(query)).persistent(false).bind(consumer);
        let query = events.iter().fold(query, |query, event| query.bind(event.id().hyphenated().to_string()));
        let rows = query.fetch_all(&mut **tx).await.map_err(db)?;
        rows.iter().map(|row| Ok((row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?))).collect()
    }
}
