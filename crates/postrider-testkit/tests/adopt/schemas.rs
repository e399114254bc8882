//! The four outboxes of the seeds, unchanged: what is published, how it is marked, where failure lands.

use std::time::Duration;

use postrider::Kind;
use postrider::adopt::{Format, Mapping, Template};
use postrider_testkit::faults::{Answer, ScriptedBroker};

use crate::bed::{Bed, CAMPUS, PIM, SHOP, SYNC, taking};

const SHOP_ROWS: &str = r#"INSERT INTO "OutboxMessages" ("EventType", "Content")
    SELECT 'OrderCreated', '{"n": ' || n || '}' FROM generate_series(1, 40) n"#;
const CAMPUS_ROWS: &str = "INSERT INTO outbox_events (routing_key, aggregate_type, aggregate_id, payload)
    SELECT 'course.enrolled', 'course', 'c-' || n % 5, json_build_object('n', n) FROM generate_series(1, 40) n";
const PIM_ROWS: &str = "INSERT INTO outbox_events (event_id, event_type, payload)
    SELECT gen_random_uuid(), 'product.renamed', json_build_object('n', n) FROM generate_series(1, 40) n";
const SYNC_ROWS: &str = "INSERT INTO outbox (aggregate_type, aggregate_id, type, payload)
    SELECT 'USER', 'u-' || n % 5, 'UPDATED', json_build_object('n', n) FROM generate_series(1, 40) n";

