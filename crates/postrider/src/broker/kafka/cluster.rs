//! What the cluster says about its topics, and topics that are declared.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::ClientContext;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::metadata::Metadata;
use rdkafka::producer::{DeliveryResult, Producer as _, ProducerContext, ThreadedProducer};

use super::client::{self, Listener, Refusal};
use super::error::{classify, is_missing, of_code, repartitioned, unroutable};
use super::settings::{Address, KafkaSettings};
use crate::error::{Error, Kind, Result};

/// The administrator's calls are answered at once or not at all: some brokers do not know them.
pub(super) const ADMIN_WAIT: Duration = Duration::from_secs(5);
/// How often a created topic is looked for.
const CREATED_EVERY: Duration = Duration::from_millis(100);

/// A topic as the cluster shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Topic {
    pub name: String,
    pub partitions: u32,
    /// The fewest copies that a partition has.
    pub replicas: usize,
    /// Whether every partition has somebody who takes records.
    pub is_led: bool,
}

/// The cluster.
#[derive(Debug, Clone, Default)]
pub(super) struct Shape {
    pub brokers: Vec<i32>,
    pub topics: Vec<Topic>,
    /// Topics that nothing can be said about at the moment, and why.
    pub troubled: BTreeMap<String, Code>,
}

/// The number of partitions that we publish by.
struct Known {
    partitions: u32,
    /// What it was changed to.
    changed: Option<u32>,
    looked: Instant,
}

/// Listens to the client that asks. It produces nothing.
struct Asker(Listener);

impl ClientContext for Asker {
    fn log(&self, level: RDKafkaLogLevel, fac: &str, message: &str) {
        self.0.log(level, fac, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.0.error(error, reason);
    }
}

impl ProducerContext for Asker {
    type DeliveryOpaque = ();

    fn delivery(&self, _: &DeliveryResult<'_>, (): ()) {}
}

pub(super) struct Cluster {
    /// Asks. A producer, because it hears what is said instead of an answer.
    asker: Option<Arc<ThreadedProducer<Asker>>>,
    config: ClientConfig,
    settings: KafkaSettings,
    shown: String,
    refusal: Arc<Refusal>,
    known: Mutex<HashMap<String, Known>>,
    /// One question at a time; the others read the answer. Holds when the last one failed, and why.
    asking: tokio::sync::Mutex<Option<(Instant, Error)>>,
}

impl Cluster {
    pub fn new(settings: &KafkaSettings, address: &Address) -> Result<Self> {
        let asker = Asker(Listener::default());
        let refusal = asker.0.refusal.clone();
        let config = client::config(settings, address);
        let asker = config
            .create_with_context::<_, ThreadedProducer<Asker>>(asker)
            .map_err(|error| classify(&error, "use the settings", &address.shown))?;
        Ok(Self {
            asker: Some(Arc::new(asker)),
            config,
            settings: settings.clone(),
            shown: address.shown.clone(),
            refusal,
            known: Mutex::default(),
            asking: tokio::sync::Mutex::default(),
        })
    }

    /// A client for one of the administrator's calls; to be given to [`client::end`].
    pub fn admin(&self) -> Result<AdminClient<Listener>> {
        let mut config = self.config.clone();
        // Nobody reads this client's log lines, so it makes none.
        config.set_log_level(RDKafkaLogLevel::Emerg);
        config
            .create_with_context(Listener::default())
            .map_err(|error| classify(&error, "make an administrator's client", &self.shown))
    }

    /// All topics, or one. A topic that is not there is not in the answer.
    pub async fn look(&self, topic: Option<&str>) -> Result<Shape> {
        let ended = || Error::new(Kind::Other, "the Kafka client has ended");
        let (asker, wait) = (self.asker.clone().ok_or_else(ended)?, self.settings.answer_timeout);
        let asked = topic.map(str::to_owned);
        let call = move || asker.client().fetch_metadata(asked.as_deref(), wait).map(|metadata| shape(&metadata));
        let doing = || match topic {
            Some(topic) => format!("look at the topic {topic:?}"),
            None => "look at the topics".to_owned(),
        };
        match client::call(call).await? {
            Ok(shape) => {
                self.refusal.is_over();
                // Asked for one, its trouble is the answer.
                match topic.and_then(|topic| shape.troubled.get(topic)) {
                    Some(code) => Err(of_code(*code, doing(), &self.shown)),
                    None => Ok(shape),
                }
            }
            Err(error) => Err(self.refused(classify(&error, doing(), &self.shown))),
        }
    }

    /// What was said instead of an answer, if anything was.
    fn refused(&self, error: Error) -> Error {
        match self.refusal.said() {
            Some(reason) if error.kind() == Kind::Unavailable => denied(&self.shown, &reason),
            _ => error,
        }
    }

