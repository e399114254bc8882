//! One attempt to apply events: admission, handler, commit.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::claimed;
use super::slot::SlotRun;
use super::verdict::{HandlerError, Verdict, failed};
use super::{BatchHandler, Handler, Place, RemoteHandler};
use crate::broker::{Aside, AsideKind};
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::inbox::{Admission, Body, Failed, Held, Inbox};
use crate::trace::Process;

/// How a consumer applies events.
pub(super) enum Way<Tx> {
    /// One by one, in the transaction of their admission.
    Inside(Arc<dyn Handler<Tx>>),
    /// Many in one transaction; what failed together, one by one.
    Together { batch: Arc<dyn BatchHandler<Tx>>, singly: Arc<dyn Handler<Tx>> },
    /// Elsewhere; the inbox learns of it afterwards.
    Outside(Arc<dyn RemoteHandler>),
}

impl<Tx: Send + 'static> Way<Tx> {
    pub fn together(batch: impl BatchHandler<Tx> + 'static) -> Self {
        let batch: Arc<dyn BatchHandler<Tx>> = Arc::new(batch);
        Way::Together { singly: Arc::new(Singly(batch.clone())), batch }
    }

    /// Why nothing is applied at the moment, if so.
    pub fn trouble(&self) -> Option<String> {
        match self {
            Way::Outside(handler) => handler.trouble(),
            Way::Inside(_) | Way::Together { .. } => None,
        }
    }
}

struct Singly<Tx>(Arc<dyn BatchHandler<Tx>>);

#[async_trait]
impl<Tx: Send> Handler<Tx> for Singly<Tx> {
    async fn handle(&self, tx: &mut Tx, event: &Event) -> Result<(), HandlerError> {
        self.0.handle_all(tx, &[Arc::new(event.clone())]).await
    }
}

/// What one attempt came to.
pub(super) enum Outcome {
    Done,
    Behind,
    Forged,
    /// Applied elsewhere, or skipped there; the inbox does not know yet.
    Delivered {
        is_skipped: bool,
    },
    /// The handler said so.
    Said(Verdict),
    /// The store or the destination could not be used; it is not the event's fault.
    Away(Error),
}

/// Applies one event. A panic is the caller's to catch.
pub(super) async fn one<I: Inbox>(run: Arc<SlotRun<I>>, event: Arc<Event>, held: Option<Arc<Held>>) -> Outcome {
    let result = match run.way.as_ref() {
        Way::Outside(handler) => deliver(&run, handler.as_ref(), &event, held.as_deref()).await,
        Way::Inside(handler) | Way::Together { singly: handler, .. } => {
            apply(&run, handler.as_ref(), &event, held.as_deref()).await
        }
    };
    result.unwrap_or_else(blame)
}

/// Applies the events of one transaction together; says for each what its admission was. An outcome other than that is
/// the outcome of them all.
pub(super) async fn many<I: Inbox>(
    run: Arc<SlotRun<I>>,
    handler: Arc<dyn BatchHandler<I::Tx>>,
    events: Arc<[Arc<Event>]>,
) -> std::result::Result<Vec<Admission>, Outcome> {
    apply_all(&run, handler.as_ref(), &events).await.unwrap_or_else(|error| Err(blame(error)))
}

/// What the store says about the place is not the event's fault. The rest is: a constraint that is checked at the commit,
/// or a handler that went on after a failed statement.
fn blame(error: Error) -> Outcome {
    let kind = error.kind();
    if !kind.belongs_to_event() && kind != Kind::Other {
        return Outcome::Away(error);
    }
    Outcome::Said(Verdict::Retry { failed: failed(kind.as_str(), &error), after: None })
}

