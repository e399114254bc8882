//! A consumer's cursor over the log.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;

use super::{Message, OpenedSlot, Queue};
use crate::broker::{Delivery, Origin, RawMessage, Subscription, Undecodable};
use crate::error::Result;
use crate::handler::ConsumerSpec;
use crate::lease::Lease;
use crate::task::{self, Call};

/// The offset is written at most this often; a crash delivers what was acked since again, and the inbox knows it.
const COMMIT_EVERY: Duration = Duration::from_millis(100);
/// Messages read at once.
const READ_LIMIT: usize = 500;
/// The shortest wait between two looks at an empty log.
const POLL_MIN: Duration = Duration::from_millis(1);

type ReadCall = Call<(Vec<Message>, i64)>;

pub(super) struct EmbeddedSubscription<Q: Queue + ?Sized> {
    queue: Arc<Q>,
    consumer: ConsumerSpec,
    lease: Lease,
    /// Up to where the log was read.
    read_to: i64,
    buffer: VecDeque<Message>,
    /// Delivered offsets, and whether they were acked.
    delivered: BTreeMap<i64, bool>,
    unacked: usize,
    /// How many of the next messages may have ended the process that had them.
    suspicious: u16,
    committed: i64,
    reading: Option<ReadCall>,
    committing: Option<Call<()>>,
    last_commit: Instant,
    last_work: Instant,
    next_poll: Instant,
    poll: Duration,
}

impl<Q: Queue + ?Sized + 'static> EmbeddedSubscription<Q> {
    pub fn new(queue: Arc<Q>, consumer: ConsumerSpec, lease: Lease, opened: OpenedSlot, poll: Duration) -> Self {
        let now = Instant::now();
        let offset = opened.offset;
        Self {
            suspicious: if opened.was_open { consumer.prefetch } else { 0 },
            queue,
            consumer,
            lease,
            read_to: offset,
            buffer: VecDeque::new(),
            delivered: BTreeMap::new(),
            unacked: 0,
            committed: offset,
            reading: None,
            committing: None,
            last_commit: now,
            last_work: now,
            next_poll: now,
            poll,
        }
    }

    fn deliver(&mut self, message: Message) -> Delivery {
        // The last holder ended without a word: what it may have had in hand is what comes first.
        let is_redelivered = self.suspicious > 0;
        self.suspicious = self.suspicious.saturating_sub(1);
        let topic = message.event.as_ref().map(|event| event.topic().to_owned()).unwrap_or_default();
        let origin = Origin {
            exchange: String::new(),
            topic,
            queue: self.consumer.name.clone(),
            offset: Some(message.offset),
            ..Origin::default()
        };
        let event = message.event.map_err(|error| Undecodable { error, raw: RawMessage::default() });
        Delivery { tag: message.offset as u64, event, is_redelivered, origin }
    }

    /// The offset up to which everything is done: just below the lowest unfinished message, or everything read.
    fn done_to(&mut self) -> i64 {
        while let Some(entry) = self.delivered.first_entry() {
            if !entry.get() {
                return entry.key() - 1;
            }
            entry.remove();
        }
        self.buffer.front().map_or(self.read_to, |message| message.offset - 1)
    }

    fn start_commit(&mut self) {
        let offset = self.done_to();
        if offset <= self.committed || self.committing.is_some() || self.last_commit.elapsed() < COMMIT_EVERY {
            return;
        }
        self.committed = offset;
        self.last_commit = Instant::now();
        let (queue, consumer, lease) = (self.queue.clone(), self.consumer.clone(), self.lease.clone());
        self.committing = Some(task::start(async move { queue.commit(&consumer, &lease, offset).await }));
    }

    fn start_read(&mut self) {
        if self.reading.is_none() && self.buffer.is_empty() && Instant::now() >= self.next_poll {
            let (queue, consumer, slot, offset) =
                (self.queue.clone(), self.consumer.clone(), self.lease.slot, self.read_to);
            self.reading = Some(task::start(async move { queue.read(&consumer, slot, offset, READ_LIMIT).await }));
        }
    }

    fn take_read(&mut self, messages: Vec<Message>, read_to: i64) {
        let now = Instant::now();
        if read_to > self.read_to {
            self.last_work = now;
            self.next_poll = now;
        } else {
            let wait = (now.saturating_duration_since(self.last_work) / 2).clamp(POLL_MIN, self.poll);
            self.next_poll = now + wait;
        }
        self.read_to = read_to;
        let consumer = &self.consumer;
        let wanted = |message: &Message| message.event.as_ref().map_or(true, |event| consumer.wants(event.topic()));
        self.buffer.extend(messages.into_iter().filter(wanted));
    }
}

#[async_trait]
impl<Q: Queue + ?Sized + 'static> Subscription for EmbeddedSubscription<Q> {
    async fn next(&mut self) -> Result<Delivery> {
        loop {
            self.start_commit();
            let has_room = self.unacked < usize::from(self.consumer.prefetch);
            if has_room {
                if let Some(message) = self.buffer.pop_front() {
                    self.delivered.insert(message.offset, false);
                    self.unacked += 1;
                    return Ok(self.deliver(message));
                }
                self.start_read();
            }
            let now = Instant::now();
            let timer = if has_room { self.next_poll.max(now + POLL_MIN) } else { now + self.poll };
            tokio::select! {
                read = task::join(&mut self.reading) => {
                    self.reading = None;
                    let (messages, read_to) = read?;
                    self.take_read(messages, read_to);
                }
                committed = task::join(&mut self.committing) => {
                    self.committing = None;
                    committed?;
                }
                () = self.queue.appended(), if self.reading.is_none() && has_room => self.next_poll = Instant::now(),
                () = tokio::time::sleep_until(timer.into()) => {}
            }
        }
    }

    async fn ack(&mut self, tag: u64) -> Result<()> {
        if let Some(is_acked @ false) = self.delivered.get_mut(&(tag as i64)) {
            *is_acked = true;
            self.unacked -= 1;
        }
        self.start_commit();
        Ok(())
    }

    async fn close(&mut self) -> Result<()> {
        if let Some(committing) = self.committing.take() {
            committing.await?;
        }
        let offset = self.done_to().max(self.committed);
        self.queue.leave(&self.consumer, &self.lease, offset).await
    }
}
