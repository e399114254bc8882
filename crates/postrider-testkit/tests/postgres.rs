//! PostgreSQL keeps every contract of a store.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

use postrider_testkit::conformance::bed::PostgresBed;
use postrider_testkit::suite;

suite!(
    source,
    PostgresBed::new().await,
    [
        the_log_is_read_from_its_beginning,
        late_commit_is_not_skipped,
        a_long_transaction_delays_only_its_own_events,
        order_within_a_key_is_commit_order,
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
    routes,
    PostgresBed::new().await,
    [
        each_destination_gets_its_topics,
        a_destination_that_stands_still_delays_only_its_own,
        a_topic_that_moves_is_not_passed_over,
        routes_do_not_change_beside_a_relay,
        a_relay_that_slept_through_a_change_is_refused,
    ]
);
suite!(
    lease,
    PostgresBed::new().await,
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
    PostgresBed::new().await,
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
        a_replay_beside_a_running_retry_is_decided,
    ]
);
suite!(
    newest,
    PostgresBed::new().await,
    [
        every_order_of_arrival_ends_with_the_newest,
        a_late_update_after_a_delete_is_refused,
        each_consumer_and_entity_has_its_own_newest,
        without_a_version_on_both_sides_the_timestamp_decides,
        a_rollback_forgets_the_decision,
        of_many_at_once_one_is_first,
        an_id_too_long_is_refused,
        upkeep_removes_old_tombstones_alone,
    ]
);
suite!(
    relay,
    PostgresBed::new().await,
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
suite!(
    dead,
    PostgresBed::new().await,
    [
        a_failed_event_is_a_dead_letter_of_the_relay,
        a_settlement_that_comes_twice_adds_no_attempts,
        a_replayed_event_is_published_and_its_key_follows,
        a_replayed_event_that_fails_again_is_dead_again,
        a_recalled_event_has_failed_as_before,
        a_discarded_event_lets_its_key_go_on,
        a_discarded_event_that_is_read_again_is_not_published,
        an_event_that_is_published_after_all_is_no_dead_letter,
        an_event_that_failed_twice_has_one_dead_letter,
    ]
);
suite!(
    pulse,
    PostgresBed::new().await,
    [
        counts_are_added_up_by_minute_and_hour,
        instances_at_once_lose_no_count,
        a_label_that_is_too_long_is_cut,
        an_instance_is_known_until_it_withdraws,
        an_open_breaker_keeps_its_beginning,
        upkeep_forgets_old_counts_and_instances,
    ]
);
suite!(
    alert,
    PostgresBed::new().await,
    [
        an_alert_is_told_once_and_resolved_once,
        instances_at_once_open_one_alert,
        a_resolution_waits_behind_its_firing,
        a_delivery_comes_back_when_its_taker_died,
        a_silenced_alert_is_told_when_its_silence_ends,
        a_silence_ends_by_itself,
        upkeep_forgets_alerts_that_are_over,
    ]
);
suite!(
    integrity,
    PostgresBed::new().await,
    [
        every_planted_defect_is_found_and_nothing_else,
        consumers_are_orphans_only_where_all_are_known,
        a_users_check_says_what_it_found,
        a_users_check_cannot_write_or_run_for_ever,
        a_scheduled_report_is_begun_once,
    ]
);
suite!(
    view,
    PostgresBed::new().await,
    [a_holder_says_how_many_wait_behind_it, every_consumer_is_found_however_it_was_heard_of]
);
suite!(
    recovery,
    PostgresBed::new().await,
    [
        past_events_are_applied_in_order_and_once,
        a_relay_stands_still_when_what_it_published_is_gone,
        a_past_event_without_a_key_is_delivered_once,
        retention_is_no_restore,
        a_life_has_a_number_of_its_own,
    ]
);

/// What only PostgreSQL can do to us.
mod postgres_only {
    use std::sync::Arc;
    use std::time::Duration;

    use async_trait::async_trait;
    use postrider::broker::Broker;
    use postrider::broker::embedded::Embedded;
    use postrider::event::Event;
    use postrider::handler::{Consumer, ConsumerSpec, Handler, HandlerError};
    use postrider::lease::Lease;
    use postrider::outbox::OutboxStore;
    use postrider::source::Source;
    use postrider::store::Store;
    use postrider::upkeep::{Retention, Upkeep};
    use postrider_testkit::conformance::bed::{Bed, PostgresBed, event};
    use sqlx::{Postgres, Transaction};
    use tokio_util::sync::CancellationToken;

    /// Ignores a failed statement the first time, as programs do.
    struct Careless(std::sync::atomic::AtomicBool);

    #[async_trait]
    impl Handler<Transaction<'static, Postgres>> for Careless {
        async fn handle(&self, tx: &mut Transaction<'static, Postgres>, event: &Event) -> Result<(), HandlerError> {
            PostgresBed::write_effect(tx, "c", &event.id().to_string()).await?;
            if !self.0.swap(true, std::sync::atomic::Ordering::SeqCst) {
                let _ = sqlx::query("SELECT 1 / 0").execute(&mut **tx).await;
            }
            Ok(())
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_handler_that_swallows_an_sql_error_loses_nothing() {
        let bed = PostgresBed::new().await;
        let store = Arc::new(bed.store().clone());
        let broker = Arc::new(Embedded::new(store.clone()));
        assert!(broker.publish(&[Arc::new(event("k", "a"))]).await.iter().all(Result::is_ok));
        let stop = CancellationToken::new();
        let spec = ConsumerSpec::new("c", &["#"]);
        let consumer = Consumer::new(spec, broker, store.clone(), store, Careless(Default::default())).expect("valid");
        let task = tokio::spawn(consumer.run(stop.clone()));
        let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
        while bed.effects("c").await.is_empty() {
            assert!(tokio::time::Instant::now() < deadline, "acked without an effect");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        stop.cancel();
        task.await.expect("no panic").expect("stops well");
        assert_eq!(bed.effects("c").await.len(), 1);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_position_ahead_of_the_database_is_refused() {
        let bed = PostgresBed::new().await;
        let (source, lease) = (bed.source(1), bed.lease(0).await);
        source.open(&lease).await.expect("opens");
        sqlx::query("UPDATE postrider.lane SET done = '99999999:99999999:'")
            .execute(bed.store().pool())
            .await
            .expect("as after a restore");
        let error = source.open(&lease).await.expect_err("the position is from another life");
        assert_eq!(error.kind(), postrider::Kind::Mismatch);
        assert!(error.remedy().contains("runbook"));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_lane_whose_connection_died_starts_over_from_disk() {
        let bed = PostgresBed::new().await;
        let (source, lease) = (bed.source(1), bed.lease(0).await);
        let position = source.open(&lease).await.expect("opens").position;
        sqlx::query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()")
            .execute(bed.store().pool())
            .await
            .expect("terminated");
        source.read(&lease, &position, 10).await.expect_err("the connection is gone");
        source.read(&lease, &position, 10).await.expect_err("no other one may stand in for it");
    }

    /// Reads until the source says whether the next commit wakes the lane. Other tests' transactions are open now and then.
    async fn until_will_wake(source: &dyn Source, lease: &Lease, expected: bool) {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
        loop {
            let position = source.open(lease).await.expect("opens").position;
            let page = source.read(lease, &position, 10).await.expect("reads");
            if source.will_wake(lease, &page.next).await == expected {
                return;
            }
            assert!(tokio::time::Instant::now() < deadline, "not {expected} in time");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_lane_is_sure_to_be_woken_only_when_nobody_has_inserted_unseen() {
        const INSERT: &str = "INSERT INTO postrider.outbox (topic, type, payload) VALUES ('t', 't', '1')";
        let bed = PostgresBed::new().await;
        let (source, lease) = (bed.source(1), bed.lease(0).await);
        let pool = bed.store().pool();
        // Who inserts while the lane is awake does not notify, so that a lane that falls asleep must not trust it.
        let mut unseen = pool.begin().await.expect("begins");
        sqlx::query(INSERT).execute(&mut *unseen).await.expect("inserted");
        until_will_wake(&*source, &lease, false).await;
        source.set_asleep(&lease, true).await.expect("asleep");
        for _ in 0..20 {
            let position = source.open(&lease).await.expect("opens").position;
            let page = source.read(&lease, &position, 10).await.expect("reads");
            assert!(!source.will_wake(&lease, &page.next).await, "an open transaction has inserted before");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        unseen.commit().await.expect("committed");
        until_will_wake(&*source, &lease, true).await;

        // The ring of the first listening may still be there.
        let _ = tokio::time::timeout(Duration::from_millis(100), source.woken()).await;
        sqlx::query(INSERT).execute(pool).await.expect("inserted");
        tokio::time::timeout(Duration::from_secs(10), source.woken()).await.expect("the commit wakes");

        // Nothing said while nobody listened is missed: listening again rings.
        sqlx::query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()")
            .execute(pool)
            .await
            .expect("terminated");
        tokio::time::timeout(Duration::from_secs(20), source.woken()).await.expect("rings");
        until_will_wake(&*source, &lease, true).await;
        source.set_asleep(&lease, false).await.expect("awake");
        until_will_wake(&*source, &lease, false).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn upkeep_makes_partitions_and_drops_published_ones() {
        let bed = PostgresBed::new().await;
        let pool = bed.store().pool();
        let partitions: i64 =
            sqlx::query_scalar("SELECT count(*) FROM pg_inherits WHERE inhparent = 'postrider.outbox'::regclass")
                .fetch_one(pool)
                .await
                .expect("answers");
        assert_eq!(partitions, 5, "today, three days ahead, and the default");
        sqlx::raw_sql("CREATE TABLE postrider.outbox_20200101 PARTITION OF postrider.outbox FOR VALUES FROM ('2020-01-01Z') TO ('2020-01-02Z')")
            .execute(pool)
            .await
            .expect("an old partition");
        let old = chrono::DateTime::from_timestamp(1_577_880_000, 0).expect("2020-01-01 12:00");
        let old = event("k", "old").rebuild().time(old).build().expect("valid");
        bed.store().enqueue(&[old]).await.expect("enqueued");
        assert_eq!(bed.store().maintain(&Retention::default()).await.expect("runs").partitions_dropped, 0);
        let (source, lease) = (bed.store().source(&postrider::Route::all("default"), 1), bed.lease(0).await);
        let position = source.open(&lease).await.expect("opens").position;
        let page = source.read(&lease, &position, 10).await.expect("reads");
        assert_eq!(page.rows.len(), 1);
        let settlement = postrider::source::Settlement { position: Some(page.next), ..Default::default() };
        source.settle(&lease, &settlement).await.expect("settles");
        assert_eq!(bed.store().maintain(&Retention::default()).await.expect("runs").partitions_dropped, 1);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn plain_sql_and_the_function_both_enqueue() {
        let bed = PostgresBed::new().await;
        let pool = bed.store().pool();
        sqlx::raw_sql(
            "INSERT INTO postrider.outbox (topic, key, type, payload) VALUES ('a.b', 'k', 't', '{\"n\": 1.10}'); \
             SELECT postrider.enqueue('a.b', 't', '{\"n\": 2}', key => 'k', headers => '{\"x\": \"y\"}', tenant => 'acme')",
        )
        .execute(pool)
        .await
        .expect("both work");
        let start = bed.store().position(true).await.expect("answers");
        let page = bed.store().tail(&start, 10).await.expect("answers");
        let events: Vec<&Event> = page.rows.iter().map(|row| row.event.as_ref().expect("an event")).collect();
        assert_eq!(events[0].payload().as_ref(), br#"{"n": 1.10}"#, "the text is kept as it was written");
        assert_eq!(events[0].id().get_version_num(), 7);
        assert_eq!((events[1].tenant(), events[1].headers()["x"].as_str()), (Some("acme"), "y"));
        for bad in [
            "SELECT postrider.enqueue('', 't', '{}')",
            "SELECT postrider.enqueue('a', 't', '{bad')",
            "SELECT postrider.enqueue('a', 't', '{}', headers => '{\"x\": 1}')",
            "INSERT INTO postrider.outbox (topic, type, payload) VALUES ('', 't', '{}')",
        ] {
            sqlx::raw_sql(bad).execute(pool).await.expect_err(bad);
        }
    }
}
