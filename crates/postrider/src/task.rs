//! Calls to databases and brokers run as tasks of their own, so that a `select!` or a time-out around them drops only the
//! waiting, never the call: a driver's future that is dropped half-way may leave its connection in the middle of
//! something.

use std::time::Duration;

use tokio::task::JoinHandle;

use crate::error::{Error, Kind, Result};

/// A database that takes longer than this for one of our statements is as good as gone. The statement is left to its fate;
/// whatever it still does is idempotent or fenced.
pub(crate) const ANSWER_WAIT: Duration = Duration::from_secs(30);

/// Starts a call and bounds the wait for it.
pub(crate) fn start<T: Send + 'static>(
    call: impl Future<Output = Result<T>> + Send + 'static,
) -> JoinHandle<Result<T>> {
    tokio::spawn(async {
        match tokio::time::timeout(ANSWER_WAIT, tokio::spawn(call)).await {
            Ok(result) => result.map_err(ended)?,
            Err(_) => Err(Error::new(
                Kind::Unavailable,
                format!("the database did not answer within {} s", ANSWER_WAIT.as_secs()),
            )),
        }
    })
}

/// The result of the task, or never when there is none. Cancel-safe.
pub(crate) async fn join<T>(task: &mut Option<JoinHandle<Result<T>>>) -> Result<T> {
    match task {
        Some(task) => task.await.map_err(ended)?,
        None => std::future::pending().await,
    }
}

/// The error of a task that panicked or was stopped.
pub(crate) fn ended(error: tokio::task::JoinError) -> Error {
    Error::new(Kind::Other, "a task ended unexpectedly").with_source(error)
}
