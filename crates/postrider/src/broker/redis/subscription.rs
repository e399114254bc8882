//! The messages of one slot of a consumer: of all shards that are the slot's.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use redis::aio::MultiplexedConnection;
use redis::{FromRedisValue, Script, ScriptInvocation, Value};

use super::error::{of_streams, replaced, unexpected};
use super::message::{Entry, EntryId};
use super::script::{HOLDER_GONE_MS, Scripts, answer};
use super::settings::RedisStreamSettings;
use super::trim;
use crate::broker::window::Window;
use crate::broker::{Delivery, Origin, Subscription};
use crate::error::Result;
use crate::handler::{ConsumerSpec, SLOTS_MAX};
use crate::lease::Lease;
use crate::redis_server::Link;
use crate::task::{self, Call};

/// Positions are written at most this often; a crash delivers what was done since again, and the inbox knows it.
const COMMIT_EVERY: Duration = Duration::from_millis(100);
/// How long a read waits in Redis for the next entry.
pub(super) const WAIT: Duration = Duration::from_secs(5);
/// How often what everybody has done is trimmed.
const TRIM_EVERY: Duration = Duration::from_secs(60);
/// What one read should weigh. How many entries that is, is learned from the last one.
const READ_BYTES: usize = 8 * 1024 * 1024;
/// The first read has learned nothing yet.
const READ_FIRST: usize = 16;
/// A message that is not done keeps at most this many of its shard behind it in hand.
const WINDOW_MAX: usize = 10_000;

/// The entries of each shard that was read.
type Page = Vec<Vec<Entry>>;

/// What a task needs to speak for this subscription.
struct Reader {
    link: Arc<Link>,
    /// For reads that wait.
    waiting: MultiplexedConnection,
    scripts: Arc<Scripts>,
    settings: Arc<RedisStreamSettings>,
    consumer: ConsumerSpec,
    slot: u32,
    /// No other subscription has the same.
    token: String,
    shards: Vec<u32>,
}

struct Shard {
    number: u32,
    /// Up to where it was read.
    read_to: EntryId,
    /// Everything up to here is done.
    done_to: EntryId,
    /// And Redis knows.
    committed: EntryId,
    /// What comes up to here may have been in somebody's hands.
    seen: EntryId,
    window: Window<EntryId>,
}

pub(super) struct ShardSubscription {
    reader: Arc<Reader>,
    shards: Vec<Shard>,
    /// What was read and not delivered, with the place of its shard.
    buffer: VecDeque<(usize, Entry)>,
    /// Counts deliveries.
    count: u64,
    /// How many entries to read at once.
    read_count: usize,
    /// Which shard is read first; each in its turn.
    turn: usize,
    reading: Option<(Vec<usize>, Call<Page>)>,
    committing: Option<Call<()>>,
    trimming: Option<Call<u64>>,
    last_commit: Instant,
    next_trim: Instant,
}

impl Reader {
    async fn ask<T: FromRedisValue>(&self, script: &ScriptInvocation<'_>) -> Result<T> {
        self.link.call(async |connection| script.invoke_async(connection).await).await.map_err(of_streams)
    }

    /// What a fenced script answers.
    async fn fenced(&self, script: &ScriptInvocation<'_>) -> Result<Vec<Value>> {
        match answer(self.ask(script).await?) {
            Some(Some(items)) => Ok(items),
            Some(None) => Err(replaced(&self.consumer.name, self.slot)),
            None => Err(unexpected(&self.link.shown)),
        }
    }

    /// The positions of the slot's shards, and what was seen of them.
    async fn open(&self, epoch: i64) -> Result<Vec<(EntryId, EntryId)>> {
        let mut script = self.scripts.open.key(self.settings.holders(&self.consumer.name));
        for shard in 0..SLOTS_MAX {
            script.key(self.settings.stream(shard));
        }
        script.arg(&self.consumer.name).arg(self.consumer.slots).arg(self.slot).arg(epoch);
        script.arg(&self.token).arg(HOLDER_GONE_MS);
        let items = self.fenced(&script).await?;
        let ids: Option<Vec<EntryId>> = items.into_iter().map(id).collect();
        let ids = ids.filter(|ids| ids.len() == 2 * self.shards.len());
        let ids = ids.ok_or_else(|| unexpected(&self.link.shown))?;
        Ok(ids.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect())
    }

    /// The entries after the given ids. Waits for them once.
    async fn read(&self, after: &[(u32, EntryId)], count: usize) -> Result<Page> {
        let page = self.read_now(after, count).await?;
        if page.iter().any(|entries| !entries.is_empty()) {
            return Ok(page);
        }
        let mut command = redis::cmd("XREAD");
        command.arg("COUNT").arg(1).arg("BLOCK").arg(WAIT.as_millis() as u64).arg("STREAMS");
        after.iter().for_each(|(shard, _)| {
            command.arg(self.settings.stream(*shard));
        });
        after.iter().for_each(|(_, id)| {
            command.arg(id.to_string());
        });
        let mut waiting = self.waiting.clone();
        // Only a sign that something has come: who may read it is for the script to say.
        let _: Value = command.query_async(&mut waiting).await.map_err(|error| of_streams(self.link.failed(error)))?;
        self.read_now(after, count).await
    }

