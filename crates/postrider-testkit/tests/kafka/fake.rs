//! On a broker that a test can order about: it loses acknowledgements, asks for a password, changes and deletes topics.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use krafka::testing::{ApiKey, Control, FakeBroker};
use postrider::Kind;
use postrider::broker::kafka::{Kafka, KafkaSettings};
use postrider::broker::{Aside, AsideKind, Broker, Subscription};
use postrider::event::Event;
use postrider::handler::{ConsumerSpec, Place};
use postrider::inbox::{Body, Failed};
use postrider::lease::Lease;
use postrider_testkit::conformance::bed::event;
use postrider_testkit::conformance::broker::BrokerBed;

use crate::bed::{SOON, TOPICS, take};

const TOPIC: &str = "test.created";

struct Fake {
    server: FakeBroker,
    broker: Arc<Kafka>,
    epoch: AtomicI64,
}

impl Fake {
    async fn new(change: impl FnOnce(&mut KafkaSettings)) -> Self {
        let server = FakeBroker::start_cluster(3).await.expect("a broker");
        let broker = Self::connect(&server, "", change);
        Self { server, broker, epoch: AtomicI64::new(0) }
    }

    async fn of_suite() -> Self {
        let fake = Self::new(|_| {}).await;
        for topic in TOPICS {
            fake.server.create_topic(topic, 6);
        }
        fake
    }

    fn connect(server: &FakeBroker, login: &str, change: impl FnOnce(&mut KafkaSettings)) -> Arc<Kafka> {
        let mut settings = KafkaSettings {
            declare: false,
            partitions: 4,
            replication: 1,
            publish_timeout: Duration::from_secs(5),
            answer_timeout: Duration::from_secs(3),
            refresh: Duration::from_millis(300),
            ..KafkaSettings::new(format!("kafka://{login}{}", server.bootstrap_servers()))
        };
        change(&mut settings);
        Arc::new(Kafka::new(settings).expect("valid settings"))
    }

    async fn publish(&self, event: &Event) -> postrider::Result<()> {
        self.broker.publish(&[Arc::new(event.clone())]).await.remove(0)
    }

    async fn subscribe(&self, topics: &[&str]) -> Box<dyn Subscription> {
        let spec = ConsumerSpec::new("all", topics);
        let lease = self.lease(&spec, 0).await;
        self.broker.subscribe(&spec, &lease).await.expect("the subscription begins")
    }

    /// The subscription's end, with whatever comes before it.
    async fn end_of(&self, subscription: &mut Box<dyn Subscription>) -> postrider::Error {
        let ending = async {
            loop {
                if let Err(error) = subscription.next().await {
                    return error;
                }
            }
        };
        tokio::time::timeout(SOON, ending).await.expect("it ends")
    }

    fn records(&self, topic: &str) -> usize {
        self.server.all_records(topic).expect("a log").len()
    }
}

#[async_trait]
impl BrokerBed for Fake {
    fn broker(&self) -> Arc<dyn Broker> {
        self.broker.clone()
    }

    async fn lease(&self, consumer: &ConsumerSpec, slot: u32) -> Lease {
        let epoch = self.epoch.fetch_add(1, Ordering::SeqCst) + 1;
        Lease { group: consumer.group(), slot, owner: "test".to_owned(), epoch }
    }

    fn orders_across_topics(&self) -> bool {
        false
    }
}

