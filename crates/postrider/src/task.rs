//! Waiting for tasks. Database and broker calls run as tasks of their own, so that a `select!` around them drops only
//! the waiting, never the call.

use tokio::task::JoinHandle;

use crate::error::{Error, Kind, Result};

/// The result of the task, or never when there is none. Cancel-safe.
pub(crate) async fn join<T>(task: &mut Option<JoinHandle<Result<T>>>) -> Result<T> {
    match task {
        Some(task) => task.await.map_err(|error| Error::new(Kind::Other, "a task ended").with_source(error))?,
        None => std::future::pending().await,
    }
}
