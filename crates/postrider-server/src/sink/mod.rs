//! Sinks: who is told of alerts. The log is always told, by whoever watches; these are the others.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use postrider::alert::{Alert, Urgency};
use postrider::{Error, Kind, Result};
use serde::Serialize;

use crate::config::{AlertsConfig, SinkConfig, SinkKind};

mod smtp;
mod webhook;

/// No sink may take longer to take a message.
pub const TELL_WAIT: Duration = Duration::from_secs(10);

/// What is told, as the webhook writes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// The same at every try, so that a receiver can tell a repetition.
    pub id: String,
    /// The number of the alert; none of one that no store knows.
    pub alert: Option<i64>,
    /// `firing` or `resolved`.
    pub state: &'static str,
    /// The rule.
    pub rule: String,
    /// What it is about.
    pub subject: String,
    /// How bad.
    pub urgency: Urgency,
    /// What is wrong, or was.
    pub summary: String,
    /// What to do.
    pub remedy: String,
    /// Since when.
    pub fired_at: DateTime<Utc>,
    /// Until when.
    pub resolved_at: Option<DateTime<Utc>>,
    /// The name of this service in the log.
    pub service: String,
    /// Where people can look.
    pub url: Option<String>,
}

impl Message {
    /// The message of an alert.
    pub fn of(id: String, alert: &Alert, has_number: bool, service: &str, alerts: &AlertsConfig) -> Self {
        Self {
            id,
            alert: has_number.then_some(alert.id),
            state: if alert.resolved_at.is_some() { "resolved" } else { "firing" },
            rule: alert.rule.clone(),
            subject: alert.subject.clone(),
            urgency: alert.urgency,
            summary: alert.summary.clone(),
            remedy: alert.remedy.clone(),
            fired_at: alert.fired_at,
            resolved_at: alert.resolved_at,
            service: service.to_owned(),
            url: (!alerts.url.is_empty()).then(|| format!("{}/#/alerts", alerts.url)),
        }
    }

    /// One line: what, about what, how bad.
    pub fn title(&self) -> String {
        let what = match (self.state, self.urgency) {
            ("resolved", _) => "RESOLVED",
            (_, Urgency::Critical) => "CRITICAL",
            (_, Urgency::Warning) => "WARNING",
        };
        let about = if self.subject.is_empty() { &self.service } else { &self.subject };
        format!("[{what}] {} {about}", self.rule)
    }

    /// Everything, for people.
    pub fn text(&self) -> String {
        let mut lines = vec![self.summary.clone()];
        let shown = |time: DateTime<Utc>| time.format("%Y-%m-%d %H:%M:%S UTC").to_string();
        match self.resolved_at {
            Some(until) => lines.push(format!("Over at {}; it began at {}.", shown(until), shown(self.fired_at))),
            None => {
                lines.push(format!("What to do: {}", self.remedy));
                lines.push(format!("Since {}.", shown(self.fired_at)));
            }
        }
        lines.extend(self.url.clone());
        lines.join("\n")
    }
}

/// Somebody who is told.
#[async_trait]
pub trait Sink: Send + Sync {
    /// Tells, once. `Ok` means that the other side has taken it. Called concurrently; the caller bounds the time, and may
    /// drop the future.
    async fn tell(&self, message: &Message) -> Result<()>;
}

/// A sink with its name.
#[derive(Clone)]
pub struct Named {
    /// The name.
    pub name: String,
    /// The sink.
    pub sink: Arc<dyn Sink>,
}

impl Named {
    /// Tells, within [`TELL_WAIT`].
    pub async fn tell(&self, message: &Message) -> Result<()> {
        match tokio::time::timeout(TELL_WAIT, self.sink.tell(message)).await {
            Ok(result) => result,
            Err(_) => {
                let what = format!("it took nothing within {} s", TELL_WAIT.as_secs());
                Err(Error::new(Kind::Unavailable, what))
            }
        }
    }
}

/// All sinks of a configuration.
pub fn build(sinks: &[SinkConfig]) -> Result<Vec<Named>> {
    let build = |config: &SinkConfig| -> Result<Named> {
        let sink: Result<Arc<dyn Sink>> = match &config.kind {
            SinkKind::Webhook(webhook) => webhook::Json::new(webhook).map(|sink| Arc::new(sink) as Arc<dyn Sink>),
            SinkKind::Slack(webhook) => webhook::Slack::new(webhook).map(|sink| Arc::new(sink) as Arc<dyn Sink>),
            SinkKind::Smtp(smtp) => smtp::build(smtp),
        };
        let sink = sink.map_err(|error| error.context(format_args!("sink {:?}", config.name)))?;
        Ok(Named { name: config.name.clone(), sink })
    };
    sinks.iter().map(build).collect()
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A message of an alert that fires.
    pub fn message() -> Message {
        Message {
            id: "alert-1".to_owned(),
            alert: Some(17),
            state: "firing",
            rule: "breaker_open".to_owned(),
            subject: "relay/default".to_owned(),
            urgency: Urgency::Critical,
            summary: "relay/default: <refused> & more".to_owned(),
            remedy: "start it".to_owned(),
            fired_at: "2026-11-16T10:00:00Z".parse().unwrap(),
            resolved_at: None,
            service: "postrider".to_owned(),
            url: None,
        }
    }

    #[test]
    fn people_read_what_is_wrong_and_what_to_do() {
        let firing = message();
        assert_eq!(firing.title(), "[CRITICAL] breaker_open relay/default");
        let text = "relay/default: <refused> & more\nWhat to do: start it\nSince 2026-11-16 10:00:00 UTC.";
        assert_eq!(firing.text(), text);
        let over = Message {
            state: "resolved",
            resolved_at: Some("2026-11-16T10:05:00Z".parse().unwrap()),
            url: Some("https://p.example/#/alerts".to_owned()),
            ..firing
        };
        assert_eq!(over.title(), "[RESOLVED] breaker_open relay/default");
        assert!(over.text().ends_with(
            "Over at 2026-11-16 10:05:00 UTC; it began at 2026-11-16 10:00:00 UTC.\nhttps://p.example/#/alerts"
        ));
    }
}
