//! `[[outbox]]`: tables of services that are relayed as they are.

use std::time::Duration;

use postrider::adopt::{Clock, Format, Mapping, State, TableName, Template};

use super::settings::Settings;

/// An `[[outbox]]`.
#[derive(Debug, Clone)]
pub struct OutboxConfig {
    /// Which column means what.
    pub mapping: Mapping,
    /// Where its events go.
    pub destination: String,
}

/// Every `[[outbox]]`.
pub fn read(settings: &mut Settings) -> Vec<OutboxConfig> {
    let mut outboxes: Vec<OutboxConfig> = Vec::new();
    for n in 1..=settings.items("outbox") {
        let prefix = format!("outbox.{n}");
        let Some(mapping) = mapping(settings, &prefix) else { continue };
        if outboxes.iter().any(|other| other.mapping.name == mapping.name) {
            settings.complain(&format!("{prefix}.name"), "is taken by another outbox", None);
        }
        if outboxes.iter().any(|other| other.mapping.table == mapping.table) {
            let help = "one table is relayed once; two would publish its rows in turn";
            settings.complain(&format!("{prefix}.table"), "is adopted already", Some(help.to_owned()));
        }
        let destination = settings.text(&format!("{prefix}.destination"));
        outboxes.push(OutboxConfig { mapping, destination });
    }
    outboxes
}

fn mapping(settings: &mut Settings, prefix: &str) -> Option<Mapping> {
    let key = |name: &str| format!("{prefix}.{name}");
    let table = settings.parsed(&key("table"), |text| match text {
        "" => Err("is missing; `postrider adopt inspect <table>` writes a mapping".to_owned()),
        text => TableName::parse(text),
    });
    let name = settings.parsed(&key("name"), |name| match name {
        "" => Ok(None),
        super::super::config::DESTINATION => Err("is taken by [broker]"),
        name if super::is_name(name) => Ok(Some(name.to_owned())),
        _ => Err("must have 1 to 60 letters, digits, '-' or '_'"),
    });
    let mut required = |name: &str, what: &str| {
        settings.parsed(&key(name), |text| match text {
            "" => Err(format!("is missing; {what}")),
            text => Ok(text.to_owned()),
        })
    };
    let id = required("id", "name the column of the primary key");
    let payload = required("payload", "name the column that is sent");
    let template = |settings: &mut Settings, name: &str, default: Option<String>| {
        settings.parsed(&key(name), |text| match (text, &default) {
            ("", Some(default)) => Template::parse(default),
            ("", None) => {
                Err("is missing; write a column in braces, such as \"{routing_key}\", or a text around it".to_owned())
            }
            (text, _) => Template::parse(text),
        })
    };
    let topic = template(settings, "topic", None);
    let kind = template(settings, "type", topic.as_ref().map(ToString::to_string));
    let message_id = template(settings, "message_id", id.as_ref().map(|id| format!("outbox-{{{id}}}")));
    let optional = |name: &str| Some(settings.text(&key(name))).filter(|text| !text.is_empty());
    let column = [
        "order",
        "key",
        "headers",
        "tenant",
        "time",
        "published_at",
        "updated_at",
        "attempts",
        "attempts_max",
        "available_at",
        "last_error",
        "source",
        "status",
        "published",
        "status_processing",
        "status_failed",
    ]
    .map(optional);
    let [
        order,
        key_column,
        headers,
        tenant,
        time,
        published_at,
        updated_at,
        attempts,
        attempts_max,
        available_at,
        last_error,
        source,
        status,
        published,
        processing,
        failed,
    ] = column;
    let state = match (status, published) {
        (Some(_), Some(_)) => {
            settings.complain(&key("published"), "stands beside status; only one of them says what is published", None);
            return None;
        }
        (Some(column), None) => State::Status {
            column,
            pending: settings.text(&key("status_pending")),
            processing,
            published: settings.text(&key("status_published")),
            failed,
        },
        (None, Some(column)) => State::Flag { column },
        (None, None) if published_at.is_some() => State::PublishedAt,
        (None, None) => {
            let help = "a column of words, of true and false, or of a time that is null before";
            settings.complain(
                &key("status"),
                "is missing, and so are published and published_at",
                Some(help.to_owned()),
            );
            return None;
        }
    };
    let format = settings.choice(&key("format"), &[("cloudevents", Format::CloudEvents), ("raw", Format::Raw)]);
    let clock = match settings.text(&key("clock")).as_str() {
        "utc" | "UTC" => Clock::Utc,
        zone => Clock::Zone(zone.to_owned()),
    };
    if matches!(&clock, Clock::Zone(zone) if zone.is_empty()) {
        settings.complain(&key("clock"), "must be \"utc\" or a time zone, such as \"Asia/Ho_Chi_Minh\"", None);
    }
    let processing_timeout = Duration::from_secs(settings.integer(&key("processing_timeout_s"), 1..=86_400));
    let (table, name) = (table?, name?);
    Some(Mapping {
        name: name.unwrap_or_else(|| super::name_of(&table.name)),
        table,
        id: id?,
        order,
        key: key_column,
        payload: payload?,
        headers,
        tenant,
        time,
        state,
        published_at,
        updated_at,
        attempts,
        attempts_max,
        available_at,
        last_error,
        topic: topic?,
        kind: kind?,
        message_id: message_id?,
        source,
        content_type: settings.text(&key("content_type")),
        format: format?,
        processing_timeout,
        clock,
    })
}
