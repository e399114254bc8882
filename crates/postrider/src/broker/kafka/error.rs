//! The one place that knows Kafka's error codes.

use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};

use crate::error::{Error, Kind};

/// The code, whichever call it comes from.
pub(super) fn code(error: &KafkaError) -> Option<Code> {
    match error {
        KafkaError::AdminOp(code) => Some(*code),
        _ => error.rdkafka_error_code(),
    }
}

/// Whether nobody has a topic of that name.
pub(super) fn is_missing(code: Code) -> bool {
    matches!(code, Code::UnknownTopicOrPartition | Code::UnknownTopic | Code::UnknownPartition | Code::UnknownTopicId)
}

/// Whether it says that we are not who we should be, or may not do it.
pub(super) fn is_denied(code: Code) -> bool {
    matches!(
        code,
        Code::Authentication
            | Code::SaslAuthenticationFailed
            | Code::UnsupportedSASLMechanism
            | Code::IllegalSASLState
            | Code::SSL
            | Code::TopicAuthorizationFailed
            | Code::GroupAuthorizationFailed
            | Code::ClusterAuthorizationFailed
            | Code::TransactionalIdAuthorizationFailed
            | Code::SecurityDisabled
    )
}

/// Our error for one of librdkafka's. `doing` says what failed and names the thing; `shown` is the broker's address without
/// the password.
pub(super) fn classify(error: &KafkaError, doing: impl std::fmt::Display, shown: &str) -> Error {
    match error {
        // Its text may quote the value, which may be a password.
        KafkaError::ClientConfig(_, _, key, _) => {
            Error::new(Kind::Config, format!("librdkafka does not take the property {key:?} with this value"))
                .with_remedy("correct it; TLS and SCRAM need rdkafka with the feature `ssl`, zstd the feature `zstd`")
        }
        KafkaError::ClientCreation(text) => {
            Error::new(Kind::Config, format!("librdkafka does not take the settings: {text}"))
        }
        _ => match code(error) {
            Some(code) => of_code(code, doing, shown),
            None => Error::new(Kind::Unavailable, format!("cannot {doing}: Kafka at {shown} cannot be used"))
                .with_source(error.to_string()),
        },
    }
}

/// [`classify`], of a bare code.
pub(super) fn of_code(code: Code, doing: impl std::fmt::Display, shown: &str) -> Error {
    let (kind, remedy) = match code {
        code if is_denied(code) => (
            Kind::Denied,
            Some(
                "correct user and password, or grant the right (kafka-acls.sh) to read and write topics and the group",
            ),
        ),
        code if is_missing(code) => {
            (Kind::Missing, Some("create the topic, or let Postrider declare it (declare = true)"))
        }
        Code::MessageSizeTooLarge | Code::InvalidMessageSize | Code::MessageBatchTooLarge => (
            Kind::TooLarge,
            Some("send a smaller payload, or raise the topic's max.message.bytes and payload_bytes_max"),
        ),
        Code::InvalidTopic => (Kind::Invalid, None),
        Code::InvalidRecord | Code::InvalidTimestamp => {
            (Kind::Refused, Some("look at the topic's settings: a compacted topic takes no event without a key"))
        }
        Code::InvalidReplicationFactor => {
            (Kind::Config, Some("the cluster has fewer brokers than copies: set replication to what it has"))
        }
        Code::InvalidPartitions | Code::PolicyViolation | Code::InvalidConfig => {
            (Kind::Config, Some("change partitions or replication so that the cluster's policy allows them"))
        }
        // Somebody reads with the same group by Kafka's own group protocol.
        Code::UnknownMemberId | Code::IllegalGeneration | Code::RebalanceInProgress | Code::FencedInstanceId => (
            Kind::Mismatch,
            Some("another program uses this group: stop it, or give the consumer another name (or a prefix)"),
        ),
        Code::BadCompression | Code::NotImplemented | Code::UnsupportedFeature | Code::UnsupportedCompressionType => {
            (Kind::Config, Some("the topic has zstd records: build with rdkafka's feature `zstd`, or use lz4"))
        }
        Code::NotEnoughReplicas | Code::NotEnoughReplicasAfterAppend | Code::ISRInsufficient => {
            (Kind::Unavailable, Some("bring the followers back: fewer copies than min.insync.replicas are in sync"))
        }
        _ => (Kind::Unavailable, None),
    };
    let ours = Error::new(kind, format!("cannot {doing}: Kafka at {shown} says {code}"));
    match remedy {
        Some(remedy) => ours.with_remedy(remedy),
        None => ours,
    }
}

/// An event whose topic nobody has.
pub(super) fn unroutable(kafka_topic: &str) -> Error {
    Error::new(Kind::Unroutable, format!("Kafka has no topic {kafka_topic:?}")).with_remedy(
        "create the topic, or let Postrider declare it (declare = true); the event is sent again by itself",
    )
}

/// A topic whose partitions were changed under us.
pub(super) fn repartitioned(kafka_topic: &str, had: u32, has: u32) -> Error {
    Error::new(
        Kind::Mismatch,
        format!("the topic {kafka_topic:?} has {has} partitions and had {had}: keys would move to other partitions"),
    )
    .with_remedy("let consumers finish what is in the topic, then restart the instances that publish to it")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_become_kinds() {
        let kinds = [
            (Code::TopicAuthorizationFailed, Kind::Denied),
            (Code::SaslAuthenticationFailed, Kind::Denied),
            (Code::UnknownTopicOrPartition, Kind::Missing),
            (Code::MessageSizeTooLarge, Kind::TooLarge),
            (Code::MessageTimedOut, Kind::Unavailable),
            (Code::NotEnoughReplicas, Kind::Unavailable),
            (Code::AllBrokersDown, Kind::Unavailable),
            (Code::UnknownMemberId, Kind::Mismatch),
        ];
        for (code, kind) in kinds {
            let error = classify(&KafkaError::MessageProduction(code), "do it", "kafka://h:1");
            assert_eq!(error.kind(), kind, "{code:?}");
            assert!(error.to_string().contains("do it"));
        }
    }
}
