//! Recovery: what to do after a restore, and past events for one consumer once more.
//!
//! Positions live in the database of the outbox, so a restore takes both back together, and the database alone cannot know
//! that events were published which it no longer has. Three things tell:
//!
//! - The *origin*: the database writes down which database it is. A dump that was restored elsewhere says that it is another.
//! - The position: on PostgreSQL it is made of transaction numbers; one that the database has not reached comes from another
//!   life of it.
//! - The *witness*: a relay remembers the newest event that it published, in memory and, if it is told to, in a file. When the
//!   outbox has drawn lower numbers only, or another event has that number, the event is gone. The file knows the database by
//!   its *lineage*, which is drawn once and comes along with dumps and copies, not by an address.
//!
//! A relay that notices stands still and says what was published and is no longer there. A person looks, and begins the
//! database's next *life* with [`Recovery::begin_life`]; what was remembered of earlier lives counts no more.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
use crate::broker::Origin;
use crate::dead::ReplayProgress;
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::source::Row;

mod republish;

pub use republish::{Republish, Republished};

/// The newest event that a relay has published.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// The database's life in which it was published.
    pub life: i64,
    /// Its number in the outbox.
    pub id: i64,
    /// The event's id.
    pub event_id: Uuid,
    /// When the relay noted that it was published.
    pub at: DateTime<Utc>,
}

/// What a relay remembers of one destination; shared by its lanes. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Witness(Arc<Mutex<Seen>>);

#[derive(Debug, Default)]
struct Seen {
    life: i64,
    mark: Option<Mark>,
}

impl Witness {
    /// What an earlier process remembered.
    pub fn of(mark: Option<Mark>) -> Self {
        let life = mark.as_ref().map_or(0, |mark| mark.life);
        Self(Arc::new(Mutex::new(Seen { life, mark })))
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        // Nothing here panics half-way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The newest event that was published.
    pub fn mark(&self) -> Option<Mark> {
        self.lock().mark.clone()
    }

    /// The life that the database is in. What was remembered of an earlier one is forgotten.
    pub(crate) fn set_life(&self, life: i64) {
        let mut seen = self.lock();
        seen.life = life;
        if seen.mark.as_ref().is_some_and(|mark| mark.life != life) {
            seen.mark = None;
        }
    }

    /// The broker has confirmed it.
    pub(crate) fn published(&self, id: i64, event_id: Uuid) {
        let mut seen = self.lock();
        if seen.mark.as_ref().is_none_or(|mark| mark.id < id) {
            seen.mark = Some(Mark { life: seen.life, id, event_id, at: Utc::now() });
        }
    }
}

/// How a source finds itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LookBack {
    /// The life that the database is in.
    pub life: i64,
    /// What does not fit together, if so.
    pub restored: Option<Restored>,
}

/// The database is not the one that the relay knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Restored {
    /// How it was noticed.
    pub evidence: Evidence,
    /// The newest event that the outbox has: its number and time.
    pub newest: Option<(i64, DateTime<Utc>)>,
    /// The newest event that is known to have been published, if any is.
    pub published: Option<Mark>,
    /// How many events wait, exact up to [`crate::upkeep::BACKLOG_COUNT_MAX`]; some of them may have been published before.
    pub pending: u64,
}

/// How a restore was noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Evidence {
    /// The positions were written in another database.
    OtherDatabase,
    /// The position is ahead of the database.
    PositionAhead,
    /// An event that was published is not in the outbox any more.
    PublishedIsGone,
}

/// How a reason tells [`Evidence::OtherDatabase`].
pub const OTHER_DATABASE: &str = "its positions were written in another database";

/// What every such reason begins with.
const RESTORED: &str = "the database was restored: ";

