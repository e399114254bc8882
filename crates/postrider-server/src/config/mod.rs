//! The configuration: `postrider.toml`, one list of defaults, and the environment over both.
//!
//! `defaults.toml` is the list of all settings: what it does not name is unknown, and the type of each default is the
//! type of the setting. [`mod@load`] puts the layers on top of each other, [`settings`] reads typed values out of them and
//! collects every mistake, and [`mod@error`] shows the mistakes at their place in the file.

use std::path::PathBuf;
use std::time::Duration;

use postrider::ConsumerSpec;
use postrider::doctor::Finding;
use postrider::event::PAYLOAD_BYTES_MAX;
use postrider::upkeep::Retention;

use crate::access::Token;

mod access;
mod alerts;
mod broker;
mod check;
mod claim;
mod error;
mod expand;
mod load;
mod outbox;
mod settings;
mod typed;
mod url;

pub use access::{CookieSecurity, HttpConfig};
#[cfg(feature = "smtp")]
pub use alerts::SmtpTls;
pub use alerts::{AlertsConfig, SinkConfig, SinkKind, SmtpSink, WebhookSink};
pub use broker::{BrokerConfig, QueueType, RouteConfig};
pub use check::CheckConfig;
pub use claim::{ClaimConfig, ClaimUrl};
pub use error::{Problems, nearest};
#[cfg(test)]
pub use load::defaults_alone as defaults;
pub use load::{DEFAULTS, load};
pub use outbox::OutboxConfig;
pub use url::{BrokerUrl, Secret, StoreUrl, redact};

/// The destination that is `[broker]`; destinations name lanes, breakers and metrics.
pub const DESTINATION: &str = "default";

/// All settings, checked.
#[derive(Debug, Clone)]
pub struct Config {
    /// The file that was read, if there was one.
    pub file: Option<PathBuf>,
    /// `[store]`
    pub store: StoreUrl,
    /// `[broker]`
    pub broker: BrokerConfig,
    /// `[relay]`
    pub relay: RelayConfig,
    /// `[breaker]`
    pub breaker: BreakerConfig,
    /// `[retention]`
    pub retention: Retention,
    /// `[redis]`: its address, if there is one.
    pub redis: Option<Secret>,
    /// `[claim_check]`, when it is on.
    pub claim_check: Option<ClaimConfig>,
    /// `[http]`
    pub http: HttpConfig,
    /// `[alerts]`
    pub alerts: AlertsConfig,
    /// Every `[[sink]]`
    pub sinks: Vec<SinkConfig>,
    /// `[check]` and every `[[check_sql]]`
    pub check: CheckConfig,
    /// `[log]`
    pub log: LogConfig,
    /// `[trace]`, when it is on.
    pub trace: Option<TraceConfig>,
    /// Every `[[route]]`
    pub routes: Vec<RouteConfig>,
    /// Every `[[outbox]]`
    pub outboxes: Vec<OutboxConfig>,
    /// Every `[[consumer]]`
    pub consumers: Vec<ConsumerConfig>,
    /// Every `[[token]]`
    pub tokens: Vec<Token>,
}

/// Whether it may name a destination or an outbox: it stands in metrics and leases.
pub fn is_name(name: &str) -> bool {
    (1..=60).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
}

