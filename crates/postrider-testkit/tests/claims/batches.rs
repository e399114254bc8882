//! A storage that fails in the middle of a batch.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use postrider::broker::{Batching, Broker, Subscription};
use postrider::claim::{ClaimCheck, Claims, Hash, Object, Objects};
use postrider::doctor::Finding;
use postrider::event::Event;
use postrider::handler::ConsumerSpec;
use postrider::lease::Lease;
use postrider::{Error, Kind, Result};
use uuid::Uuid;

use crate::bed::event;

/// Refuses one object. The error is one that would be the event's if a broker said it.
struct Refusing(Uuid);

#[async_trait]
impl Objects for Refusing {
    async fn put(&self, path: &str, _content: Bytes, _hash: &Hash) -> Result<()> {
        match path.ends_with(&self.0.to_string()) {
            true => Err(Error::new(Kind::TooLarge, "too large for this bucket")),
            false => Ok(()),
        }
    }

    async fn get(&self, _path: &str, _bytes_max: usize) -> Result<Option<Bytes>> {
        Ok(None)
    }

    async fn delete(&self, _path: &str) -> Result<()> {
        Ok(())
    }

    async fn list(&self, _under: &str, _after: &str, _limit: usize) -> Result<Vec<Object>> {
        Ok(Vec::new())
    }

    fn place(&self) -> String {
        "nowhere".to_owned()
    }
}

/// Remembers what it was given, and refuses one event.
struct Recorder {
    batching: Batching,
    refused: Uuid,
    given: Mutex<Vec<Event>>,
}

#[async_trait]
impl Broker for Recorder {
    fn batching(&self) -> Batching {
        self.batching
    }

    fn check(&self, _event: &Event) -> Result<()> {
        Ok(())
    }

    async fn publish(&self, batch: &[Arc<Event>]) -> Vec<Result<()>> {
        self.given.lock().expect("no panic").extend(batch.iter().map(|event| Event::clone(event)));
        let refuse = |event: &Arc<Event>| match event.id() == self.refused {
            true => Err(Error::new(Kind::Unroutable, "nobody wants it")),
            false => Ok(()),
        };
        batch.iter().map(refuse).collect()
    }

    fn blocked(&self) -> Option<String> {
        None
    }

    async fn subscribe(&self, _consumer: &ConsumerSpec, _lease: &Lease) -> Result<Box<dyn Subscription>> {
        Err(Error::new(Kind::Other, "nobody asks"))
    }

    async fn inspect(&self) -> Result<Vec<Finding>> {
        Ok(Vec::new())
    }
}

/// Publishes a small event, a large one that cannot be stored, one that the broker refuses, and a large one.
async fn publish(batching: Batching) -> (Vec<Option<Kind>>, Vec<Event>) {
    let events = [event("a", 10), event("b", 5_000), event("c", 10), event("d", 5_000)];
    let broker = Arc::new(Recorder { batching, refused: events[2].id(), given: Mutex::default() });
    let claims = Arc::new(Claims::new(Arc::new(Refusing(events[1].id()))));
    let check = ClaimCheck::new(broker.clone(), claims).above_bytes(1_000);
    let results = check.publish(&events.map(Arc::new)).await;
    let kinds = results.into_iter().map(|result| result.err().map(|error| error.kind())).collect();
    let given = broker.given.lock().expect("no panic").clone();
    (kinds, given)
}

#[tokio::test]
async fn an_event_that_cannot_be_stored_does_not_go_and_the_others_do() {
    let (kinds, given) = publish(Batching::Independent).await;
    assert_eq!(kinds, [None, Some(Kind::Other), Some(Kind::Unroutable), None], "each result at its place");
    assert_eq!(given.iter().map(|event| event.key().expect("a key")).collect::<Vec<_>>(), ["a", "c", "d"]);
    assert!(given[2].payload().is_empty());
    assert!(!Kind::Other.belongs_to_event(), "so that no attempt is spent");
}

#[tokio::test]
async fn nothing_of_a_whole_batch_goes_when_one_cannot_be_stored() {
    let (kinds, given) = publish(Batching::Atomic).await;
    assert_eq!(kinds, [Some(Kind::Other); 4]);
    assert!(given.is_empty());
}
