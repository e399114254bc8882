//! RabbitMQ that goes away, comes back and asks for mercy, in the middle of a relay's work.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

mod own_servers {
    use std::collections::HashSet;
    use std::sync::Arc;
    use std::time::Duration;

    use postrider::Route;
    use postrider::broker::Broker;
    use postrider::broker::rabbitmq::{RabbitMq, RabbitMqSettings};
    use postrider::event::Event;
    use postrider::handler::ConsumerSpec;
    use postrider::lease::{Lease, Leases};
    use postrider::outbox::OutboxStore;
    use postrider::relay::{BreakerSettings, Relay, RelaySettings};
    use postrider::store::Store;
    use postrider_testkit::conformance::bed::{Bed, PostgresBed, event, name};
    use postrider_testkit::testbed;
    use tokio_util::sync::CancellationToken;

    /// Receives until all are there, subscribing again after every outage; returns first arrivals in order.
    async fn receive(broker: &RabbitMq, count: usize) -> Vec<Event> {
        let spec = ConsumerSpec::new("all", &["#"]);
        let lease = Lease { group: spec.group(), slot: 0, owner: "test".to_owned(), epoch: 1 };
        let (mut seen, mut events) = (HashSet::new(), Vec::new());
        let work = async {
            while events.len() < count {
                let Ok(mut subscription) = broker.subscribe(&spec, &lease).await else {
                    tokio::time::sleep(Duration::from_millis(200)).await;
                    continue;
                };
                while let Ok(delivery) = subscription.next().await {
                    let event = delivery.event.expect("an event");
                    if seen.insert(event.id()) {
                        events.push(event);
                    }
                    if subscription.ack(delivery.tag).await.is_err() || events.len() == count {
                        break;
                    }
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(120), work).await.expect("all events arrive");
        events
    }

    fn relay(bed: &PostgresBed, broker: Arc<RabbitMq>) -> (Relay, CancellationToken) {
        let breaker = BreakerSettings { open: Duration::from_secs(2), ..BreakerSettings::default() };
        let leases: Arc<dyn Leases> = Arc::new(bed.store().clone());
        let settings = RelaySettings { breaker, ..RelaySettings::default() };
        (
            Relay::new("default", bed.store().source(&Route::all("default"), 1), leases, broker, settings),
            CancellationToken::new(),
        )
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_broker_that_is_killed_and_restarted_loses_and_reorders_nothing() {
        let bed = PostgresBed::new().await;
        let mut server = testbed::RabbitMq::start_private().await.expect("RabbitMQ starts");
        let settings =
            RabbitMqSettings { publish_timeout: Duration::from_secs(5), ..RabbitMqSettings::new(server.url()) };
        let broker = Arc::new(RabbitMq::new(settings).expect("valid settings"));
        // The queue must be there before the first event.
        let spec = ConsumerSpec::new("all", &["#"]);
        let lease = Lease { group: spec.group(), slot: 0, owner: "test".to_owned(), epoch: 1 };
        drop(broker.subscribe(&spec, &lease).await.expect("the queue is declared"));

        let (relay, stop) = relay(&bed, broker.clone());
        let relay = tokio::spawn(relay.run(stop.clone()));
        let store = bed.store().clone();
        let producer = tokio::spawn(async move {
            for n in 0..3_000 {
                store.enqueue(&[event(&format!("{}", n % 50), &format!("{n:04}"))]).await.expect("enqueued");
            }
        });
        tokio::time::sleep(Duration::from_secs(1)).await;
        server.kill().await.expect("killed");
        server.restart().await.expect("restarted");
        let events = receive(&broker, 3_000).await;
        producer.await.expect("the producer ends");
        stop.cancel();
        relay.await.expect("no panic").expect("stops well");
        for key in 0..50 {
            let names: Vec<String> =
                events.iter().filter(|event| event.key() == Some(&key.to_string())).map(name).collect();
            assert_eq!(names.len(), 60);
            assert!(names.is_sorted(), "key {key} lost its order");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_blocked_connection_opens_the_breaker() {
        let bed = PostgresBed::new().await;
        let server = testbed::RabbitMq::start_private().await.expect("RabbitMQ starts");
        let broker = Arc::new(RabbitMq::new(RabbitMqSettings::new(server.url())).expect("valid settings"));
        let spec = ConsumerSpec::new("all", &["#"]);
        let lease = Lease { group: spec.group(), slot: 0, owner: "test".to_owned(), epoch: 1 };
        drop(broker.subscribe(&spec, &lease).await.expect("the queue is declared"));
        let (relay, stop) = relay(&bed, broker.clone());
        let gate = relay.gate();
        let relay = tokio::spawn(relay.run(stop.clone()));

        bed.store().enqueue(&[event("k", "before")]).await.expect("enqueued");
        receive(&broker, 1).await;
        server.ctl(&["set_vm_memory_high_watermark", "absolute", "1"]).await.expect("the alarm goes off");
        bed.store().enqueue(&[event("k", "meanwhile")]).await.expect("enqueued");
        // RabbitMQ blocks a connection when it publishes; from then on the relay leaves it alone.
        let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
        while gate.closed_because().is_none() {
            assert!(tokio::time::Instant::now() < deadline, "nobody noticed that the broker is blocked");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        bed.store().enqueue(&[event("k", "later")]).await.expect("enqueued");
        server.ctl(&["set_vm_memory_high_watermark", "0.6"]).await.expect("the alarm ends");
        let names: Vec<String> = receive(&broker, 2).await.iter().map(name).collect();
        assert_eq!(names, ["meanwhile", "later"]);
        stop.cancel();
        relay.await.expect("no panic").expect("stops well");
    }
}
