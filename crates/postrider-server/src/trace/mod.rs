//! Sends spans to an OpenTelemetry collector: OTLP over HTTP, in JSON.
//!
//! Traces help people and are worth no event: the queue is bounded, what the collector does not take is dropped and
//! counted, and nothing waits for it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use postrider::http::{HttpClient, HttpSettings, Request};
use postrider::metrics;
use postrider::trace::{Span, Tracer};
use postrider::{Error, Kind, Result};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::config::Config;

mod otlp;

/// Spans that wait to be sent; a few seconds of a busy relay.
const QUEUE: usize = 16_384;
/// Spans of one request; about 300 kB.
const BATCH: usize = 512;
/// The longest that a span waits for others.
const EVERY: Duration = Duration::from_secs(1);
/// A collector that takes longer is left alone for a while.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long the end waits for the last spans to be sent.
const END_WAIT: Duration = Duration::from_secs(5);
/// Where OTLP wants traces.
const PATH: &str = "v1/traces";

/// Begins to record spans, if the config wants it.
pub fn start(config: &Config) -> Result<Option<Exporting>> {
    let Some(trace) = &config.trace else { return Ok(None) };
    let named = |error: Error| error.context("trace.url");
    let mut request = Request::post(&format!("{}/{PATH}", trace.url.expose().trim_end_matches('/'))).map_err(named)?;
    if let Some(authorization) = &trace.authorization {
        let named = |error: Error| error.context("trace.authorization");
        request = request.header("authorization", authorization.expose()).map_err(named)?;
    }
    let client =
        HttpClient::new(HttpSettings { timeout: TIMEOUT, connect_timeout: TIMEOUT, ..HttpSettings::default() })?;
    let (queue, spans) = mpsc::channel(QUEUE);
    if !postrider::trace::install(Arc::new(Queue(queue))) {
        return Err(Error::new(Kind::Other, "there is another tracer in this process"));
    }
    let stop = CancellationToken::new();
    let resource = otlp::resource(&config.log.service);
    let exporter = Exporter { client, request, resource, spans, is_failing: false };
    Ok(Some(Exporting { task: tokio::spawn(exporter.run(stop.clone()).boxed()), stop }))
}

/// Takes spans while events flow.
struct Queue(mpsc::Sender<Span>);

impl Tracer for Queue {
    fn record(&self, span: Span) {
        if self.0.try_send(span).is_err() {
            metrics::spans(false, 1);
        }
    }
}

/// Spans are being sent.
pub struct Exporting {
    task: JoinHandle<()>,
    stop: CancellationToken,
}

impl Exporting {
    /// Sends what was recorded until now, if the collector takes it soon.
    pub async fn end(self) {
        self.stop.cancel();
        if tokio::time::timeout(END_WAIT, self.task).await.is_err() {
            tracing::debug!("the last spans were not sent in time");
        }
    }
}

struct Exporter {
    client: HttpClient,
    request: Request,
    resource: serde_json::Value,
    spans: mpsc::Receiver<Span>,
    is_failing: bool,
}

impl Exporter {
    async fn run(mut self, stop: CancellationToken) {
        let mut is_over = false;
        while !is_over {
            is_over = tokio::select! {
                () = stop.cancelled() => true,
                () = tokio::time::sleep(EVERY) => false,
            };
            while let Some(batch) = self.next() {
                let count = batch.len() as u64;
                let sent = self.send(&batch).await;
                metrics::spans(sent.is_ok(), count);
                self.tell(sent, count);
            }
        }
    }

    /// What waits, without waiting for more.
    fn next(&mut self) -> Option<Vec<Span>> {
        let batch: Vec<Span> = std::iter::from_fn(|| self.spans.try_recv().ok()).take(BATCH).collect();
        (!batch.is_empty()).then_some(batch)
    }

    /// Once: whoever tries again falls behind. While the collector is away the client's breaker answers at once.
    async fn send(&self, batch: &[Span]) -> Result<()> {
        let request = self.request.clone().json(&otlp::request(&self.resource, batch))?;
        self.client.send_once(&request).await?.accept().map(drop)
    }

    /// Once when it begins to fail, and once when that is over.
    fn tell(&mut self, sent: Result<()>, count: u64) {
        let was_failing = std::mem::replace(&mut self.is_failing, sent.is_err());
        match sent {
            Ok(()) if was_failing => tracing::info!("traces are sent again"),
            Ok(()) => {}
            Err(error) if was_failing => tracing::debug!(error_type = error.kind().as_str(), %error, dropped = count,
                "traces are dropped"),
            Err(error) => tracing::warn!(error_type = error.kind().as_str(), %error, causes = ?error.causes(),
                remedy = "start the collector or correct trace.url; events are not held up", dropped = count,
                "traces cannot be sent and are dropped"),
        }
    }
}