    async fn read_now(&self, after: &[(u32, EntryId)], count: usize) -> Result<Page> {
        let mut script = self.scripts.read.key(self.settings.holders(&self.consumer.name));
        script.arg(&self.token).arg(count).arg(format!("alive:{}:{}", self.consumer.slots, self.slot));
        for (shard, id) in after {
            script.key(self.settings.stream(*shard)).arg(shard).arg(id.to_string());
        }
        let items = self.fenced(&script).await?;
        let entries = |value| match value {
            Value::Array(items) => items.into_iter().map(Entry::of).collect::<Option<Vec<_>>>(),
            _ => None,
        };
        let page: Option<Page> = items.into_iter().map(entries).collect();
        page.filter(|page| page.len() == after.len()).ok_or_else(|| unexpected(&self.link.shown))
    }

    /// Writes positions.
    async fn commit(&self, positions: &[(u32, EntryId)]) -> Result<()> {
        self.fenced(&self.moving(&self.scripts.commit, positions)).await.map(|_| ())
    }

    /// Writes positions, and that the holder ends in good order. `seen` is what others had seen before it.
    async fn leave(&self, positions: &[(u32, EntryId)], seen: &[EntryId]) -> Result<()> {
        let mut script = self.moving(&self.scripts.leave, positions);
        seen.iter().for_each(|id| {
            script.arg(id.to_string());
        });
        self.fenced(&script).await.map(|_| ())
    }

    fn moving<'s>(&self, script: &'s Script, positions: &[(u32, EntryId)]) -> ScriptInvocation<'s> {
        let mut script = script.key(self.settings.holders(&self.consumer.name));
        script.arg(&self.token).arg(&self.consumer.name);
        for (shard, id) in positions {
            script.key(self.settings.stream(*shard)).arg(shard).arg(id.to_string());
        }
        script
    }
}

fn id(value: Value) -> Option<EntryId> {
    let Value::BulkString(text) = value else { return None };
    EntryId::parse(std::str::from_utf8(&text).ok()?)
}

impl ShardSubscription {
    pub async fn open(
        link: Arc<Link>,
        scripts: Arc<Scripts>,
        settings: Arc<RedisStreamSettings>,
        consumer: &ConsumerSpec,
        lease: &Lease,
    ) -> Result<Self> {
        let waiting = link.dedicated(WAIT + settings.publish_timeout).await.map_err(of_streams)?;
        let shards: Vec<u32> = (0..SLOTS_MAX).filter(|shard| shard % consumer.slots == lease.slot).collect();
        let token = format!("{:016x}", fastrand::u64(..));
        let consumer = consumer.clone();
        let reader = Reader { link, waiting, scripts, settings, consumer, slot: lease.slot, token, shards };
        let positions = reader.open(lease.epoch).await?;
        let shards = reader.shards.iter().zip(positions).map(|(number, (position, seen))| Shard {
            number: *number,
            read_to: position,
            done_to: position,
            committed: position,
            seen,
            window: Window::default(),
        });
        let shards: Vec<_> = shards.collect();
        let now = Instant::now();
        Ok(Self {
            read_count: READ_FIRST.min(usize::from(reader.consumer.prefetch)),
            reader: Arc::new(reader),
            shards,
            buffer: VecDeque::new(),
            count: 0,
            turn: 0,
            reading: None,
            committing: None,
            trimming: None,
            last_commit: now,
            next_trim: now + TRIM_EVERY.mul_f64(fastrand::f64()),
        })
    }

    fn has_room(&self) -> bool {
        let unsettled: usize = self.shards.iter().map(|shard| shard.window.unsettled()).sum();
        unsettled < usize::from(self.reader.consumer.prefetch)
    }

    fn start_read(&mut self) {
        if self.reading.is_some() || !self.buffer.is_empty() {
            return;
        }
        // Each shard is the first one in its turn, so that a busy one cannot keep the others from being read.
        self.turn = (self.turn + 1) % self.shards.len();
        let order = (self.turn..self.shards.len()).chain(0..self.turn);
        let order: Vec<usize> = order.filter(|at| self.shards[*at].window.len() < WINDOW_MAX).collect();
        if order.is_empty() {
            return;
        }
        let after: Vec<_> = order.iter().map(|at| (self.shards[*at].number, self.shards[*at].read_to)).collect();
        let (reader, count) = (self.reader.clone(), self.read_count);
        self.reading = Some((order, task::start(async move { reader.read(&after, count).await })));
    }

