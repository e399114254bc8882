//! The integrity check finds every planted defect and nothing in a system that is well; checks of users' cannot write.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use postrider::Kind;
use postrider::Route;
use postrider::doctor::{Finding, Severity};
use postrider::integrity::{Integrity as _, Limits};
use postrider::outbox::OutboxStore as _;
use postrider::upkeep::{Retention, Upkeep as _};

use super::bed::{Bed, event};

/// What to plant, in each dialect, and the check that must find it. An empty statement: the database has nothing like it.
const DEFECTS: [(&str, [&str; 3]); 13] = [
    (
        "outbox.stale",
        [
            "INSERT INTO postrider.outbox (topic, key, type, payload, created_at) \
             VALUES ('t', 'k', 't', '{}', now() - interval '2 hours')",
            "UPDATE outbox SET created_at = strftime('%Y-%m-%dT%H:%M:%f', 'now', '-2 hours') || '000Z'",
            "INSERT INTO postrider_outbox (topic, `key`, type, payload, created_at) \
             VALUES ('t', 'k', 't', '{}', UTC_TIMESTAMP(6) - INTERVAL 2 HOUR)",
        ],
    ),
    (
        "parked.stranded",
        [
            "INSERT INTO postrider.parked (destination, id, state, attempts, next_at, parked_at, event_id, topic, key, type, \
               payload, content_type, created_at) VALUES ('default', 7001, 'waiting', 0, now(), now() - interval '2 hours', \
               gen_random_uuid(), 't', 'alone', 't', '{}', 'application/json', now())",
            "INSERT INTO parked (destination, id, hash, state, attempts, next_at, first_parked_at, event_id, topic, key, \
               type, payload, content_type, created_at) VALUES ('default', 7001, 0, 'waiting', 0, 0, \
               strftime('%Y-%m-%dT%H:%M:%f', 'now', '-2 hours') || '000Z', '0190a000-0000-7000-8000-000000007001', 't', \
               'alone', 't', '{}', 'application/json', strftime('%Y-%m-%dT%H:%M:%f', 'now') || '000Z')",
            "INSERT INTO postrider_parked (destination, id, hash, state, attempts, next_at, parked_at, event_id, topic, \
               `key`, type, payload, content_type, created_at) VALUES ('default', 7001, 0, 'waiting', 0, UTC_TIMESTAMP(6), \
               UTC_TIMESTAMP(6) - INTERVAL 2 HOUR, UUID(), 't', 'alone', 't', '{}', 'application/json', UTC_TIMESTAMP(6))",
        ],
    ),
    (
        "parked.orphaned",
        [
            "INSERT INTO postrider.parked (destination, id, state, attempts, next_at, event_id, topic, key, type, payload, \
               content_type, created_at) VALUES ('gone', 7002, 'failed', 9, now(), gen_random_uuid(), 't', 'k', 't', '{}', \
               'application/json', now())",
            "INSERT INTO parked (destination, id, hash, state, attempts, next_at, event_id, topic, key, type, payload, \
               content_type, created_at) VALUES ('gone', 7002, 0, 'failed', 9, 0, '0190a000-0000-7000-8000-000000007002', \
               't', 'k', 't', '{}', 'application/json', strftime('%Y-%m-%dT%H:%M:%f', 'now') || '000Z')",
            "INSERT INTO postrider_parked (destination, id, hash, state, attempts, next_at, event_id, topic, `key`, type, \
               payload, content_type, created_at) VALUES ('gone', 7002, 0, 'failed', 9, UTC_TIMESTAMP(6), UUID(), 't', 'k', \
               't', '{}', 'application/json', UTC_TIMESTAMP(6))",
        ],
    ),
    (
        "leases.stuck",
        [
            "INSERT INTO postrider.lease (group_name, slot, owner, expires_at) VALUES ('g', 0, 'o', now() + interval '2 hours')",
            "INSERT INTO lease (group_name, slot, owner, epoch, expires_at) VALUES ('g', 0, 'o', 1, (unixepoch() + 7200) * 1000)",
            "INSERT INTO postrider_lease (group_name, slot, owner, epoch, expires_at) \
             VALUES ('g', 0, 'o', 1, UTC_TIMESTAMP(6) + INTERVAL 2 HOUR)",
        ],
    ),
    (
        "retries.stuck",
        [
            "INSERT INTO postrider.held (consumer, shard, message_id, key, state, next_at, origin, envelope, payload) \
             VALUES ('c', 0, gen_random_uuid(), 'r', 'running', now() - interval '2 hours', '{}', '{}', '')",
            "INSERT INTO held (consumer, shard, message_id, key, state, next_at, origin, envelope, payload) \
             VALUES ('c', 0, 'm1', 'r', 'running', (unixepoch() - 7200) * 1000, '{}', '{}', x'')",
            "INSERT INTO postrider_held (consumer, shard, message_id, `key`, state, next_at, history, origin, envelope, payload) \
             VALUES ('c', 0, 'm1', 'r', 'running', UTC_TIMESTAMP(6) - INTERVAL 2 HOUR, '[]', '{}', '{}', '')",
        ],
    ),
    (
        "held.stranded",
        [
            "INSERT INTO postrider.held (consumer, shard, message_id, key, state, next_at, origin, envelope, payload, held_at) \
             VALUES ('c', 0, gen_random_uuid(), 's', 'waiting', 'infinity', '{}', '{}', '', now() - interval '2 hours')",
            "INSERT INTO held (consumer, shard, message_id, key, state, origin, envelope, payload, held_at) \
             VALUES ('c', 0, 'm2', 's', 'waiting', '{}', '{}', x'', \
                     strftime('%Y-%m-%dT%H:%M:%f', 'now', '-2 hours') || '000Z')",
            "INSERT INTO postrider_held (consumer, shard, message_id, `key`, state, history, origin, envelope, payload, held_at) \
             VALUES ('c', 0, 'm2', 's', 'waiting', '[]', '{}', '{}', '', UTC_TIMESTAMP(6) - INTERVAL 2 HOUR)",
        ],
    ),
    (
        "held.orphaned",
        [
            "INSERT INTO postrider.held (consumer, shard, message_id, state, next_at, origin, envelope, payload) \
             VALUES ('ghost', 0, gen_random_uuid(), 'retrying', now() + interval '1 minute', '{}', '{}', '')",
            "INSERT INTO held (consumer, shard, message_id, state, next_at, origin, envelope, payload) \
             VALUES ('ghost', 0, 'm3', 'retrying', (unixepoch() + 60) * 1000, '{}', '{}', x'')",
            "INSERT INTO postrider_held (consumer, shard, message_id, state, next_at, history, origin, envelope, payload) \
             VALUES ('ghost', 0, 'm3', 'retrying', UTC_TIMESTAMP(6) + INTERVAL 1 MINUTE, '[]', '{}', '{}', '')",
        ],
    ),
    (
        "dead.orphaned",
        [
            "INSERT INTO postrider.dead_letter (consumer, message_id, shard, error_type, error, attempts, history, origin, \
               payload) VALUES ('spectre', gen_random_uuid(), 0, 'e', 'e', 1, '[]', '{}', '')",
            "INSERT INTO dead_letter (consumer, message_id, shard, error_type, error, attempts, history, origin, payload) \
             VALUES ('spectre', 'm4', 0, 'e', 'e', 1, '[]', '{}', x'')",
            "INSERT INTO postrider_dead_letter (consumer, message_id, shard, error_type, error, causes, attempts, history, \
               origin, payload) VALUES ('spectre', 'm4', 0, 'e', 'e', '[]', 1, '[]', '{}', '')",
        ],
    ),
    (
        "dead.lost",
        [
            "INSERT INTO postrider.dead_letter (consumer, message_id, state, shard, error_type, error, attempts, history, \
               origin, payload) VALUES ('c', gen_random_uuid(), 'replaying', 0, 'e', 'e', 1, '[]', '{}', '')",
            "INSERT INTO dead_letter (consumer, message_id, state, shard, error_type, error, attempts, history, origin, payload) \
             VALUES ('c', 'm5', 'replaying', 0, 'e', 'e', 1, '[]', '{}', x'')",
            "INSERT INTO postrider_dead_letter (consumer, message_id, state, shard, error_type, error, causes, attempts, \
               history, origin, payload) VALUES ('c', 'm5', 'replaying', 0, 'e', 'e', '[]', 1, '[]', '{}', '')",
        ],
    ),
    (
        "inbox.effect",
        [
            "INSERT INTO postrider.inbox (consumer, message_id, topic) \
             SELECT consumer, message_id, 't' FROM postrider.held WHERE consumer = 'c' LIMIT 1",
            "INSERT INTO inbox (consumer, message_id, topic) VALUES ('c', 'm1', 't')",
            "INSERT INTO postrider_inbox (consumer, message_id, topic) VALUES ('c', 'm1', 't')",
        ],
    ),
    (
        "inbox.retention",
        [
            "INSERT INTO postrider.inbox (consumer, message_id, topic, processed_at) \
             VALUES ('c', gen_random_uuid(), 't', now() - interval '30 days')",
            "INSERT INTO inbox (consumer, message_id, topic, processed_at) VALUES ('c', 'm6', 't', '2020-01-01T00:00:00.000000Z')",
            "INSERT INTO postrider_inbox (consumer, message_id, topic, processed_at) \
             VALUES ('c', 'm6', 't', UTC_TIMESTAMP(6) - INTERVAL 30 DAY)",
        ],
    ),
    (
        "partitions.missing",
        [
            "DO $$ BEGIN EXECUTE format('DROP TABLE postrider.outbox_%s', \
               to_char(now() AT TIME ZONE 'UTC' + interval '1 day', 'YYYYMMDD')); END $$",
            "",
            "",
        ],
    ),
    (
        "partitions.default",
        [
            "INSERT INTO postrider.outbox (topic, type, payload, created_at) VALUES ('t', 't', '{}', now() + interval '90 days')",
            "",
            "",
        ],
    ),
];