async fn apply<I: Inbox>(
    run: &SlotRun<I>,
    handler: &dyn Handler<I::Tx>,
    event: &Event,
    held: Option<&Held>,
) -> Result<Outcome> {
    let consumer = run.spec.name.as_str();
    // Before the transaction, which must not wait for it.
    let (event, unfetched) = claimed::fetch(run, event).await;
    let event = event.as_ref();
    let mut tx = run.inbox.begin().await?;
    match run.admit(&mut tx, event, held).await? {
        Admission::New => {}
        Admission::Done => {
            // A held message that was applied before leaves the store.
            match held {
                Some(_) => run.inbox.commit(tx).await?,
                None => run.inbox.rollback(tx).await?,
            }
            run.meter.duplicate();
            return Ok(Outcome::Done);
        }
        Admission::Behind => {
            run.inbox.rollback(tx).await?;
            return Ok(Outcome::Behind);
        }
        Admission::Forged => {
            run.inbox.rollback(tx).await?;
            return Ok(Outcome::Forged);
        }
    }
    // Asked after the admission: an event that was applied before does not need its payload again.
    if let Some(said) = unfetched {
        run.inbox.rollback(tx).await?;
        return Ok(Outcome::Said(said));
    }
    let (span, traced) = Process::begin(consumer, event).unzip();
    let given = traced.as_ref().unwrap_or(event);
    // The handler's own time: waiting for a connection, or for SQLite's one writer, is not its fault.
    let said = in_time(run.spec.handler_timeout, handler.handle(&mut tx, given)).await;
    match said {
        None => {
            // In the middle of whatever it did; the driver rolls back when the connection answers again.
            drop(tx);
            let said = too_slow(run.spec.handler_timeout);
            end(span, Err(&said));
            Ok(Outcome::Said(said))
        }
        Some(Ok(())) => {
            run.inbox.commit(tx).await?;
            end(span, Ok(()));
            count_applied(run, event, held);
            Ok(Outcome::Done)
        }
        Some(Err(Verdict::Skip)) => {
            run.set_aside_skipped(event, held).await?;
            run.inbox.skip(&mut tx, consumer, event).await?;
            run.inbox.commit(tx).await?;
            end(span, Err(&Verdict::Skip));
            run.meter.skipped();
            Ok(Outcome::Done)
        }
        Some(Err(said)) => {
            end(span, Err(&said));
            run.inbox.rollback(tx).await?;
            Ok(of_verdict(said))
        }
    }
}

async fn apply_all<I: Inbox>(
    run: &SlotRun<I>,
    handler: &dyn BatchHandler<I::Tx>,
    events: &[Arc<Event>],
) -> Result<std::result::Result<Vec<Admission>, Outcome>> {
    let consumer = run.spec.name.as_str();
    let mut whole = Vec::with_capacity(events.len());
    for event in events {
        match claimed::fetch(run, event).await {
            (_, Some(said)) => return Ok(Err(Outcome::Said(said))),
            (Cow::Borrowed(_), None) => whole.push(event.clone()),
            (Cow::Owned(fetched), None) => whole.push(Arc::new(fetched)),
        }
    }
    let events = whole.as_slice();
    let mut tx = run.inbox.begin().await?;
    let admissions = run.inbox.admit_all(&mut tx, consumer, events).await?;
    let new: Vec<Arc<Event>> = events
        .iter()
        .zip(&admissions)
        .filter(|(_, to)| **to == Admission::New)
        .map(|(event, _)| event.clone())
        .collect();
    if new.is_empty() {
        run.inbox.rollback(tx).await?;
        return Ok(Ok(admissions));
    }
    let mut given = Cow::Borrowed(new.as_slice());
    let mut spans = Vec::new();
    for (n, event) in new.iter().enumerate() {
        if let Some((span, traced)) = Process::begin(consumer, event) {
            spans.push(span);
            given.to_mut()[n] = Arc::new(traced);
        }
    }
    let end_all = |said: Result<(), &Verdict>| spans.into_iter().for_each(|span| end(Some(span), said));
    match in_time(run.spec.handler_timeout, handler.handle_all(&mut tx, &given)).await {
        None => {
            drop(tx);
            let said = too_slow(run.spec.handler_timeout);
            end_all(Err(&said));
            Ok(Err(Outcome::Said(said)))
        }
        Some(Ok(())) => {
            run.inbox.commit(tx).await?;
            end_all(Ok(()));
            run.meter.applied_all(&new);
            Ok(Ok(admissions))
        }
        Some(Err(said)) => {
            end_all(Err(&said));
            run.inbox.rollback(tx).await?;
            Ok(Err(of_verdict(said)))
        }
    }
}

