//! The messages of one slot of a consumer.
//!
//! Pulled with a durable consumer that is this subscription's alone. JetStream is told the floor below which everything is
//! done (its ack policy is `all`), never single messages, and waits for ever before it redelivers. Whatever looks odd, a gap
//! or a repetition, ends the subscription: the next one begins at the floor.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, ReplayPolicy, pull};
use async_nats::jetstream::context::ConsumerInfoErrorKind;
use async_nats::jetstream::stream::{ConsumerErrorKind, Stream};
use async_nats::{StatusCode, Subject, Subscriber, jetstream};
use async_trait::async_trait;
use futures_util::{StreamExt, TryStreamExt};

use super::error::{classify, of_code};
use super::link::{Link, Live};
use super::settings::NatsSettings;
use super::{durable, message, stream, trim};
use crate::broker::window::Window;
use crate::broker::{Delivery, Origin, Subscription, topic};
use crate::error::{Error, Kind, Result};
use crate::handler::{ConsumerSpec, SLOTS_MAX};
use crate::lease::Lease;
use crate::task::{self, Call};

/// The floor is told at most this often; a crash delivers what was done since again, and the inbox knows it.
const TELL_EVERY: Duration = Duration::from_millis(100);
/// How long a request for messages waits on the server.
const ASK: Duration = Duration::from_secs(10);
/// How much later than that the server may say so.
const ASK_GRACE: Duration = Duration::from_secs(10);
/// A message that is not done keeps at most this many behind it in hand.
const WINDOW_MAX: usize = 10_000;
/// Longer than anybody can keep a message: JetStream must not redeliver by itself.
const ACK_WAIT: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);
/// How often what everybody has done is purged.
const TRIM_EVERY: Duration = Duration::from_secs(5 * 60);
/// The header that says how many messages of a request that is over the server has not sent.
const OWED: &str = "Nats-Pending-Messages";
/// How long an orderly end may take.
const CLOSE_WAIT: Duration = Duration::from_secs(5);

pub(super) struct StreamSubscription {
    link: Arc<Link>,
    live: Live,
    stream: Stream,
    settings: Arc<NatsSettings>,
    consumer: ConsumerSpec,
    lease: Lease,
    /// The durable consumer.
    name: String,
    inbox: Subject,
    subscriber: Subscriber,
    /// What was received, with its sequence and the subject to ack it by.
    window: Window<(u64, Subject)>,
    /// Everything up to here is done.
    floor: u64,
    /// Where to tell of it, while the server does not know yet.
    untold: Option<Subject>,
    last_told: Instant,
    /// What comes up to this sequence may have been in somebody's hands.
    reach: u64,
    /// The number of the last message by the durable consumer's own count.
    count: u64,
    /// How many messages were asked for and have not come, and until when the server has time to say so.
    asked: usize,
    asked_until: Instant,
    /// Whether nobody answers for the durable consumer any more.
    is_unheard: bool,
    /// Whether a successor has removed it.
    is_replaced: bool,
    next_trim: Instant,
    trimming: Option<Call<u64>>,
}