fn limits() -> Limits {
    Limits {
        stale_after: Duration::from_secs(3600),
        routes: vec![Route::all("default")],
        retention: Retention::default(),
        consumers: vec!["c".to_owned()],
    }
}

async fn findings(bed: &impl Bed) -> Vec<Finding> {
    bed.store().integrity_findings(&limits()).await.expect("checked")
}

fn bad(findings: &[Finding]) -> BTreeSet<&str> {
    findings.iter().filter(|finding| finding.severity > Severity::Ok).map(|finding| finding.check.as_str()).collect()
}

/// A clean system has no finding, and each defect is found by the check that is meant for it.
pub async fn every_planted_defect_is_found_and_nothing_else(bed: &impl Bed) {
    // Work that waits its time is no defect.
    bed.store().enqueue(&[event("k", "young")]).await.expect("enqueued");
    let clean = findings(bed).await;
    assert_eq!(bad(&clean), BTreeSet::new(), "{clean:#?}");
    let mut expected = BTreeSet::new();
    for (check, statements) in DEFECTS {
        if bed.is_without(statements) {
            continue;
        }
        assert!(clean.iter().any(|finding| finding.check == check), "{check} is reported where all is well");
        bed.sql(statements).await;
        expected.insert(check);
        let found = findings(bed).await;
        let mut seen = bad(&found);
        // Just after midnight two hours ago was another day, which has no partition.
        if !expected.contains("partitions.default") {
            seen.remove("partitions.default");
        }
        assert_eq!(seen, expected, "after {check}: {found:#?}");
        let finding = found.iter().find(|finding| finding.check == check).expect("it is there");
        assert!(!finding.remedy.is_empty() && !finding.message.is_empty());
    }
}

