//! The streams on the server: declared when they are missing, read back, refused when they could drop what nobody has read.

use std::time::Duration;

use async_nats::jetstream::context::{CreateStreamErrorKind, GetStreamErrorKind};
use async_nats::jetstream::stream::{Config, DiscardPolicy, Info, RetentionPolicy, StorageType, Stream};
use async_nats::jetstream::{self, ErrorCode};

use super::error::{classify, of_code};
use super::link::Live;
use super::settings::NatsSettings;
use crate::doctor::{Finding, Severity};
use crate::error::{Error, Kind, Result};

/// Repetitions within this time are dropped by JetStream. Later ones are known to the inbox.
const DUPLICATE_WINDOW: Duration = Duration::from_secs(120);

/// The stream for the events, declared if need be. [`Kind::Mismatch`] names what is unsafe.
pub(super) async fn events(live: &Live, settings: &NatsSettings, shown: &str) -> Result<Stream> {
    let stream = ensure(live, &settings.stream, settings.subjects(), settings, shown).await?;
    let found = faults(stream.cached_info(), settings);
    match found.into_iter().find(|finding| finding.severity == Severity::Error) {
        None => Ok(stream),
        Some(fault) => Err(Error::new(Kind::Mismatch, fault.message).with_remedy(fault.remedy)),
    }
}

/// The stream for what is set aside.
pub(super) async fn places(live: &Live, settings: &NatsSettings, shown: &str) -> Result<Stream> {
    let subjects = format!("{}.>", settings.places_prefix());
    ensure(live, &settings.places_stream(), subjects, settings, shown).await
}

async fn ensure(live: &Live, name: &str, subjects: String, settings: &NatsSettings, shown: &str) -> Result<Stream> {
    if let Some(stream) = find(live, name, shown).await? {
        return Ok(stream);
    }
    if !settings.declare {
        return Err(Error::new(Kind::Missing, format!("the stream {name:?} does not exist on NATS at {shown}"))
            .with_remedy(format!(
                "create it on disk with the subjects {subjects}, or let Postrider declare it (declare = true)"
            )));
    }
    let config = Config {
        name: name.to_owned(),
        subjects: vec![subjects],
        storage: StorageType::File,
        retention: RetentionPolicy::Limits,
        discard: DiscardPolicy::New,
        num_replicas: settings.replicas,
        duplicate_window: DUPLICATE_WINDOW,
        max_bytes: -1,
        max_messages: -1,
        max_messages_per_subject: -1,
        max_consumers: -1,
        max_message_size: -1,
        ..Config::default()
    };
    let doing = || format!("create the stream {name:?}");
    live.jetstream.create_stream(config).await.map_err(|error| match error.kind() {
        CreateStreamErrorKind::JetStream(said) => of_code(said.error_code(), &said.to_string(), doing(), shown),
        _ => classify(error, doing(), shown),
    })
}

/// A stream, if it is there.
pub(super) async fn find(live: &Live, name: &str, shown: &str) -> Result<Option<Stream>> {
    let doing = || format!("look at the stream {name:?}");
    match live.jetstream.get_stream(name).await {
        Ok(stream) => Ok(Some(stream)),
        Err(error) => match error.kind() {
            GetStreamErrorKind::JetStream(said) if said.error_code() == ErrorCode::STREAM_NOT_FOUND => Ok(None),
            GetStreamErrorKind::JetStream(said) => Err(of_code(said.error_code(), &said.to_string(), doing(), shown)),
            _ => Err(without_jetstream(live, error, doing(), shown)),
        },
    }
}

/// Nobody who answers is another trouble when the server has no JetStream at all.
fn without_jetstream(live: &Live, error: jetstream::context::GetStreamError, doing: String, shown: &str) -> Error {
    match live.client.try_server_info() {
        Some(info) if !info.jetstream => Error::new(Kind::Missing, format!("NATS at {shown} runs without JetStream"))
            .with_remedy("enable it in the server's configuration (jetstream { store_dir: … })"),
        _ => classify(error, doing, shown),
    }
}