    fn take_read(&mut self, order: &[usize], page: Page) {
        let (mut count, mut bytes) = (0usize, 0usize);
        for (at, entries) in order.iter().zip(page) {
            for entry in entries {
                count += 1;
                bytes += entry.bytes();
                self.shards[*at].read_to = entry.id;
                self.buffer.push_back((*at, entry));
            }
        }
        if let Some(bytes) = usize::checked_div(bytes, count) {
            let fitting = READ_BYTES / bytes.max(1);
            self.read_count = fitting.clamp(1, usize::from(self.reader.consumer.prefetch));
        }
    }

    /// The delivery of an entry, unless nobody here wants it.
    fn deliver(&mut self, at: usize, entry: Entry) -> Option<Delivery> {
        let (topic, id) = (entry.topic(), entry.id);
        // What has no topic is for everybody to look at.
        let is_wanted = topic.is_empty() || self.reader.consumer.wants(&topic);
        self.count += 1;
        // The shard is found again in the tag.
        let tag = self.count * u64::from(SLOTS_MAX) + at as u64;
        let shard = &mut self.shards[at];
        shard.window.push(tag, id, !is_wanted);
        let origin = Origin {
            exchange: self.reader.settings.stream(shard.number),
            topic: crate::inbox::without_nul(topic),
            queue: self.reader.consumer.name.clone(),
            offset: None,
            is_replayed: false,
        };
        let is_redelivered = id <= shard.seen;
        is_wanted.then(|| Delivery { tag, event: entry.event(), is_redelivered, origin })
    }

    /// Positions that Redis does not know yet.
    fn uncommitted(&mut self) -> Vec<(u32, EntryId)> {
        for shard in &mut self.shards {
            if let Some(id) = shard.window.advance() {
                shard.done_to = id;
            }
        }
        let moved = self.shards.iter().filter(|shard| shard.done_to > shard.committed);
        moved.map(|shard| (shard.number, shard.done_to)).collect()
    }

    fn start_commit(&mut self) {
        if self.committing.is_some() || self.last_commit.elapsed() < COMMIT_EVERY {
            return;
        }
        let positions = self.uncommitted();
        if positions.is_empty() {
            return;
        }
        self.last_commit = Instant::now();
        self.shards.iter_mut().for_each(|shard| shard.committed = shard.done_to);
        let reader = self.reader.clone();
        self.committing = Some(task::start(async move { reader.commit(&positions).await }));
    }

    fn start_trim(&mut self) {
        if self.trimming.is_none() && Instant::now() >= self.next_trim {
            self.next_trim = Instant::now() + TRIM_EVERY;
            let reader = self.reader.clone();
            let trimming =
                async move { trim::trim(&reader.link, &reader.scripts, &reader.settings, &reader.shards).await };
            self.trimming = Some(task::start(trimming));
        }
    }
}

/// The page, or never when nothing is read. Cancel-safe.
async fn page(reading: &mut Option<(Vec<usize>, Call<Page>)>) -> Result<Page> {
    match reading {
        Some((_, reading)) => reading.await,
        None => std::future::pending().await,
    }
}

#[async_trait]
impl Subscription for ShardSubscription {
    async fn next(&mut self) -> Result<Delivery> {
        loop {
            self.start_commit();
            self.start_trim();
            if self.has_room() {
                while let Some((at, entry)) = self.buffer.pop_front() {
                    if let Some(delivery) = self.deliver(at, entry) {
                        return Ok(delivery);
                    }
                }
                self.start_read();
            }
            // Only what is not written yet is worth a look at the clock.
            let wake = if self.uncommitted().is_empty() { WAIT } else { COMMIT_EVERY };
            tokio::select! {
                read = page(&mut self.reading) => {
                    let order = self.reading.take().map(|(order, _)| order).unwrap_or_default();
                    self.take_read(&order, read?);
                }
                committed = task::join(&mut self.committing) => {
                    self.committing = None;
                    committed?;
                }
                trimmed = task::join(&mut self.trimming) => {
                    self.trimming = None;
                    if let Err(error) = trimmed {
                        tracing::warn!(error_type = error.kind().as_str(), %error, remedy = error.remedy(),
                            "cannot trim what every consumer has done, trying again later");
                    }
                }
                () = tokio::time::sleep(wake) => {}
            }
        }
    }

    async fn ack(&mut self, tag: u64) -> Result<()> {
        let at = (tag % u64::from(SLOTS_MAX)) as usize;
        if let Some(shard) = self.shards.get_mut(at) {
            shard.window.settle(tag);
        }
        self.start_commit();
        Ok(())
    }

    async fn close(&mut self) -> Result<()> {
        self.reading = None;
        if let Some(committing) = self.committing.take() {
            committing.await?;
        }
        self.uncommitted();
        let positions: Vec<_> = self.shards.iter().map(|shard| (shard.number, shard.done_to)).collect();
        let seen: Vec<_> = self.shards.iter().map(|shard| shard.seen).collect();
        let reader = self.reader.clone();
        task::start(async move { reader.leave(&positions, &seen).await }).await
    }
}