impl StreamSubscription {
    pub async fn open(
        link: Arc<Link>,
        settings: Arc<NatsSettings>,
        consumer: &ConsumerSpec,
        lease: &Lease,
    ) -> Result<Self> {
        let live = link.live().await?;
        let shown = link.shown();
        let doing = || format!("read the stream {:?} for the consumer {:?}", settings.stream, consumer.name);
        let stream = stream::events(&live, &settings, shown).await?;
        let found: Vec<_> = stream.consumers().try_collect().await.map_err(|error| classify(error, doing(), shown))?;
        let found: Vec<_> = found.iter().filter_map(|info| durable::known(consumer, info)).collect();
        // A server that lost its newest messages gives their sequences again.
        let last = stream.cached_info().state.last_sequence;
        let start = durable::start(&found, consumer, lease, last)?;
        let name = durable::name(consumer, lease);
        // Before the durable consumer exists: nothing that it sends may be missed.
        let inbox: Subject = live.client.new_inbox().into();
        let subscriber = live.client.subscribe(inbox.clone()).await.map_err(|error| classify(error, doing(), shown))?;
        let now = Instant::now();
        let subscription = Self {
            settings: settings.clone(),
            consumer: consumer.clone(),
            lease: lease.clone(),
            name,
            inbox,
            subscriber,
            window: Window::default(),
            floor: start.floor,
            untold: None,
            last_told: now,
            reach: start.reach,
            count: 0,
            asked: 0,
            asked_until: now,
            is_unheard: false,
            is_replaced: false,
            next_trim: now + TRIM_EVERY.mul_f64(fastrand::f64()),
            trimming: None,
            link: link.clone(),
            live,
            stream,
        };
        subscription.create(&subscription.name, start.floor).await?;
        subscription.remove(&start.followed).await;
        Ok(subscription)
    }

    /// Makes a durable consumer that begins behind the floor.
    async fn create(&self, name: &str, floor: u64) -> Result<()> {
        let config = pull::Config {
            durable_name: Some(name.to_owned()),
            description: Some(format!("{} slot {} of {}", self.consumer.name, self.lease.slot, self.consumer.slots)),
            deliver_policy: DeliverPolicy::ByStartSequence { start_sequence: floor + 1 },
            ack_policy: AckPolicy::All,
            ack_wait: ACK_WAIT,
            max_deliver: -1,
            max_ack_pending: -1,
            // Everything, also what has no shard in its subject; `take` knows what is wanted.
            filter_subject: self.settings.subjects(),
            replay_policy: ReplayPolicy::Instant,
            ..pull::Config::default()
        };
        self.stream.create_consumer(config).await.map_err(|error| self.failed(error))?;
        Ok(())
    }

    /// Removes durable consumers that have a successor. What stays behind is removed by the next one.
    async fn remove(&self, names: &[String]) {
        for name in names {
            self.remove_one(name).await;
        }
    }

    /// False when somebody else has removed it before.
    async fn remove_one(&self, name: &str) -> bool {
        let Err(error) = self.stream.delete_consumer(name).await else { return true };
        tracing::debug!(durable = %name, %error, "a durable consumer was not removed");
        !matches!(error.kind(), ConsumerErrorKind::JetStream(said) if said.error_code() == ErrorCode::CONSUMER_NOT_FOUND)
    }

