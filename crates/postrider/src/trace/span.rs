//! Spans that are under way.

use std::sync::Arc;

use chrono::{DateTime, Utc};

use super::{Context, Span, SpanKind, Tracer, tracer};
use crate::error::Result;
use crate::event::Event;

/// A span that has begun. Dropped before its end, by a panic for example, it is recorded as broken off.
struct Open {
    tracer: &'static dyn Tracer,
    span: Option<Span>,
}

impl Open {
    /// Below the span that the event carries. None without a tracer, or if nobody records the trace.
    fn begin(event: &Event, kind: SpanKind, verb: &str, own: [(&'static str, String); 2]) -> Option<Self> {
        let tracer = tracer()?;
        let context = event.traceparent().and_then(Context::parse).filter(|context| context.is_sampled)?;
        let mut attributes = vec![
            ("messaging.system", "postrider".to_owned()),
            ("messaging.destination.name", event.topic().to_owned()),
            ("messaging.message.id", event.message_id().into_owned()),
            ("postrider.type", event.kind().to_owned()),
        ];
        attributes.extend(own);
        let span = Span {
            trace_id: context.trace_id,
            // Zero is no id.
            id: fastrand::u64(1..),
            parent: context.parent,
            name: format!("{verb} {}", event.topic()),
            kind,
            start: Utc::now(),
            end: DateTime::UNIX_EPOCH,
            attributes,
            error_type: None,
            state: event.tracestate().map(str::to_owned),
        };
        Some(Self { tracer, span: Some(span) })
    }

    /// The event with this span as parent of what comes next.
    fn carried_by(&self, event: &Event) -> Event {
        let mut event = event.clone();
        if let Some(Span { trace_id, id, .. }) = self.span {
            event.traceparent = Some(Context { trace_id, parent: id, is_sampled: true }.to_string().into());
        }
        event
    }

    fn end(&mut self, outcome: &'static str, error_type: Option<&str>) {
        let Some(mut span) = self.span.take() else { return };
        span.end = Utc::now();
        span.attributes.push(("postrider.outcome", outcome.to_owned()));
        if let Some(error_type) = error_type {
            span.attributes.push(("error.type", error_type.to_owned()));
            span.error_type = Some(error_type.to_owned());
        }
        self.tracer.record(span);
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.end("broken_off", Some("broken_off"));
    }
}

/// A publish call: a span for each of its events that has a trace.
#[derive(Default)]
pub(crate) struct Publish {
    /// Empty, or one for each event.
    spans: Vec<Option<Open>>,
}

impl Publish {
    /// Begins, and puts the spans into what is sent. Costs a look at a pointer when there is no tracer.
    pub fn begin(destination: &str, events: &mut [Arc<Event>]) -> Self {
        if tracer().is_none() {
            return Self::default();
        }
        let begin = |event: &mut Arc<Event>| {
            let own =
                [("messaging.operation.type", "publish".to_owned()), ("postrider.destination", destination.to_owned())];
            let open = Open::begin(event, SpanKind::Producer, "publish", own)?;
            *event = Arc::new(open.carried_by(event));
            Some(open)
        };
        Self { spans: events.iter_mut().map(begin).collect() }
    }

    /// Ends each span with its event's result.
    pub fn end(self, results: &[Result<()>]) {
        for (span, result) in self.spans.into_iter().zip(results) {
            let Some(mut span) = span else { continue };
            match result {
                Ok(()) => span.end("published", None),
                Err(error) => span.end("failed", Some(error.kind().as_str())),
            }
        }
    }
}

/// An attempt to apply an event.
pub(crate) struct Process(Open);

impl Process {
    /// Begins; the event for the handler has the span as parent of what it does. None as for [`Open::begin`].
    pub fn begin(consumer: &str, event: &Event) -> Option<(Self, Event)> {
        let own = [
            ("messaging.operation.type", "process".to_owned()),
            ("messaging.consumer.group.name", consumer.to_owned()),
        ];
        let open = Open::begin(event, SpanKind::Consumer, "process", own)?;
        let event = open.carried_by(event);
        Some((Self(open), event))
    }

    /// It was applied, or is nobody's.
    pub fn done(mut self, outcome: &'static str) {
        self.0.end(outcome, None);
    }

    /// It was not.
    pub fn failed(mut self, error_type: &str) {
        self.0.end("failed", Some(error_type));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::install;
    use super::*;
    use crate::error::{Error, Kind};

    #[derive(Default)]
    struct Kept(Mutex<Vec<Span>>);

    impl Tracer for Kept {
        fn record(&self, span: Span) {
            self.0.lock().unwrap().push(span);
        }
    }

    fn event(traceparent: Option<&str>) -> Event {
        let mut builder = Event::builder("orders.paid", "order.paid").key("s3cret").json(&"s3cret").unwrap();
        if let Some(traceparent) = traceparent {
            builder = builder.traceparent(traceparent);
        }
        builder.build().unwrap()
    }

    /// All in one: the tracer is the process's.
    #[test]
    fn spans_hang_together_and_only_sampled_traces_have_them() {
        let sampled = event(Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"));
        let mut events = vec![Arc::new(sampled.clone())];
        Publish::begin("default", &mut events).end(&[Ok(())]);
        assert_eq!(*events[0], sampled, "nothing happens without a tracer");

        let kept = Arc::new(Kept::default());
        assert!(install(kept.clone()));
        assert!(!install(Arc::new(Kept::default())), "the first one stays");
        let unsampled = event(Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"));
        let mut events: Vec<_> =
            [sampled.clone(), unsampled.clone(), event(None), event(Some("nonsense"))].map(Arc::new).to_vec();
        let publish = Publish::begin("default", &mut events);
        publish.end(&[Ok(()), Ok(()), Ok(()), Ok(())]);
        assert_eq!(*events[1], unsampled);
        assert_eq!((events[2].traceparent(), events[3].traceparent()), (None, Some("nonsense")));
        assert_eq!(events[0].fingerprint(), sampled.fingerprint(), "it is the same event to every inbox");
        assert_eq!(events[0].id(), sampled.id());

        let (process, given) = Process::begin("billing", &events[0]).unwrap();
        let next = given.follow("mails.sent", "mail.sent").json(&1).unwrap().build().unwrap();
        process.done("applied");
        let (process, _) = Process::begin("billing", &events[0]).unwrap();
        process.failed("timeout");
        drop(Process::begin("billing", &events[0]).unwrap());
        assert!(Process::begin("billing", &unsampled).is_none());
        let mut refused = vec![Arc::new(sampled)];
        Publish::begin("default", &mut refused).end(&[Err(Error::new(Kind::TooLarge, "no"))]);

        let spans = kept.0.lock().unwrap();
        assert_eq!(spans.len(), 5);
        let [publish, applied, failed, broken, refused] = spans.as_slice() else { panic!("{spans:?}") };
        assert!(spans.iter().all(|span| span.trace_id == 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c));
        assert!(spans.iter().all(|span| span.start <= span.end && !format!("{span:?}").contains("s3cret")));
        assert_eq!(
            (publish.name.as_str(), publish.kind, publish.parent),
            ("publish orders.paid", SpanKind::Producer, 0xb7ad_6b71_6920_3331)
        );
        assert_eq!(
            (applied.name.as_str(), applied.kind, applied.parent),
            ("process orders.paid", SpanKind::Consumer, publish.id)
        );
        assert_eq!(Context::parse(next.traceparent().unwrap()).unwrap().parent, applied.id, "what follows hangs below");
        let error = |span: &Span| span.error_type.clone();
        assert_eq!((error(publish), error(applied)), (None, None));
        assert_eq!((error(failed).as_deref(), error(broken).as_deref()), (Some("timeout"), Some("broken_off")));
        assert_eq!(error(refused).as_deref(), Some("too_large"));
    }
}
