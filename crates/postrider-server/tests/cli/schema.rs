//! Whether a value is what the API's description says. It knows the part of JSON Schema that the description uses, and is
//! stricter: a member that is not described is a mistake too.

use std::collections::BTreeMap;

use serde_json::Value;

/// The description that a daemon serves.
pub struct Description(pub Value);

impl Description {
    /// The schema of an answer in JSON; none if it has another media type.
    pub fn answer(&self, method: &str, path: &str, status: u16) -> Option<&Value> {
        let operation = &self.0["paths"][path][method.to_lowercase()];
        assert!(operation.is_object(), "{method} {path} is not described");
        let response = &operation["responses"][status.to_string()];
        assert!(response.is_object(), "{method} {path} is not described to answer {status}");
        let response = self.resolve(response);
        let content = response.get("content")?;
        ["application/json", "application/problem+json"].iter().find_map(|media| content[media].get("schema"))
    }

    /// A schema by its name.
    pub fn named(&self, name: &str) -> &Value {
        &self.0["components"]["schemas"][name]
    }

    /// Everything that is wrong with a value.
    pub fn mistakes(&self, schema: &Value, value: &Value) -> Vec<String> {
        let mut mistakes = Vec::new();
        self.check(schema, value, "", &mut mistakes);
        mistakes
    }

    fn resolve<'a>(&'a self, schema: &'a Value) -> &'a Value {
        match schema["$ref"].as_str().and_then(|reference| reference.strip_prefix('#')) {
            Some(pointer) => self.resolve(self.0.pointer(pointer).expect(pointer)),
            None => schema,
        }
    }

    fn check(&self, schema: &Value, value: &Value, place: &str, mistakes: &mut Vec<String>) {
        let schema = self.resolve(schema);
        if let Some(choices) = schema["anyOf"].as_array() {
            if !choices.iter().any(|choice| self.mistakes(choice, value).is_empty()) {
                mistakes.push(format!("{place}: {value} is none of the choices"));
            }
            return;
        }
        let types: Vec<&str> = match &schema["type"] {
            Value::String(one) => vec![one],
            Value::Array(several) => several.iter().filter_map(Value::as_str).collect(),
            _ if schema["allOf"].is_array() => vec!["object"],
            _ => return,
        };
        if !types.iter().any(|name| is_of(name, value)) {
            return mistakes.push(format!("{place}: {value} is not {types:?}"));
        }
        if let Some(values) = schema["enum"].as_array()
            && !values.contains(value)
        {
            mistakes.push(format!("{place}: {value} is none of {values:?}"));
        }
        if let (Some(minimum), Some(number)) = (schema["minimum"].as_f64(), value.as_f64())
            && number < minimum
        {
            mistakes.push(format!("{place}: {value} is below {minimum}"));
        }
        if schema["format"] == "date-time"
            && let Some(text) = value.as_str()
            && chrono::DateTime::parse_from_rfc3339(text).is_err()
        {
            mistakes.push(format!("{place}: {text:?} is no time"));
        }
        if let Some(items) = value.as_array() {
            for (index, item) in items.iter().enumerate() {
                self.check(&schema["items"], item, &format!("{place}/{index}"), mistakes);
            }
        }
        if let Some(members) = value.as_object() {
            self.check_members(schema, members, place, mistakes);
        }
    }

    fn check_members(
        &self,
        schema: &Value,
        members: &serde_json::Map<String, Value>,
        place: &str,
        mistakes: &mut Vec<String>,
    ) {
        let (mut described, mut required) = (BTreeMap::new(), Vec::new());
        self.members(schema, &mut described, &mut required);
        if described.is_empty() && schema["additionalProperties"].is_null() {
            return;
        }
        for name in required.iter().filter(|name| !members.contains_key(**name)) {
            mistakes.push(format!("{place}: {name} is missing"));
        }
        for (name, member) in members {
            match described.get(name.as_str()) {
                Some(schema) => self.check(schema, member, &format!("{place}/{name}"), mistakes),
                None if schema["additionalProperties"].is_object() => {
                    self.check(&schema["additionalProperties"], member, &format!("{place}/{name}"), mistakes);
                }
                None => mistakes.push(format!("{place}: {name} is not described")),
            }
        }
    }

    /// The members of a schema and of those that it is made of.
    fn members<'a>(
        &'a self,
        schema: &'a Value,
        described: &mut BTreeMap<&'a str, &'a Value>,
        required: &mut Vec<&'a str>,
    ) {
        let schema = self.resolve(schema);
        described.extend(schema["properties"].as_object().into_iter().flatten().map(|(name, of)| (name.as_str(), of)));
        required.extend(schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str));
        for part in schema["allOf"].as_array().into_iter().flatten() {
            self.members(part, described, required);
        }
    }
}

fn is_of(name: &str, value: &Value) -> bool {
    match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => panic!("the type {name} is not known"),
    }
}

#[test]
fn what_is_wrong_is_found() {
    let description = Description(serde_json::json!({"components": {"schemas": {
        "Base": {"type": "object", "properties": {"id": {"type": "integer", "minimum": 0}}, "required": ["id"]},
        "Thing": {"allOf": [{"$ref": "#/components/schemas/Base"}, {"type": "object", "required": ["at"], "properties": {
            "at": {"type": ["string", "null"], "format": "date-time"},
            "kind": {"type": "string", "enum": ["a"]},
            "some": {"type": "array", "items": {"anyOf": [{"$ref": "#/components/schemas/Base"}, {"type": "null"}]}}}}]},
    }}}));
    let schema = description.named("Thing").clone();
    let mistakes = |value: Value| description.mistakes(&schema, &value);
    let good = serde_json::json!({"id": 1, "at": null, "kind": "a", "some": [null, {"id": 2}]});
    assert_eq!(mistakes(good), Vec::<String>::new());
    for (bad, part) in [
        (serde_json::json!({"at": null}), "id is missing"),
        (serde_json::json!({"id": 1}), "at is missing"),
        (serde_json::json!({"id": -1, "at": null}), "below 0"),
        (serde_json::json!({"id": "1", "at": null}), "/id: \"1\" is not"),
        (serde_json::json!({"id": 1, "at": "noon"}), "is no time"),
        (serde_json::json!({"id": 1, "at": null, "kind": "b"}), "none of"),
        (serde_json::json!({"id": 1, "at": null, "some": [{"id": "x"}]}), "/some/0"),
        (serde_json::json!({"id": 1, "at": null, "more": 1}), "more is not described"),
        (serde_json::json!([]), "is not"),
    ] {
        let found = mistakes(bad);
        assert!(found.iter().any(|mistake| mistake.contains(part)), "{part:?} is missing in {found:?}");
    }
}
