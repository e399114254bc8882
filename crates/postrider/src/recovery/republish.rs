//! Past events for one consumer once more: page by page, not faster than asked for, and no page before the last is decided.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Serialize;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::Recovery;
use crate::broker::topic::TopicFilter;
use crate::error::Result;
use crate::event::Event;

/// Rows that are read at once.
const PAGE: usize = 500;
/// How often progress is asked for.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Which events, and to whom.
#[derive(Debug, Clone)]
pub struct Republish {
    /// The consumer.
    pub consumer: String,
    /// Created at or after this time.
    pub from: DateTime<Utc>,
    /// Created before this time.
    pub to: DateTime<Utc>,
    /// With numbers above this: where an earlier run ended.
    pub after: i64,
    /// Of these topics.
    pub topics: TopicFilter,
    /// Of this key.
    pub key: Option<String>,
    /// Apply once more what was applied.
    pub is_again: bool,
    /// At most this many per second.
    pub rate: u32,
    /// Only count.
    pub is_dry_run: bool,
    /// Who asks, for the audit table.
    pub actor: String,
}

/// What a run has come to, so far or in the end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Republished {
    /// Events that were asked for.
    pub found: u64,
    /// Left out, because the consumer has them: applied, held, or among its dead letters.
    pub skipped: u64,
    /// Given to the consumer (of a dry run: would be).
    pub given: u64,
    /// Applied.
    pub applied: u64,
    /// Given up by the consumer.
    pub failed: u64,
    /// Not decided yet.
    pub open: u64,
    /// Rows of the outbox that are no events.
    pub unreadable: u64,
    /// The number of the last event that was looked at: where to go on.
    pub last_id: i64,
    /// Whether it was stopped before its end.
    pub is_stopped: bool,
}

impl Republish {
    /// Reads from `outbox` and gives to the consumer, whose inbox is in `target`. Ends when there are no more, or on `stop`;
    /// what was given is tried by the consumer in any case. `progress` hears of every change, so that after an error it has the
    /// place to go on from.
    pub async fn run(
        self,
        outbox: &dyn Recovery,
        target: &dyn Recovery,
        stop: &CancellationToken,
        progress: &watch::Sender<Republished>,
    ) -> Result<Republished> {
        let mut sum = Republished { last_id: self.after, ..Republished::default() };
        let limit = PAGE.min(self.rate.max(1) as usize);
        while !stop.is_cancelled() {
            let began = Instant::now();
            let rows = outbox.past(self.from, self.to, sum.last_id, limit).await?;
            let is_last = rows.len() < limit;
            let last_id = rows.last().map_or(sum.last_id, |row| row.id);
            let mut wanted = Vec::with_capacity(rows.len());
            for row in rows {
                match row.event {
                    Ok(event) if self.wants(&event) => wanted.push(event),
                    Ok(_) => {}
                    Err(_) => sum.unreadable += 1,
                }
            }
            sum.found += wanted.len() as u64;
            let given = self.give(target, &wanted, last_id).await?;
            sum.skipped += (wanted.len() - given.len()) as u64;
            sum.given += given.len() as u64;
            sum.last_id = last_id;
            tell(progress, Republished { open: given.len() as u64, ..sum });
            if self.is_dry_run {
                sum.applied = 0;
            } else {
                sum = self.watch(target, &given, sum, stop, progress).await?;
                let pace = Duration::from_secs_f64(given.len() as f64 / f64::from(self.rate.max(1)));
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = tokio::time::sleep_until(began + pace) => {}
                }
            }
            tell(progress, sum);
            if is_last && sum.open == 0 {
                return Ok(sum);
            }
        }
        sum.is_stopped = true;
        tell(progress, sum);
        Ok(sum)
    }

    fn wants(&self, event: &Event) -> bool {
        self.topics.wants(event.topic()) && self.key.as_deref().is_none_or(|key| event.key() == Some(key))
    }

    async fn give(&self, target: &dyn Recovery, events: &[Event], up_to: i64) -> Result<Vec<Uuid>> {
        if events.is_empty() {
            return Ok(Vec::new());
        }
        if !self.is_dry_run {
            return target.republish(&self.consumer, events, up_to, self.is_again, &self.actor).await;
        }
        let ids: Vec<Uuid> = events.iter().map(Event::id).collect();
        let known = target.known_to(&self.consumer, &ids).await?;
        Ok(ids.into_iter().filter(|id| self.is_again || !known.contains(id)).collect())
    }

    /// Waits until all of a page are decided, or a stop is asked for.
    async fn watch(
        &self,
        target: &dyn Recovery,
        given: &[Uuid],
        sum: Republished,
        stop: &CancellationToken,
        progress: &watch::Sender<Republished>,
    ) -> Result<Republished> {
        loop {
            let found = target.republish_progress(&self.consumer, given).await?;
            let now = Republished {
                applied: sum.applied + found.applied,
                failed: sum.failed + found.failed,
                open: found.open,
                ..sum
            };
            tell(progress, now);
            if found.open == 0 || stop.is_cancelled() {
                return Ok(now);
            }
            tokio::select! {
                () = stop.cancelled() => {}
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
        }
    }
}

/// Whoever waits for a change hears only of changes.
fn tell(progress: &watch::Sender<Republished>, now: Republished) {
    progress.send_if_modified(|last| std::mem::replace(last, now) != now);
}