/// A store cannot know which consumers there are unless it is told.
pub async fn consumers_are_orphans_only_where_all_are_known(bed: &impl Bed) {
    for (_, statements) in DEFECTS.iter().filter(|(check, _)| check.ends_with("d.orphaned")) {
        bed.sql(*statements).await;
    }
    let limits = Limits { consumers: Vec::new(), routes: Vec::new(), ..limits() };
    let found = bed.store().integrity_findings(&limits).await.expect("checked");
    assert_eq!(bad(&found), BTreeSet::new(), "{found:#?}");
}

/// Rows become texts, whatever their types; they are bounded in number and length.
pub async fn a_users_check_says_what_it_found(bed: &impl Bed) {
    let store = bed.store();
    let second = Duration::from_secs(5);
    let rows =
        store.integrity_query("SELECT 1 AS n, 'it''s; a' AS t, NULL AS z, 1.5 AS f;", second, 10).await.expect("runs");
    assert_eq!(rows, ["n=1, t=it's; a, z=null, f=1.5"]);
    let many = "WITH RECURSIVE c (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 50) SELECT n FROM c -- all";
    let rows = store.integrity_query(many, second, 3).await.expect("runs");
    assert_eq!(rows, ["n=1", "n=2", "n=3"]);
    bed.sql([
        "INSERT INTO effect (consumer, name) VALUES ('c', repeat('ü', 500))",
        "INSERT INTO effect (consumer, name) VALUES ('c', replace(hex(zeroblob(250)), '0', 'ü'))",
        "INSERT INTO effect (consumer, name) VALUES ('c', REPEAT('ü', 500))",
    ])
    .await;
    let rows = store.integrity_query("SELECT name FROM effect", second, 10).await.expect("runs");
    assert_eq!(rows, [format!("name={}", "ü".repeat(200))]);
    assert!(store.integrity_query("SELECT name FROM effect WHERE 1 = 0", second, 10).await.expect("runs").is_empty());
}

