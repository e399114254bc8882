//! The messages of one slot of a consumer: its partitions of every topic that it wants, read by a client of its own.
//!
//! Acks come in any order; Kafka is told the offset below the lowest unfinished message of each partition. See `progress`.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rdkafka::Message as _;
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode as Code};
use rdkafka::message::BorrowedMessage;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::client::{self, Listener};
use super::cluster::Cluster;
use super::error::{classify, code, is_denied, is_missing};
use super::message;
use super::opening::{self, Found, Opened, Read, Reader, Wish, Written};
use super::progress::Commit;
use crate::broker::{Delivery, Subscription};
use crate::error::{Error, Kind, Result};
use crate::task;

/// Offsets are written at most this often, unless a bound is near; a crash delivers what was acked since again.
const COMMIT_EVERY: Duration = Duration::from_millis(200);
/// The shortest wait for a point in time.
const TICK: Duration = Duration::from_millis(20);
/// The wait before a commit that failed is tried again.
const COMMIT_AGAIN: Duration = Duration::from_secs(1);
/// Kafka forgets the offsets of a group that commits nothing (after 7 days, or what `offsets.retention.minutes` says).
const COMMIT_ANYWAY: Duration = Duration::from_secs(3600);
/// How long to wait for the last commit.
const CLOSE_WAIT: Duration = Duration::from_secs(5);
/// How long librdkafka waits before it fetches again when it has enough. Its own default, a second, starves a small queue.
const FETCH_AGAIN: Duration = Duration::from_millis(10);
/// What librdkafka holds of messages that nobody has taken yet.
const FETCHED_KBYTES: &str = "16384";

/// What to do about a log that was cut.
const READ_ON: &str = "nothing, it is read on; the next lines of the log say what was lost";

type CommitCall = client::Call<KafkaResult<()>>;

pub(super) struct KafkaSubscription {
    /// None after the end.
    reader: Option<Arc<Reader>>,
    cluster: Arc<Cluster>,
    wish: Wish,
    topics: BTreeMap<String, u32>,
    partitions: Vec<Opened>,
    index: HashMap<String, HashMap<i32, usize>>,
    /// Received, but not to be given out yet.
    parked: VecDeque<(usize, i64, Delivery)>,
    /// Given out and not acked: partition and offset.
    open: HashMap<u64, (usize, i64)>,
    next_tag: u64,
    committing: Option<CommitCall>,
    planned: Vec<(usize, Commit)>,
    next_commit: Instant,
    commit_anyway: Instant,
    is_bound_near: bool,
    /// Whether something was delivered or acked since the last commit.
    is_dirty: bool,
    looking: Option<JoinHandle<Result<Found>>>,
    next_look: Instant,
    is_away: bool,
    /// What was read is not what Kafka has now, so its offsets mean nothing.
    is_cut: bool,
    /// The partitions of which that is known.
    shorter: Vec<(String, i32)>,
}

impl KafkaSubscription {
    pub async fn open(cluster: Arc<Cluster>, address: &super::settings::Address, wish: Wish) -> Result<Self> {
        let mut config = client::config(&wish.settings, address);
        config
            .set("group.id", wish.group())
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            // Offsets are given; one that is gone is an error, never a silent jump.
            .set("auto.offset.reset", "error")
            .set("queued.min.messages", (u32::from(wish.consumer.prefetch) * 2).to_string())
            .set("queued.max.messages.kbytes", FETCHED_KBYTES)
            .set("fetch.queue.backoff.ms", client::millis(FETCH_AGAIN));
        let reader: Reader = config
            .create_with_context(Listener::default())
            .map_err(|error| classify(&error, "make a consumer", &wish.shown))?;
        let now = Instant::now();
        let mut subscription = Self {
            reader: Some(Arc::new(reader)),
            topics: BTreeMap::new(),
            partitions: Vec::new(),
            index: HashMap::new(),
            parked: VecDeque::new(),
            open: HashMap::new(),
            next_tag: 0,
            committing: None,
            planned: Vec::new(),
            next_commit: now,
            commit_anyway: now + COMMIT_ANYWAY,
            is_bound_near: false,
            is_dirty: false,
            looking: None,
            next_look: now + wish.settings.refresh,
            is_away: false,
            is_cut: false,
            shorter: Vec::new(),
            cluster,
            wish,
        };
        let found = subscription.look()?.await.map_err(task::ended)??;
        subscription.take_found(found)?;
        Ok(subscription)
    }

