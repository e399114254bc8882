//! Which partitions a slot reads, and from where.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rdkafka::consumer::{CommitMode, Consumer as _, StreamConsumer};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::{Offset, TopicPartitionList};

use super::client::{self, Listener};
use super::cluster::{Cluster, Shape};
use super::error::{classify, code, is_missing, repartitioned};
use super::progress::{Commit, Progress};
use super::settings::KafkaSettings;
use crate::broker::topic;
use crate::error::{Error, Kind, Result};
use crate::handler::{ConsumerSpec, Place};

/// A client that reads.
pub(super) type Reader = StreamConsumer<Listener>;

/// A commit of one partition: topic, partition, offset and metadata.
pub(super) type Written = (String, i32, Commit);

/// How far one partition was read: topic, partition, and one above the highest offset.
pub(super) type Read = (String, i32, i64);

/// What a slot reads. Knows nothing of how.
#[derive(Clone)]
pub(super) struct Wish {
    pub consumer: ConsumerSpec,
    pub slot: u32,
    pub settings: KafkaSettings,
    pub shown: String,
}

/// A partition that was opened.
pub(super) struct Opened {
    pub topic: String,
    pub partition: i32,
    pub progress: Progress,
}

impl Wish {
    pub fn group(&self) -> String {
        format!("{}{}", self.settings.prefix, self.consumer.name)
    }

    /// How far the bound of [`Progress`] is put ahead.
    pub fn window(&self) -> i64 {
        i64::from(self.consumer.prefetch) * 2
    }

    /// Whether the consumer wants what a Kafka topic has.
    pub fn wants(&self, kafka_topic: &str) -> bool {
        let Some(name) = self.settings.topic(kafka_topic) else { return false };
        let spec = &self.consumer;
        if name.starts_with("__") {
            return false;
        }
        if spec.topics.iter().any(|pattern| pattern == name) {
            return true;
        }
        let is_named = |place: &Place| matches!(place, Place::Named(place) if place == name);
        // What was set aside must not come back by a wildcard.
        let is_place = name.ends_with(super::places::DEAD)
            || name.ends_with(super::places::SKIPPED)
            || is_named(&spec.dead_letters_to)
            || is_named(&spec.skipped_to);
        !is_place && spec.topics.iter().any(|pattern| topic::matches(pattern, name))
    }

    /// The topics that are wanted and new, after comparing with those that are known.
    fn compare(&self, known: &BTreeMap<String, u32>, shape: &Shape) -> Result<BTreeMap<String, u32>> {
        let found: BTreeMap<_, _> = shape.topics.iter().map(|topic| (topic.name.as_str(), topic.partitions)).collect();
        for (name, had) in known {
            match found.get(name.as_str()) {
                Some(has) if has == had => {}
                Some(has) => return Err(repartitioned(name, *had, *has)),
                None if shape.troubled.contains_key(name) => {}
                None => return Err(Error::new(Kind::Missing, format!("the topic {name:?} is gone"))),
            }
        }
        let slots = self.consumer.slots;
        let mut new = BTreeMap::new();
        for (name, partitions) in found {
            if known.contains_key(name) || !self.wants(name) {
                continue;
            }
            if partitions % slots != 0 {
                return Err(Error::new(
                    Kind::Config,
                    format!(
                        "consumer {:?} has {slots} slots, which do not divide the {partitions} partitions of {name:?}",
                        self.consumer.name
                    ),
                )
                .with_remedy("choose slots that divide the partitions of every topic that the consumer wants"));
            }
            new.insert(name.to_owned(), partitions);
        }
        Ok(new)
    }

    /// The slot's partitions of these topics.
    fn partitions(&self, topics: &BTreeMap<String, u32>) -> Vec<(String, i32)> {
        let of_topic = |(name, partitions): (&String, &u32)| {
            let name = name.clone();
            let own = (0..*partitions).filter(|partition| partition % self.consumer.slots == self.slot);
            own.map(move |partition| (name.clone(), partition.cast_signed())).collect::<Vec<_>>()
        };
        topics.iter().flat_map(of_topic).collect()
    }

    /// Exact names that nobody has yet.
    fn absent<'w>(&'w self, shape: &'w Shape) -> impl Iterator<Item = String> + 'w {
        let exact = self.consumer.topics.iter().filter(|pattern| !pattern.contains(['*', '#']));
        let names = exact.map(|name| self.settings.kafka_topic(name));
        names.filter(|name| !shape.troubled.contains_key(name) && !shape.topics.iter().any(|topic| topic.name == *name))
    }
}

/// What was found by a look at the topics.
pub(super) struct Found {
    /// New topics, and how many partitions they have.
    pub topics: BTreeMap<String, u32>,
    /// The slot's partitions of them.
    pub opened: Vec<Opened>,
    /// Partitions that were known, and end before what was read of them. While there are any, nothing is opened.
    pub shorter: Vec<(String, i32)>,
}

