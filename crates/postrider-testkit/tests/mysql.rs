//! MariaDB (and MySQL, where one is given) keeps every contract of a store.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

use postrider_testkit::conformance::bed::MysqlBed;
use postrider_testkit::suite;

suite!(
    source,
    MysqlBed::new().await,
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
    lease,
    MysqlBed::new().await,
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
    MysqlBed::new().await,
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
    MysqlBed::new().await,
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
    MysqlBed::new().await,
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
    MysqlBed::new().await,
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
    MysqlBed::new().await,
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
    MysqlBed::new().await,
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
    MysqlBed::new().await,
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
    MysqlBed::new().await,
    [a_holder_says_how_many_wait_behind_it, every_consumer_is_found_however_it_was_heard_of]
);
suite!(
    recovery,
    MysqlBed::new().await,
    [
        past_events_are_applied_in_order_and_once,
        a_relay_stands_still_when_what_it_published_is_gone,
        a_past_event_without_a_key_is_delivered_once,
        retention_is_no_restore,
        a_life_has_a_number_of_its_own,
    ]
);

/// What other programs do to the tables, and what only these servers do.
mod plain_sql {
    use std::time::Duration;

    use postrider::dead::{DeadFilter, DeadLetters};
    use postrider::doctor::Severity;
    use postrider::event::Event;
    use postrider::lease::Leases;
    use postrider::outbox::OutboxStore;
    use postrider::source::{Park, ParkedState, Settlement};
    use postrider::store::Store;
    use postrider::upkeep::Upkeep;
    use postrider::{Kind, Route};
    use postrider_testkit::conformance::bed::{Bed, MysqlBed, TTL, event, name};

    async fn events(bed: &MysqlBed) -> Vec<Event> {
        let start = bed.store().position(true).await.expect("answers");
        let page = bed.store().tail(&start, 1000).await.expect("answers");
        page.rows.into_iter().map(|row| row.event.expect("an event")).collect()
    }

