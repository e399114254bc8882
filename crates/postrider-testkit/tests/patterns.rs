//! A topic pattern means the same as its regular expression, on the servers that use it.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

use postrider::broker::topic::TopicFilter;
use postrider_testkit::testbed;
use sqlx::{Connection, PgConnection};

const WORDS: [&str; 6] = ["a", "b", "A", "", "x-1_+(", "é"];

fn text(rng: &mut fastrand::Rng, extra: &[&str]) -> String {
    let words: Vec<&str> = (0..rng.usize(1..5))
        .map(|_| match extra {
            [] => WORDS[rng.usize(..WORDS.len())],
            extra if rng.bool() => extra[rng.usize(..extra.len())],
            _ => WORDS[rng.usize(..WORDS.len())],
        })
        .collect();
    words.join(".")
}

#[tokio::test]
async fn postgres_agrees() {
    let url = testbed::postgres().await.database("patterns").await.expect("a database");
    let mut connection = PgConnection::connect(&url).await.expect("connects");
    let mut rng = fastrand::Rng::with_seed(7);
    let mut matched = 0;
    for _ in 0..3_000 {
        let wanted = [text(&mut rng, &["*", "#"]), text(&mut rng, &["*", "#"])];
        let unwanted: Vec<String> = (0..rng.usize(..2)).map(|_| text(&mut rng, &["*", "#"])).collect();
        let filter = TopicFilter::new(wanted, unwanted);
        let topic = text(&mut rng, &[]);
        let Some(regex) = filter.regex() else { continue };
        let found: bool = sqlx::query_scalar("SELECT $1 ~ $2")
            .bind(&topic)
            .bind(&regex)
            .fetch_one(&mut connection)
            .await
            .expect("PostgreSQL understands it");
        assert_eq!(found, filter.wants(&topic), "{filter:?} {regex} {topic:?}");
        matched += u32::from(found);
    }
    assert!(matched > 300, "only {matched} matched: the test says little");
}