/// Looks for topics that are not known yet, and opens the slot's partitions of them: reads where the last holder was, and
/// writes how far this one may go, before anything is delivered.
pub(super) async fn look(
    cluster: Arc<Cluster>,
    reader: Arc<Reader>,
    wish: Wish,
    known: BTreeMap<String, u32>,
    read: Vec<Read>,
) -> Result<Found> {
    let mut shape = cluster.look(None).await?;
    let absent: Vec<String> = wish.absent(&shape).collect();
    for name in absent {
        if wish.settings.declare {
            shape.topics.push(cluster.declare(&name, &[]).await?);
        } else if known.is_empty() {
            tracing::warn!(consumer = %wish.consumer.name, topic = %name, "there is no such topic yet, waiting for it");
        }
    }
    let topics = wish.compare(&known, &shape)?;
    let (window, wait) = (wish.window(), wish.settings.answer_timeout);
    let asked = reader.clone();
    let shorter = client::call(move || shorter(&asked, &read, wait)).await?;
    let partitions = wish.partitions(&topics);
    if !shorter.is_empty() || partitions.is_empty() {
        return Ok(Found { topics, opened: Vec::new(), shorter });
    }
    let open = move || open(&reader, &partitions, window, wait);
    let opened = client::call(open).await?;
    let doing = || format!("read the offsets of the group {:?}", wish.group());
    let opened = opened.map_err(|error| classify(&error, doing(), &wish.shown))?;
    Ok(Found { topics, opened, shorter })
}

/// Blocks.
fn open(reader: &Reader, partitions: &[(String, i32)], window: i64, wait: Duration) -> KafkaResult<Vec<Opened>> {
    let mut list = TopicPartitionList::with_capacity(partitions.len());
    for (topic, partition) in partitions {
        list.add_partition(topic, *partition);
    }
    let committed = reader.committed_offsets(list, wait)?;
    let mut opened = Vec::with_capacity(partitions.len());
    for element in committed.elements() {
        element.error()?;
        let (topic, partition) = (element.topic().to_owned(), element.partition());
        let (low, high) = reader.fetch_watermarks(&topic, partition, wait)?;
        let last = match element.offset() {
            Offset::Offset(offset) => within(Commit::read(offset, element.metadata()), low, high, &topic, partition),
            // Never seen: from the oldest message that is kept.
            _ => Commit { offset: low, bound: low },
        };
        opened.push(Opened { topic, partition, progress: Progress::new(last, window) });
    }
    let planned =
        opened.iter().filter_map(|opened| Some((opened.topic.clone(), opened.partition, opened.progress.plan(None)?)));
    let planned: Vec<Written> = planned.collect();
    write(reader, &planned)?;
    for (opened, (_, _, commit)) in opened.iter_mut().zip(planned) {
        opened.progress.committed(commit);
    }
    Ok(opened)
}

/// The partitions whose log ends before what was read of it. Kafka says so by itself when it is asked for more, but a client
/// that learns of a new topic under an old name may wait in silence. Blocks.
fn shorter(reader: &Reader, read: &[Read], wait: Duration) -> Vec<(String, i32)> {
    let mut shorter = Vec::new();
    for (topic, partition, read_to) in read {
        // What cannot be asked now is asked at the next look.
        let Ok((_, high)) = reader.fetch_watermarks(topic, *partition, wait) else { break };
        if high < *read_to {
            shorter.push((topic.clone(), *partition));
        }
    }
    shorter
}

/// Has the next holder read from its start what is not the log that was read, which is known of some: what was committed of
/// the other may well lie within this one, and would skip what is below. Blocks.
pub(super) fn start_over(reader: &Reader, read: &[Read], known: &[(String, i32)], wait: Duration) -> KafkaResult<()> {
    let mut commits = Vec::new();
    for (topic, partition, read_to) in read {
        let (low, high) = match reader.fetch_watermarks(topic, *partition, wait) {
            Ok(marks) => marks,
            Err(error) if code(&error).is_some_and(is_missing) => continue,
            Err(error) => return Err(error),
        };
        let is_known = known.iter().any(|known| known.0 == *topic && known.1 == *partition);
        if is_known || high < *read_to {
            commits.push((topic.clone(), *partition, Commit { offset: low, bound: low }));
        }
    }
    if commits.is_empty() { Ok(()) } else { write(reader, &commits) }
}

