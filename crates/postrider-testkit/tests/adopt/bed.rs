//! A table, a broker that answers as it is told, and a relay between them.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use postrider::adopt::{Adopted, AdoptedRow, AdoptedTables, Mapping, TableName, propose};
use postrider::broker::Broker;
use postrider::relay::{Backoff, BreakerSettings, RelaySettings};
use postrider_testkit::conformance::bed::{Bed as _, PostgresBed};
use postrider_testkit::faults::{Answer, ScriptedBroker};
use sqlx::AssertSqlSafe;
use tokio_util::sync::CancellationToken;

pub const SHOP: &str = include_str!("../../../../examples/shop/schema.sql");
pub const CAMPUS: &str = include_str!("../../../../examples/campus/schema.sql");
pub const PIM: &str = include_str!("../../../../examples/pim/schema.sql");
/// The table of the secure synchronisation.
pub const SYNC: &str = "CREATE TABLE outbox (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregate_type varchar(255) NOT NULL,
    aggregate_id varchar(255) NOT NULL, type varchar(255) NOT NULL, payload jsonb NOT NULL,
    status varchar(50) DEFAULT 'PENDING', created_at timestamp with time zone DEFAULT now());
    CREATE INDEX idx_outbox_pending ON outbox (created_at) WHERE status = 'PENDING';";

/// A database with a table.
pub struct Bed(pub PostgresBed);

impl Bed {
    pub async fn new(schema: &str) -> Self {
        let bed = Self(PostgresBed::new().await);
        bed.sql(schema).await;
        bed
    }

    pub async fn sql(&self, sql: &str) {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(self.0.store().pool()).await.expect("the statement runs");
    }

    /// The first column of the first row, as text.
    pub async fn value(&self, sql: &str) -> String {
        let value: Option<Option<String>> =
            sqlx::query_scalar(AssertSqlSafe(format!("SELECT v::text FROM ({sql}) t(v)")))
                .fetch_optional(self.0.store().pool())
                .await
                .expect("the statement answers");
        value.flatten().unwrap_or_else(|| "null".to_owned())
    }

    /// Waits until the statement answers that.
    pub async fn until(&self, sql: &str, wanted: &str) {
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

    /// The mapping that `adopt inspect` would write.
    pub async fn mapping(&self, table: &str) -> Mapping {
        let name = TableName::parse(table).expect("a table's name");
        let store = self.0.store();
        let info = store.table(&name).await.expect("answers").expect("the table is there");
        let status = info.columns.iter().find(|column| column.name == "status");
        let words = match status {
            Some(_) => store.words(&name, "status").await.expect("answers"),
            None => Vec::new(),
        };
        propose(&name, &info, &words).expect("it can be guessed")
    }

    pub async fn relay(&self, mapping: &Mapping, broker: &Arc<ScriptedBroker>) -> Running {
        Running::start(self, mapping, broker.clone()).await
    }
}

pub fn settings() -> RelaySettings {
    let backoff = Backoff { base: Duration::from_millis(50), max: Duration::from_millis(200), jitter: Duration::ZERO };
    RelaySettings {
        poll: Duration::from_millis(20),
        page: 16,
        batch: 4,
        backoff,
        attempts_max: 3,
        breaker: BreakerSettings { open: Duration::from_millis(300), ..BreakerSettings::default() },
        ..RelaySettings::default()
    }
}

/// A relay that runs until it is stopped.
pub struct Running {
    stop: CancellationToken,
    task: tokio::task::JoinHandle<postrider::Result<()>>,
}

impl Running {
    pub async fn start(bed: &Bed, mapping: &Mapping, broker: Arc<dyn Broker>) -> Self {
        let table = bed.0.store().adopt(mapping).await.expect("the mapping fits");
        let stop = CancellationToken::new();
        let relay = Adopted::new(mapping.clone(), table, broker, settings());
        Self { task: tokio::spawn(relay.run(stop.clone())), stop }
    }

    pub async fn stop(self) {
        self.stop.cancel();
        self.task.await.expect("no panic").expect("stops well");
    }
}

/// A broker that takes everything.
pub fn taking() -> Arc<ScriptedBroker> {
    ScriptedBroker::new(|_, _| Answer::Confirm)
}

/// Both together are `count` rows, and no key is in both.
pub fn assert_parts(mapping: &Mapping, first: &[AdoptedRow], second: &[AdoptedRow], count: usize) {
    let ids: HashSet<&str> = first.iter().chain(second).map(|row| row.id.as_str()).collect();
    assert_eq!((first.len() + second.len(), ids.len()), (count, count));
    let keys = |rows: &[AdoptedRow]| {
        rows.iter().map(|row| row.values.get(mapping.key.as_ref().expect("a key")).cloned()).collect::<HashSet<_>>()
    };
    let (first, second) = (keys(first), keys(second));
    assert!(!first.is_empty() && !second.is_empty() && first.is_disjoint(&second), "{first:?} {second:?}");
}
