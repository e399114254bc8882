//! The same on MariaDB: the shop's and the campus's tables as their services made them there.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use postrider::Kind;
use postrider::adopt::{Adopted, AdoptedTables as _, Mapping, Part, TableName, propose};
use postrider::doctor::Severity;
use postrider_testkit::conformance::bed::{Bed as _, MysqlBed};
use postrider_testkit::faults::{Answer, ScriptedBroker};
use sqlx::AssertSqlSafe;
use tokio_util::sync::CancellationToken;

use crate::bed::{assert_parts, settings, taking};

const SHOP: &str = include_str!("../../../../examples/shop/schema.mysql.sql");
const CAMPUS: &str = include_str!("../../../../examples/campus/schema.mysql.sql");

struct Bed(MysqlBed);

impl Bed {
    async fn new(schema: &str) -> Self {
        let bed = Self(MysqlBed::new().await);
        bed.sql(schema).await;
        bed
    }

    async fn sql(&self, sql: &str) {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(self.0.store().pool()).await.expect("the statement runs");
    }

    /// The first column of the first row, as text.
    async fn value(&self, sql: &str) -> String {
        let sql = format!("SELECT CAST(v AS CHAR) FROM ({sql}) t");
        let value: Option<Option<String>> = sqlx::query_scalar(AssertSqlSafe(sql))
            .fetch_optional(self.0.store().pool())
            .await
            .expect("the statement answers");
        value.flatten().unwrap_or_else(|| "null".to_owned())
    }

