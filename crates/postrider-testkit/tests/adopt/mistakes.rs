//! Mappings that are wrong, tables that are odd, rows that cannot be sent.

use std::time::Duration;

use postrider::Kind;
use postrider::adopt::{AdoptedTables as _, State};
use postrider::doctor::Severity;
use postrider_testkit::conformance::bed::Bed as _;

use crate::bed::{Bed, CAMPUS, PIM, SYNC, taking};

#[tokio::test(flavor = "multi_thread")]
async fn a_mapping_that_does_not_fit_is_refused_by_name() {
    let bed = Bed::new(CAMPUS).await;
    let store = bed.0.store();
    let good = bed.mapping("outbox_events").await;
    let mut wrong = good.clone();
    wrong.payload = "body".to_owned();
    let error = store.adopt(&wrong).await.err().expect("refused");
    assert_eq!(error.kind(), Kind::Config);
    assert!(error.to_string().contains("payload = \"body\": outbox_events has no such column"), "{error}");

    let mut wrong = good.clone();
    wrong.attempts = Some("payload".to_owned());
    let error = store.adopt(&wrong).await.err().expect("refused");
    assert!(error.to_string().contains("attempts = \"payload\" is of type jsonb"), "{error}");

    let mut wrong = good;
    wrong.table.name = "outbox_event".to_owned();
    let error = store.adopt(&wrong).await.err().expect("refused");
    assert!(error.to_string().contains("there is no table outbox_event"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_without_a_primary_key_is_refused() {
    let bed = Bed::new(CAMPUS).await;
    bed.sql("ALTER TABLE outbox_events DROP CONSTRAINT outbox_events_pkey").await;
    let mut mapping = crate::bed::Bed::new(CAMPUS).await.mapping("outbox_events").await;
    mapping.id = "id".to_owned();
    let error = bed.0.store().adopt(&mapping).await.err().expect("refused");
    assert!(error.to_string().contains("has no primary key"), "{error}");
}

/// Quotes, spaces, dots and letters of other alphabets in names.
#[tokio::test(flavor = "multi_thread")]
async fn names_may_hold_anything() {
    let bed = Bed::new("CREATE SCHEMA \"Mine.\"\"s\"").await;
    bed.sql(
        "CREATE TABLE \"Mine.\"\"s\".\"sự kiện; DROP TABLE x\" (\"the id\" bigserial PRIMARY KEY, \"loại'\" text, \
         \"nội \"\"dung\" json, \"published_at\" timestamptz)",
    )
    .await;
    bed.sql(
        "INSERT INTO \"Mine.\"\"s\".\"sự kiện; DROP TABLE x\" (\"loại'\", \"nội \"\"dung\") VALUES ('a.b', '{\"n\": 1}')",
    )
    .await;
    let mut mapping = Bed::new(CAMPUS).await.mapping("outbox_events").await;
    mapping.table = postrider::adopt::TableName::parse("\"Mine.\"\"s\".\"sự kiện; DROP TABLE x\"").expect("a name");
    (mapping.id, mapping.payload) = ("the id".to_owned(), "nội \"dung".to_owned());
    mapping.topic = postrider::adopt::Template::of_column("loại'");
    mapping.kind = mapping.topic.clone();
    mapping.message_id = postrider::adopt::Template::parse("outbox-{the id}").expect("a template");
    mapping.state = State::PublishedAt;
    mapping.published_at = Some("published_at".to_owned());
    for column in [
        &mut mapping.key,
        &mut mapping.time,
        &mut mapping.updated_at,
        &mut mapping.attempts,
        &mut mapping.available_at,
        &mut mapping.last_error,
    ] {
        *column = None;
    }
    let broker = taking();
    let relay = bed.relay(&mapping, &broker).await;
    bed.until("SELECT count(published_at) FROM \"Mine.\"\"s\".\"sự kiện; DROP TABLE x\"", "1").await;
    relay.stop().await;
    assert_eq!(broker.arrived()[0].topic(), "a.b");
    assert_eq!(&*broker.arrived()[0].message_id(), "outbox-1");
}

/// A payload that is null or no JSON, and a topic that is empty: set aside with the reason, others flow.
#[tokio::test(flavor = "multi_thread")]
async fn rows_that_are_no_events_are_failed_with_the_reason() {
    let bed = Bed::new(CAMPUS).await;
    bed.sql(
        "ALTER TABLE outbox_events ALTER payload DROP NOT NULL, ALTER payload TYPE text, ALTER aggregate_id DROP NOT NULL;
         INSERT INTO outbox_events (routing_key, aggregate_type, aggregate_id, payload) VALUES
         ('a', 't', 'k1', NULL), ('a', 't', 'k2', '{'), ('', 't', 'k3', '{}'), ('a', 't', NULL, '{}'), ('a', 't', 'k4', '{}')",
    )
    .await;
    let broker = taking();
    let relay = bed.relay(&bed.mapping("outbox_events").await, &broker).await;
    bed.until("SELECT count(*) FROM outbox_events WHERE status = 'pending'", "0").await;
    relay.stop().await;
    let states = bed.value("SELECT string_agg(id || ' ' || status, ', ' ORDER BY id) FROM outbox_events").await;
    assert_eq!(states, "1 failed, 2 failed, 3 failed, 4 published, 5 published");
    for (id, part) in [(1, "(column \"payload\") is null"), (2, "not valid JSON"), (3, "the topic is empty")] {
        let error = bed.value(&format!("SELECT last_error FROM outbox_events WHERE id = {id}")).await;
        assert!(error.contains(part), "{error}");
    }
}

/// Rows that the mapping does not cover are named, not passed over in silence.
#[tokio::test(flavor = "multi_thread")]
async fn unknown_words_are_named() {
    let bed = Bed::new(SYNC).await;
    bed.sql(
        "INSERT INTO outbox (aggregate_type, aggregate_id, type, payload, status) VALUES
         ('USER', 'u', 'A', '{}', 'PENDING'), ('USER', 'u', 'A', '{}', 'Sent?'), ('USER', 'u', 'A', '{}', NULL)",
    )
    .await;
    let table = bed.0.store().adopt(&bed.mapping("outbox").await).await.expect("fits");
    let findings = table.inspect().await.expect("answers");
    let errors: Vec<_> = findings.iter().filter(|finding| finding.severity == Severity::Error).collect();
    assert_eq!(errors.len(), 2, "{findings:?}");
    assert!(errors.iter().any(|finding| finding.message.contains("1 rows are in the state \"Sent?\"")), "{errors:?}");
    assert!(errors.iter().any(|finding| finding.message.contains("\"null\"")), "{errors:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_index_that_is_proposed_is_the_one_that_helps() {
    let bed = Bed::new(CAMPUS).await;
    let table = bed.0.store().adopt(&bed.mapping("outbox_events").await).await.expect("fits");
    let findings = table.inspect().await.expect("answers");
    assert_eq!(findings[0].severity, Severity::Warning, "{findings:?}");
    bed.sql(&findings[0].remedy).await;
    let findings = table.inspect().await.expect("answers");
    assert_eq!(findings[0].severity, Severity::Ok, "{findings:?}");
}

/// A column goes while the relay runs, and comes back: named, nothing lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_is_altered_is_waited_for() {
    let bed = Bed::new(PIM).await;
    let broker = taking();
    let relay = bed.relay(&bed.mapping("outbox_events").await, &broker).await;
    bed.sql("ALTER TABLE outbox_events RENAME published_at TO gone").await;
    bed.sql("INSERT INTO outbox_events (event_id, event_type, payload) VALUES (gen_random_uuid(), 'a.b', '{}')").await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(bed.value("SELECT published FROM outbox_events").await, "false");
    bed.sql("ALTER TABLE outbox_events RENAME gone TO published_at").await;
    bed.until("SELECT published FROM outbox_events", "true").await;
    relay.stop().await;
    assert!(!broker.arrived().is_empty());
}

/// Words that an enumeration does not know are refused before anything is sent, and not proposed.
#[tokio::test(flavor = "multi_thread")]
async fn words_of_an_enumeration_are_checked() {
    let bed = Bed::new(
        "CREATE TYPE state AS ENUM ('PENDING', 'SENT');
         CREATE TABLE box (id char(36) PRIMARY KEY, type text NOT NULL, payload json NOT NULL, status state NOT NULL DEFAULT 'PENDING',
           attempts int, created_at timestamptz NOT NULL DEFAULT clock_timestamp());
         INSERT INTO box (id, type, payload) VALUES ('a', 'made', '{}')",
    )
    .await;
    let mapping = bed.mapping("box").await;
    let State::Status { published, processing, failed, .. } = &mapping.state else { panic!("{mapping:?}") };
    assert_eq!((published.as_str(), processing, failed), ("SENT", &None, &None));
    let broker = taking();
    let relay = bed.relay(&mapping, &broker).await;
    bed.until("SELECT status FROM box", "SENT").await;
    relay.stop().await;
    assert_eq!(broker.arrived().len(), 1, "an id of fixed length is found and marked");

    let mut wrong = mapping;
    wrong.state = State::Status {
        column: "status".to_owned(),
        pending: "PENDING".to_owned(),
        processing: None,
        published: "PUBLISHED".to_owned(),
        failed: None,
    };
    let error = bed.0.store().adopt(&wrong).await.err().expect("refused");
    assert!(error.to_string().contains("the status \"PUBLISHED\" is not among those"), "{error}");
}

/// Nulls where others have numbers and times, and keys that are empty.
#[tokio::test(flavor = "multi_thread")]
async fn nulls_and_empty_keys_stop_nobody() {
    let bed = Bed::new(CAMPUS).await;
    bed.sql(
        "ALTER TABLE outbox_events ALTER attempts DROP NOT NULL, ALTER payload DROP NOT NULL;
         INSERT INTO outbox_events (routing_key, aggregate_type, aggregate_id, payload, attempts) VALUES
         ('a', 't', 'k', '{}', NULL), ('a', 't', '', NULL, 0), ('a', 't', '', '{}', 0)",
    )
    .await;
    let broker = taking();
    let relay = bed.relay(&bed.mapping("outbox_events").await, &broker).await;
    bed.until("SELECT string_agg(status, ' ' ORDER BY id) FROM outbox_events", "published failed published").await;
    relay.stop().await;

    let bed = Bed::new(SYNC).await;
    bed.sql("INSERT INTO outbox (aggregate_type, aggregate_id, type, payload, created_at) VALUES ('U', 'u', 'A', '{}', NULL)").await;
    let table = bed.0.store().adopt(&bed.mapping("outbox").await).await.expect("fits");
    let findings = table.inspect().await.expect("answers");
    assert!(findings.iter().any(|finding| finding.message.contains("1 rows that wait have no value")), "{findings:?}");
}

/// Rows of a key that were written at the same time would come in the order of random ids.
#[tokio::test(flavor = "multi_thread")]
async fn an_order_that_cannot_tell_rows_apart_is_warned_of() {
    let bed = Bed::new(SYNC).await;
    let said = async || {
        let table = bed.0.store().adopt(&bed.mapping("outbox").await).await.expect("fits");
        let findings = table.inspect().await.expect("answers");
        findings.into_iter().find(|finding| finding.message.starts_with("order")).map(|finding| finding.message)
    };
    assert!(said().await.is_some_and(|said| said.contains("all rows of a transaction")));
    bed.sql("ALTER TABLE outbox ALTER created_at SET DEFAULT clock_timestamp()").await;
    assert_eq!(said().await, None, "microseconds of each row");
    bed.sql("ALTER TABLE outbox ALTER created_at TYPE timestamptz(3)").await;
    assert!(said().await.is_some_and(|said| said.contains("3 digits")));
    bed.sql("CREATE DOMAIN whole AS timestamptz(0); ALTER TABLE outbox ALTER created_at TYPE whole").await;
    assert!(said().await.is_some_and(|said| said.contains("whole seconds")));
}