    fn reader(&self) -> Result<Arc<Reader>> {
        self.reader.clone().ok_or_else(|| Error::new(Kind::Other, "the subscription was closed"))
    }

    fn look(&self) -> Result<JoinHandle<Result<Found>>> {
        let (cluster, reader) = (self.cluster.clone(), self.reader()?);
        let looking = opening::look(cluster, reader, self.wish.clone(), self.topics.clone(), self.read());
        Ok(tokio::spawn(looking))
    }

    fn read(&self) -> Vec<Read> {
        let read = |opened: &Opened| (opened.topic.clone(), opened.partition, opened.progress.read_to());
        self.partitions.iter().map(read).collect()
    }

    fn take_found(&mut self, found: Found) -> Result<()> {
        self.topics.extend(found.topics);
        if found.opened.is_empty() {
            return Ok(());
        }
        let assigned = opening::assign(self.reader()?.as_ref(), found.opened.iter());
        assigned.map_err(|error| classify(&error, "read partitions", &self.wish.shown))?;
        for opened in found.opened {
            let place = self.partitions.len();
            self.index.entry(opened.topic.clone()).or_default().insert(opened.partition, place);
            self.partitions.push(opened);
        }
        Ok(())
    }

    /// A record, made a delivery; it is given out later.
    fn receive(&mut self, record: &BorrowedMessage<'_>) {
        let place = self.index.get(record.topic()).and_then(|partitions| partitions.get(&record.partition()));
        let (Some(place), Some(topic)) = (place, self.wish.settings.topic(record.topic())) else { return };
        let offset = record.offset();
        let delivery = message::delivery(record, topic, self.wish.group());
        let progress = &self.partitions[*place].progress;
        self.is_bound_near |= progress.is_near_bound(offset);
        self.parked.push_back((*place, offset, delivery));
    }

    /// The first received message that may be given out. Those of a partition keep their order.
    fn give_out(&mut self) -> Result<Option<Delivery>> {
        let mut stopped = HashSet::new();
        let mut at = 0;
        while let Some((place, offset, _)) = self.parked.get(at) {
            let (place, offset) = (*place, *offset);
            if stopped.contains(&place) || !self.partitions[place].progress.may_deliver(offset) {
                stopped.insert(place);
                at += 1;
                continue;
            }
            let Some((_, _, mut delivery)) = self.parked.remove(at) else { break };
            let Some(is_redelivered) = self.partitions[place].progress.deliver(offset) else {
                let opened = &self.partitions[place];
                self.shorter.push((opened.topic.clone(), opened.partition));
                return Err(self.cut());
            };
            self.next_tag += 1;
            delivery.tag = self.next_tag;
            delivery.is_redelivered = is_redelivered;
            self.open.insert(self.next_tag, (place, offset));
            return Ok(Some(delivery));
        }
        Ok(None)
    }

    /// A log that is not the one that was read. Opened anew, the slot finds out from where to go on.
    fn cut(&mut self) -> Error {
        self.is_cut = true;
        let group = self.wish.group();
        Error::new(Kind::Unavailable, format!("messages of the group {group:?} are gone: a log was cut or made anew"))
            .with_remedy(READ_ON)
    }

