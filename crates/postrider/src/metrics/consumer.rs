//! What a consumer counts.

use std::sync::Arc;
use std::time::Duration;

use metrics::{counter, histogram};

use super::labels::{ERROR_TYPES, TOPICS};
use crate::event::Event;
use crate::pulse::{Metric, Tally};

/// Counts for one consumer: in the metrics of this process, and for the pulse.
#[derive(Clone)]
pub(crate) struct ConsumerMeter {
    consumer: String,
    tally: Arc<Tally>,
}

impl ConsumerMeter {
    pub fn new(consumer: &str) -> Self {
        // A counter that begins with its first event hides it: an increase is seen only from one scrape to the next.
        counter!("postrider_applied_total", "consumer" => consumer.to_owned()).increment(0);
        Self { consumer: consumer.to_owned(), tally: Arc::new(Tally::new()) }
    }

    /// What goes out with the pulse.
    pub fn tally(&self) -> Arc<Tally> {
        self.tally.clone()
    }

    fn consumer(&self) -> String {
        self.consumer.clone()
    }

    /// An effect was committed.
    pub fn applied(&self, event: &Event) {
        self.tally.applied(&[self.applied_one(event)]);
    }

    /// The effect of an event that a person sent again was committed; its age says nothing about how events flow.
    pub fn applied_again(&self) {
        self.count_applied();
        self.tally.add(Metric::Applied, "", 1);
    }

    /// The effects of a transaction were committed.
    pub fn applied_all(&self, events: &[Arc<Event>]) {
        let latencies: Vec<Duration> = events.iter().map(|event| self.applied_one(event)).collect();
        self.tally.applied(&latencies);
    }

    fn applied_one(&self, event: &Event) -> Duration {
        self.count_applied();
        // Producer's and consumer's clocks may differ; a negative latency is a clock's fault and shown as none.
        let latency = (chrono::Utc::now() - event.time()).to_std().unwrap_or_default();
        let topic = TOPICS.of(event.topic());
        histogram!("postrider_latency_seconds", "consumer" => self.consumer(), "topic" => topic)
            .record(latency.as_secs_f64());
        latency
    }

    fn count_applied(&self) {
        counter!("postrider_applied_total", "consumer" => self.consumer()).increment(1);
    }

    pub fn duplicate(&self) {
        counter!("postrider_duplicates_total", "consumer" => self.consumer()).increment(1);
        self.tally.add(Metric::Duplicate, "", 1);
    }

    pub fn skipped(&self) {
        counter!("postrider_skipped_total", "consumer" => self.consumer()).increment(1);
        self.tally.add(Metric::Skipped, "", 1);
    }

    /// An attempt failed, the last one included.
    pub fn failed(&self, error_type: &str) {
        let label = ERROR_TYPES.of(error_type);
        counter!("postrider_handler_failed_total", "consumer" => self.consumer(), "error_type" => label).increment(1);
        self.tally.add(Metric::Failed, error_type, 1);
    }

    pub fn held(&self) {
        counter!("postrider_held_total", "consumer" => self.consumer()).increment(1);
    }

    pub fn buried(&self, error_type: &str) {
        let label = ERROR_TYPES.of(error_type);
        counter!("postrider_dead_letters_total", "consumer" => self.consumer(), "error_type" => label).increment(1);
        self.tally.add(Metric::Dead, error_type, 1);
    }

    pub fn undecodable(&self) {
        counter!("postrider_undecodable_total", "consumer" => self.consumer()).increment(1);
    }

    pub fn subscription_lost(&self) {
        counter!("postrider_subscriptions_lost_total", "consumer" => self.consumer()).increment(1);
    }

    pub fn claim_fetched(&self) {
        counter!("postrider_claims_fetched_total", "consumer" => self.consumer()).increment(1);
    }
}
