//! What Kafka answers to a publish.

use std::sync::Arc;
use std::time::{Duration, Instant};

use postrider::Kind;
use postrider::broker::Broker;
use postrider::broker::kafka::{Kafka, KafkaSettings};
use postrider::handler::ConsumerSpec;
use postrider_testkit::conformance::bed::event;
use postrider_testkit::testbed::response;
use rdkafka::error::RDKafkaErrorCode as Code;
use rdkafka::types::RDKafkaApiKey;

use crate::bed::{KafkaBed, SOON, take};

const TOPIC: &str = "test.created";

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_right_is_an_outage_and_not_the_events_fault() {
    let bed = KafkaBed::mock(&[(TOPIC, 1)]).await;
    let codes = [response(Code::TopicAuthorizationFailed)];
    bed.server.fail_next(RDKafkaApiKey::Produce, &codes).await.expect("ordered");
    let error = bed.broker.publish(&[Arc::new(event("k", "a"))]).await.remove(0).expect_err("denied");
    assert_eq!(error.kind(), Kind::Denied);
    assert!(error.to_string().contains(TOPIC), "{error}");
    // Granted, it is found out by the next look at the topics.
    let deadline = Instant::now() + SOON;
    while bed.broker.publish(&[Arc::new(event("k", "a"))]).await[0].is_err() {
        assert!(Instant::now() < deadline, "it is never found out");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_is_too_large_only_if_it_is_so_alone() {
    let bed = KafkaBed::mock(&[(TOPIC, 1)]).await;
    bed.publish("k", "first").await;
    let batch: Vec<_> = ["a", "b", "c"].map(|name| Arc::new(event(name, name))).into();
    let too_large = response(Code::MessageSizeTooLarge);
    bed.server.fail_next(RDKafkaApiKey::Produce, &[too_large]).await.expect("ordered");
    for result in bed.broker.publish(&batch).await {
        result.expect("it stood beside one that is too large");
    }
    bed.server.fail_next(RDKafkaApiKey::Produce, &[too_large, too_large]).await.expect("ordered");
    let error = bed.broker.publish(&batch[..1]).await.remove(0).expect_err("too large");
    assert_eq!(error.kind(), Kind::TooLarge);

    let big = vec![b'x'; bed.settings.payload_bytes_max + 1];
    let big = postrider::Event::builder(TOPIC, "t").payload("text/plain", big).build().expect("valid");
    assert_eq!(bed.broker.check(&big).expect_err("too large").kind(), Kind::TooLarge);
    assert_eq!(bed.broker.publish(&[Arc::new(big)]).await.remove(0).expect_err("too large").kind(), Kind::TooLarge);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_lost_with_a_request_reorders_nothing() {
    let bed = KafkaBed::mock(&[(TOPIC, 1)]).await;
    bed.publish("k", "a").await;
    // The connection is lost with the request.
    bed.server.fail_next(RDKafkaApiKey::Produce, &[response(Code::BrokerTransportFailure)]).await.expect("ordered");
    bed.publish("k", "b").await;
    bed.publish("k", "c").await;
    let mut subscription = bed.subscribe(&ConsumerSpec::new("all", &["#"])).await;
    for expected in ["a", "b", "c"] {
        assert_eq!(take(&mut subscription).await.1, expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_producer_that_lost_its_sequence_is_replaced() {
    let bed = KafkaBed::mock(&[(TOPIC, 1)]).await;
    bed.publish("k", "a").await;
    let codes = [response(Code::OutOfOrderSequenceNumber); 1];
    bed.server.fail_next(RDKafkaApiKey::Produce, &codes).await.expect("ordered");
    let result = bed.broker.publish(&[Arc::new(event("k", "b"))]).await.remove(0);
    println!("with a broken sequence: {result:?}");
    if let Err(error) = result {
        assert!(!error.kind().belongs_to_event(), "{error}");
    }
    bed.publish("k", "b").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_is_away_is_unavailable_in_time() {
    let port = postrider_testkit::testbed::free_port().expect("a port");
    let settings = KafkaSettings {
        publish_timeout: Duration::from_secs(2),
        answer_timeout: Duration::from_secs(1),
        ..KafkaSettings::new(format!("kafka://127.0.0.1:{port}"))
    };
    let broker = Kafka::new(settings).expect("valid settings");
    let batch: Vec<_> = ["a", "b"].map(|name| Arc::new(event(name, name))).into();
    let began = Instant::now();
    for result in broker.publish(&batch).await {
        assert_eq!(result.expect_err("nobody is there").kind(), Kind::Unavailable);
    }
    let spec = ConsumerSpec::new("all", &["#"]);
    let lease = postrider::lease::Lease { group: spec.group(), slot: 0, owner: "test".to_owned(), epoch: 1 };
    assert_eq!(broker.subscribe(&spec, &lease).await.err().expect("nobody").kind(), Kind::Unavailable);
    assert_eq!(broker.inspect().await.expect_err("nobody").kind(), Kind::Unavailable);
    assert!(began.elapsed() < Duration::from_secs(7), "{:?}", began.elapsed());
}
