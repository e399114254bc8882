//! The query of a list.

use postrider::dead::{DeadFilter, Stage};

use super::super::Problem;
use super::super::page::Query;

const REMEDY: &str = "use consumer, type, error, key, tenant, stage (relay or consumer), since and until (RFC 3339, \
                      2026-11-15T12:00:00Z), after (a number), limit (1 to 1000)";

const KNOWN: [&str; 10] = ["consumer", "type", "error", "key", "tenant", "stage", "since", "until", "after", "limit"];

/// Which dead letters, and which page of them.
#[derive(Debug)]
pub(super) struct List {
    pub filter: DeadFilter,
    pub after: i64,
    pub limit: usize,
}

impl List {
    /// Reads `consumer=billing&limit=10`. A parameter without a value is as good as none.
    pub fn read(query: Option<&str>) -> Result<Self, Problem> {
        let query = Query::read(query, &KNOWN, REMEDY)?;
        let text = |name| query.text(name).map(str::to_owned);
        let stage = query.text("stage").map(str::parse::<Stage>).transpose();
        let filter = DeadFilter {
            ids: None,
            consumer: text("consumer"),
            kind: text("type"),
            error_type: text("error"),
            key: text("key"),
            tenant: text("tenant"),
            stage: stage.map_err(|error| query.wrong("stage", error.to_string()))?,
            since: query.parsed("since", "a time")?,
            until: query.parsed("until", "a time")?,
        };
        Ok(Self { filter, after: query.parsed("after", "a number")?.unwrap_or(0), limit: query.limit()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_understood_is_named() {
        let list = List::read(Some("consumer=a%20b&type=&stage=relay&since=2026-11-15T12:00:00Z&limit=7")).unwrap();
        assert_eq!((list.filter.consumer.as_deref(), list.filter.kind, list.limit), (Some("a b"), None, 7));
        assert!(list.filter.stage.is_some() && list.filter.since.is_some());
        for (query, part) in [
            ("limit=0", "must be 1 to 1000"),
            ("limit=1001", "must be 1 to 1000"),
            ("limit=x", "\"parameter\": String(\"limit\")"),
            ("after=x", "not a number"),
            ("since=yesterday", "since is not a time"),
            ("stage=broker", "there is no stage"),
            ("key=%00", "zero byte"),
            ("consummer=a", "there is no parameter \\\"consummer\\\""),
        ] {
            let said = format!("{:?}", List::read(Some(query)).unwrap_err());
            assert!(said.contains(part), "{part:?} is missing in {said}");
        }
    }
}
