//! Log lines on stderr: JSON with a fixed schema (O4), or pretty for people.
//!
//! The schema is docs/reference/log.schema.json. A JSON line has `timestamp`, `level`, `service`, `error_type`, `message`, `causes` and `context`; `error_type` and
//! `causes` are there only when something went wrong. Everything else that an event or the spans around it carry is in
//! `context`. No payload ever is.

use std::fmt::{self, Write as _};
use std::io::{IsTerminal, Write as _};

use serde::Serialize;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::{LogConfig, LogFormat};

/// The longest text of a line; what is longer is cut.
const TEXT_BYTES_MAX: usize = 4096;

/// Installs the subscriber, once per process, and says whether it writes JSON. RUST_LOG wins over the configured level.
pub fn init(log: &LogConfig) -> bool {
    let is_json = match log.format {
        LogFormat::Json => true,
        LogFormat::Auto => !std::io::stderr().is_terminal(),
        LogFormat::Pretty => false,
    };
    let (filter, complaint) = filter(log.level);
    // The filter stands beside the layer, for all layers: as the filter of one layer it loses the event that follows a
    // `tracing::enabled!`, which sqlx calls all the time.
    let registry = tracing_subscriber::registry().with(filter);
    // Fails only where a test harness has installed one of its own before us.
    let _ = if is_json {
        tell_panics();
        registry.with(Json { service: log.service.clone() }).try_init()
    } else {
        let is_coloured = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(is_coloured);
        registry.with(layer.with_target(false)).try_init()
    };
    if let Some(complaint) = complaint {
        tracing::warn!(error_type = "config", "{complaint}");
    }
    is_json
}

/// Warnings on stderr, for commands that end at once: plain, unless somebody wants them otherwise.
pub fn init_quiet(format: Option<LogFormat>) {
    let format = format.unwrap_or(LogFormat::Pretty);
    let _ = init(&LogConfig { format, level: LevelFilter::WARN, service: "postrider".to_owned() });
}

/// A panic is a line like any other.
fn tell_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let said = panic.payload_as_str().unwrap_or("it panicked");
        tracing::error!(error_type = "panic", place, remedy = "report it, with this line", "a task ended: {said}");
    }));
}

/// Targets and levels, as `RUST_LOG` has them; filters by the names of spans and fields would need a regex engine.
fn filter(level: LevelFilter) -> (Targets, Option<String>) {
    // Of the drivers' troubles the library makes errors of its own, with a remedy; told twice they only confuse. And
    // sqlx passes on the server's notices, which may hold values of rows.
    let default = || {
        let targets = [("lapin", LevelFilter::OFF), ("sqlx", LevelFilter::ERROR)];
        Targets::new().with_default(level).with_targets(targets)
    };
    match std::env::var("RUST_LOG") {
        Ok(directives) if !directives.trim().is_empty() => match directives.parse::<Targets>() {
            Ok(filter) => (filter, None),
            Err(error) => (default(), Some(format!("RUST_LOG is ignored: {error}"))),
        },
        _ => (default(), None),
    }
}

/// Writes one JSON object a line.
struct Json {
    service: String,
}

impl Json {
    fn line<'a>(&'a self, metadata: &Metadata<'_>, mut context: Map<String, Value>, fields: Fields) -> Line<'a> {
        context.extend(fields.context);
        context.insert("target".to_owned(), metadata.target().into());
        Line {
            timestamp: chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Micros, true),
            level: metadata.level().as_str(),
            service: &self.service,
            error_type: fields.error_type,
            message: fields.message,
            causes: fields.causes,
            context,
        }
    }
}

