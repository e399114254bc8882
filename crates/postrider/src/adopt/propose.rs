//! A mapping that a table's columns suggest.

use std::time::Duration;

use super::{Clock, ColumnKind, Format, Mapping, State, TableInfo, TableName, Template};

/// Rows that a worker has taken are free again after this long.
const PROCESSING_TIMEOUT: Duration = Duration::from_secs(300);

/// The mapping that names and types suggest, with `words` that stand in its status column. What cannot be guessed is said.
pub fn propose(name: &TableName, info: &TableInfo, words: &[String]) -> Result<Mapping, String> {
    use ColumnKind::{Boolean, Integer, Json, Text, Uuid};
    let find = |kinds: &[ColumnKind], names: &[&str]| find(info, kinds, names);
    let times = [ColumnKind::Instant, ColumnKind::DateTime];
    let [id] = info.primary_key.as_slice() else {
        return Err(format!("{name} has no primary key of one column, so it cannot be adopted"));
    };
    let payload =
        find(&[Json, Text, ColumnKind::Bytes], &["payload", "content", "data", "body", "message", "eventdata"])
            .ok_or_else(|| format!("no column of {name} looks like a payload"))?;
    let kind = find(&[Text], &["eventtype", "type", "messagetype", "kind", "eventname", "name"]);
    let aggregate = find(&[Text], &["aggregatetype", "entitytype", "aggregate"]);
    let topic = find(&[Text], &["routingkey", "topic", "destination", "channel"]);
    let published_at = find(
        &times,
        &["publishedat", "processedonutc", "processedon", "processedat", "sentat", "dispatchedat", "publishedonutc"],
    );
    let status = find(&[Text], &["status", "state"]);
    let flag = find(&[Boolean], &["published", "ispublished", "processed", "isprocessed", "sent", "dispatched"]);
    let state = match (&status, flag, &published_at) {
        (Some(column), _, _) => status_of(info, column, words),
        (None, Some(column), _) => State::Flag { column },
        (None, None, Some(_)) => State::PublishedAt,
        (None, None, None) => return Err(format!("no column of {name} says whether a row is published")),
    };
    let time = find(
        &times,
        &["createdat", "occurredonutc", "occurredon", "occurredat", "createdonutc", "createdon", "timestamp"],
    );
    let is_number = info.column(id).is_some_and(|column| column.kind == Integer);
    let event_id = find(&[Uuid, Text], &["eventid", "messageid"]).filter(|column| column != id);
    let topic = match (&topic, &aggregate, &kind) {
        (Some(topic), _, _) => format!("{{{topic}}}"),
        (None, Some(aggregate), Some(kind)) => format!("{{{aggregate}|lower}}.{{{kind}|lower}}"),
        (None, _, Some(kind)) => format!("{{{kind}}}"),
        (None, _, None) => return Err(format!("no column of {name} looks like a topic or a type")),
    };
    let kind = match (&aggregate, &kind) {
        (_, Some(kind)) => format!("{{{kind}}}"),
        (_, None) => topic.clone(),
    };
    let message_id = event_id.map_or_else(|| format!("outbox-{{{id}}}"), |column| format!("{{{column}}}"));
    Ok(Mapping {
        name: default_name(&info.name),
        table: name.clone(),
        order: if is_number { None } else { time.clone() },
        key: find(&[Integer, Uuid, Text], &["aggregateid", "entityid", "partitionkey", "key", "orderingkey"]),
        payload,
        headers: find(&[Json], &["headers", "metadata"]),
        tenant: find(&[Integer, Uuid, Text], &["tenantid", "tenant", "orgid"]),
        time,
        state,
        published_at,
        updated_at: find(&times, &["updatedat", "modifiedat", "updatedonutc"]),
        attempts: find(&[Integer], &["attempts", "attemptcount", "retrycount", "retries"]),
        attempts_max: find(&[Integer], &["maxattempts", "maxretries", "attemptsmax"]),
        available_at: find(
            &times,
            &["availableat", "nextattemptonutc", "nextattemptat", "nextretryat", "scheduledat", "visibleat"],
        ),
        last_error: find(&[Text], &["lasterror", "lasterrormessage", "errormessage", "error"]),
        topic: Template::parse(&topic)?,
        kind: Template::parse(&kind)?,
        message_id: Template::parse(&message_id)?,
        source: None,
        content_type: crate::event::JSON.to_owned(),
        format: Format::CloudEvents,
        processing_timeout: PROCESSING_TIMEOUT,
        clock: Clock::Utc,
        id: id.clone(),
    })
}

/// A name without case and underscores.
fn plain(name: &str) -> String {
    name.chars().filter(|c| *c != '_').flat_map(char::to_lowercase).collect()
}

/// The column with the first of these names that holds one of these kinds.
fn find(info: &TableInfo, kinds: &[ColumnKind], names: &[&str]) -> Option<String> {
    names.iter().find_map(|name| {
        info.columns
            .iter()
            .find(|column| plain(&column.name) == *name && kinds.contains(&column.kind))
            .map(|column| column.name.clone())
    })
}

/// The words of a status column: those that stand in it or in its default, else the usual ones in the same letters.
fn status_of(info: &TableInfo, column: &str, words: &[String]) -> State {
    let default = info.column(column).and_then(|column| column.default.clone()).unwrap_or_default();
    let default: String = default.trim_start_matches('\'').chars().take_while(|c| *c != '\'').collect();
    let allowed = info.column(column).map(|column| column.words.clone()).unwrap_or_default();
    let known = |names: &[&str]| {
        let all = words.iter().chain([&default]).chain(&allowed);
        all.into_iter().find(|word| names.contains(&plain(word).as_str())).cloned()
    };
    let is_upper = words.iter().chain([&default]).any(|word| word.chars().any(char::is_uppercase));
    let usual = |word: &str| if is_upper { word.to_uppercase() } else { word.to_owned() };
    let has_attempts =
        find(info, &[ColumnKind::Integer], &["attempts", "attemptcount", "retrycount", "retries"]).is_some();
    State::Status {
        column: column.to_owned(),
        pending: known(&["pending", "new", "ready", "unpublished", "queued", "created"])
            .unwrap_or_else(|| usual("pending")),
        processing: known(&["processing", "inprogress", "claimed", "locked"])
            .or_else(|| (has_attempts && allowed.is_empty()).then(|| usual("processing"))),
        published: known(&["published", "processed", "sent", "done", "completed", "dispatched"])
            .unwrap_or_else(|| usual("published")),
        failed: known(&["failed", "error", "dead"])
            .or_else(|| (has_attempts && allowed.is_empty()).then(|| usual("failed"))),
    }
}

/// A name for metrics out of a table's name.
fn default_name(table: &str) -> String {
    let name: String = table
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '_' || c == '-' { c } else { '-' })
        .take(60)
        .collect();
    if name.is_empty() { "outbox".to_owned() } else { name }
}
