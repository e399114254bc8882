//! Several instances, outages and crashes: each row once, in the order of its key.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use postrider::adopt::{AdoptedTables as _, Part};
use postrider::{Event, Kind};
use postrider_testkit::conformance::bed::Bed as _;
use postrider_testkit::faults::{Answer, ScriptedBroker};

use crate::bed::{Bed, CAMPUS, assert_parts, taking};

fn rows(from: u32, to: u32) -> String {
    format!(
        "INSERT INTO outbox_events (routing_key, aggregate_type, aggregate_id, payload)
         SELECT 'course.enrolled', 'course', 'c-' || n % 7, json_build_object('n', n) FROM generate_series({from}, {to}) n"
    )
}

/// First arrivals only: what is published again carries the same id, and consumers know it.
fn assert_in_order(arrived: &[Event], count: usize) {
    let mut last: HashMap<String, i64> = HashMap::new();
    let mut seen = std::collections::HashSet::new();
    for event in arrived {
        if !seen.insert(event.id()) {
            continue;
        }
        let number = event.decode::<serde_json::Value>().expect("JSON")["n"].as_i64().expect("a number");
        let before = last.insert(event.key().expect("a key").to_owned(), number);
        assert!(before.is_none_or(|before| before < number), "{:?}: {number} after {before:?}", event.key());
    }
    assert_eq!(seen.len(), count, "each event");
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_share_rows_and_keep_the_order_of_keys() {
    let bed = Bed::new(CAMPUS).await;
    let (mapping, broker) = (bed.mapping("outbox_events").await, taking());
    bed.sql(&rows(1, 200)).await;
    let relays =
        [bed.relay(&mapping, &broker).await, bed.relay(&mapping, &broker).await, bed.relay(&mapping, &broker).await];
    for n in 0..20 {
        bed.sql(&rows(201 + n * 10, 210 + n * 10)).await;
    }
    bed.until("SELECT count(*) FROM outbox_events WHERE status <> 'published'", "0").await;
    for relay in relays {
        relay.stop().await;
    }
    assert_in_order(&broker.arrived(), 400);
    assert_eq!(broker.arrived().len(), 400, "no row was published by two");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_down_costs_no_attempt_and_no_order() {
    let bed = Bed::new(CAMPUS).await;
    bed.sql(&rows(1, 100)).await;
    let is_down = Arc::new(AtomicBool::new(true));
    let switch = is_down.clone();
    let broker = ScriptedBroker::new(move |_, attempt| match (switch.load(Ordering::SeqCst), attempt % 2) {
        (true, 0) => Answer::DownAfterWrite,
        (true, _) => Answer::Down,
        (false, _) => Answer::Confirm,
    });
    let relay = bed.relay(&bed.mapping("outbox_events").await, &broker).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    is_down.store(false, Ordering::SeqCst);
    bed.until("SELECT count(*) FROM outbox_events WHERE status <> 'published'", "0").await;
    relay.stop().await;
    assert_in_order(&broker.arrived(), 100);
    assert_eq!(bed.value("SELECT max(attempts) FROM outbox_events").await, "0");
}

/// What another worker holds is left to it, and what is behind it in its key too.
#[tokio::test(flavor = "multi_thread")]
async fn rows_that_another_worker_holds_are_left_to_it() {
    let bed = Bed::new(CAMPUS).await;
    bed.sql(&rows(1, 21)).await;
    let mut other = bed.0.store().pool().begin().await.expect("a transaction");
    sqlx::query("SELECT 1 FROM outbox_events WHERE id = 3 FOR UPDATE").execute(&mut *other).await.expect("locks");
    let broker = taking();
    let relay = bed.relay(&bed.mapping("outbox_events").await, &broker).await;
    bed.until("SELECT count(*) FROM outbox_events WHERE status = 'pending'", "3").await;
    let left =
        bed.value("SELECT string_agg(id::text, ' ' ORDER BY id) FROM outbox_events WHERE status = 'pending'").await;
    assert_eq!(left, "3 10 17", "the row, and its key behind it");
    other.rollback().await.expect("rolls back");
    bed.until("SELECT count(*) FROM outbox_events WHERE status = 'pending'", "0").await;
    relay.stop().await;
    assert_in_order(&broker.arrived(), 21);
}

/// The service's own worker had taken rows, and died.
#[tokio::test(flavor = "multi_thread")]
async fn rows_that_a_worker_took_and_left_are_taken_over() {
    let bed = Bed::new(CAMPUS).await;
    bed.sql(&rows(1, 14)).await;
    bed.sql("UPDATE outbox_events SET status = 'processing', updated_at = now() - interval '1 hour' WHERE id = 1")
        .await;
    bed.sql("UPDATE outbox_events SET status = 'processing' WHERE id = 2").await;
    let broker = taking();
    let relay = bed.relay(&bed.mapping("outbox_events").await, &broker).await;
    bed.until("SELECT count(*) FROM outbox_events WHERE status = 'published'", "12").await;
    relay.stop().await;
    let left = bed.value(
        "SELECT string_agg(id || ' ' || status, ', ' ORDER BY id) FROM outbox_events WHERE status <> 'published'",
    );
    assert_eq!(left.await, "2 processing, 9 pending", "the other may still be at work");
}

/// A row with a time in the future waits, and its key with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_is_not_due_keeps_its_key_back() {
    let bed = Bed::new(CAMPUS).await;
    bed.sql(&rows(1, 14)).await;
    bed.sql("UPDATE outbox_events SET available_at = now() + interval '1 hour' WHERE id = 4").await;
    let broker = taking();
    let relay = bed.relay(&bed.mapping("outbox_events").await, &broker).await;
    bed.until("SELECT count(*) FROM outbox_events WHERE status = 'published'", "12").await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let left =
        bed.value("SELECT string_agg(id::text, ' ' ORDER BY id) FROM outbox_events WHERE status <> 'published'").await;
    assert_eq!(left, "4 11");
    bed.sql("UPDATE outbox_events SET available_at = now() WHERE id = 4").await;
    bed.until("SELECT count(*) FROM outbox_events WHERE status <> 'published'", "0").await;
    relay.stop().await;
    assert_in_order(&broker.arrived(), 14);
}

/// The server ends a connection between publishing and marking: the rows are published again, in order.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_breaks_loses_nothing() {
    let bed = Bed::new(CAMPUS).await;
    bed.sql(&rows(1, 100)).await;
    let broker = ScriptedBroker::new(|_, _| Answer::Confirm);
    let relay = bed.relay(&bed.mapping("outbox_events").await, &broker).await;
    for _ in 0..10 {
        bed.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()")
            .await;
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    bed.until("SELECT count(*) FROM outbox_events WHERE status <> 'published'", "0").await;
    relay.stop().await;
    assert_in_order(&broker.arrived(), 100);
}

/// A failing event between others of its key, at each attempt.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_fails_for_a_while_is_not_overtaken() {
    let bed = Bed::new(CAMPUS).await;
    bed.sql(&rows(1, 70)).await;
    let broker = ScriptedBroker::new(|event, attempt| {
        let number = event.decode::<serde_json::Value>().expect("JSON")["n"].as_i64().unwrap_or_default();
        if number % 10 == 3 && attempt < 3 { Answer::Refuse(Kind::Refused) } else { Answer::Confirm }
    });
    let relay = bed.relay(&bed.mapping("outbox_events").await, &broker).await;
    bed.until("SELECT count(*) FROM outbox_events WHERE status <> 'published'", "0").await;
    relay.stop().await;
    assert_in_order(&broker.arrived(), 70);
    let table = bed.0.store().adopt(&bed.mapping("outbox_events").await).await.expect("fits");
    assert_eq!(table.backlog().await.expect("answers"), postrider::upkeep::Backlog::default());
}