/// The schema, in the order in which people read it.
#[derive(Serialize)]
struct Line<'a> {
    timestamp: String,
    level: &'static str,
    service: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error_type: Option<String>,
    message: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    causes: Vec<String>,
    context: Map<String, Value>,
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Json {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, ctx: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let Some(span) = ctx.span(id) {
            span.extensions_mut().insert(fields);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, ctx: Context<'_, S>) {
        if let Some(span) = ctx.span(id)
            && let Some(fields) = span.extensions_mut().get_mut::<Fields>()
        {
            values.record(fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, ctx: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let mut context = Map::new();
        for span in ctx.event_scope(event).into_iter().flat_map(|scope| scope.from_root()) {
            if let Some(fields) = span.extensions().get::<Fields>() {
                context.extend(fields.context.clone());
            }
        }
        let line = self.line(event.metadata(), context, fields);
        if let Ok(mut text) = serde_json::to_string(&line) {
            text.push('\n');
            // A log that cannot be written must not stop the relay.
            let _ = std::io::stderr().lock().write_all(text.as_bytes());
        }
    }
}

/// What an event or a span carries.
#[derive(Default)]
struct Fields {
    message: String,
    error_type: Option<String>,
    causes: Vec<String>,
    context: Map<String, Value>,
}

impl Fields {
    fn put(&mut self, field: &Field, value: Value) {
        let value = cut(value);
        match (field.name(), value) {
            ("message", Value::String(text)) => self.message = text,
            ("error_type", Value::String(text)) => self.error_type = Some(text),
            // `causes = ?error.causes()`: a list of strings, in a notation that is JSON for nearly all of them.
            ("causes", Value::String(text)) => {
                self.causes = serde_json::from_str(&text).unwrap_or_else(|_| vec![text]);
            }
            (name, value) => {
                self.context.insert(name.trim_start_matches("r#").to_owned(), value);
            }
        }
    }
}

/// A text of somebody else's, a handler's error for example, may have any length; a line has an end.
fn cut(value: Value) -> Value {
    match value {
        Value::String(mut text) if text.len() > TEXT_BYTES_MAX => {
            text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
            text.push('…');
            Value::String(text)
        }
        value => value,
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value.into());
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        let mut next = value.source();
        while let Some(cause) = next {
            self.causes.push(cause.to_string());
            next = cause.source();
        }
        if let Some(error) = value.downcast_ref::<postrider::Error>() {
            self.error_type = Some(error.kind().as_str().to_owned());
        }
        self.put(field, value.to_string().into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = write!(text, "{value:?}");
        self.put(field, text.into());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Collects the lines that the JSON layer would write.
    struct Collect(Json, Arc<Mutex<Vec<Value>>>);

    impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Collect {
        fn on_event(&self, event: &Event<'_>, _ctx: Context<'_, S>) {
            let mut fields = Fields::default();
            event.record(&mut fields);
            let line = serde_json::to_value(self.0.line(event.metadata(), Map::new(), fields)).unwrap();
            self.1.lock().unwrap().push(line);
        }
    }

    #[test]
    fn lines_have_the_schema() {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let layer = Collect(Json { service: "shop".to_owned() }, lines.clone());
        let subscriber =
            tracing_subscriber::registry().with(Targets::new().with_default(LevelFilter::INFO)).with(layer);
        tracing::subscriber::with_default(subscriber, || {
            // sqlx asks like this before each statement; the next event must not suffer for the answer.
            assert!(!tracing::enabled!(tracing::Level::DEBUG));
            tracing::warn!(destination = "default", lane = 3, error_type = "unavailable", causes = ?["a \"b\"", "c"], "no {}", "broker");
        });
        let lines = lines.lock().unwrap();
        assert_eq!(lines.len(), 1);
        let line = &lines[0];
        assert_eq!(line["level"], "WARN");
        assert_eq!(line["service"], "shop");
        assert_eq!(line["error_type"], "unavailable");
        assert_eq!(line["message"], "no broker");
        assert_eq!(line["causes"], serde_json::json!(["a \"b\"", "c"]));
        assert_eq!(line["context"]["destination"], "default");
        assert_eq!(line["context"]["lane"], 3);
        assert!(line["timestamp"].as_str().unwrap().ends_with('Z'));
    }

    #[test]
    fn a_line_has_an_end() {
        assert_eq!(cut("short".into()), "short");
        let long = cut("é".repeat(4000).into());
        assert_eq!(long.as_str().map(str::len), Some(TEXT_BYTES_MAX + '…'.len_utf8()));
    }
}