impl fmt::Display for Restored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |at: &DateTime<Utc>| at.to_rfc3339_opts(SecondsFormat::Secs, true);
        f.write_str(RESTORED)?;
        f.write_str(match self.evidence {
            Evidence::OtherDatabase => OTHER_DATABASE,
            Evidence::PositionAhead => "the relay's position is ahead of it",
            Evidence::PublishedIsGone => "an event that was published is not there any more",
        })?;
        match (&self.published, &self.newest) {
            (Some(mark), Some((id, at))) if mark.id > *id => write!(
                f,
                ". Published and no longer there: events after number {id} ({}) up to number {} ({}, life {})",
                time(at),
                mark.id,
                time(&mark.at),
                mark.life
            )?,
            (Some(mark), _) => write!(
                f,
                ". Published and no longer there: events up to number {} ({}, life {}, event {}), from an unknown one on",
                mark.id,
                time(&mark.at),
                mark.life,
                mark.event_id
            )?,
            (None, Some((id, at))) => {
                write!(f, ". Published and no longer there: whatever was committed after number {id} ({})", time(at))?
            }
            (None, None) => f.write_str(". The outbox is empty")?,
        }
        write!(f, ". To be sent, perhaps again: {} events that wait", self.pending)
    }
}

impl Restored {
    /// Why the relay stands still.
    pub(crate) fn error(&self) -> Error {
        Error::new(Kind::Mismatch, self.to_string()).with_remedy(
            "`postrider outbox recover` shows it and, with --yes, lets the relay go on; see \"After a restore\" in \
             docs/operations/runbook.md",
        )
    }
}

/// What is known of earlier lives, for the next one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Before {
    /// The highest number that is known to have been published. Numbers up to it are not drawn again.
    pub id: i64,
    /// The latest life that somebody remembers. After two restores the database itself may remember an earlier one.
    pub life: i64,
}

impl Before {
    /// What marks say.
    pub fn of<'a>(marks: impl IntoIterator<Item = &'a Mark>) -> Self {
        let highest = |sum: Self, mark: &Mark| Self { id: sum.id.max(mark.id), life: sum.life.max(mark.life) };
        marks.into_iter().fold(Self::default(), highest)
    }

    /// What the reason of a relay that stands still because of a restore says; `None` of any other reason. It may be all that
    /// is left: a relay remembers in memory what no file knows.
    pub fn told(reason: &str) -> Option<Self> {
        if !reason.starts_with(RESTORED) {
            return None;
        }
        let number = |after: &str| -> Option<i64> {
            let digits = reason.split_once(after)?.1;
            digits.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
        };
        Some(Self { id: number("up to number ").unwrap_or(0), life: number(", life ").unwrap_or(0) })
    }

    /// What both know.
    pub fn and(self, other: Self) -> Self {
        Self { id: self.id.max(other.id), life: self.life.max(other.life) }
    }
}

/// What the next life began with.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct NewLife {
    /// Its number.
    pub life: i64,
    /// Events that wait and were given to the new life, because the numbers of their transactions mean nothing here.
    pub moved: u64,
}

/// The store's side.
#[async_trait]
pub trait Recovery: Send + Sync {
    /// Begins the database's next life, in one transaction: positions are brought into the numbers of this database, so that
    /// no event is passed over (some may be published again); relays that stand still go on, and those that hold a lane lose
    /// it. Its number is above that of every life that is known. Audited.
    async fn begin_life(&self, before: Before, actor: &str) -> Result<NewLife>;

    /// The database stands elsewhere, with all its events and its own numbers: only that is noted. Refused when positions
    /// say otherwise. Audited.
    async fn keep_positions(&self, actor: &str) -> Result<()> {
        let _ = actor;
        Err(Error::new(Kind::Config, "this database does not note where it stands, so there is nothing to note anew")
            .with_remedy("without --keep-positions the next life begins"))
    }

    /// What this database, its dumps and its copies have in common, and no other has.
    async fn lineage(&self) -> Result<String>;

