//! RabbitMQ keeps every contract of a broker.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

mod rabbit_bed;

use postrider_testkit::suite;
use rabbit_bed::RabbitBed;

suite!(
    broker,
    RabbitBed::new().await,
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
