//! What every client of librdkafka here has in common: its settings, and where its log lines and errors go.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use rdkafka::ClientContext;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::consumer::ConsumerContext;
use rdkafka::error::KafkaError;
use tokio::sync::oneshot;

use super::error::{code, is_denied};
use super::settings::{Address, KafkaSettings};
use crate::error::{Error, Kind, Result};

/// The longest wait before a lost connection is tried again. librdkafka's own 10 s would be most of an outage.
const RECONNECT_MAX: Duration = Duration::from_secs(2);

/// How long a client is kept for calls under way; they have their own bounds, which are shorter.
const SHARED_WAIT: Duration = Duration::from_secs(120);
/// How often they are looked at.
const SHARED_EVERY: Duration = Duration::from_millis(50);

/// Whether Kafka has refused us. librdkafka tries again by itself and reports only that time has passed, so what was said
/// meanwhile is kept here.
#[derive(Default)]
pub(super) struct Refusal(Mutex<Option<String>>);

impl Refusal {
    pub fn said(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn is_over(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn note(&self, reason: &str) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.to_owned());
    }
}

/// Listens to a client. Its texts name brokers and topics, never a record.
#[derive(Clone, Default)]
pub(super) struct Listener {
    pub refusal: Arc<Refusal>,
}

impl ClientContext for Listener {
    fn log(&self, level: RDKafkaLogLevel, fac: &str, message: &str) {
        match level {
            RDKafkaLogLevel::Emerg | RDKafkaLogLevel::Alert | RDKafkaLogLevel::Critical => {
                tracing::warn!(target: "postrider::kafka", fac, "{message}");
            }
            // A lost connection is told of by whoever needed it.
            _ => tracing::debug!(target: "postrider::kafka", fac, "{message}"),
        }
    }

    fn error(&self, error: KafkaError, reason: &str) {
        if code(&error).is_some_and(is_denied) {
            self.refusal.note(reason);
        }
        tracing::debug!(target: "postrider::kafka", %error, reason, "librdkafka");
    }
}

impl ConsumerContext for Listener {}

/// The settings of every client.
pub(super) fn config(settings: &KafkaSettings, address: &Address) -> ClientConfig {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", &address.servers)
        .set("client.id", "postrider")
        // A topic that appears by a typing error has the wrong partitions and no consumers.
        .set("allow.auto.create.topics", "false")
        .set("reconnect.backoff.max.ms", millis(RECONNECT_MAX))
        .set("topic.metadata.refresh.interval.ms", millis(settings.refresh));
    if let Some((user, password)) = &address.login {
        config
            .set("security.protocol", "sasl_plaintext")
            .set("sasl.mechanisms", "PLAIN")
            .set("sasl.username", user)
            .set("sasl.password", password);
    }
    for (name, value) in &settings.properties {
        config.set(name, value);
    }
    config.set_log_level(RDKafkaLogLevel::Warning);
    config
}

/// Milliseconds, as librdkafka wants them.
pub(super) fn millis(duration: Duration) -> String {
    duration.as_millis().min(u128::from(i32::MAX.unsigned_abs())).to_string()
}

/// A call of librdkafka that blocks, on a thread of its own. Not on one of the runtime's: that would wait for it at its end,
/// and a call may take a minute while Kafka is away.
pub(super) fn call<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> Call<T> {
    let (done, answer) = oneshot::channel();
    // Without a thread the other end hears that nobody will answer.
    let _ = std::thread::Builder::new().name("kafka call".to_owned()).spawn(move || drop(done.send(call())));
    Call(answer)
}

/// The answer to a [`call`]. Dropped, the call goes on and nobody hears of it.
pub(super) struct Call<T>(oneshot::Receiver<T>);

impl<T> Future for Call<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        let unanswered = |_| Error::new(Kind::Other, "a call of librdkafka ended unexpectedly");
        Pin::new(&mut self.0).poll(context).map_err(unanswered)
    }
}

/// Ends a client on a thread of its own: it waits for its connections, and a worker of the runtime must not.
pub(super) fn end<T: Send + 'static>(client: T) {
    // Without a thread it is dropped here, when the failed call drops what it was given.
    let _ = std::thread::Builder::new().name("kafka end".to_owned()).spawn(move || drop(client));
}

/// [`end`], for a client that calls under way may still have: the last of them would end it where it happens to run.
pub(super) fn end_shared<T: Send + Sync + 'static>(client: Arc<T>) {
    let ending = move || {
        let began = Instant::now();
        while Arc::strong_count(&client) > 1 && began.elapsed() < SHARED_WAIT {
            std::thread::park_timeout(SHARED_EVERY);
        }
    };
    let _ = std::thread::Builder::new().name("kafka end".to_owned()).spawn(ending);
}