    /// How many partitions the topic has that an event is to be published to. Declares it if need be.
    pub async fn partitions(&self, topic: &str) -> Result<u32> {
        let began = Instant::now();
        if let Some(known) = self.known(topic, began.checked_sub(self.settings.refresh)) {
            return known;
        }
        let mut failed = self.asking.lock().await;
        // Somebody else may have asked meanwhile.
        if let Some(known) = self.known(topic, Some(began)) {
            return known;
        }
        if let Some((at, error)) = failed.as_ref()
            && *at > began
        {
            return Err(error.duplicate());
        }
        match self.look(Some(topic)).await {
            Ok(shape) => match shape.topics.into_iter().find(|found| found.name == topic) {
                Some(found) => self.note(topic, found.partitions),
                None => {
                    // It may come back with other partitions, which is a change too, so the number is kept.
                    self.doubt(topic);
                    if !self.settings.declare {
                        return Err(unroutable(topic));
                    }
                    let found = self.declare(topic, &[]).await?;
                    self.note(topic, found.partitions)
                }
            },
            Err(error) => {
                // What is known is good enough until the next look.
                let mut known = self.lock();
                if let Some(known) = known.get_mut(topic) {
                    known.looked = Instant::now();
                    return known.answer(topic);
                }
                drop(known);
                *failed = Some((Instant::now(), error.duplicate()));
                Err(error)
            }
        }
    }

    /// The topic is looked at again before the next event.
    pub fn doubt(&self, topic: &str) {
        let past = Instant::now().checked_sub(self.settings.refresh);
        if let (Some(known), Some(past)) = (self.lock().get_mut(topic), past) {
            known.looked = past;
        }
    }

    /// Creates a topic and waits until it can be used. One that is there already is left as it is.
    pub async fn declare(&self, topic: &str, extra: &[(&str, &str)]) -> Result<Topic> {
        let doing = format!("create the topic {topic:?}");
        let replication = TopicReplication::Fixed(i32::from(self.settings.replication));
        let mut new = NewTopic::new(topic, i32::from(self.settings.partitions), replication);
        if self.settings.replication >= 3 {
            new = new.set("min.insync.replicas", "2");
        }
        for (name, value) in extra {
            new = new.set(name, value);
        }
        let options = AdminOptions::new().request_timeout(Some(ADMIN_WAIT)).operation_timeout(Some(ADMIN_WAIT));
        let unanswered = || {
            Error::new(Kind::Unavailable, format!("cannot {doing}: Kafka at {} does not answer in time", self.shown))
                .with_remedy("create the topic by hand, or look why the cluster's controller does not answer")
        };
        let admin = self.admin()?;
        let creating = admin.create_topics([&new], &options);
        let created = tokio::time::timeout(ADMIN_WAIT * 2, creating).await;
        client::end(admin);
        let created = created.map_err(|_| unanswered())?.map_err(|error| classify(&error, &doing, &self.shown))?;
        for result in created {
            match result {
                Ok(_) => tracing::info!(topic, partitions = self.settings.partitions, "created a Kafka topic"),
                Err((_, Code::TopicAlreadyExists)) => {}
                Err((_, code)) => return Err(of_code(code, &doing, &self.shown)),
            }
        }
        let deadline = Instant::now() + self.settings.answer_timeout;
        while Instant::now() < deadline {
            let shape = self.look(Some(topic)).await?;
            if let Some(found) = shape.topics.into_iter().find(|found| found.name == topic && found.is_led) {
                return Ok(found);
            }
            tokio::time::sleep(CREATED_EVERY).await;
        }
        Err(unanswered())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is known of a topic, if it was looked at after `since`.
    fn known(&self, topic: &str, since: Option<Instant>) -> Option<Result<u32>> {
        let known = self.lock();
        let known = known.get(topic)?;
        since.is_none_or(|since| known.looked > since).then(|| known.answer(topic))
    }

    fn note(&self, topic: &str, partitions: u32) -> Result<u32> {
        let mut known = self.lock();
        let fresh = Known { partitions, changed: None, looked: Instant::now() };
        let known = known.entry(topic.to_owned()).or_insert(fresh);
        known.looked = Instant::now();
        known.changed = (known.partitions != partitions).then_some(partitions);
        known.answer(topic)
    }
}

impl Known {
    fn answer(&self, topic: &str) -> Result<u32> {
        match self.changed {
            Some(changed) => Err(repartitioned(topic, self.partitions, changed)),
            None => Ok(self.partitions),
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Some(asker) = self.asker.take() {
            client::end_shared(asker);
        }
    }
}

/// Kafka has refused us.
pub(super) fn denied(shown: &str, reason: &str) -> Error {
    Error::new(Kind::Denied, format!("Kafka at {shown} refuses us: {reason}"))
}

/// The topics as they are. One that is not there, or is just being created, is left out.
fn shape(metadata: &Metadata) -> Shape {
    let mut shape =
        Shape { brokers: metadata.brokers().iter().map(|broker| broker.id()).collect(), ..Shape::default() };
    for topic in metadata.topics() {
        match topic.error().map(Code::from) {
            Some(code) if is_missing(code) || code == Code::InvalidTopic => continue,
            Some(code) => {
                shape.troubled.insert(topic.name().to_owned(), code);
                continue;
            }
            None if topic.partitions().is_empty() => continue,
            None => {}
        }
        let partitions = topic.partitions();
        shape.topics.push(Topic {
            name: topic.name().to_owned(),
            partitions: u32::try_from(partitions.len()).unwrap_or(u32::MAX),
            replicas: partitions.iter().map(|partition| partition.replicas().len()).min().unwrap_or(0),
            is_led: partitions.iter().all(|partition| partition.leader() >= 0),
        });
    }
    shape
}