    async fn until(&self, sql: &str, wanted: &str) {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
        loop {
            let found = self.value(sql).await;
            if found == wanted {
                return;
            }
            assert!(tokio::time::Instant::now() < deadline, "{sql}: {found}, not {wanted}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn mapping(&self, table: &str) -> Mapping {
        let name = TableName::parse(table).expect("a table's name");
        let info = self.0.store().table(&name).await.expect("answers").expect("the table is there");
        propose(&name, &info, &[]).expect("it can be guessed")
    }

    async fn relay(&self, mapping: &Mapping, broker: &Arc<ScriptedBroker>) -> Running {
        let table = self.0.store().adopt(mapping).await.expect("the mapping fits");
        let stop = CancellationToken::new();
        let relay = Adopted::new(mapping.clone(), table, broker.clone(), settings());
        Running { task: tokio::spawn(relay.run(stop.clone())), stop }
    }

    /// Rows of seven keys.
    async fn fill(&self, from: u32, to: u32) {
        let rows: Vec<String> =
            (from..=to).map(|n| format!("('course.enrolled', 'course', 'c-{}', '{{\"n\": {n}}}')", n % 7)).collect();
        let columns = "routing_key, aggregate_type, aggregate_id, payload";
        self.sql(&format!("INSERT INTO outbox_events ({columns}) VALUES {}", rows.join(", "))).await;
    }
}

struct Running {
    stop: CancellationToken,
    task: tokio::task::JoinHandle<postrider::Result<()>>,
}

impl Running {
    async fn stop(self) {
        self.stop.cancel();
        self.task.await.expect("no panic").expect("stops well");
    }
}

fn assert_in_order(broker: &ScriptedBroker, count: usize) {
    let mut last: HashMap<String, i64> = HashMap::new();
    let mut seen = std::collections::HashSet::new();
    for event in broker.arrived().iter().filter(|event| seen.insert(event.id())) {
        let number = event.decode::<serde_json::Value>().expect("JSON")["n"].as_i64().expect("a number");
        let before = last.insert(event.key().expect("a key").to_owned(), number);
        assert!(before.is_none_or(|before| before < number), "{:?}: {number} after {before:?}", event.key());
    }
    assert_eq!(seen.len(), count, "each event");
}

const PENDING: &str = "SELECT count(*) AS v FROM outbox_events WHERE status <> 'published'";

#[tokio::test(flavor = "multi_thread")]
async fn the_shop_is_relayed_as_it_is() {
    let bed = Bed::new(SHOP).await;
    for n in 1..=40 {
        bed.sql(&format!(
            "INSERT INTO OutboxMessages (Id, EventType, Content, OccurredOnUtc) \
             VALUES (uuid(), 'Order{}', '{{\"n\": {n}}}', utc_timestamp(6))",
            if n == 7 { "Bad" } else { "Created" }
        ))
        .await;
    }
    let broker = ScriptedBroker::new(|event, _| match event.topic() {
        "OrderBad" => Answer::Refuse(Kind::Refused),
        _ => Answer::Confirm,
    });
    let relay = bed.relay(&bed.mapping("OutboxMessages").await, &broker).await;
    bed.until("SELECT count(*) AS v FROM OutboxMessages WHERE ProcessedOnUtc IS NULL", "1").await;
    bed.until("SELECT AttemptCount AS v FROM OutboxMessages WHERE EventType = 'OrderBad'", "3").await;
    relay.stop().await;
    assert_eq!(broker.arrived().len(), 39, "each once");
    let error = bed.value("SELECT LastErrorMessage AS v FROM OutboxMessages WHERE EventType = 'OrderBad'").await;
    assert!(error.contains("refused by script"), "{error}");
    assert_eq!(bed.value("SELECT count(*) AS v FROM postrider_adopted").await, "0", "nothing of it is ours");
    let late = "SELECT max(abs(timestampdiff(SECOND, ProcessedOnUtc, utc_timestamp()))) < 60 AS v FROM OutboxMessages";
    assert_eq!(bed.value(late).await, "1", "the time is UTC, as the column says");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_campus_is_relayed_by_several_instances_in_order() {
    let bed = Bed::new(CAMPUS).await;
    let (mapping, broker) = (bed.mapping("outbox_events").await, taking());
    bed.fill(1, 100).await;
    let relays = [bed.relay(&mapping, &broker).await, bed.relay(&mapping, &broker).await];
    for n in 0..10 {
        bed.fill(101 + n * 10, 110 + n * 10).await;
    }
    bed.until(PENDING, "0").await;
    for relay in relays {
        relay.stop().await;
    }
    assert_in_order(&broker, 200);
    assert_eq!(broker.arrived().len(), 200, "no row was published by two");
    assert!(broker.arrived().iter().any(|event| event.message_id() == "outbox-7"));
}

#[tokio::test(flavor = "multi_thread")]
async fn failure_lands_in_the_columns_and_stops_its_key_alone() {
    let bed = Bed::new(CAMPUS).await;
    bed.fill(1, 120).await;
    let broker = ScriptedBroker::new(|event, attempt| match (event.message_id().as_ref(), attempt) {
        ("outbox-1", _) => Answer::Refuse(Kind::Refused),
        ("outbox-2", 1 | 2) => Answer::Refuse(Kind::Refused),
        _ => Answer::Confirm,
    });
    let relay = bed.relay(&bed.mapping("outbox_events").await, &broker).await;
    bed.until("SELECT status AS v FROM outbox_events WHERE id = 1", "failed").await;
    bed.until(PENDING, "18").await;
    let row = bed.value("SELECT concat(attempts, ' ', last_error) AS v FROM outbox_events WHERE id = 1").await;
    assert!(row.starts_with("3 refused by script; "), "{row}");
    bed.sql("UPDATE outbox_events SET status = 'published' WHERE id = 1").await;
    bed.until(PENDING, "0").await;
    relay.stop().await;
    assert_in_order(&broker, 119);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_other_workers_are_left_or_taken_over() {
    let bed = Bed::new(CAMPUS).await;
    bed.fill(1, 21).await;
    bed.sql("UPDATE outbox_events SET status = 'processing', updated_at = updated_at - INTERVAL 1 HOUR WHERE id = 1")
        .await;
    bed.sql("UPDATE outbox_events SET status = 'processing' WHERE id = 2").await;
    let mut other = bed.0.store().pool().begin().await.expect("a transaction");
    sqlx::query("SELECT 1 FROM outbox_events WHERE id = 3 FOR UPDATE").execute(&mut *other).await.expect("locks");
    let broker = taking();
    let relay = bed.relay(&bed.mapping("outbox_events").await, &broker).await;
    bed.until(PENDING, "6").await;
    let left = "SELECT group_concat(id ORDER BY id SEPARATOR ' ') AS v FROM outbox_events WHERE status <> 'published'";
    assert_eq!(bed.value(left).await, "2 3 9 10 16 17", "what is held, and what is behind it");
    other.rollback().await.expect("rolls back");
    bed.until(PENDING, "3").await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mistakes_are_named_and_the_index_is_proposed() {
    let bed = Bed::new(CAMPUS).await;
    let good = bed.mapping("outbox_events").await;
    let wrong = Mapping { payload: "body".to_owned(), ..good.clone() };
    let error = bed.0.store().adopt(&wrong).await.err().expect("refused");
    assert!(error.to_string().contains("payload = \"body\": outbox_events has no such column"), "{error}");

    bed.sql("INSERT INTO outbox_events (routing_key, aggregate_type, aggregate_id, payload, status) VALUES ('a', 't', 'k', '{}', 'sent?')").await;
    let table = bed.0.store().adopt(&good).await.expect("fits");
    let findings = table.inspect().await.expect("answers");
    assert!(
        findings.iter().any(|finding| finding.message.contains("1 rows are in the state \"sent?\"")),
        "{findings:?}"
    );
    let is_index = |finding: &&postrider::doctor::Finding| finding.remedy.starts_with("CREATE INDEX");
    let index = findings.iter().find(is_index).expect("an index is missing");
    bed.sql(&index.remedy).await;
    bed.sql("DELETE FROM outbox_events").await;
    let findings = table.inspect().await.expect("answers");
    assert!(findings.iter().find(is_index).is_none(), "{findings:?}");
    assert!(findings.iter().all(|finding| finding.severity != Severity::Error), "{findings:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_hold_every_row_once_and_do_not_cut_a_key() {
    let bed = Bed::new(CAMPUS).await;
    bed.fill(1, 70).await;
    let mapping = bed.mapping("outbox_events").await;
    let table = bed.0.store().adopt(&mapping).await.expect("fits");
    let first = table.lock(Part { number: 0, of: 2 }, 1000).await.expect("locks");
    let second = table.lock(Part { number: 1, of: 2 }, 1000).await.expect("locks");
    assert_parts(&mapping, first.rows(), second.rows(), 70);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_order_that_cannot_tell_rows_apart_is_warned_of() {
    let bed = Bed::new(
        "CREATE TABLE outbox (id char(36) PRIMARY KEY, aggregate_id varchar(64) NOT NULL, type varchar(64) NOT NULL,
           payload json NOT NULL, published boolean NOT NULL DEFAULT false, created_at datetime NOT NULL)",
    )
    .await;
    let said = async || {
        let table = bed.0.store().adopt(&bed.mapping("outbox").await).await.expect("fits");
        let findings = table.inspect().await.expect("answers");
        findings.into_iter().find(|finding| finding.message.starts_with("order")).map(|finding| finding.message)
    };
    assert!(said().await.is_some_and(|said| said.contains("whole seconds")));
    bed.sql("ALTER TABLE outbox MODIFY created_at datetime(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)").await;
    assert_eq!(said().await, None);
}