    /// Events of the outbox that were created in a span of time, with numbers above `after`, in order.
    async fn past(&self, from: DateTime<Utc>, to: DateTime<Utc>, after: i64, limit: usize) -> Result<Vec<Row>>;

    /// Whether this store has heard of the consumer: through its inbox, a pulse, a cursor, a held message or a dead letter.
    async fn knows_consumer(&self, consumer: &str) -> Result<bool>;

    /// Which of these events its inbox has, is held for it or lies among its dead letters.
    async fn known_to(&self, consumer: &str, ids: &[Uuid]) -> Result<Vec<Uuid>>;

    /// Gives events to one consumer, as held messages, in their order, behind whatever is held of their keys. What its inbox
    /// has is left out, unless `is_again`: then its row goes in the same transaction. Held messages and dead letters are left
    /// alone. Audited, with the number `up_to` which the outbox was read; returns those that were given.
    async fn republish(
        &self,
        consumer: &str,
        events: &[Event],
        up_to: i64,
        is_again: bool,
        actor: &str,
    ) -> Result<Vec<Uuid>>;

    /// How these fare: held is open, a dead letter has failed, the rest was applied.
    async fn republish_progress(&self, consumer: &str, ids: &[Uuid]) -> Result<ReplayProgress>;
}

/// Where a message says that it came from when a person gave it to a consumer once more.
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub(crate) fn republished_origin(event: &Event) -> Origin {
    let (topic, queue) = (event.topic().to_owned(), "republish".to_owned());
    Origin { topic, queue, is_replayed: true, ..Origin::default() }
}

/// What the audit says of it.
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub(crate) fn republished_detail(consumer: &str, given: &[Uuid], is_again: bool, up_to: i64) -> serde_json::Value {
    let (count, first) = (given.len(), given.first());
    serde_json::json!({ "consumer": consumer, "count": count, "again": is_again, "first": first, "up_to": up_to })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(id: i64) -> Mark {
        Mark { life: 0, id, event_id: Uuid::nil(), at: DateTime::UNIX_EPOCH }
    }

    #[test]
    fn what_is_gone_is_said_as_exactly_as_it_is_known() {
        let restored =
            |published, newest| Restored { evidence: Evidence::PublishedIsGone, newest, published, pending: 3 };
        let at = DateTime::UNIX_EPOCH;
        let text = restored(Some(mark(9)), Some((4, at))).to_string();
        assert!(
            text.contains("after number 4 (1970-01-01T00:00:00Z) up to number 9") && text.contains("3 events"),
            "{text}"
        );
        assert!(restored(Some(mark(9)), Some((12, at))).to_string().contains("from an unknown one on"));
        assert!(restored(None, Some((4, at))).to_string().contains("committed after number 4"));
        assert_eq!(restored(None, None).error().kind(), Kind::Mismatch);
        let told = |published, newest| Before::told(restored(published, newest).error().message());
        let late = Mark { life: 2, ..mark(9) };
        assert_eq!(told(Some(late.clone()), Some((4, at))), Some(Before { id: 9, life: 2 }));
        assert_eq!(told(Some(late.clone()), None), Some(Before::of([&late, &mark(5)])));
        assert_eq!(told(None, Some((4, at))), Some(Before::default()));
        assert_eq!(Before::told("the broker is down; up to number 9"), None);
    }

    #[test]
    fn a_witness_keeps_the_newest_and_forgets_earlier_lives() {
        let event = Event::builder("t", "t").json(&1).unwrap().build().unwrap();
        let witness = Witness::of(Some(mark(9)));
        witness.published(5, event.id());
        assert_eq!(witness.mark(), Some(mark(9)));
        witness.set_life(0);
        assert_eq!(witness.mark(), Some(mark(9)));
        witness.set_life(1);
        assert_eq!(witness.mark(), None);
        witness.published(5, event.id());
        assert_eq!(witness.mark().map(|mark| (mark.life, mark.id)), Some((1, 5)));
    }
}
