//! Calls to databases and brokers run as tasks of their own, so that a `select!` or a time-out around them drops only the
//! waiting, never the call: a driver's future that is dropped half-way may leave its connection in the middle of
//! something.
//!
//! Tasks are spawned boxed, here and elsewhere: tokio's part of a task is compiled anew for every kind of future, and was a
//! seventh of all that we compile.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::oneshot;
use tokio::time::Timeout;

use crate::error::{Error, Kind, Result};

/// A database that takes longer than this for one of our statements is as good as gone. The statement is left to its fate;
/// whatever it still does is idempotent or fenced.
pub(crate) const ANSWER_WAIT: Duration = Duration::from_secs(30);

/// A call that is under way: its result, waited for at most [`ANSWER_WAIT`] from its start. Dropped, it goes on by itself.
pub(crate) struct Call<T>(Pin<Box<Timeout<oneshot::Receiver<Result<T>>>>>);

/// Starts a call and bounds the wait for it.
pub(crate) fn start<T: Send + 'static>(call: impl Future<Output = Result<T>> + Send + 'static) -> Call<T> {
    let (sender, receiver) = oneshot::channel();
    // Nobody may wait for it any longer.
    let call = call.map(|result| drop(sender.send(result)));
    tokio::spawn(call.boxed());
    Call(Box::pin(tokio::time::timeout(ANSWER_WAIT, receiver)))
}

impl<T> Future for Call<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        self.0.as_mut().poll(context).map(|answered| match answered {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(Error::new(Kind::Other, "a call ended unexpectedly")),
            Err(_) => {
                let seconds = ANSWER_WAIT.as_secs();
                Err(Error::new(Kind::Unavailable, format!("the database did not answer within {seconds} s")))
            }
        })
    }
}

/// The result of the call, or never when there is none. Cancel-safe.
pub(crate) async fn join<T>(call: &mut Option<Call<T>>) -> Result<T> {
    match call {
        Some(call) => call.await,
        None => std::future::pending().await,
    }
}

/// The error of a task that panicked or was stopped.
pub(crate) fn ended(error: tokio::task::JoinError) -> Error {
    Error::new(Kind::Other, "a task ended unexpectedly").with_source(error)
}
