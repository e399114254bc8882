//! The query of a list.

use postrider::dead::DeadFilter;

use super::super::Problem;

/// Items of a page, unless `limit` says otherwise.
const LIMIT: usize = 100;
const LIMIT_MAX: usize = 1000;

const REMEDY: &str = "use consumer, type, error, key, tenant, stage (relay or consumer), since and until (RFC 3339, \
                      2026-11-15T12:00:00Z), after (a number), limit (1 to 1000)";

/// Which dead letters, and which page of them.
#[derive(Debug)]
pub(super) struct List {
    pub filter: DeadFilter,
    pub after: i64,
    pub limit: usize,
}

impl List {
    /// Reads `consumer=billing&limit=10`. A parameter without a value is as good as none.
    pub fn read(query: &str) -> Result<Self, Problem> {
        let mut list = Self { filter: DeadFilter::default(), after: 0, limit: LIMIT };
        let uri = format!("/?{query}").parse().map_err(|_| Problem::bad_request("the query cannot be read"))?;
        let pairs = axum::extract::Query::<Vec<(String, String)>>::try_from_uri(&uri)
            .map_err(|_| Problem::bad_request("the query cannot be read").remedy(REMEDY))?;
        for (name, value) in pairs.0.into_iter().filter(|(_, value)| !value.is_empty()) {
            list.set(&name, value)
                .map_err(|detail| Problem::bad_request(detail).with("parameter", &name).remedy(REMEDY))?;
        }
        Ok(list)
    }

    fn set(&mut self, name: &str, value: String) -> Result<(), String> {
        let filter = &mut self.filter;
        match name {
            "consumer" => filter.consumer = Some(value),
            "type" => filter.kind = Some(value),
            "error" => filter.error_type = Some(value),
            "key" => filter.key = Some(value),
            "tenant" => filter.tenant = Some(value),
            "stage" => filter.stage = Some(value.parse().map_err(|error: postrider::Error| error.to_string())?),
            "since" => filter.since = Some(value.parse().map_err(|_| format!("{name} is not a time"))?),
            "until" => filter.until = Some(value.parse().map_err(|_| format!("{name} is not a time"))?),
            "after" => self.after = value.parse().map_err(|_| format!("{name} is not a number"))?,
            "limit" => {
                let limit = value.parse().map_err(|_| format!("{name} is not a number"))?;
                if !(1..=LIMIT_MAX).contains(&limit) {
                    return Err(format!("the limit is {limit}, it must be 1 to {LIMIT_MAX}"));
                }
                self.limit = limit;
            }
            _ => return Err(format!("there is no parameter {name:?}")),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_understood_is_named() {
        let list = List::read("consumer=a%20b&type=&stage=relay&since=2026-11-15T12:00:00Z&limit=7").unwrap();
        assert_eq!((list.filter.consumer.as_deref(), list.filter.kind, list.limit), (Some("a b"), None, 7));
        assert!(list.filter.stage.is_some() && list.filter.since.is_some());
        for (query, part) in [
            ("limit=0", "must be 1 to 1000"),
            ("limit=1001", "must be 1 to 1000"),
            ("limit=x", "\"parameter\": String(\"limit\")"),
            ("after=x", "not a number"),
            ("since=yesterday", "since is not a time"),
            ("stage=broker", "there is no stage"),
            ("consummer=a", "there is no parameter \\\"consummer\\\""),
        ] {
            let said = format!("{:?}", List::read(query).unwrap_err());
            assert!(said.contains(part), "{part:?} is missing in {said}");
        }
    }
}
