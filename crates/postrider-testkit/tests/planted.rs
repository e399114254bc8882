//! Each planted bug is caught by the suites, each time.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

use std::sync::Arc;

use async_trait::async_trait;
use postrider::Route;
use postrider::event::Event;
use postrider::handler::{ConsumerSpec, HandlerError};
use postrider::source::Source;
use postrider::store::Store;
use postrider::store::postgres::PostgresStore;
use postrider_testkit::conformance::bed::{Bed, PostgresBed, Producer, Tx};
use postrider_testkit::conformance::broker::BrokerBed;
use postrider_testkit::conformance::consumer::{self, Parts};
use postrider_testkit::conformance::{broker, source};
use postrider_testkit::planted::{BrokerBug, InboxFirst, PlantedBroker, PlantedSource, SourceBug, is_caught};

mod rabbit_bed;

/// How often each planted bug must be caught.
const RUNS: usize = 5;

/// A PostgreSQL bed whose source has a bug.
struct Planted {
    bed: PostgresBed,
    bug: SourceBug,
}

impl Planted {
    async fn new(bug: SourceBug) -> Self {
        Self { bed: PostgresBed::new().await, bug }
    }
}

#[async_trait]
impl Bed for Planted {
    type Store = PostgresStore;

    fn store(&self) -> &PostgresStore {
        self.bed.store()
    }
    fn source(&self, lanes: u32) -> Arc<dyn Source> {
        let store = self.bed.store();
        Arc::new(PlantedSource {
            inner: store.source(&Route::all("default"), lanes),
            store: store.clone(),
            bug: self.bug,
        })
    }
    fn open_again(&self) -> std::pin::Pin<Box<dyn Future<Output = Self::Store> + Send>> {
        self.bed.open_again()
    }

    async fn write_effect(tx: &mut Tx<Self>, consumer: &str, name: &str) -> Result<(), HandlerError> {
        PostgresBed::write_effect(tx, consumer, name).await
    }
    async fn begin(&self) -> Box<dyn Producer> {
        self.bed.begin().await
    }
    async fn effects(&self, consumer: &str) -> Vec<String> {
        self.bed.effects(consumer).await
    }
    async fn dead_letters(&self, consumer: &str) -> Vec<(String, String, i64)> {
        self.bed.dead_letters(consumer).await
    }
    async fn outbox_status(&self, event: &Event) -> String {
        self.bed.outbox_status(event).await
    }
    async fn sql(&self, statements: [&'static str; 3]) {
        self.bed.sql(statements).await;
    }
    fn is_without(&self, statements: [&'static str; 3]) -> bool {
        self.bed.is_without(statements)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_cursor_is_caught() {
    assert!(
        is_caught(RUNS, || async {
            source::late_commit_is_not_skipped(&Planted::new(SourceBug::IdCursor).await).await
        })
        .await
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn order_by_created_at_is_caught() {
    assert!(
        is_caught(RUNS, || async {
            source::order_does_not_come_from_the_clock(&Planted::new(SourceBug::CreatedAtOrder).await).await
        })
        .await
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_lease_that_settles_is_caught() {
    assert!(
        is_caught(RUNS, || async {
            source::settle_refuses_a_stale_lease(&Planted::new(SourceBug::UnfencedSettle).await).await
        })
        .await
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inbox_row_before_the_effect_is_caught() {
    let suite = || async {
        let bed = PostgresBed::new().await;
        let Parts { inbox, broker } = consumer::real(&bed);
        let parts = Parts { inbox: Arc::new(InboxFirst { inner: inbox }), broker };
        consumer::failing_handler_with(&bed, parts).await;
    };
    assert!(is_caught(RUNS, suite).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ack_before_the_commit_is_caught() {
    let suite = || async {
        let bed = PostgresBed::new().await;
        consumer::surviving_with(&bed, |inner| Arc::new(PlantedBroker { inner, bug: BrokerBug::AckOnDelivery })).await;
    };
    assert!(is_caught(RUNS, suite).await);
}

/// A RabbitMQ bed that trusts the confirm alone.
struct Trusting(rabbit_bed::RabbitBed);

#[async_trait]
impl BrokerBed for Trusting {
    fn broker(&self) -> Arc<dyn postrider::broker::Broker> {
        Arc::new(PlantedBroker { inner: self.0.broker(), bug: BrokerBug::NotMandatory })
    }
    async fn lease(&self, consumer: &ConsumerSpec, slot: u32) -> postrider::lease::Lease {
        self.0.lease(consumer, slot).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_confirm_without_mandatory_is_caught() {
    let suite = || async {
        broker::an_unroutable_event_is_an_error(&Trusting(rabbit_bed::RabbitBed::new().await)).await;
    };
    assert!(is_caught(RUNS, suite).await);
}