/// What could lose an event, or makes the stream useless to us.
pub(super) fn faults(info: &Info, settings: &NatsSettings) -> Vec<Finding> {
    const CHECK: &str = "nats.stream";
    let config = &info.config;
    let name = &config.name;
    let mut found = Vec::new();
    let mut refuse = |message: String, remedy: &str| found.push(Finding::error(CHECK, message, remedy));
    if config.storage != StorageType::File {
        refuse(
            format!("the stream {name:?} is kept in memory: a restart loses all events"),
            "create it anew with file storage",
        );
    }
    if config.retention != RetentionPolicy::Limits {
        refuse(
            format!("the stream {name:?} removes what one consumer has read, before others have"),
            "create it anew with retention limits",
        );
    }
    let subjects = settings.subjects();
    if !config.subjects.iter().any(|subject| *subject == subjects || subject == ">") {
        refuse(
            format!("the stream {name:?} does not have the subjects {subjects}"),
            "add the subjects to the stream, or correct the settings stream and prefix",
        );
    }
    if config.no_ack || config.sealed || config.mirror.is_some() {
        refuse(
            format!("the stream {name:?} confirms no messages (no_ack), is sealed, or mirrors another one"),
            "use a stream of its own for events",
        );
    }
    let has_limit = config.max_messages > 0 || config.max_bytes > 0 || config.max_messages_per_subject > 0;
    if has_limit && config.discard == DiscardPolicy::Old {
        refuse(
            format!("the stream {name:?} drops its oldest events when it is full, read or not"),
            "set discard to new, or remove max_msgs, max_bytes and max_msgs_per_subject",
        );
    }
    if !config.max_age.is_zero() {
        found.push(Finding::warning(
            "nats.max_age",
            format!("the stream {name:?} drops events after {:?}, read or not", config.max_age),
            "make max_age longer than any consumer may be away",
        ));
    }
    if config.duplicate_window.is_zero() {
        found.push(Finding::warning(
            "nats.duplicates",
            format!("the stream {name:?} does not know repetitions; consumers without an inbox see them"),
            "set duplicate_window to 2 minutes",
        ));
    }
    let servers = info.cluster.as_ref().map_or(1, |cluster| cluster.replicas.len() + 1);
    let is_cluster = info.cluster.as_ref().is_some_and(|cluster| cluster.name.is_some());
    found.push(match (config.num_replicas, is_cluster) {
        (1, true) => Finding::warning(
            "nats.replicas",
            format!(
                "the stream {name:?} is kept on one server of a cluster: while it is away nothing can be published"
            ),
            "set replicas to 3",
        ),
        (replicas, _) => Finding::ok("nats.replicas", format!("{replicas} of {servers} servers keep {name:?}")),
    });
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Severity;

    fn info(change: impl FnOnce(&mut serde_json::Value)) -> Info {
        let mut info = serde_json::json!({
            "config": {
                "name": "postrider", "subjects": ["postrider.>"], "retention": "limits", "storage": "file",
                "discard": "old", "num_replicas": 1, "max_msgs": -1, "max_bytes": -1, "max_msgs_per_subject": -1,
                "duplicate_window": 120_000_000_000u64,
            },
            "created": "2026-11-16T03:00:00Z",
            "state": {
                "messages": 0, "bytes": 0, "first_seq": 1, "last_seq": 0, "consumer_count": 0,
                "first_ts": "2026-11-16T03:00:00Z", "last_ts": "2026-11-16T03:00:00Z",
            },
        });
        change(&mut info["config"]);
        serde_json::from_value(info).unwrap()
    }

    fn severities(change: impl FnOnce(&mut serde_json::Value)) -> Vec<Severity> {
        let found = faults(&info(change), &NatsSettings::default());
        found.into_iter().map(|finding| finding.severity).collect()
    }

    #[test]
    fn what_could_lose_events_is_refused() {
        assert_eq!(severities(|_| ()), [Severity::Ok]);
        type Change = fn(&mut serde_json::Value);
        let unsafe_ones: [Change; 7] = [
            |config| config["storage"] = "memory".into(),
            |config| config["retention"] = "interest".into(),
            |config| config["retention"] = "workqueue".into(),
            |config| config["subjects"] = serde_json::json!(["other.>"]),
            |config| config["max_msgs"] = 10.into(),
            |config| config["max_bytes"] = 10.into(),
            |config| config["no_ack"] = true.into(),
        ];
        for change in unsafe_ones {
            assert_eq!(severities(change)[0], Severity::Error);
        }
        let full = |config: &mut serde_json::Value| {
            config["max_msgs"] = 10.into();
            config["discard"] = "new".into();
        };
        assert_eq!(severities(full), [Severity::Ok], "it refuses new ones instead");
        let aging = |config: &mut serde_json::Value| {
            config["max_age"] = 1_000_000_000u64.into();
            config["duplicate_window"] = 0.into();
        };
        assert_eq!(severities(aging), [Severity::Warning, Severity::Warning, Severity::Ok]);
    }
}
