//! The JSON body of a replay or a discard: which dead letters, and members of its own.

use axum::http::HeaderMap;
use chrono::{DateTime, Utc};
use postrider::dead::{DeadFilter, Stage};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::super::Problem;
use super::super::body::pointer;
use super::super::events::require_json;

/// Numbers in one request.
const IDS_MAX: usize = 1000;

const REMEDY: &str = "send {\"ids\": [17]}, or a filter of consumer, type, error, key, tenant, stage, since and until, or \
                      {\"all\": true}; a replay also takes rate and dry_run, a discard wants a reason";

/// Which dead letters are meant.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Selection {
    ids: Option<Vec<i64>>,
    consumer: Option<String>,
    r#type: Option<String>,
    error: Option<String>,
    key: Option<String>,
    tenant: Option<String>,
    stage: Option<Stage>,
    since: Option<DateTime<Utc>>,
    until: Option<DateTime<Utc>>,
    #[serde(default)]
    all: bool,
}

/// A body of which some members are taken first; the rest must be a selection.
#[derive(Debug)]
pub(super) struct Body(Map<String, Value>);

impl Body {
    /// An object, declared as JSON: a page in somebody's browser cannot send that across origins.
    pub fn read(headers: &HeaderMap, body: &[u8]) -> Result<Self, Problem> {
        require_json(headers, "send application/json")?;
        let object: Map<String, Value> =
            serde_json::from_slice(body).map_err(|error| Problem::bad_request(error.to_string()).remedy(REMEDY))?;
        let is_zero = |value: &Value| value.as_str().is_some_and(|text| text.contains('\0'));
        match object.iter().find(|(_, value)| is_zero(value)) {
            Some((name, _)) => Err(Problem::bad_request(format!("{name} has a zero byte in it"))
                .pointer(format!("/{name}"))
                .remedy("leave it out: no database text can hold one")),
            None => Ok(Self(object)),
        }
    }

    /// Takes a member out, if it is there.
    pub fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, Problem> {
        let Some(value) = self.0.remove(name) else { return Ok(None) };
        serde_json::from_value(value)
            .map(Some)
            .map_err(|error| Problem::bad_request(error.to_string()).pointer(format!("/{name}")).remedy(REMEDY))
    }

    /// What is left. Everything must be meant, not just not excluded.
    pub fn filter(self) -> Result<DeadFilter, Problem> {
        let selection: Selection = serde_path_to_error::deserialize(Value::Object(self.0)).map_err(|error| {
            let problem = Problem::bad_request(error.inner().to_string()).remedy(REMEDY);
            problem.pointer(pointer(error.path()))
        })?;
        let Selection { ids, consumer, r#type, error, key, tenant, stage, since, until, all } = selection;
        if ids.as_ref().is_some_and(|ids| ids.is_empty() || ids.len() > IDS_MAX) {
            let detail = format!("a request names 1 to {IDS_MAX} numbers");
            return Err(Problem::bad_request(detail).pointer("/ids").remedy(REMEDY));
        }
        let filter = DeadFilter { ids, consumer, kind: r#type, error_type: error, key, tenant, stage, since, until };
        match (filter == DeadFilter::default(), all) {
            (true, false) => Err(Problem::bad_request("no dead letter is named").remedy(REMEDY)),
            (false, true) => Err(Problem::bad_request("either all are meant, or some")
                .pointer("/all")
                .remedy("leave out all, or everything else that chooses")),
            _ => Ok(filter),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> Result<DeadFilter, Problem> {
        let headers = HeaderMap::from_iter([("content-type".parse().unwrap(), "application/json".parse().unwrap())]);
        let headers: HeaderMap = headers;
        Body::read(&headers, body.as_bytes())?.filter()
    }

    #[test]
    fn a_selection_says_what_it_means() {
        assert_eq!(read(r#"{"all":true}"#).unwrap(), DeadFilter::default());
        assert_eq!(read(r#"{"ids":[1,2]}"#).unwrap().ids, Some(vec![1, 2]));
        assert_eq!(read(r#"{"stage":"relay"}"#).unwrap().stage, Some(Stage::Relay));
        let many = format!(r#"{{"ids":[{}1]}}"#, "1,".repeat(IDS_MAX));
        for (body, parts) in [
            ("{}", vec!["no dead letter is named"]),
            (r#"{"all":false}"#, vec!["no dead letter is named"]),
            (r#"{"all":true,"consumer":"a"}"#, vec!["either all", "/all"]),
            (r#"{"ids":[]}"#, vec!["/ids"]),
            (&many, vec!["1 to 1000", "/ids"]),
            (r#"{"ids":["a"]}"#, vec!["/ids/0"]),
            (r#"{"consumer":7}"#, vec!["/consumer"]),
            (r#"{"key":"a\u0000"}"#, vec!["/key", "zero byte"]),
            (r#"{"since":"yesterday"}"#, vec!["/since"]),
            (r#"{"stage":"broker"}"#, vec!["/stage", "relay"]),
            (r#"{"consummer":"a"}"#, vec!["/consummer"]),
            ("[]", vec!["expected a map"]),
            ("", vec!["EOF"]),
        ] {
            let said = format!("{:?}", read(body).unwrap_err());
            for part in parts {
                assert!(said.contains(part), "{part:?} is missing in {said}");
            }
        }
    }
}
