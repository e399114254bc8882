//! What Kafka says about its settings, and what of it loses events.

use std::collections::HashMap;
use std::time::Duration;

use rdkafka::admin::{AdminOptions, ConfigResource, OwnedResourceSpecifier, ResourceSpecifier};

use super::cluster::{ADMIN_WAIT, Shape, Topic};
use super::error::classify;
use super::places::{DEAD, SKIPPED};
use super::{Kafka, client};
use crate::doctor::Finding;
use crate::error::{Error, Kind, Result};
use crate::handler::SLOTS_MAX;

/// Settings are read of so many topics.
const TOPICS_MAX: usize = 100;
/// An event that is deleted this soon is lost to a consumer that is away over a long weekend.
const RETENTION_MIN: Duration = Duration::from_secs(4 * 24 * 3600);

pub(super) async fn inspect(broker: &Kafka) -> Result<Vec<Finding>> {
    let shown = broker.address();
    let shape = broker.cluster.look(None).await?;
    let brokers = shape.brokers.len();
    let mut findings = vec![Finding::ok(
        "kafka.connection",
        format!("connected to {shown}, {brokers} brokers, {} topics", shape.topics.len()),
    )];
    if broker.settings.declare && usize::from(broker.settings.replication) > brokers {
        findings.push(Finding::warning(
            "kafka.replication",
            format!(
                "topics are to be created with {} copies, but there are {brokers} brokers",
                broker.settings.replication
            ),
            "set replication to the number of brokers, at most",
        ));
    }
    let is_ours = |topic: &&Topic| {
        let name = broker.settings.topic(&topic.name);
        name.is_some_and(|name| !name.starts_with("__") && !name.ends_with(DEAD) && !name.ends_with(SKIPPED))
    };
    let ours: Vec<&Topic> = shape.topics.iter().filter(is_ours).collect();
    findings.extend(ours.iter().flat_map(|topic| of_shape(topic)));
    match settings(broker, &shape, &ours).await {
        Ok(resources) => findings.extend(of_settings(&resources, &ours)),
        Err(error) => findings.push(Finding::warning(
            "kafka.settings",
            format!("the settings of brokers and topics cannot be read: {error}"),
            "check them by hand: auto.create.topics.enable, min.insync.replicas, cleanup.policy, retention.ms",
        )),
    }
    Ok(findings)
}

/// The settings of one broker and of our topics.
async fn settings(broker: &Kafka, shape: &Shape, topics: &[&Topic]) -> Result<Vec<ConfigResource>> {
    let mut wanted: Vec<ResourceSpecifier<'_>> =
        shape.brokers.first().map(|id| ResourceSpecifier::Broker(*id)).into_iter().collect();
    wanted.extend(topics.iter().take(TOPICS_MAX).map(|topic| ResourceSpecifier::Topic(&topic.name)));
    let options = AdminOptions::new().request_timeout(Some(ADMIN_WAIT));
    let admin = broker.cluster.admin()?;
    let asking = admin.describe_configs(&wanted, &options);
    let unanswered = || Error::new(Kind::Unavailable, "the administrator's interface does not answer");
    let answer = tokio::time::timeout(ADMIN_WAIT, asking).await;
    client::end(admin);
    let answer =
        answer.map_err(|_| unanswered())?.map_err(|error| classify(&error, "read settings", broker.address()))?;
    Ok(answer.into_iter().flatten().collect())
}

fn of_shape(topic: &Topic) -> Vec<Finding> {
    let mut findings = Vec::new();
    let name = &topic.name;
    if topic.replicas < 2 {
        findings.push(Finding::warning(
            "kafka.replication",
            format!("the topic {name:?} has one copy only: its events are lost with a broker's disk"),
            "give it three copies (kafka-reassign-partitions.sh)",
        ));
    }
    if !topic.is_led {
        findings.push(Finding::error(
            "kafka.leader",
            format!("the topic {name:?} has partitions without a leader"),
            "bring the brokers back that have its copies",
        ));
    }
    if topic.partitions > SLOTS_MAX {
        findings.push(Finding::warning(
            "kafka.partitions",
            format!("the topic {name:?} has {} partitions, Postrider fills {SLOTS_MAX}", topic.partitions),
            "it does no harm; use 32 or fewer for topics that only Postrider writes",
        ));
    }
    findings
}

