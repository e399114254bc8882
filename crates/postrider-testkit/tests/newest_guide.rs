//! The SQL of docs/guides/newest-wins.md does what the guide says.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

use postrider::newest::{Change, Stamp};
use postrider_testkit::conformance::newest::{permutations, timed, versioned};
use postrider_testkit::testbed;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

const GUIDE: &str = include_str!("../../../docs/guides/newest-wins.md");

/// The blocks of SQL below the heading.
fn statements(heading: &str) -> Vec<&'static str> {
    let (_, section) = GUIDE.split_once(heading).expect("the heading");
    let section = section.split("\n## ").next().unwrap_or_default();
    section.split("```sql\n").skip(1).map(|block| block.split("```").next().unwrap_or_default()).collect()
}

#[tokio::test]
async fn every_order_of_arrival_ends_in_the_same_state() {
    let url = testbed::postgres().await.database("newest").await.expect("a database");
    let mut connection = PgConnection::connect(&url).await.expect("connects");
    let statements = statements("\n## PostgreSQL");
    let [create, upsert, delete, read, clean] = statements.as_slice() else {
        panic!("five statements: {statements:?}")
    };
    sqlx::raw_sql(*create).execute(&mut connection).await.expect("creates");

    for end in [Change::Upsert, Change::Delete] {
        for changes in [versioned(end), timed(end)] {
            let (newest, _) = changes[changes.len() - 1];
            for order in permutations(changes.len()) {
                let id = format!("{end:?} {:?} {order:?}", newest.version);
                let mut seen = None;
                for n in order {
                    let (Stamp { version, at }, change) = changes[n];
                    let query = match change {
                        Change::Upsert => {
                            sqlx::query(*upsert).bind(&id).bind(format!("name {n}")).bind(version).bind(at)
                        }
                        Change::Delete => sqlx::query(*delete).bind(&id).bind(version).bind(at),
                    };
                    let rows = query.execute(&mut connection).await.expect("applies").rows_affected();
                    assert_eq!(rows == 1, seen.is_none_or(|seen| n > seen), "{id}: change {n} after {seen:?}");
                    seen = seen.max(Some(n));
                }
                let found: Option<(String, String)> =
                    sqlx::query_as(*read).bind(&id).fetch_optional(&mut connection).await.expect("reads");
                let expected = (end == Change::Upsert).then(|| (id.clone(), "name 3".to_owned()));
                assert_eq!(found, expected, "{id}");
                let stamp: (Option<i64>, chrono::DateTime<chrono::Utc>) =
                    sqlx::query_as("SELECT version, updated_at FROM customer WHERE id = $1")
                        .bind(&id)
                        .fetch_one(&mut connection)
                        .await
                        .expect("a row, or a tombstone");
                assert_eq!(stamp, (newest.version, newest.at), "{id}");
            }
        }
    }

    let cleaned = sqlx::raw_sql(*clean).execute(&mut connection).await.expect("cleans").rows_affected();
    assert_eq!(cleaned, 0, "the tombstones are young, whatever their stamps say");
    let sooner = clean.replace("28 days", "0 days");
    let cleaned = sqlx::raw_sql(AssertSqlSafe(sooner)).execute(&mut connection).await.expect("cleans").rows_affected();
    assert_eq!(cleaned, 2 * 24, "all tombstones and nothing else");
}