    /// Asks for as many messages as there is room for.
    async fn ask(&mut self) -> Result<()> {
        let prefetch = usize::from(self.consumer.prefetch);
        let room = prefetch.saturating_sub(self.window.unsettled());
        // Not one by one while there is enough to do.
        if self.asked > 0 || room < prefetch.div_ceil(2) || self.window.len() >= WINDOW_MAX {
            return Ok(());
        }
        let subject = format!("$JS.API.CONSUMER.MSG.NEXT.{}.{}", self.settings.stream, self.name);
        let request = format!(r#"{{"batch":{room},"expires":{}}}"#, ASK.as_nanos());
        let asking = self.live.client.publish_with_reply(subject, self.inbox.clone(), request.into());
        asking.await.map_err(|error| classify(error, self.doing(), self.link.shown()))?;
        self.asked = room;
        self.asked_until = Instant::now() + ASK + ASK_GRACE;
        Ok(())
    }

    /// One slot is enough for the whole stream.
    fn start_trim(&mut self) {
        if self.lease.slot == 0 && self.trimming.is_none() && Instant::now() >= self.next_trim {
            self.next_trim = Instant::now() + TRIM_EVERY;
            let (stream, link, retention) = (self.stream.clone(), self.link.clone(), self.settings.retention);
            self.trimming = Some(task::start(async move { trim::trim(&stream, retention, link.shown()).await }));
        }
    }

    /// Tells the server the floor, now and then.
    async fn tell(&mut self) -> Result<()> {
        if let Some((sequence, reply)) = self.window.advance() {
            self.floor = sequence;
            self.untold = Some(reply);
        }
        if let Some(reply) = &self.untold
            && self.last_told.elapsed() >= TELL_EVERY
        {
            let telling = self.live.client.publish(reply.clone(), "+ACK".into());
            telling.await.map_err(|error| classify(error, self.doing(), self.link.shown()))?;
            self.untold = None;
            self.last_told = Instant::now();
        }
        Ok(())
    }

    /// One message from the server, which may be none for a handler. Does not wait, so nothing is lost when dropped.
    fn take(&mut self, received: async_nats::Message) -> Result<Option<Delivery>> {
        match received.status {
            None | Some(StatusCode::OK) => {}
            // The request is over: it has waited long enough, or was answered.
            Some(StatusCode::NOT_FOUND | StatusCode::TIMEOUT) => {
                // What the server says it still owes; the rest of what was asked for has left it.
                let owed = received.headers.as_ref().and_then(|headers| headers.get(OWED));
                if owed.and_then(|owed| owed.as_str().parse().ok()).is_some_and(|owed: usize| owed != self.asked) {
                    return Err(self.lost());
                }
                self.asked = 0;
                return Ok(None);
            }
            Some(StatusCode::NO_RESPONDERS) => {
                self.is_unheard = true;
                return Ok(None);
            }
            Some(status) => {
                let text = received.description.unwrap_or_default();
                if text.contains("Deleted") {
                    return Err(self.replaced());
                }
                return Err(Error::new(
                    Kind::Unavailable,
                    format!("cannot {}: NATS at {} says {status} {text}", self.doing(), self.link.shown()),
                ));
            }
        }
        let received = jetstream::Message { message: received, context: self.live.jetstream.clone() };
        let Ok(info) = received.info() else { return Ok(None) };
        let (count, sequence, times) = (info.consumer_sequence, info.stream_sequence, info.delivered);
        if count != self.count + 1 || times != 1 {
            return Err(self.lost());
        }
        self.count = count;
        self.asked = self.asked.saturating_sub(1);
        let async_nats::Message { subject, reply, payload, headers, .. } = received.message;
        let reply = reply.unwrap_or_else(|| Subject::from_static(""));
        let topic = message::topic_of(&self.settings.prefix, &subject);
        if !self.consumer.wants(topic) {
            self.window.push(sequence, (sequence, reply), true);
            return Ok(None);
        }
        let event = message::decode(topic, &headers.unwrap_or_default(), payload);
        let shard = match &event {
            Ok(event) => topic::shard(event),
            Err(undecodable) => topic::hash(undecodable.raw.id().as_bytes()) % SLOTS_MAX,
        };
        let is_ours = shard % self.consumer.slots == self.lease.slot;
        self.window.push(sequence, (sequence, reply), !is_ours);
        let origin = Origin {
            exchange: self.settings.stream.clone(),
            topic: crate::inbox::without_nul(topic.to_owned()),
            queue: self.consumer.name.clone(),
            offset: i64::try_from(sequence).ok(),
            is_replayed: false,
        };
        Ok(is_ours.then_some(Delivery { tag: sequence, event, is_redelivered: sequence <= self.reach, origin }))
    }

    /// Why nobody answers.
    async fn unheard(&mut self) -> Error {
        match self.stream.consumer_info(&self.name).await {
            Err(error) if error.kind() == ConsumerInfoErrorKind::NotFound => self.replaced(),
            Err(error) => classify(error, self.doing(), self.link.shown()),
            Ok(_) => Error::new(
                Kind::Unavailable,
                format!("cannot {}: NATS at {} does not answer", self.doing(), self.link.shown()),
            ),
        }
    }

    fn lost(&self) -> Error {
        Error::new(
            Kind::Unavailable,
            format!("messages from NATS at {} were lost on their way, reading them again", self.link.shown()),
        )
    }

    fn replaced(&mut self) -> Error {
        self.is_replaced = true;
        Error::new(Kind::LeaseLost, format!("the durable consumer {:?} was removed by its successor", self.name))
    }

    fn doing(&self) -> String {
        format!("read the stream {:?} for the consumer {:?}", self.settings.stream, self.consumer.name)
    }

    fn failed(&self, error: jetstream::stream::ConsumerError) -> Error {
        match error.kind() {
            ConsumerErrorKind::JetStream(said) => {
                of_code(said.error_code(), &said.to_string(), self.doing(), self.link.shown())
            }
            _ => classify(error, self.doing(), self.link.shown()),
        }
    }

    /// Tells the floor and waits for the answer; then leaves a durable consumer that was never read, so that the next
    /// holder need not suspect what was in hand here. One who has a successor leaves nothing: nobody would ever read it,
    /// and what it has not done would be kept for ever.
    async fn leave(&mut self) -> Result<()> {
        if self.is_replaced {
            return Ok(());
        }
        if let Some((sequence, reply)) = self.window.advance() {
            self.floor = sequence;
            self.untold = Some(reply);
        }
        if let Some(reply) = self.untold.take() {
            let told = self.live.client.request(reply, "+ACK".into()).await;
            told.map_err(|error| classify(error, self.doing(), self.link.shown()))?;
        }
        if self.window.len() > 0 || self.asked > 0 {
            // Not there: removed by a successor.
            let found = self.stream.consumer_info(&self.name).await;
            found.map_err(|error| classify(error, self.doing(), self.link.shown()))?;
            let next = durable::name(&self.consumer, &self.lease);
            self.create(&next, self.floor).await?;
            if !self.remove_one(&self.name).await {
                self.remove_one(&next).await;
            }
        }
        Ok(())
    }
}

#[async_trait]
impl Subscription for StreamSubscription {
    async fn next(&mut self) -> Result<Delivery> {
        loop {
            if self.is_unheard {
                return Err(self.unheard().await);
            }
            self.tell().await?;
            self.ask().await?;
            self.start_trim();
            let now = Instant::now();
            if self.asked > 0 && now > self.asked_until {
                return Err(self.unheard().await);
            }
            let mut wake = if self.asked > 0 { self.asked_until } else { now + ASK };
            if self.untold.is_some() {
                wake = wake.min(self.last_told + TELL_EVERY);
            }
            tokio::select! {
                received = self.subscriber.next() => match received {
                    Some(received) => {
                        if let Some(delivery) = self.take(received)? {
                            return Ok(delivery);
                        }
                    }
                    None => {
                        return Err(Error::new(
                            Kind::Unavailable,
                            format!("the connection to NATS at {} was closed", self.link.shown()),
                        ));
                    }
                },
                trimmed = task::join(&mut self.trimming) => {
                    self.trimming = None;
                    if let Err(error) = trimmed {
                        tracing::warn!(error_type = error.kind().as_str(), %error, remedy = error.remedy(),
                            "cannot purge what every consumer has done, trying again later");
                    }
                }
                () = tokio::time::sleep_until(wake.into()) => {}
            }
        }
    }

    async fn ack(&mut self, tag: u64) -> Result<()> {
        self.window.settle(tag);
        self.tell().await
    }

    async fn ack_all(&mut self, tags: &[u64]) -> Result<()> {
        for tag in tags {
            self.window.settle(*tag);
        }
        self.tell().await
    }

    async fn close(&mut self) -> Result<()> {
        // Not calling it is safe, so neither is a server that is away an error.
        match tokio::time::timeout(CLOSE_WAIT, self.leave()).await {
            Ok(Err(error)) => tracing::debug!(%error, "a subscription was left without a word"),
            Err(_) => tracing::debug!("a subscription was left without an answer"),
            Ok(Ok(())) => {}
        }
        Ok(())
    }
}