#[tokio::test(flavor = "multi_thread")]
async fn the_shop_is_relayed_as_it_is() {
    let bed = Bed::new(SHOP).await;
    bed.sql(SHOP_ROWS).await;
    let (mapping, broker) = (bed.mapping("OutboxMessages").await, taking());
    let relay = bed.relay(&mapping, &broker).await;
    bed.until(r#"SELECT count(*) FROM "OutboxMessages" WHERE "ProcessedOnUtc" IS NULL"#, "0").await;
    relay.stop().await;
    let arrived = broker.arrived();
    assert_eq!(arrived.len(), 40, "each once");
    assert!(arrived.iter().all(|event| event.topic() == "OrderCreated" && event.message_id().starts_with("outbox-")));
    let late = bed.value(r#"SELECT max(abs(extract(epoch FROM "ProcessedOnUtc" - (now() AT TIME ZONE 'UTC')))) < 60 FROM "OutboxMessages""#);
    assert_eq!(late.await, "true", "the time is UTC, as the column says");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_campus_is_relayed_as_it_is() {
    let bed = Bed::new(CAMPUS).await;
    bed.sql(CAMPUS_ROWS).await;
    let (mapping, broker) = (bed.mapping("outbox_events").await, taking());
    let relay = bed.relay(&mapping, &broker).await;
    bed.until("SELECT count(*) FROM outbox_events WHERE status <> 'published' OR published_at IS NULL", "0").await;
    relay.stop().await;
    let arrived = broker.arrived();
    assert_eq!(arrived.len(), 40, "each once");
    assert!(arrived.iter().any(|event| event.message_id() == "outbox-7"));
    for n in 0..5 {
        let key = format!("c-{n}");
        let of_key: Vec<i64> = arrived.iter().filter(|event| event.key() == Some(&key)).map(number).collect();
        assert!(of_key.len() == 8 && of_key.is_sorted(), "{key}: {of_key:?}");
    }
}

fn number(event: &postrider::Event) -> i64 {
    event.decode::<serde_json::Value>().expect("JSON")["n"].as_i64().expect("a number")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_product_service_is_relayed_as_it_is() {
    let bed = Bed::new(PIM).await;
    bed.sql(PIM_ROWS).await;
    let (mapping, broker) = (bed.mapping("outbox_events").await, taking());
    let relay = bed.relay(&mapping, &broker).await;
    bed.until("SELECT count(*) FROM outbox_events WHERE NOT published OR published_at IS NULL", "0").await;
    relay.stop().await;
    let arrived = broker.arrived();
    assert_eq!(arrived.len(), 40, "each once");
    let id = bed.value("SELECT event_id FROM outbox_events WHERE id = 7").await;
    assert!(arrived.iter().any(|event| event.id().to_string() == id), "the event's own id");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_synchronisation_is_relayed_as_it_is() {
    let bed = Bed::new(SYNC).await;
    bed.sql(SYNC_ROWS).await;
    let (mapping, broker) = (bed.mapping("outbox").await, taking());
    let relay = bed.relay(&mapping, &broker).await;
    bed.until("SELECT count(*) FROM outbox WHERE status <> 'PUBLISHED'", "0").await;
    relay.stop().await;
    let arrived = broker.arrived();
    assert_eq!(arrived.len(), 40, "each once");
    assert!(arrived.iter().all(|event| event.topic() == "user.updated"), "{:?}", arrived[0]);
}

/// Raw: payload and message id alone.
#[tokio::test(flavor = "multi_thread")]
async fn raw_events_have_no_envelope() {
    let bed = Bed::new(CAMPUS).await;
    bed.sql(CAMPUS_ROWS).await;
    let mapping = Mapping {
        format: Format::Raw,
        message_id: Template::parse("campus-{id}").expect("a template"),
        ..bed.mapping("outbox_events").await
    };
    let broker = taking();
    let relay = bed.relay(&mapping, &broker).await;
    bed.until("SELECT count(*) FROM outbox_events WHERE status <> 'published'", "0").await;
    relay.stop().await;
    assert!(broker.arrived().iter().all(|event| event.is_raw() && event.message_id().starts_with("campus-")));
}

/// What has columns for attempts, the next one and the error gets them there.
#[tokio::test(flavor = "multi_thread")]
async fn failure_lands_in_the_columns_of_the_table() {
    let bed = Bed::new(CAMPUS).await;
    bed.sql(CAMPUS_ROWS).await;
    let mapping = bed.mapping("outbox_events").await;
    let broker = ScriptedBroker::new(|event, _| match event.message_id().as_ref() {
        "outbox-1" => Answer::Refuse(Kind::Refused),
        _ => Answer::Confirm,
    });
    let relay = bed.relay(&mapping, &broker).await;
    bed.until("SELECT status FROM outbox_events WHERE id = 1", "failed").await;
    bed.until("SELECT count(*) FROM outbox_events WHERE status = 'pending'", "7").await;
    let row = bed.value("SELECT attempts || ' ' || last_error FROM outbox_events WHERE id = 1").await;
    assert!(row.starts_with("3 refused by script; "), "{row}");
    assert_eq!(bed.value("SELECT count(*) FROM postrider.adopted").await, "0", "nothing of it is ours");
    let stuck =
        bed.value("SELECT string_agg(id::text, ' ' ORDER BY id) FROM outbox_events WHERE status = 'pending'").await;
    assert_eq!(stuck, "6 11 16 21 26 31 36", "its key waits behind it, nothing else");

    bed.sql("UPDATE outbox_events SET status = 'published' WHERE id = 1").await;
    bed.until("SELECT count(*) FROM outbox_events WHERE status = 'pending'", "0").await;
    relay.stop().await;
}

/// A shop's message that was tried as often as it says is not tried again.
#[tokio::test(flavor = "multi_thread")]
async fn attempts_end_where_the_row_says() {
    let bed = Bed::new(SHOP).await;
    bed.sql(r#"INSERT INTO "OutboxMessages" ("EventType", "Content", "MaxAttempts") VALUES ('Bad', '{}', 2), ('Good', '{}', 2)"#)
        .await;
    let mapping = bed.mapping("OutboxMessages").await;
    let broker = ScriptedBroker::new(|event, _| match event.topic() {
        "Bad" => Answer::Refuse(Kind::Refused),
        _ => Answer::Confirm,
    });
    let relay = bed.relay(&mapping, &broker).await;
    bed.until(r#"SELECT "AttemptCount" FROM "OutboxMessages" WHERE "EventType" = 'Bad'"#, "2").await;
    bed.until(r#"SELECT count(*) FROM "OutboxMessages" WHERE "ProcessedOnUtc" IS NOT NULL"#, "1").await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    relay.stop().await;
    assert_eq!(bed.value(r#"SELECT "AttemptCount" FROM "OutboxMessages" WHERE "EventType" = 'Bad'"#).await, "2");
    let error = bed.value(r#"SELECT "LastErrorMessage" FROM "OutboxMessages" WHERE "EventType" = 'Bad'"#).await;
    assert!(error.contains("refused by script"), "{error}");
}

/// What has no columns for it is kept by us, and forgotten when it is published.
#[tokio::test(flavor = "multi_thread")]
async fn failure_lands_with_us_where_the_table_has_no_columns() {
    let bed = Bed::new(PIM).await;
    bed.sql(PIM_ROWS).await;
    let bad = bed.value("SELECT event_id FROM outbox_events WHERE id = 5").await;
    let late = bed.value("SELECT event_id FROM outbox_events WHERE id = 6").await;
    let broker = ScriptedBroker::new(move |event, attempt| match event.id().to_string() {
        id if id == bad => Answer::Refuse(Kind::Refused),
        id if id == late && attempt < 3 => Answer::Refuse(Kind::Refused),
        _ => Answer::Confirm,
    });
    let relay = bed.relay(&bed.mapping("outbox_events").await, &broker).await;
    bed.until("SELECT is_failed FROM postrider.adopted WHERE row_id = '5'", "true").await;
    bed.until("SELECT count(*) FROM outbox_events WHERE NOT published", "1").await;
    assert_eq!(bed.value("SELECT string_agg(row_id || ':' || attempts, ' ') FROM postrider.adopted").await, "5:3");

    // A person has corrected what was wrong.
    bed.sql("DELETE FROM postrider.adopted").await;
    bed.until("SELECT is_failed FROM postrider.adopted WHERE row_id = '5'", "true").await;
    relay.stop().await;
}