/// More rows behind a failed one than a page has: they keep nobody else waiting.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_key_behind_a_failed_row_stops_nothing_else() {
    for schema in [CAMPUS, crate::bed::SYNC] {
        let bed = Bed::new(schema).await;
        let is_campus = schema == CAMPUS;
        if !is_campus {
            // The rows of one statement need times of their own, as `doctor` says.
            bed.sql("ALTER TABLE outbox ALTER created_at SET DEFAULT clock_timestamp()").await;
        }
        let (table, published) = if is_campus { ("outbox_events", "published") } else { ("outbox", "PUBLISHED") };
        let insert = |key: &str, count: u32| {
            let (columns, kind) = match is_campus {
                true => ("routing_key, aggregate_type, aggregate_id, payload", "'course.enrolled', 'course'"),
                false => ("type, aggregate_type, aggregate_id, payload", "'CHANGED', 'USER'"),
            };
            format!(
                "INSERT INTO {table} ({columns}) SELECT {kind}, '{key}', json_build_object('n', n) FROM generate_series(1, {count}) n"
            )
        };
        bed.sql(&insert("poison", 60)).await;
        let broker = ScriptedBroker::new(|event, _| match event.key() {
            Some("poison") => Answer::Refuse(Kind::Invalid),
            _ => Answer::Confirm,
        });
        let relay = bed.relay(&bed.mapping(table).await, &broker).await;
        bed.sql(&insert("other", 20)).await;
        bed.until(&format!("SELECT count(*) FROM {table} WHERE status = '{published}'"), "20").await;
        relay.stop().await;
        assert_in_order(&broker.arrived(), 20);
    }
}

/// Another worker holds the head of a key with more rows than a page: the others flow.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_key_that_another_worker_holds_stops_nothing_else() {
    let bed = Bed::new(CAMPUS).await;
    let insert = |key: &str, count: u32| {
        format!(
            "INSERT INTO outbox_events (routing_key, aggregate_type, aggregate_id, payload)
             SELECT 'course.enrolled', 'course', '{key}', json_build_object('n', n) FROM generate_series(1, {count}) n"
        )
    };
    bed.sql(&insert("held", 50)).await;
    bed.sql(&insert("free", 10)).await;
    let mut other = bed.0.store().pool().begin().await.expect("a transaction");
    sqlx::query("SELECT 1 FROM outbox_events WHERE id = 1 FOR UPDATE").execute(&mut *other).await.expect("locks");
    let broker = taking();
    let relay = bed.relay(&bed.mapping("outbox_events").await, &broker).await;
    bed.until("SELECT count(*) FROM outbox_events WHERE status = 'published'", "10").await;
    other.rollback().await.expect("rolls back");
    bed.until("SELECT count(*) FROM outbox_events WHERE status <> 'published'", "0").await;
    relay.stop().await;
    assert_in_order(&broker.arrived(), 60);
}

/// Two that look at different parts find all rows between them, none twice, and none behind the other's.
#[tokio::test(flavor = "multi_thread")]
async fn parts_hold_every_row_once_and_do_not_cut_a_key() {
    let bed = Bed::new(CAMPUS).await;
    bed.sql(&rows(1, 70)).await;
    let mapping = bed.mapping("outbox_events").await;
    let table = bed.0.store().adopt(&mapping).await.expect("fits");
    let first = table.lock(Part { number: 0, of: 2 }, 1000).await.expect("locks");
    let second = table.lock(Part { number: 1, of: 2 }, 1000).await.expect("locks");
    assert_parts(&mapping, first.rows(), second.rows(), 70);
}
