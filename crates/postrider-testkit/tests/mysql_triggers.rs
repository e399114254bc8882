//! Change triggers on MariaDB.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

use postrider::adopt::TableName;
use postrider::trigger::{Trigger, Triggers as _};
use postrider_testkit::conformance::bed::{Bed as _, MysqlBed};

#[tokio::test(flavor = "multi_thread")]
async fn changes_become_events_without_personal_data() {
    let bed = MysqlBed::new().await;
    let store = bed.store();
    let sql = async |sql: &'static str| sqlx::raw_sql(sql).execute(store.pool()).await.expect("runs");
    sql("CREATE TABLE `the users` (id int PRIMARY KEY, email text, org text, version int, plan varchar(20))").await;
    let trigger = Trigger {
        table: TableName { schema: None, name: "the users".to_owned() },
        entity: "USER".to_owned(),
        id: None,
        tenant: Some("org".to_owned()),
        version: Some("version".to_owned()),
        columns: vec!["plan".to_owned()],
        topic: "users.changed".to_owned(),
    };
    store.add(&trigger).await.expect("made");
    store.add(&trigger).await.expect("once more replaces it");
    sql("INSERT INTO `the users` VALUES (7, 'a@b.example', 'org-1', 1, 'free')").await;
    sql("UPDATE `the users` SET email = 'c@d.example', version = 2").await;
    sql("UPDATE `the users` SET email = email").await;
    sql("UPDATE `the users` SET id = 8").await;
    sql("DELETE FROM `the users`").await;
    let rows: Vec<String> = sqlx::query_scalar(
        "SELECT CAST(concat_ws(' ', topic, `key`, type, subject, tenant, payload) AS CHAR) FROM postrider_outbox ORDER BY id",
    )
    .fetch_all(store.pool())
    .await
    .expect("answers");
    let row = |key: u32, kind: &str, version: u32| {
        let action = kind.to_uppercase();
        format!(
            "users.changed USER:{key} user.{kind} {key} org-1 {{\"entity\": {{\"type\": \"USER\", \"id\": \"{key}\"}}, \
             \"action\": \"{action}\", \"version\": {version}, \"columns\": {{\"plan\": \"free\"}}}}"
        )
    };
    let wanted =
        [row(7, "insert", 1), row(7, "update", 2), row(7, "delete", 2), row(8, "insert", 2), row(8, "delete", 2)];
    assert_eq!(rows, wanted);

    let list = store.list().await.expect("answers");
    assert_eq!(list.len(), 1);
    assert!(list[0].table.ends_with(".\"the users\"") && list[0].entity == "USER", "{list:?}");
    assert_eq!(store.remove(&trigger.table, Some("user")).await.expect("removed"), 1);
    assert!(store.list().await.expect("answers").is_empty());
}
