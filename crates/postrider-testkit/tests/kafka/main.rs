//! Kafka keeps every contract of a broker. On the mock inside librdkafka, or on the cluster that POSTRIDER_TEST_KAFKA names.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

mod bed;
mod fake;
mod ladder;
mod outage;
mod reading;
mod writing;

use bed::KafkaBed;

postrider_testkit::suite!(
    broker,
    KafkaBed::new().await,
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