/// A name out of a table's.
fn name_of(table: &str) -> String {
    table.chars().map(|c| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' }).take(60).collect()
}

/// A `[[consumer]]`: a service that gets events over HTTP.
#[derive(Debug, Clone)]
pub struct ConsumerConfig {
    /// What it wants, and how it is tried again.
    pub spec: ConsumerSpec,
    /// The destination whose broker it reads from.
    pub destination: String,
    /// Where events are posted to.
    pub url: Secret,
    /// What requests are signed with.
    pub secrets: Vec<Hidden>,
    /// The Authorization header.
    pub authorization: Option<Hidden>,
    /// How long the service may take.
    pub timeout: Duration,
}

/// A value that is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Hidden(String);

impl Hidden {
    /// A value as it was configured.
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The value, for the client alone.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Hidden {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

/// `[relay]`
#[derive(Debug, Clone)]
pub struct RelayConfig {
    /// Whether this instance publishes.
    pub enabled: bool,
    /// How often an idle relay looks for events.
    pub poll: Duration,
    /// Events per read.
    pub page: usize,
    /// Events per publish call.
    pub batch: usize,
    /// Publish calls at once, per lane.
    pub in_flight: usize,
    /// Parts of the outbox.
    pub lanes: u32,
    /// The lease of a lane.
    pub lease: Duration,
    /// Attempts before an event is failed.
    pub attempts_max: u32,
    /// The first wait.
    pub backoff_base: Duration,
    /// The longest wait.
    pub backoff_max: Duration,
    /// The largest random addition.
    pub jitter: Duration,
    /// When a waiting event raises the alert.
    pub stale_after: Duration,
    /// The file that remembers what was published; empty for none.
    pub witness: String,
}

/// `[breaker]`
#[derive(Debug, Clone)]
pub struct BreakerConfig {
    /// Failures in a row that open it.
    pub failures: u32,
    /// How many calls the ratio looks back at.
    pub window: u32,
    /// The share of failures that opens it.
    pub ratio: f64,
    /// The ratio counts from this many calls on.
    pub calls_min: u32,
    /// How long it stays open before a probe.
    pub open: Duration,
}

/// `[log]`
#[derive(Debug, Clone)]
pub struct LogConfig {
    /// How lines look.
    pub format: LogFormat,
    /// The least severe level that is shown.
    pub level: tracing::level_filters::LevelFilter,
    /// The service's name in JSON lines.
    pub service: String,
}

/// `[trace]`
#[derive(Debug, Clone)]
pub struct TraceConfig {
    /// The collector.
    pub url: Secret,
    /// The header `Authorization` for it.
    pub authorization: Option<Hidden>,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Pretty on a terminal, JSON elsewhere.
    Auto,
    /// One JSON object a line.
    Json,
    /// For people.
    Pretty,
}

impl Config {
    /// The largest payload that may be sent.
    pub fn payload_bytes_max(&self) -> usize {
        match self.claim_check {
            // What the broker would not take goes to storage.
            Some(_) => PAYLOAD_BYTES_MAX,
            None => self.broker.payload_bytes_max,
        }
    }

    /// What is allowed but risky: logged by `run`, listed by `doctor`.
    pub fn warnings(&self) -> Vec<Finding> {
        let mut found = Vec::new();
        found.extend(access::warning(&self.http, &self.tokens));
        if self.retention.inbox < self.retention.queue {
            found.push(Finding::warning(
                "config.retention.inbox_days",
                "the inbox forgets events before the embedded broker does, so a late duplicate is applied twice",
                "set retention.inbox_days to more than retention.queue_days",
            ));
        }
        for (route, broker) in self.destinations() {
            if let BrokerUrl::RabbitMq(url) | BrokerUrl::Kafka(url) | BrokerUrl::Nats(url) | BrokerUrl::Redis(url) =
                &broker.url
                && url.is_plaintext_over_network()
            {
                let check = match route.destination.as_str() {
                    DESTINATION => "config.broker.url".to_owned(),
                    name => format!("config.route.{name}.url"),
                };
                found.push(Finding::warning(
                    check,
                    format!("{url} sends the password and all events unencrypted over the network"),
                    "use TLS (amqps://, tls://, rediss://), or keep the broker on this machine or a private network",
                ));
            }
        }
        if let Some(endpoint) = self.claim_check.as_ref().and_then(|claims| claims.endpoint.as_deref())
            && url::is_plaintext_over_network(endpoint, "http://")
        {
            found.push(Finding::warning(
                "config.claim_check.endpoint",
                format!("{endpoint} gets large payloads unencrypted over the network"),
                "use https://, or keep the storage on this machine or a private network",
            ));
        }
        if !self.relay.enabled {
            found.push(Finding::warning(
                "config.relay.enabled",
                "this instance publishes nothing (relay.enabled = false)",
                "make sure that another instance relays, or set relay.enabled = true",
            ));
        }
        found
    }
}
