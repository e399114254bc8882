//! An inbox with a bug.

use std::sync::Arc;

use async_trait::async_trait;
use postrider::error::Result;
use postrider::event::Event;
use postrider::inbox::{Admission, Held, Inbox, Retries};

/// Commits the inbox row before the effect: when the effect fails the event counts as done.
pub struct InboxFirst<I> {
    /// The real inbox.
    pub inner: Arc<I>,
}

#[async_trait]
impl<I: Inbox> Inbox for InboxFirst<I> {
    type Tx = I::Tx;

    async fn begin(&self) -> Result<I::Tx> {
        self.inner.begin().await
    }
    async fn admit(&self, tx: &mut I::Tx, consumer: &str, event: &Event) -> Result<Admission> {
        let admission = self.inner.admit(tx, consumer, event).await?;
        let own = std::mem::replace(tx, self.inner.begin().await?);
        self.inner.commit(own).await?;
        Ok(admission)
    }
    async fn admit_held(&self, tx: &mut I::Tx, held: &Held) -> Result<Admission> {
        self.inner.admit_held(tx, held).await
    }
    async fn has_applied(&self, held: &Held) -> Result<bool> {
        self.inner.has_applied(held).await
    }
    async fn look(&self, consumer: &str, event: &Event) -> Result<Admission> {
        self.inner.look(consumer, event).await
    }
    async fn skip(&self, tx: &mut I::Tx, consumer: &str, event: &Event) -> Result<()> {
        self.inner.skip(tx, consumer, event).await
    }
    async fn commit(&self, tx: I::Tx) -> Result<()> {
        self.inner.commit(tx).await
    }
    async fn rollback(&self, tx: I::Tx) -> Result<()> {
        self.inner.rollback(tx).await
    }
    fn retries(&self) -> &dyn Retries {
        self.inner.retries()
    }
}
