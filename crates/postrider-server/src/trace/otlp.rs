//! OTLP in JSON: `ExportTraceServiceRequest`. Ids are hexadecimal, times are nanoseconds as text, as the specification asks.

use chrono::{DateTime, Utc};
use postrider::trace::{Span, SpanKind};
use serde_json::{Value, json};

/// Who records.
pub fn resource(service: &str) -> Value {
    let own = [("service.name", service), ("service.version", env!("CARGO_PKG_VERSION"))];
    let instance = postrider::lease::instance_name();
    let all = own.into_iter().chain([("service.instance.id", instance.as_str())]);
    json!({ "attributes": all.map(|(name, value)| attribute(name, value)).collect::<Vec<_>>() })
}

/// The body of a request.
pub fn request(resource: &Value, spans: &[Span]) -> Value {
    let scope = json!({ "name": "postrider", "version": env!("CARGO_PKG_VERSION") });
    let spans: Vec<Value> = spans.iter().map(span).collect();
    json!({ "resourceSpans": [{ "resource": resource, "scopeSpans": [{ "scope": scope, "spans": spans }] }] })
}

fn span(span: &Span) -> Value {
    let kind = match span.kind {
        SpanKind::Producer => 4,
        SpanKind::Consumer => 5,
    };
    let attributes: Vec<Value> = span.attributes.iter().map(|(name, value)| attribute(name, value)).collect();
    let mut json = json!({
        "traceId": format!("{:032x}", span.trace_id),
        "spanId": format!("{:016x}", span.id),
        "parentSpanId": format!("{:016x}", span.parent),
        "name": span.name,
        "kind": kind,
        "startTimeUnixNano": nanos(span.start),
        "endTimeUnixNano": nanos(span.end),
        "attributes": attributes,
    });
    if let Some(state) = &span.state {
        json["traceState"] = state.as_str().into();
    }
    if let Some(error_type) = &span.error_type {
        // 2 is an error; unset means that all went well.
        json["status"] = json!({ "code": 2, "message": error_type });
    }
    json
}

fn attribute(name: &str, value: &str) -> Value {
    json!({ "key": name, "value": { "stringValue": value } })
}

fn nanos(at: DateTime<Utc>) -> String {
    at.timestamp_nanos_opt().unwrap_or_default().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_written_as_the_specification_asks() {
        let span = Span {
            trace_id: 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c,
            id: 0x1f,
            parent: 0xb7ad_6b71_6920_3331,
            name: "publish orders.paid".to_owned(),
            kind: SpanKind::Producer,
            start: "2026-01-01T00:00:00.000001Z".parse().unwrap(),
            end: "2026-01-01T00:00:01Z".parse().unwrap(),
            attributes: vec![("error.type", "refused".to_owned())],
            error_type: Some("refused".to_owned()),
            state: Some("vendor=1".to_owned()),
        };
        let body = request(&resource("shop"), &[span]);
        let resource = &body["resourceSpans"][0]["resource"]["attributes"][0];
        assert_eq!(*resource, json!({ "key": "service.name", "value": { "stringValue": "shop" } }));
        let written = &body["resourceSpans"][0]["scopeSpans"][0]["spans"][0];
        let expected = json!({
            "traceId": "0af7651916cd43dd8448eb211c80319c", "spanId": "000000000000001f",
            "parentSpanId": "b7ad6b7169203331", "name": "publish orders.paid", "kind": 4,
            "startTimeUnixNano": "1767225600000001000", "endTimeUnixNano": "1767225601000000000",
            "attributes": [{ "key": "error.type", "value": { "stringValue": "refused" } }],
            "traceState": "vendor=1", "status": { "code": 2, "message": "refused" },
        });
        assert_eq!(*written, expected);
    }
}