fn of_settings(resources: &[ConfigResource], topics: &[&Topic]) -> Vec<Finding> {
    let replicas: HashMap<&str, usize> = topics.iter().map(|topic| (topic.name.as_str(), topic.replicas)).collect();
    let mut findings = Vec::new();
    for resource in resources {
        let value = |name: &str| resource.get(name).and_then(|entry| entry.value.as_deref());
        match &resource.specifier {
            OwnedResourceSpecifier::Broker(_) => findings.push(match value("auto.create.topics.enable") {
                Some("true") => Finding::warning(
                    "kafka.auto_create",
                    "brokers create topics that any program names, with their default number of partitions",
                    "set auto.create.topics.enable=false; Postrider never uses it",
                ),
                Some(_) => Finding::ok("kafka.auto_create", "topics are created on purpose only"),
                None => continue,
            }),
            OwnedResourceSpecifier::Topic(name) => {
                let copies = replicas.get(name.as_str()).copied().unwrap_or_default();
                findings.extend(of_topic(name, copies, value));
            }
            OwnedResourceSpecifier::Group(_) => {}
        }
    }
    findings
}

fn of_topic<'v>(name: &str, copies: usize, value: impl Fn(&str) -> Option<&'v str>) -> Vec<Finding> {
    let mut findings = Vec::new();
    if value("cleanup.policy").is_some_and(|policy| policy.contains("compact")) {
        findings.push(Finding::error(
            "kafka.compaction",
            format!("the topic {name:?} is compacted: Kafka deletes all but the last event of a key"),
            "set cleanup.policy=delete on topics that carry events",
        ));
    }
    let in_sync: Option<usize> = value("min.insync.replicas").and_then(|text| text.parse().ok());
    if in_sync.is_some_and(|in_sync| copies >= 3 && in_sync < 2) {
        findings.push(Finding::warning(
            "kafka.min_insync",
            format!("one copy of {name:?} is enough to confirm an event: it is lost if that broker is"),
            "set min.insync.replicas=2 on the topic",
        ));
    }
    if in_sync.is_some_and(|in_sync| copies > 0 && in_sync > copies) {
        findings.push(Finding::error(
            "kafka.min_insync",
            format!("the topic {name:?} has {copies} copies but min.insync.replicas asks for more: it takes no event"),
            "give it more copies, or lower min.insync.replicas",
        ));
    }
    if value("unclean.leader.election.enable") == Some("true") {
        findings.push(Finding::warning(
            "kafka.unclean_election",
            format!("a copy of {name:?} that lacks events may become the leader: confirmed events are lost then"),
            "set unclean.leader.election.enable=false",
        ));
    }
    // A negative retention keeps for ever.
    let retention = value("retention.ms").and_then(|text| text.parse::<u64>().ok()).map(Duration::from_millis);
    if let Some(retention) = retention.filter(|retention| *retention < RETENTION_MIN) {
        findings.push(Finding::warning(
            "kafka.retention",
            format!(
                "the topic {name:?} keeps events for {} h: a consumer that is away longer loses them",
                retention.as_secs() / 3600
            ),
            "raise retention.ms above the longest absence of a consumer; the default is 7 days",
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_loses_events_is_found() {
        let checks = |copies: usize, values: &[(&'static str, &'static str)]| -> Vec<String> {
            let value = |name: &str| values.iter().find(|(key, _)| *key == name).map(|(_, value)| *value);
            of_topic("t", copies, value).into_iter().map(|finding| finding.check).collect()
        };
        let good = [("cleanup.policy", "delete"), ("min.insync.replicas", "2"), ("retention.ms", "604800000")];
        assert_eq!(checks(3, &good), [""; 0]);
        assert_eq!(checks(3, &[("cleanup.policy", "compact,delete")]), ["kafka.compaction"]);
        assert_eq!(checks(3, &[("min.insync.replicas", "1")]), ["kafka.min_insync"]);
        assert_eq!(checks(1, &[("min.insync.replicas", "2")]), ["kafka.min_insync"]);
        assert_eq!(checks(1, &[("retention.ms", "3600000")]), ["kafka.retention"]);
        assert_eq!(checks(1, &[("retention.ms", "-1")]), [""; 0]);
        assert_eq!(checks(1, &[("unclean.leader.election.enable", "true")]), ["kafka.unclean_election"]);
    }
}