    fn waiting(id: i64) -> Park {
        Park { id, state: ParkedState::Waiting, attempts: 0, delay: Duration::ZERO, failure: None }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn plain_sql_and_the_procedure_both_enqueue() {
        let bed = MysqlBed::new().await;
        let before = chrono::Utc::now();
        sqlx::raw_sql(
            "INSERT INTO postrider_outbox (topic, `key`, type, payload) VALUES ('a.b', 'k', 't', '{\"n\":  1.10, \"a\": 1}'), \
               ('a.b', NULL, 't', '{}'); \
             CALL postrider_enqueue('a.b', 't', '{\"n\": 2}', 'k', '{\"x\": \"y\"}', 'ácme', NULL); \
             CALL postrider_enqueue('a.b', 't', '{}', NULL, NULL, NULL, '0192f5e5-0000-7000-8000-000000000001')",
        )
        .execute(bed.store().pool())
        .await
        .expect("all work");
        let events = events(&bed).await;
        assert_eq!(events[0].payload().as_ref(), br#"{"n":  1.10, "a": 1}"#, "the text is kept as it was written");
        assert!(events[..3].iter().all(|event| event.id().get_version_num() == 7));
        assert!((events[0].time() - before).num_seconds().abs() < 60, "UTC: {}", events[0].time());
        let made = events[0].id().get_timestamp().expect("a UUIDv7 has a time").to_unix().0 as i64;
        assert!((made - before.timestamp()).abs() < 60, "{made}");
        assert_eq!((events[2].tenant(), events[2].headers()["x"].as_str()), (Some("ácme"), "y"));
        assert_eq!(events[3].id().to_string(), "0192f5e5-0000-7000-8000-000000000001");
        let mut ids: Vec<_> = events.iter().map(Event::id).collect();
        ids.dedup();
        assert_eq!(ids.len(), 4);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_no_event_is_refused() {
        let bed = MysqlBed::new().await;
        let long = "x".repeat(256);
        let bad = [
            "CALL postrider_enqueue('', 't', '{}', NULL, NULL, NULL, NULL)".to_owned(),
            "CALL postrider_enqueue('a', 't', '{bad', NULL, NULL, NULL, NULL)".to_owned(),
            "CALL postrider_enqueue('a', 't', NULL, NULL, NULL, NULL, NULL)".to_owned(),
            "CALL postrider_enqueue('a', 't', '{}', NULL, '[]', NULL, NULL)".to_owned(),
            "CALL postrider_enqueue('a', 't', '{}', NULL, NULL, NULL, 'no uuid')".to_owned(),
            format!("CALL postrider_enqueue('a', 't', '{{}}', '{long}', NULL, NULL, NULL)"),
            "INSERT INTO postrider_outbox (topic, type, payload) VALUES ('a\nb', 't', '{}')".to_owned(),
            "INSERT INTO postrider_outbox (topic, type, payload, `key`) VALUES ('a', 't', '{}', '')".to_owned(),
            "INSERT INTO postrider_outbox (topic, payload) VALUES ('a', '{}')".to_owned(),
            format!("INSERT INTO postrider_outbox (topic, type, payload) VALUES ('{}', 't', '{{}}')", "é".repeat(200)),
        ];
        for sql in bad {
            sqlx::raw_sql(sqlx::AssertSqlSafe(sql.clone())).execute(bed.store().pool()).await.expect_err(&sql);
        }
        assert!(events(&bed).await.is_empty());
        // The same from Rust says so.
        let old = Event::builder("a", "t").payload("text/plain", "x").time(chrono::DateTime::UNIX_EPOCH);
        let error = bed.store().enqueue(&[old.build().expect("valid")]).await.expect_err("1970 is not of our time");
        assert_eq!(error.kind(), Kind::Invalid, "{error}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn payloads_come_back_as_they_were() {
        let bed = MysqlBed::new().await;
        let json =
            |text: &str| Event::builder("t", "t").payload("application/json", text.to_owned()).build().expect("valid");
        let deep = format!("{}1{}", "[".repeat(90), "]".repeat(90));
        let bytes = Event::builder("t", "t").payload("image/png", vec![0u8, 255, 10, 39, 92]);
        let large = format!("\"{}\"", "ü".repeat(3 * 1024 * 1024));
        let sent = [
            json("{ \"b\" : 1.10,\n\"a\":\"\\u00e9 é 🐎 \\\\ ' \" }"),
            json(&deep),
            bytes.build().expect("valid"),
            json("  \"blanks  \"  "),
            json(&large),
        ];
        bed.store().enqueue(&sent).await.expect("enqueued");
        let read = events(&bed).await;
        assert_eq!(read.len(), sent.len());
        for (sent, read) in sent.iter().zip(&read) {
            assert!(sent.payload() == read.payload(), "{} bytes changed", sent.payload().len());
            assert_eq!((sent.id(), sent.time(), sent.content_type()), (read.id(), read.time(), read.content_type()));
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_message_with_a_topic_that_fits_nowhere_is_buried() {
        use postrider::broker::{Origin, RawMessage};
        use postrider::inbox::{Body, DeadLetter, Failed, Retries};
        let bed = MysqlBed::new().await;
        let raw = RawMessage { headers: Default::default(), payload: "x".into() };
        let origin = Origin { topic: "é".repeat(300), ..Origin::default() };
        let failed = Failed { error_type: "corrupt".to_owned(), error: "too long".to_owned(), causes: Vec::new() };
        let (id, message) = (raw.id(), Body::Raw(&raw));
        let letter = DeadLetter { consumer: "c", message, id, failed: &failed, origin: &origin, held: None };
        bed.store().bury(&letter).await.expect("buried");
        let (topic, all): (String, String) = sqlx::query_as("SELECT topic, origin FROM postrider_dead_letter")
            .fetch_one(bed.store().pool())
            .await
            .expect("one");
        assert_eq!(topic, "é".repeat(255));
        assert!(all.contains(&origin.topic), "all of it is kept beside");
    }

    /// Databases here compare texts without case, accents and trailing blanks unless they are told otherwise.
    #[tokio::test(flavor = "multi_thread")]
    async fn keys_that_look_alike_are_different() {
        let bed = MysqlBed::new().await;
        let keys = ["k", "K", "k ", "ḱ", " k"];
        let (source, lease) = (bed.source(1), bed.lease(0).await);
        let position = source.open(&lease).await.expect("opens").position;
        for key in keys {
            bed.store().enqueue(&[event(key, "a"), event(key, "b")]).await.expect("enqueued");
        }
        let page = source.read(&lease, &position, 100).await.expect("reads");
        let park: Vec<_> = page.rows.iter().map(|row| waiting(row.id)).collect();
        source
            .settle(&lease, &Settlement { position: Some(page.next), park, published: vec![] })
            .await
            .expect("settles");
        let mut parked = source.parked(&lease).await.expect("answers").keys;
        parked.sort();
        let mut expected: Vec<(String, u64)> = keys.iter().map(|key| ((*key).to_owned(), 2)).collect();
        expected.sort();
        assert_eq!(parked, expected);
        assert_eq!(source.due(&lease, 100).await.expect("answers").len(), 10);
        for group in ["c", "C", "c "] {
            assert!(
                bed.store().take(group, 0, "o", TTL).await.expect("answers").is_some(),
                "{group:?} is another group"
            );
        }
        let none = DeadFilter { key: Some("K".to_owned()), ..DeadFilter::default() };
        assert!(bed.store().dead_list(&none, 0, 10).await.expect("answers").is_empty());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn each_destination_gets_its_topics_and_a_change_waits_for_the_relay() {
        let bed = MysqlBed::new().await;
        let store = bed.store();
        let filter = |wanted: &str, unwanted: &[&str]| {
            let texts = unwanted.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
            postrider::broker::topic::TopicFilter::new([wanted.to_owned()], texts)
        };
        let orders = Route { destination: "orders".to_owned(), topics: filter("orders.#", &[]) };
        let rest = Route { destination: "rest".to_owned(), topics: filter("#", &["orders.#"]) };
        store.set_routes(&[orders.clone(), rest.clone()]).await.expect("set");
        let on = |topic: &str| Event::builder(topic, "t").json(&topic).expect("json").build().expect("valid");
        let all = ["orders.made", "Orders.made", "orders", "ordersx", "a.b"].map(on);
        store.enqueue(&all).await.expect("enqueued");
        let read = async |route: &Route| {
            let source = store.source(route, 1);
            let lease =
                store.take(&format!("relay/{}", route.destination), 0, "test", TTL).await.expect("ok").expect("free");
            let position = source.open(&lease).await.expect("opens").position;
            let page = source.read(&lease, &position, 10).await.expect("reads");
            (lease, page.rows.iter().map(|row| name(row.event.as_ref().expect("an event"))).collect::<Vec<_>>())
        };
        let (lease, names) = read(&orders).await;
        assert_eq!(names, ["orders.made", "orders"]);
        assert_eq!(store.backlog(&orders).await.expect("answers").pending, 2);
        assert_eq!(bed.outbox_status(&all[4]).await, "pending");
        let one = [Route::all("orders")];
        assert_eq!(store.set_routes(&one).await.expect_err("somebody relays").kind(), Kind::Config);
        store.give_back(&lease).await.expect("given back");
        let (lease, names) = read(&rest).await;
        assert_eq!(names, ["Orders.made", "ordersx", "a.b"]);
        store.give_back(&lease).await.expect("given back");
        store.set_routes(&one).await.expect("nobody relays");
        assert_eq!(store.backlog(&one[0]).await.expect("answers").pending, 5, "what was pending goes the new way");
        let twice = [Route::all("a"), Route::all("b")];
        assert_eq!(store.set_routes(&twice).await.expect_err("one event, one destination").kind(), Kind::Config);
    }

    /// A number that was used before must not let a new event pass for a parked one.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_truncated_outbox_stops_the_lane() {
        let bed = MysqlBed::new().await;
        let (source, lease) = (bed.source(1), bed.lease(0).await);
        let mut position = source.open(&lease).await.expect("opens").position;
        let mut park = async |name: &str| {
            bed.store().enqueue(&[event("k", name)]).await.expect("enqueued");
            let page = source.read(&lease, &position, 10).await.expect("reads");
            position = page.next.clone();
            let park = vec![waiting(page.rows[0].id)];
            source.settle(&lease, &Settlement { position: Some(page.next), park, published: vec![] }).await
        };
        park("a").await.expect("parked");
        sqlx::raw_sql("TRUNCATE postrider_outbox").execute(bed.store().pool()).await.expect("truncated");
        assert_eq!(park("b").await.expect_err("the number was used before").kind(), Kind::Mismatch);
        assert_eq!(bed.store().backlog(&Route::all("default")).await.expect("answers").pending, 1, "not marked");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn tail_finds_what_commits_late() {
        let bed = MysqlBed::new().await;
        let mut late = bed.begin().await;
        late.append(&event("k", "late")).await;
        bed.store().enqueue(&[event("k", "early")]).await.expect("enqueued");
        let start = bed.store().position(true).await.expect("answers");
        let page = bed.store().tail(&start, 10).await.expect("answers");
        assert_eq!(page.rows.len(), 1);
        late.commit().await;
        let page = bed.store().tail(&page.next, 10).await.expect("answers");
        assert_eq!(name(page.rows[0].event.as_ref().expect("an event")), "late");
        assert!(bed.store().tail(&page.next, 10).await.expect("answers").rows.is_empty());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_doctor_finds_what_is_unsafe() {
        let bed = MysqlBed::new().await;
        let findings = bed.store().inspect().await.expect("inspected");
        assert!(findings.iter().all(|finding| finding.severity != Severity::Error), "{findings:?}");
        let of = |check: &str| findings.iter().find(|finding| finding.check == check).expect(check).severity;
        // The shared server of tests does not wait for the disk; one that somebody else runs may.
        let flush: i64 = sqlx::query_scalar("SELECT CAST(@@innodb_flush_log_at_trx_commit AS SIGNED)")
            .fetch_one(bed.store().pool())
            .await
            .expect("answers");
        assert_eq!(of("mysql.flush"), if flush == 1 { Severity::Ok } else { Severity::Warning });
        for check in ["mysql.version", "mysql.sql_mode", "mysql.schema", "mysql.rights", "mysql.isolation", "clock"] {
            assert_eq!(of(check), Severity::Ok, "{check}");
        }
    }

    /// The optimizer must never walk over everything that was ever published.
    #[tokio::test(flavor = "multi_thread")]
    async fn pending_rows_are_found_through_the_index_alone() {
        let bed = MysqlBed::new().await;
        let many: Vec<Event> = (0..300).map(|n| event("k", &n.to_string())).collect();
        bed.store().enqueue(&many).await.expect("enqueued");
        sqlx::raw_sql("UPDATE postrider_outbox SET state = 1 WHERE id < 290")
            .execute(bed.store().pool())
            .await
            .expect("ok");
        let plan = "EXPLAIN SELECT id FROM postrider_outbox FORCE INDEX (postrider_outbox_state) \
             WHERE state = 0 AND hash % 4 = 1 ORDER BY id LIMIT 100";
        let row = sqlx::raw_sql(plan).fetch_one(bed.store().pool()).await.expect("a plan");
        let (key, extra): (String, String) = (sqlx::Row::get(&row, "key"), sqlx::Row::get(&row, "Extra"));
        assert_eq!(key, "postrider_outbox_state");
        assert!(extra.contains("Using index") && !extra.contains("filesort"), "{extra}");
    }
}