/// Where to go on, if Kafka does not have any more what was committed. What is lost then is said loudly.
fn within(last: Commit, low: i64, high: i64, topic: &str, partition: i32) -> Commit {
    let from_start = Commit { offset: low, bound: low };
    if last.offset > high {
        tracing::error!(
            topic,
            partition,
            committed = last.offset,
            end = high,
            "the log is shorter than what was read of it: the topic was made anew, or lost events; reading from its start"
        );
        return from_start;
    }
    if last.offset < low {
        tracing::error!(
            topic,
            partition,
            missing = low - last.offset,
            remedy = "raise the topic's retention above the longest absence of a consumer",
            "messages were deleted by Kafka before the consumer has read them"
        );
        return Commit { bound: last.bound.max(low), ..from_start };
    }
    last
}

/// Commits, and waits for the answer. Blocks.
pub(super) fn write(reader: &Reader, commits: &[Written]) -> KafkaResult<()> {
    let mut list = TopicPartitionList::with_capacity(commits.len());
    for (topic, partition, commit) in commits {
        let mut element = list.add_partition(topic, *partition);
        element.set_offset(Offset::Offset(commit.offset))?;
        let metadata = commit.metadata();
        if !metadata.is_empty() {
            element.set_metadata(metadata);
        }
    }
    reader.commit(&list, CommitMode::Sync)
}

/// Begins to read partitions.
pub(super) fn assign<'o>(reader: &Reader, opened: impl Iterator<Item = &'o Opened>) -> Result<(), KafkaError> {
    let mut list = TopicPartitionList::new();
    for opened in opened {
        let offset = Offset::Offset(opened.progress.again().offset);
        list.add_partition_offset(&opened.topic, opened.partition, offset)?;
    }
    reader.incremental_assign(&list)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broker::kafka::cluster::Topic;

    fn wish(topics: &[&str], slots: u32) -> Wish {
        let consumer = ConsumerSpec {
            slots,
            dead_letters_to: Place::Named("shop.errors".to_owned()),
            ..ConsumerSpec::new("c", topics)
        };
        let settings = KafkaSettings { prefix: "p-".to_owned(), ..KafkaSettings::default() };
        Wish { consumer, slot: 1, settings, shown: String::new() }
    }

    fn shape(topics: &[(&str, u32)]) -> Shape {
        let topic = |(name, partitions): &(&str, u32)| Topic {
            name: (*name).to_owned(),
            partitions: *partitions,
            replicas: 1,
            is_led: true,
        };
        Shape { topics: topics.iter().map(topic).collect(), ..Shape::default() }
    }

    #[test]
    fn wildcards_do_not_bring_back_what_was_set_aside() {
        let all = wish(&["#"], 1);
        assert!(all.wants("p-orders.paid"));
        let unwanted =
            ["orders.paid", "p-orders.paid.dlq", "p-orders.paid.skipped", "p-shop.errors", "p-__offsets", "p-"];
        for name in unwanted {
            assert!(!all.wants(name), "{name}");
        }
        assert!(wish(&["orders.paid.dlq"], 1).wants("p-orders.paid.dlq"), "by its name it does");
    }

    #[test]
    fn what_kafka_has_not_any_more_is_not_waited_for() {
        let last = Commit { offset: 50, bound: 60 };
        assert_eq!(within(last, 0, 50, "t", 0), last);
        assert_eq!(within(last, 55, 70, "t", 0), Commit { offset: 55, bound: 60 }, "deleted by retention");
        assert_eq!(within(last, 0, 20, "t", 0), Commit { offset: 0, bound: 0 }, "another log");
    }

    #[test]
    fn slots_share_partitions() {
        let wish = wish(&["#"], 3);
        let new = wish.compare(&BTreeMap::new(), &shape(&[("p-a", 6), ("other", 1)])).unwrap();
        assert_eq!(wish.partitions(&new), [("p-a".to_owned(), 1), ("p-a".to_owned(), 4)]);
        let error = wish.compare(&BTreeMap::new(), &shape(&[("p-a", 4)])).unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        assert!(error.to_string().contains("p-a"), "{error}");
    }

    #[test]
    fn a_topic_that_changes_ends_the_subscription() {
        let wish = wish(&["#"], 1);
        let known = BTreeMap::from([("p-a".to_owned(), 4)]);
        assert!(wish.compare(&known, &shape(&[("p-a", 4)])).unwrap().is_empty());
        assert_eq!(wish.compare(&known, &shape(&[("p-a", 8)])).unwrap_err().kind(), Kind::Mismatch);
        assert_eq!(wish.compare(&known, &shape(&[])).unwrap_err().kind(), Kind::Missing);
        let troubled = BTreeMap::from([("p-a".to_owned(), rdkafka::types::RDKafkaErrorCode::LeaderNotAvailable)]);
        assert!(wish.compare(&known, &Shape { troubled, ..Shape::default() }).unwrap().is_empty(), "it may come back");
        assert_eq!(wish.compare(&known, &shape(&[("p-a", 4), ("p-b", 2)])).unwrap()["p-b"], 2);
    }
}