    /// Writes offsets, if it is time and something is new.
    fn start_commit(&mut self) -> Result<()> {
        let now = Instant::now();
        let is_anyway = now >= self.commit_anyway;
        let is_time = self.is_bound_near || is_anyway || (self.is_dirty && now >= self.next_commit);
        if self.committing.is_some() || !is_time {
            return Ok(());
        }
        // The highest offset of each partition that waits for its bound.
        let mut waiting: HashMap<usize, i64> = HashMap::new();
        for (place, offset, _) in &self.parked {
            let highest = waiting.entry(*place).or_default();
            *highest = offset.saturating_add(1).max(*highest);
        }
        let plan = |(place, opened): (usize, &Opened)| {
            let planned = opened.progress.plan(waiting.get(&place).copied());
            planned.or_else(|| is_anyway.then(|| opened.progress.again())).map(|commit| (place, commit))
        };
        self.planned = self.partitions.iter().enumerate().filter_map(plan).collect();
        (self.is_bound_near, self.is_dirty) = (false, false);
        self.next_commit = now + COMMIT_EVERY;
        if is_anyway {
            self.commit_anyway = now + COMMIT_ANYWAY;
        }
        if !self.planned.is_empty() {
            let (reader, commits) = (self.reader()?, self.written(&self.planned));
            self.committing = Some(client::call(move || opening::write(&reader, &commits)));
        }
        Ok(())
    }

    fn written(&self, commits: &[(usize, Commit)]) -> Vec<Written> {
        let of_place = |(place, commit): &(usize, Commit)| {
            let opened = &self.partitions[*place];
            (opened.topic.clone(), opened.partition, *commit)
        };
        commits.iter().map(of_place).collect()
    }

    fn end_commit(&mut self, result: KafkaResult<()>) -> Result<()> {
        self.committing = None;
        let planned = std::mem::take(&mut self.planned);
        let Err(error) = result else {
            for (place, commit) in planned {
                self.partitions[place].progress.committed(commit);
            }
            let is_near =
                |(place, offset, _): &(usize, i64, Delivery)| self.partitions[*place].progress.is_near_bound(*offset);
            self.is_bound_near = self.parked.iter().any(is_near);
            return Ok(());
        };
        let error = classify(&error, format!("commit offsets of the group {:?}", self.wish.group()), &self.wish.shown);
        if error.kind() != Kind::Unavailable {
            return Err(error);
        }
        tracing::warn!(consumer = %self.wish.consumer.name, slot = self.wish.slot, %error, "offsets are written later");
        self.next_commit = Instant::now() + COMMIT_AGAIN;
        (self.is_bound_near, self.is_dirty) = (false, true);
        Ok(())
    }

    /// Most errors are about a connection, which librdkafka makes again by itself.
    fn survive(&mut self, error: &KafkaError) -> Result<()> {
        let doing = format!("consume as the group {:?}", self.wish.group());
        if matches!(code(error), Some(Code::AutoOffsetReset | Code::OffsetOutOfRange | Code::LogTruncation)) {
            return Err(self.cut());
        }
        let is_end = matches!(error, KafkaError::MessageConsumptionFatal(_))
            || code(error).is_some_and(|code| is_missing(code) || is_denied(code))
            || classify(error, &doing, &self.wish.shown).kind() == Kind::Config;
        if is_end {
            return Err(classify(error, doing, &self.wish.shown));
        }
        if !std::mem::replace(&mut self.is_away, true) {
            tracing::warn!(consumer = %self.wish.consumer.name, slot = self.wish.slot, %error,
                "Kafka does not answer, waiting for it");
        }
        Ok(())
    }

    fn end_look(&mut self, found: Result<Found>) -> Result<()> {
        self.looking = None;
        self.next_look = Instant::now() + self.wish.settings.refresh;
        match found {
            Ok(found) => match found.shorter.first() {
                None => self.take_found(found),
                Some((topic, partition)) => {
                    let what = format!("partition {partition} of {topic:?} ends before what was read of it");
                    let error = Error::new(Kind::Missing, format!("{what}: it was cut, or made anew"));
                    (self.is_cut, self.shorter) = (true, found.shorter);
                    Err(error.with_remedy(READ_ON))
                }
            },
            Err(error) if error.kind() == Kind::Unavailable => {
                tracing::debug!(consumer = %self.wish.consumer.name, %error, "topics cannot be looked at");
                Ok(())
            }
            Err(error) => {
                self.is_cut |= error.kind() == Kind::Missing;
                Err(error)
            }
        }
    }
}

/// What ended a wait.
enum Ended {
    Received,
    Failed(KafkaError),
    Committed(KafkaResult<()>),
    Looked(Result<Found>),
    Time,
}

