//! Chooses a handler by the event's type.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;

use super::{Handler, HandlerError};
use crate::event::{Event, Payload};

/// Handles events of one payload type. The typed sister of [`Handler`].
#[async_trait]
pub trait HandlerOf<P: Payload, Tx: Send>: Send + Sync {
    /// Applies one event; see [`Handler::handle`].
    async fn handle(&self, tx: &mut Tx, payload: P, event: &Event) -> Result<(), HandlerError>;
}

/// A handler made of handlers: one per event type.
///
/// An event whose payload cannot be decoded as its type says goes to the dead letters at once. One of a type that has no
/// handler is skipped (counted, and visible in the inbox), or rejected after [`Router::reject_unknown`].
pub struct Router<Tx: Send> {
    routes: HashMap<&'static str, Arc<dyn Handler<Tx>>>,
    rejects_unknown: bool,
}

impl<Tx: Send> Default for Router<Tx> {
    fn default() -> Self {
        Self { routes: HashMap::new(), rejects_unknown: false }
    }
}

impl<Tx: Send + 'static> Router<Tx> {
    /// A router without handlers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives events of the type [`Payload::TYPE`] to `handler`. The last handler of a type wins.
    #[must_use]
    pub fn on<P: Payload + Send + 'static>(mut self, handler: impl HandlerOf<P, Tx> + 'static) -> Self {
        let typed = Typed { handler, payload: std::marker::PhantomData };
        self.routes.insert(P::TYPE, Arc::new(typed));
        self
    }

    /// Gives events of a type to a handler as they came.
    #[must_use]
    pub fn on_type(mut self, kind: &'static str, handler: impl Handler<Tx> + 'static) -> Self {
        self.routes.insert(kind, Arc::new(handler));
        self
    }

    /// Sends events of a type without a handler to the dead letters instead of skipping them.
    #[must_use]
    pub fn reject_unknown(mut self) -> Self {
        self.rejects_unknown = true;
        self
    }
}

#[async_trait]
impl<Tx: Send + 'static> Handler<Tx> for Router<Tx> {
    async fn handle(&self, tx: &mut Tx, event: &Event) -> Result<(), HandlerError> {
        match self.routes.get(event.kind()) {
            Some(handler) => handler.handle(tx, event).await,
            None if self.rejects_unknown => {
                Err(HandlerError::reject(format!("no handler for the type {:?}", event.kind())))
            }
            None => Err(HandlerError::skip()),
        }
    }
}

struct Typed<P, H> {
    handler: H,
    payload: std::marker::PhantomData<fn() -> P>,
}

#[async_trait]
impl<P: Payload + Send + 'static, Tx: Send + 'static, H: HandlerOf<P, Tx>> Handler<Tx> for Typed<P, H> {
    async fn handle(&self, tx: &mut Tx, event: &Event) -> Result<(), HandlerError> {
        let payload = event.decode::<P>().map_err(HandlerError::reject)?;
        self.handler.handle(tx, payload, event).await
    }
}

#[cfg(test)]
mod tests {
    use super::super::verdict::Verdict;
    use super::*;

    #[derive(serde::Serialize, serde::Deserialize)]
    struct Paid {
        order: String,
    }

    impl Payload for Paid {
        const TYPE: &'static str = "order.paid";
        const TOPIC: &'static str = "orders.paid";
        fn key(&self) -> Option<String> {
            Some(self.order.clone())
        }
    }

    struct Note;

    #[async_trait]
    impl HandlerOf<Paid, Vec<String>> for Note {
        async fn handle(&self, tx: &mut Vec<String>, paid: Paid, _event: &Event) -> Result<(), HandlerError> {
            tx.push(paid.order);
            Ok(())
        }
    }

    fn json(kind: &str, text: &str) -> Event {
        Event::builder("t", kind).payload("application/json", text.to_owned()).build().unwrap()
    }

    #[tokio::test]
    async fn the_type_chooses_the_handler() {
        let router = Router::new().on::<Paid>(Note);
        let mut tx = Vec::new();
        router.handle(&mut tx, &json("order.paid", r#"{"order":"o-1"}"#)).await.unwrap();
        assert_eq!(tx, ["o-1"]);
        let unknown = router.handle(&mut tx, &json("order.sent", "{}")).await.unwrap_err();
        assert!(matches!(unknown.0, Verdict::Skip));
        let garbage = router.handle(&mut tx, &json("order.paid", r#"{"total":1}"#)).await.unwrap_err();
        assert!(matches!(garbage.0, Verdict::Reject(_)));
        let strict = router.reject_unknown();
        let unknown = strict.handle(&mut tx, &json("order.sent", "{}")).await.unwrap_err();
        assert!(matches!(unknown.0, Verdict::Reject(_)));
    }
}
