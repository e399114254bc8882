//! The description of the API (OpenAPI 3.1), written by hand and checked against the table of endpoints and against real
//! answers.

use axum::http::header;
use axum::response::IntoResponse;

/// The document.
pub const DOCUMENT: &str = include_str!("openapi.json");

/// Serves it.
pub async fn show() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json"), (header::CACHE_CONTROL, "public, max-age=300")], DOCUMENT)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::super::table::endpoints;
    use super::DOCUMENT;
    use crate::access::Need;

    fn document() -> Value {
        serde_json::from_str(DOCUMENT).unwrap()
    }

    /// Method, path and description of each operation.
    fn operations(document: &Value) -> Vec<(String, String, &Value)> {
        let paths = document["paths"].as_object().unwrap().iter();
        let of_path = |(path, item): (&String, &'_ Value)| {
            let path = path.clone();
            let methods: Vec<String> = item.as_object().unwrap().keys().cloned().collect();
            methods.into_iter().map(move |method| (method.to_uppercase(), path.clone())).collect::<Vec<_>>()
        };
        let names: Vec<(String, String)> = paths.flat_map(of_path).collect();
        let find = |(method, path): (String, String)| {
            let operation = &document["paths"][&path][method.to_lowercase()];
            (method, path, operation)
        };
        names.into_iter().map(find).collect()
    }

    #[test]
    fn every_endpoint_is_described_and_nothing_else() {
        let document = document();
        let described: BTreeSet<(String, String, String)> = operations(&document)
            .into_iter()
            .map(|(method, path, operation)| {
                (method, path, operation["x-postrider-role"].as_str().unwrap_or("missing").to_owned())
            })
            .collect();
        let role = |need| match need {
            Need::Nothing => "nothing",
            Need::Metrics | Need::Viewer => "viewer",
            Need::Producer => "producer",
            Need::Operator => "operator",
        };
        let there: BTreeSet<(String, String, String)> = endpoints()
            .into_iter()
            .map(|endpoint| (endpoint.method.to_string(), endpoint.path.to_owned(), role(endpoint.need).to_owned()))
            .collect();
        assert_eq!(described, there);
    }

    #[test]
    fn operations_are_whole() {
        let document = document();
        let mut ids = BTreeSet::new();
        for (method, path, operation) in operations(&document) {
            let place = format!("{method} {path}");
            assert!(ids.insert(operation["operationId"].as_str().unwrap().to_owned()), "{place}");
            assert!(operation["summary"].as_str().is_some_and(|text| !text.is_empty()), "{place}");
            let named: BTreeSet<&str> = path.split(['{', '}']).skip(1).step_by(2).collect();
            let empty = Vec::new();
            let parameters = operation["parameters"].as_array().unwrap_or(&empty);
            let in_path = parameters.iter().filter(|parameter| parameter["in"] == "path");
            assert_eq!(named, in_path.map(|parameter| parameter["name"].as_str().unwrap()).collect(), "{place}");
            let responses = operation["responses"].as_object().unwrap();
            assert!(responses.keys().any(|code| code.starts_with('2')), "{place}");
            if operation["x-postrider-role"] != "nothing" {
                assert!(
                    ["401", "403", "429", "500", "503"].iter().all(|code| responses.contains_key(*code)),
                    "{place}"
                );
            }
            for (code, response) in responses.iter().filter(|(code, _)| !code.starts_with('2')) {
                assert!(response["$ref"].as_str().unwrap().starts_with("#/components/responses/"), "{place} {code}");
            }
        }
    }

    #[test]
    fn references_lead_somewhere_and_nothing_is_left_over() {
        let document = document();
        let mut references = BTreeSet::new();
        collect(&document, &mut references);
        for reference in &references {
            let pointer = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{reference} leads nowhere");
        }
        for name in document["components"]["schemas"].as_object().unwrap().keys() {
            // What the stream sends is named in its description alone.
            let is_sent = ["OverviewFast", "AlertItems"].contains(&name.as_str());
            assert!(is_sent || references.contains(&format!("#/components/schemas/{name}")), "{name} is not used");
        }
    }

    fn collect(value: &Value, references: &mut BTreeSet<String>) {
        match value {
            Value::Object(members) => {
                if let Some(Value::String(reference)) = members.get("$ref") {
                    references.insert(reference.clone());
                }
                members.values().for_each(|member| collect(member, references));
            }
            Value::Array(items) => items.iter().for_each(|item| collect(item, references)),
            _ => {}
        }
    }
}
