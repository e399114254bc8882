//! SQLite keeps every contract of a store. It has one writer, so nothing commits late.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

use postrider_testkit::conformance::bed::SqliteBed;
use postrider_testkit::suite;

suite!(
    source,
    SqliteBed::new().await,
    [
        the_log_is_read_from_its_beginning,
        order_does_not_come_from_the_clock,
        rolled_back_events_are_never_read,
        a_big_window_is_read_in_pages_and_resumed,
        settle_refuses_a_stale_lease,
        parked_events_come_back_in_order,
        a_failed_event_keeps_its_key_back,
        a_parked_row_that_is_read_again_stays_as_it_is,
        lanes_split_the_log_by_key,
        changing_the_number_of_lanes_loses_nothing,
        the_backlog_is_what_waits,
        upkeep_never_removes_what_is_not_published,
    ]
);
suite!(
    lease,
    SqliteBed::new().await,
    [
        a_slot_has_one_holder,
        an_expired_slot_is_taken_over,
        an_expired_lease_that_nobody_took_is_renewed,
        a_lease_from_a_wrong_clock_is_taken_over,
        what_is_given_back_is_free_at_once,
        members_are_counted_while_they_live,
        members_share_the_slots,
        a_crowd_never_shares_a_slot,
    ]
);
suite!(
    consumer,
    SqliteBed::new().await,
    [
        a_duplicate_has_one_effect,
        a_failing_handler_is_given_the_event_again,
        a_panicking_handler_is_given_the_event_again,
        an_unapplied_event_survives_the_instance,
        a_failed_commit_is_tried_again,
        a_failing_event_does_not_outlive_its_subscription,
        spent_attempts_end_among_the_dead_letters,
        a_rejected_event_is_a_dead_letter_at_once,
        a_handler_that_never_returns_is_stopped,
        a_skipped_event_is_done_with,
        an_id_that_comes_with_other_content_is_a_dead_letter,
        a_message_that_ends_the_process_becomes_a_dead_letter,
        a_replayed_dead_letter_is_applied_once,
        a_discarded_dead_letter_stays_where_it_is,
        each_key_keeps_its_order_at_any_concurrency,
        a_batch_is_applied_together_and_fails_alone,
        a_remote_effect_is_given_once,
    ]
);
suite!(
    relay,
    SqliteBed::new().await,
    [
        committed_events_are_published,
        a_refused_event_holds_back_only_its_key,
        a_poison_event_ends_as_failed,
        an_event_too_large_is_failed_at_once,
        an_outage_costs_no_attempts,
        a_blocked_broker_is_left_alone,
        random_trouble_loses_and_reorders_nothing,
        an_instance_that_lost_its_lease_does_no_harm,
        lanes_are_shared_between_instances,
    ]
);
