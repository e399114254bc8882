//! The embedded broker keeps every contract of a broker, on every store.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use async_trait::async_trait;
use postrider::broker::Broker;
use postrider::broker::embedded::Embedded;
use postrider::handler::ConsumerSpec;
use postrider::lease::Lease;
use postrider_testkit::conformance::bed::{Bed, MysqlBed, PostgresBed, SqliteBed};
use postrider_testkit::conformance::broker::BrokerBed;

struct EmbeddedBed<B: Bed> {
    bed: B,
    epoch: AtomicI64,
}

impl<B: Bed> EmbeddedBed<B> {
    fn new(bed: B) -> Self {
        Self { bed, epoch: AtomicI64::new(0) }
    }
}

#[async_trait]
impl<B: Bed> BrokerBed for EmbeddedBed<B> {
    fn broker(&self) -> Arc<dyn Broker> {
        Arc::new(Embedded::new(Arc::new(self.bed.store().clone())))
    }

    async fn lease(&self, consumer: &ConsumerSpec, slot: u32) -> Lease {
        let epoch = self.epoch.fetch_add(1, Ordering::SeqCst) + 1;
        Lease { group: consumer.group(), slot, owner: "test".to_owned(), epoch }
    }
}

macro_rules! on {
    ($store:ident, $bed:expr) => {
        mod $store {
            use super::*;
            postrider_testkit::suite!(
                broker,
                EmbeddedBed::new($bed.await),
                [
                    the_whole_envelope_arrives,
                    every_consumer_gets_what_it_wants,
                    messages_of_a_key_keep_their_order,
                    what_was_not_acked_comes_again,
                    prefetch_bounds_what_is_held,
                    messages_wait_for_an_absent_consumer,
                    slots_split_messages_by_key,
                ]
            );
        }
    };
}
on!(on_postgres, PostgresBed::new());
on!(on_sqlite, SqliteBed::new());
on!(on_mysql, MysqlBed::new());
