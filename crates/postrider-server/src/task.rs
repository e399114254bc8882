//! Tasks are spawned boxed: tokio's part of a task is compiled anew for every kind of future that is spawned as it is.

use futures_util::FutureExt;
use postrider::{Error, Kind, Result};
use tokio::sync::oneshot;

/// Runs a call to its end, also when nobody waits for it any longer.
pub async fn detached<T: Send + 'static>(call: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
    let (sender, receiver) = oneshot::channel();
    tokio::spawn(call.map(|result| drop(sender.send(result))).boxed());
    receiver.await.unwrap_or_else(|_| Err(Error::new(Kind::Other, "the call ended unexpectedly")))
}
