//! What is read once for everybody who asks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use postrider::Result;
use tokio::sync::Mutex;

use crate::task;

/// An error is not asked for again for this long: a store that hangs must not collect a queue of those who wait.
const ERROR_KEPT: Duration = Duration::from_secs(1);

/// A value that is read again when somebody asks and it is too old. However many ask, one reads.
pub struct Cached<T> {
    kept_for: Duration,
    kept: Arc<Mutex<Option<Kept<T>>>>,
}

struct Kept<T> {
    at: Instant,
    value: Result<Arc<T>>,
}

impl<T: Send + Sync + 'static> Cached<T> {
    /// Nothing yet.
    pub fn new(kept_for: Duration) -> Self {
        Self { kept_for, kept: Arc::default() }
    }

    /// The value, read by `read` if it is too old. Whoever hangs up meanwhile drops this future; the reading runs to its
    /// end all the same.
    pub async fn get<F>(&self, read: impl FnOnce() -> F + Send + 'static) -> Result<Arc<T>>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let (kept, kept_for) = (self.kept.clone(), self.kept_for);
        let reading = task::detached(async move {
            let mut kept = kept.lock().await;
            if let Some(found) = kept.as_ref().and_then(|kept| kept.fresh(kept_for)) {
                return found;
            }
            let value = read().await.map(Arc::new);
            let fresh = Kept { at: Instant::now(), value };
            let found = fresh.copy();
            *kept = Some(fresh);
            found
        });
        reading.await
    }

    /// Forgets it, because it was changed.
    pub async fn clear(&self) {
        *self.kept.lock().await = None;
    }
}

impl<T> Kept<T> {
    fn fresh(&self, kept_for: Duration) -> Option<Result<Arc<T>>> {
        let kept_for = if self.value.is_ok() { kept_for } else { ERROR_KEPT.min(kept_for) };
        (self.at.elapsed() < kept_for).then(|| self.copy())
    }

    fn copy(&self) -> Result<Arc<T>> {
        match &self.value {
            Ok(value) => Ok(value.clone()),
            Err(error) => Err(error.duplicate()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use postrider::{Error, Kind};

    use super::*;

    #[tokio::test]
    async fn many_ask_and_one_reads() {
        let (cached, reads) = (Arc::new(Cached::new(Duration::from_secs(60))), Arc::new(AtomicU32::new(0)));
        let ask = || {
            let (cached, reads) = (cached.clone(), reads.clone());
            tokio::spawn(
                async move { cached.get(move || async move { Ok(reads.fetch_add(1, Ordering::SeqCst)) }).await },
            )
        };
        let asked: Vec<_> = (0..20).map(|_| ask()).collect();
        for found in asked {
            assert_eq!(*found.await.unwrap().unwrap(), 0);
        }
        cached.clear().await;
        assert_eq!(*ask().await.unwrap().unwrap(), 1, "what was forgotten is read again");
    }

    #[tokio::test]
    async fn whoever_hangs_up_does_not_stop_the_reading() {
        let cached = Arc::new(Cached::new(Duration::from_secs(60)));
        let (go, wait) = tokio::sync::oneshot::channel::<()>();
        let reading = cached.get(move || async move {
            let _ = wait.await;
            Ok(7)
        });
        assert!(tokio::time::timeout(Duration::from_millis(10), reading).await.is_err());
        go.send(()).unwrap();
        assert_eq!(*cached.get(|| async { Ok(8) }).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn an_error_is_told_to_all_who_wait() {
        let cached = Cached::<u32>::new(Duration::from_secs(60));
        let away = || async { Err(Error::new(Kind::Unavailable, "away")) };
        assert_eq!(cached.get(away).await.unwrap_err().kind(), Kind::Unavailable);
        let again = cached.get(|| async { Ok(1) }).await;
        assert_eq!(again.unwrap_err().message(), "away", "not asked again within a second");
    }
}