/// One query, which only reads, for a limited time; everything else is a mistake in the configuration.
pub async fn a_users_check_cannot_write_or_run_for_ever(bed: &impl Bed) {
    let store = bed.store();
    let second = Duration::from_secs(5);
    bed.sql(["INSERT INTO effect (consumer, name) VALUES ('c', 'kept')"; 3]).await;
    for sql in [
        "DELETE FROM effect",
        "SELECT 1; DELETE FROM effect",
        "SELECT 1) q; DELETE FROM effect; SELECT * FROM (SELECT 1",
        "WITH d AS (DELETE FROM effect RETURNING *) SELECT * FROM d",
        "SELECT * FROM nowhere_to_be_found",
        "SELECT this is not SQL",
        "",
    ] {
        let error = store.integrity_query(sql, second, 10).await.expect_err(sql);
        assert_eq!(error.kind(), Kind::Config, "{sql}: {error}");
        assert!(!error.remedy().is_empty());
    }
    // A text to two of the databases, two statements to the third.
    let _ = store.integrity_query("SELECT 'a\\'') q; DELETE FROM effect; -- '", second, 10).await;
    assert_eq!(bed.effects("c").await, ["kept"]);
    let endless = "WITH RECURSIVE c (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 900000000) \
                   SELECT count(*) AS n FROM c, c AS d";
    // MariaDB ends a recursion by itself, so there it is a product of large tables.
    let began = Instant::now();
    let result = store.integrity_query(bed.endless().unwrap_or(endless), Duration::from_millis(300), 10).await;
    let error = result.expect_err("it is stopped");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!(error.kind(), Kind::Config, "{error}");
    assert!(error.to_string().contains("longer than"), "{error}");
    let rows = store.integrity_query("SELECT 1 AS n", second, 10).await.expect("the next one runs");
    assert_eq!(rows, ["n=1"]);
}

/// Of many instances one begins the scheduled report; reports are kept with what was found.
pub async fn a_scheduled_report_is_begun_once(bed: &impl Bed) {
    let store = bed.store();
    let at: DateTime<Utc> = DateTime::from_timestamp(1_790_000_000, 0).expect("a time");
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let store = store.clone();
        tasks.spawn(async move { store.report_begin("schedule", Some(at)).await.expect("answers") });
    }
    let begun: Vec<i64> = tasks.join_all().await.into_iter().flatten().collect();
    assert_eq!(begun.len(), 1);
    assert!(store.report_begin("schedule", Some(at)).await.expect("answers").is_none());
    let age = [
        "UPDATE postrider.report SET began_at = began_at - interval '31 minutes'",
        "UPDATE report SET began_at = began_at - 31 * 60000",
        "UPDATE postrider_report SET began_at = began_at - INTERVAL 31 MINUTE",
    ];
    bed.sql(age).await;
    let again = store.report_begin("schedule", Some(at)).await.expect("answers");
    assert_eq!(again, Some(begun[0]), "whoever began it has died");
    assert!(store.report_begin("schedule", Some(at)).await.expect("answers").is_none());
    let next = store.report_begin("schedule", Some(at + chrono::Duration::days(1))).await.expect("answers");
    let by_hand = [store.report_begin("ops", None).await, store.report_begin("ops", None).await];
    let by_hand: Vec<i64> = by_hand.into_iter().map(|id| id.expect("answers").expect("begun")).collect();
    assert!(next.is_some());

    let findings = [
        Finding::ok("a", "fine"),
        Finding::warning("b", "<script>alert('x')</script>", "do"),
        Finding::error("c", "bad", "do"),
    ];
    store.report_end(begun[0], 3, &findings).await.expect("ended");
    store.report_end(begun[0], 3, &findings).await.expect("ended again");
    bed.sql(age).await;
    assert!(store.report_begin("schedule", Some(at)).await.expect("answers").is_none(), "it is done");
    let report = store.report(begun[0]).await.expect("read").expect("is there");
    assert_eq!((report.view.checks, report.view.warnings, report.view.errors), (3, 1, 1));
    assert_eq!(report.findings, findings[1..]);
    assert!(report.view.ended_at.is_some_and(|at| at >= report.view.began_at));
    let all = store.reports(None, 10).await.expect("read");
    assert_eq!((all.len(), all[0].id, all[0].ended_at), (4, by_hand[1], None));
    let page = store.reports(Some(by_hand[1]), 1).await.expect("read");
    assert_eq!((page.len(), page[0].id, page[0].actor.as_str()), (1, by_hand[0], "ops"));
    assert!(store.report(999_999).await.expect("read").is_none());

    bed.sql([
        "UPDATE postrider.report SET began_at = began_at - interval '31 days' WHERE scheduled_for IS NOT NULL",
        "UPDATE report SET began_at = began_at - 2678400000 WHERE scheduled_for IS NOT NULL",
        "UPDATE postrider_report SET began_at = began_at - INTERVAL 31 DAY WHERE scheduled_for IS NOT NULL",
    ])
    .await;
    store.maintain(&Retention::default()).await.expect("upkeep");
    assert_eq!(store.reports(None, 10).await.expect("read").len(), 2);
}