/// Without a transaction while the other side works.
async fn deliver<I: Inbox>(
    run: &SlotRun<I>,
    handler: &dyn RemoteHandler,
    event: &Event,
    held: Option<&Held>,
) -> Result<Outcome> {
    let admission = match held {
        // It was not applied when it was held; recording it lets it leave the store.
        Some(held) if run.inbox.has_applied(held).await? => return Ok(Outcome::Delivered { is_skipped: false }),
        Some(_) => Admission::New,
        None => run.inbox.look(&run.spec.name, event).await?,
    };
    match admission {
        Admission::New => {}
        Admission::Done => {
            run.meter.duplicate();
            return Ok(Outcome::Done);
        }
        Admission::Behind => return Ok(Outcome::Behind),
        Admission::Forged => return Ok(Outcome::Forged),
    }
    let (whole, unfetched) = claimed::fetch(run, event).await;
    if let Some(said) = unfetched {
        return Ok(Outcome::Said(said));
    }
    let (span, traced) = Process::begin(&run.spec.name, &whole).unzip();
    let said = in_time(run.spec.handler_timeout, handler.deliver(traced.as_ref().unwrap_or(&whole))).await;
    let said = said.unwrap_or_else(|| Err(too_slow(run.spec.handler_timeout)));
    end(span, said.as_ref().copied());
    Ok(match said {
        Ok(()) => Outcome::Delivered { is_skipped: false },
        Err(Verdict::Skip) => {
            run.set_aside_skipped(event, held).await?;
            Outcome::Delivered { is_skipped: true }
        }
        Err(said) => of_verdict(said),
    })
}

/// Writes down that an event was applied or skipped elsewhere.
pub(super) async fn record<I: Inbox>(
    run: &SlotRun<I>,
    event: &Event,
    held: Option<&Held>,
    is_skipped: bool,
) -> Result<Admission> {
    let consumer = run.spec.name.as_str();
    let mut tx = run.inbox.begin().await?;
    let admission = run.admit(&mut tx, event, held).await?;
    if is_skipped && admission == Admission::New {
        run.inbox.skip(&mut tx, consumer, event).await?;
    }
    run.inbox.commit(tx).await?;
    match admission {
        Admission::New if is_skipped => run.meter.skipped(),
        Admission::New => count_applied(run, event, held),
        _ => run.meter.duplicate(),
    }
    Ok(admission)
}

fn count_applied<I: Inbox>(run: &SlotRun<I>, event: &Event, held: Option<&Held>) {
    match held {
        Some(held) if held.origin.is_replayed => run.meter.applied_again(),
        _ => run.meter.applied(event),
    }
}

/// Ends a span with what a handler said.
fn end(span: Option<Process>, said: Result<(), &Verdict>) {
    let Some(span) = span else { return };
    match said {
        Ok(()) => span.done("applied"),
        Err(Verdict::Skip) => span.done("skipped"),
        Err(Verdict::Snooze(_)) => span.done("snoozed"),
        Err(Verdict::Retry { failed, .. } | Verdict::Reject(failed)) => span.failed(&failed.error_type),
        Err(Verdict::Away(error)) => span.failed(error.kind().as_str()),
    }
}

fn of_verdict(said: Verdict) -> Outcome {
    match said {
        Verdict::Away(error) => Outcome::Away(error),
        said => Outcome::Said(said),
    }
}

async fn in_time(
    limit: Duration,
    handling: impl Future<Output = Result<(), HandlerError>>,
) -> Option<std::result::Result<(), Verdict>> {
    let answer = tokio::time::timeout(limit, handling).await.ok()?;
    Some(answer.map_err(|HandlerError(said)| said))
}

fn too_slow(limit: Duration) -> Verdict {
    retry("timeout", format!("the handler did not answer within {limit:?}"))
}

pub(super) fn retry(error_type: &str, error: String) -> Verdict {
    let failed = Failed::new(error_type, error, Vec::new());
    Verdict::Retry { failed, after: None }
}

impl<I: Inbox> SlotRun<I> {
    async fn admit(&self, tx: &mut I::Tx, event: &Event, held: Option<&Held>) -> Result<Admission> {
        match held {
            Some(held) => self.inbox.admit_held(tx, held).await,
            None => self.inbox.admit(tx, &self.spec.name, event).await,
        }
    }

    /// Before the commit: a crash in between sends it twice, which a place for people bears.
    async fn set_aside_skipped(&self, event: &Event, held: Option<&Held>) -> Result<()> {
        if !self.broker.has_places() || self.spec.skipped_to == Place::Nowhere {
            return Ok(());
        }
        let failed = Failed::new("skipped", format!("no handler for the type {:?}", event.kind()), Vec::new());
        let aside = Aside {
            consumer: &self.spec.name,
            kind: AsideKind::Skipped,
            place: &self.spec.skipped_to,
            message: Body::Event(event),
            failed: &failed,
            attempts: held.map_or(1, |held| held.attempts.max(1)),
            origin: held.map(|held| &held.origin),
        };
        self.broker.set_aside(&aside).await
    }
}