#[async_trait]
impl Subscription for KafkaSubscription {
    async fn next(&mut self) -> Result<Delivery> {
        let reader = self.reader()?;
        loop {
            self.start_commit()?;
            let prefetch = usize::from(self.wish.consumer.prefetch);
            let has_room = self.open.len() < prefetch;
            if has_room && let Some(delivery) = self.give_out()? {
                return Ok(delivery);
            }
            if self.looking.is_none() && Instant::now() >= self.next_look {
                self.looking = Some(self.look()?);
            }
            // While nothing is taken librdkafka holds a bounded number of messages. Its group needs no sign of life,
            // because partitions are assigned by our leases.
            let is_taking = has_room && self.parked.len() < prefetch;
            let mut wake = self.next_look.min(self.commit_anyway);
            if self.is_dirty {
                wake = wake.min(self.next_commit);
            }
            // A task under way says itself when it has ended.
            let wake = wake.max(Instant::now() + TICK);
            let mut received = None;
            let ended = tokio::select! {
                record = reader.recv(), if is_taking => match record {
                    Ok(record) => { received = Some(record); Ended::Received }
                    Err(error) => Ended::Failed(error),
                },
                committed = join(&mut self.committing) => Ended::Committed(committed?),
                found = looked(&mut self.looking) => Ended::Looked(found),
                () = tokio::time::sleep_until(wake) => Ended::Time,
            };
            match ended {
                Ended::Received => {
                    self.is_away = false;
                    if let Some(record) = received {
                        self.receive(&record);
                    }
                }
                Ended::Failed(error) => self.survive(&error)?,
                Ended::Committed(result) => self.end_commit(result)?,
                Ended::Looked(found) => self.end_look(found)?,
                Ended::Time => {}
            }
        }
    }

    async fn ack(&mut self, tag: u64) -> Result<()> {
        self.ack_all(&[tag]).await
    }

    async fn ack_all(&mut self, tags: &[u64]) -> Result<()> {
        for tag in tags {
            if let Some((place, offset)) = self.open.remove(tag) {
                self.partitions[place].progress.finish(offset);
                self.is_dirty = true;
            }
        }
        self.start_commit()
    }

    async fn close(&mut self) -> Result<()> {
        let Some(reader) = self.reader.take() else { return Ok(()) };
        // One commit after the other: an earlier one that comes later would take the last one back.
        if let Some(committing) = self.committing.take() {
            let _ = tokio::time::timeout(CLOSE_WAIT, committing).await;
        }
        let last: Vec<_> = self.partitions.iter().map(|opened| opened.progress.last()).enumerate().collect();
        let (commits, read, wait) = (self.written(&last), self.read(), self.wish.settings.answer_timeout);
        let shorter = self.is_cut.then(|| std::mem::take(&mut self.shorter));
        let closing = client::call(move || {
            let closed = match shorter {
                Some(known) => opening::start_over(&reader, &read, &known, wait),
                None if commits.is_empty() => Ok(()),
                None => opening::write(&reader, &commits),
            };
            client::end_shared(reader);
            closed
        });
        let doing = || format!("commit the last offsets of the group {:?}", self.wish.group());
        match tokio::time::timeout(CLOSE_WAIT, closing).await {
            Ok(closed) => closed?.map_err(|error| classify(&error, doing(), &self.wish.shown)),
            Err(_) => Err(Error::new(
                Kind::Unavailable,
                format!("cannot {}: Kafka at {} does not answer", doing(), self.wish.shown),
            )),
        }
    }
}

impl Drop for KafkaSubscription {
    fn drop(&mut self) {
        if let Some(looking) = self.looking.take() {
            looking.abort();
        }
        if let Some(reader) = self.reader.take() {
            client::end_shared(reader);
        }
    }
}

/// The answer to the call, or never when there is none. Cancel-safe.
async fn join(call: &mut Option<CommitCall>) -> Result<KafkaResult<()>> {
    match call {
        Some(call) => call.await,
        None => std::future::pending().await,
    }
}

/// What the look found, or never when there is none. Its questions have time-outs of their own.
async fn looked(looking: &mut Option<JoinHandle<Result<Found>>>) -> Result<Found> {
    match looking {
        Some(looking) => looking.await.map_err(task::ended)?,
        None => std::future::pending().await,
    }
}
