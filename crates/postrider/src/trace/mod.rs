//! Traces: a producer's request, the relay's publishing and the handler's work as one trace.
//!
//! An event carries the W3C trace context of whoever created it. If that trace is sampled, and a [`Tracer`] is installed,
//! the relay records a span `publish <topic>` below the producer's, and publishes the event with its own span as parent; the
//! consumer records a span `process <topic>` below that for every attempt, and the handler gets the event with that span
//! as parent: what it appends with [`Event::follow`](crate::Event::follow), and what it is sent over HTTP, goes on from there.
//!
//! Nothing else of an event changes on the way, and the stored one never does. Without a tracer, or for a trace that is not
//! sampled, the context travels untouched.

use std::sync::{Arc, OnceLock};

use chrono::{DateTime, Utc};

mod context;
mod span;

pub use context::Context;
pub(crate) use span::{Process, Publish};

/// What records spans. One for the process, like the recorder of metrics.
pub trait Tracer: Send + Sync {
    /// Takes a span that has ended. Must neither block nor fail: it is called while events flow.
    fn record(&self, span: Span);
}

/// A span that has ended. No payload, key or tenant is in it.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    /// The trace.
    pub trace_id: u128,
    /// Its own id.
    pub id: u64,
    /// The span that it is below.
    pub parent: u64,
    /// `publish orders.paid`, `process orders.paid`.
    pub name: String,
    /// What it did.
    pub kind: SpanKind,
    /// When it began.
    pub start: DateTime<Utc>,
    /// When it ended.
    pub end: DateTime<Utc>,
    /// Names are those of OpenTelemetry's conventions for messaging, or begin with `postrider.`.
    pub attributes: Vec<(&'static str, String)>,
    /// The type of the error that ended it, if one did.
    pub error_type: Option<String>,
    /// W3C trace state, as it came.
    pub state: Option<String>,
}

/// What a span did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpanKind {
    /// Gave an event to a broker.
    Producer,
    /// Gave an event to a handler.
    Consumer,
}

static TRACER: OnceLock<Arc<dyn Tracer>> = OnceLock::new();

/// Installs the tracer of this process, before relays and consumers run. False when there is one already; that one stays.
pub fn install(tracer: Arc<dyn Tracer>) -> bool {
    TRACER.set(tracer).is_ok()
}

fn tracer() -> Option<&'static dyn Tracer> {
    TRACER.get().map(Arc::as_ref)
}