postrider_testkit::suite!(
    broker,
    Fake::of_suite().await,
    [
        the_whole_envelope_arrives,
        every_consumer_gets_what_it_wants,
        messages_of_a_key_keep_their_order,
        what_was_not_acked_comes_again,
        prefetch_bounds_what_is_held,
        messages_wait_for_an_absent_consumer,
        slots_split_messages_by_key,
        an_unroutable_event_is_an_error,
    ]
);

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_acknowledgement_writes_nothing_twice() {
    let fake = Fake::of_suite().await;
    let names: Vec<String> = (0..20).map(|n| format!("{n:02}")).collect();
    for (n, name) in names.iter().enumerate() {
        if n % 5 == 2 {
            // Written, but the answer is lost with the connection.
            fake.server.on_once(ApiKey::Produce, |_| Control::ApplyThen(Box::new(Control::Disconnect)));
        }
        fake.publish(&event("k", name)).await.expect("confirmed");
    }
    assert_eq!(fake.records(TOPIC), names.len());
    let mut subscription = fake.subscribe(&["test.*"]).await;
    for name in names {
        assert_eq!(take(&mut subscription).await.1, name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_producer_that_the_broker_forgot_goes_on() {
    let fake = Fake::of_suite().await;
    for n in 0..10 {
        let forgotten = (0..6).filter(|partition| fake.server.clear_producer_state(TOPIC, *partition)).count();
        println!("{forgotten} partitions forgot the producer");
        let deadline = Instant::now() + SOON;
        while let Err(error) = fake.publish(&event("k", &n.to_string())).await {
            println!("{error}");
            assert!(!error.kind().belongs_to_event() && Instant::now() < deadline, "{error}");
        }
    }
    assert_eq!(fake.records(TOPIC), 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_topics_are_declared_with_their_partitions() {
    let fake = Fake::new(|settings| settings.declare = true).await;
    fake.publish(&event("k", "a")).await.expect("the topic is declared");
    let mut subscription = fake.subscribe(&[TOPIC, "orders.paid"]).await;
    assert_eq!(take(&mut subscription).await.1, "a");
    let partitions = |topic: &str| (0..100).filter(|n| fake.server.next_offset(topic, *n).is_some()).count();
    assert_eq!((partitions(TOPIC), partitions("orders.paid")), (4, 4), "a name without a wildcard is declared");

    let sent = event("k", "dead");
    let aside = Aside {
        consumer: "all",
        kind: AsideKind::Dead,
        place: &Place::Usual,
        message: Body::Event(&sent),
        failed: &Failed::new("handler", "no", Vec::new()),
        attempts: 4,
        origin: None,
    };
    fake.broker.set_aside(&aside).await.expect("set aside");
    assert_eq!((partitions("test.created.dlq"), fake.records("test.created.dlq")), (4, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_place_that_is_missing_is_no_fault_of_the_message() {
    let fake = Fake::of_suite().await;
    let sent = event("k", "dead");
    let aside = Aside {
        consumer: "all",
        kind: AsideKind::Skipped,
        place: &Place::Usual,
        message: Body::Event(&sent),
        failed: &Failed::new("skipped", "nobody handles it", Vec::new()),
        attempts: 1,
        origin: None,
    };
    let error = fake.broker.set_aside(&aside).await.expect_err("nobody has it");
    assert_eq!(error.kind(), Kind::Missing);
    assert!(error.to_string().contains("test.created.skipped"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_number_of_partitions_stops_the_topic_and_no_other() {
    let fake = Fake::of_suite().await;
    let mut subscription = fake.subscribe(&["test.*"]).await;
    fake.publish(&event("k", "before")).await.expect("confirmed");
    fake.server.add_partitions(TOPIC, 12);
    let error = fake.end_of(&mut subscription).await;
    assert_eq!(error.kind(), Kind::Mismatch);
    assert!(error.to_string().contains(TOPIC), "{error}");
    tokio::time::sleep(Duration::from_millis(400)).await;
    let before = fake.records(TOPIC);
    let other = Event::builder("orders.paid", "t").key("o").json("x").expect("JSON").build().expect("valid");
    let results = fake.broker.publish(&[Arc::new(event("k", "after")), Arc::new(other)]).await;
    let error = results[0].as_ref().expect_err("keys would move");
    assert_eq!((error.kind(), error.kind().belongs_to_event()), (Kind::Mismatch, false));
    assert!(results[1].is_ok(), "{:?}", results[1]);
    assert_eq!(fake.records(TOPIC), before, "nothing was published under the new number");

    // Opened anew it reads all partitions; a new instance publishes by the new number.
    let mut again = fake.subscribe(&["test.*"]).await;
    assert_eq!(take(&mut again).await.1, "before");
    let restarted = Fake::connect(&fake.server, "", |_| {});
    restarted.publish(&[Arc::new(event("k", "after"))]).await.remove(0).expect("confirmed");
    assert_eq!(take(&mut again).await.1, "after");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_topic_is_missing() {
    let fake = Fake::of_suite().await;
    let mut subscription = fake.subscribe(&["test.*"]).await;
    fake.publish(&event("k", "before")).await.expect("confirmed");
    fake.server.delete_topic(TOPIC);
    assert_eq!(fake.end_of(&mut subscription).await.kind(), Kind::Missing);
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(fake.publish(&event("k", "after")).await.expect_err("gone").kind(), Kind::Unroutable);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_is_denied() {
    let fake = Fake::of_suite().await;
    fake.server.require_sasl_plain("shop", "right");
    let good = Fake::connect(&fake.server, "shop:right@", |_| {});
    good.publish(&[Arc::new(event("k", "a"))]).await.remove(0).expect("the right password is taken");
    let bad = Fake::connect(&fake.server, "shop:wr0ng@", |_| {});
    let error = bad.publish(&[Arc::new(event("k", "a"))]).await.remove(0).expect_err("refused");
    assert_eq!(error.kind(), Kind::Denied, "{error}");
    let spec = ConsumerSpec::new("all", &["#"]);
    let refused = bad.subscribe(&spec, &fake.lease(&spec, 0).await).await.err().expect("refused");
    assert_eq!(refused.kind(), Kind::Denied, "{refused}");
    for error in [error, refused] {
        assert!(!format!("{error:?}").contains("wr0ng"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_was_made_anew_is_read_from_its_beginning() {
    // What was committed of the old log lies beyond the new one, or within it.
    for acked in [3, 1] {
        let fake = Fake::of_suite().await;
        let mut subscription = fake.subscribe(&["test.*"]).await;
        for (n, name) in ["a", "b", "c"].into_iter().enumerate() {
            fake.publish(&event("k", name)).await.expect("confirmed");
            let (tag, got, _) = take(&mut subscription).await;
            assert_eq!(got, name);
            if n < acked {
                subscription.ack(tag).await.expect("acked");
            }
        }
        fake.server.delete_topic(TOPIC);
        fake.server.create_topic(TOPIC, 6);
        let error = fake.end_of(&mut subscription).await;
        println!("{error}");
        subscription.close().await.expect("closed");
        let deadline = Instant::now() + SOON;
        while let Err(error) = fake.publish(&event("k", "d")).await {
            println!("{error}");
            assert!(Instant::now() < deadline, "{error}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let mut again = fake.subscribe(&["test.*"]).await;
        assert_eq!(take(&mut again).await.1, "d", "{acked} acked");
    }
}
