//! The loop that sends one instance's pulses.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{EVERY, Pulse, Pulses, Tally};
use crate::task;

/// How long an end waits for the last pulse. The instance then looks lost, which a person can tell from the log.
const END_WAIT: Duration = Duration::from_secs(5);

/// Why nothing goes through at the moment; none while it does.
pub type Why = Box<dyn Fn() -> Option<String> + Send + Sync>;

/// Tells the store of one instance: that it lives, what it has counted, and why its breaker is open.
///
/// It has a task of its own and one call at a time, so that a slow store delays neither leases nor events. What the
/// store did not take is told with the next pulse.
pub struct Heart {
    pulses: Arc<dyn Pulses>,
    group: String,
    owner: String,
    tally: Arc<Tally>,
    why: Why,
}

impl Heart {
    /// Of the instance `owner` of `group`. Nothing is told before [`Heart::start`].
    pub fn new(
        pulses: Arc<dyn Pulses>,
        group: impl Into<String>,
        owner: impl Into<String>,
        tally: Arc<Tally>,
        why: impl Fn() -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        Self { pulses, group: group.into(), owner: owner.into(), tally, why: Box::new(why) }
    }

    /// Begins: the first pulse at once, then every few seconds until [`Beating::end`].
    pub fn start(self) -> Beating {
        let stop = CancellationToken::new();
        let task = tokio::spawn(self.run(stop.clone()).boxed());
        Beating { task, stop: stop.drop_guard() }
    }

    async fn run(self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            self.beat().await;
            tokio::select! {
                () = stop.cancelled() => {}
                () = tokio::time::sleep(EVERY) => {}
            }
        }
        self.beat().await;
        let (pulses, group, owner) = (self.pulses.clone(), self.group.clone(), self.owner.clone());
        let withdrawn = task::start(async move { pulses.withdraw(&group, &owner).await }).await;
        if let Err(error) = withdrawn {
            tracing::debug!(group = %self.group, error_type = error.kind().as_str(), %error,
                "the instance is not withdrawn and will look lost");
        }
    }

    /// One pulse.
    async fn beat(&self) {
        let counts = self.tally.take();
        let pulse = Pulse {
            group: self.group.clone(),
            owner: self.owner.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            breaker: (self.why)(),
            counts: counts.clone(),
        };
        let pulses = self.pulses.clone();
        if let Err(error) = task::start(async move { pulses.pulse(&pulse).await }).await {
            self.tally.give_back(counts);
            tracing::debug!(group = %self.group, error_type = error.kind().as_str(), %error, "a pulse was not taken");
        }
    }
}

/// A heart that beats. Dropped, it ends as well, but nobody waits for it.
pub struct Beating {
    task: JoinHandle<()>,
    stop: DropGuard,
}

impl Beating {
    /// An orderly end: a last pulse with what was counted until now, and the instance is withdrawn.
    pub async fn end(self) {
        self.stop.disarm().cancel();
        if tokio::time::timeout(END_WAIT, self.task).await.is_err() {
            tracing::debug!("the last pulse was not taken in time");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    use async_trait::async_trait;
    use chrono::{DateTime, Utc};

    use super::super::{Bucket, Count, Instance, Metric, Width};
    use super::*;
    use crate::error::Result;
    use crate::error::{Error, Kind};

    #[derive(Default)]
    struct Wall {
        pulses: Mutex<Vec<Pulse>>,
        withdrawn: Mutex<Vec<(String, String)>>,
        is_away: AtomicBool,
        hangs: AtomicBool,
    }

    #[async_trait]
    impl Pulses for Wall {
        async fn pulse(&self, pulse: &Pulse) -> Result<()> {
            if self.hangs.load(Ordering::Relaxed) {
                std::future::pending::<()>().await;
            }
            if self.is_away.load(Ordering::Relaxed) {
                return Err(Error::new(Kind::Unavailable, "away"));
            }
            self.pulses.lock().unwrap().push(pulse.clone());
            Ok(())
        }
        async fn withdraw(&self, group: &str, owner: &str) -> Result<()> {
            self.withdrawn.lock().unwrap().push((group.to_owned(), owner.to_owned()));
            Ok(())
        }
        async fn instances(&self) -> Result<Vec<Instance>> {
            Ok(Vec::new())
        }
        async fn buckets(&self, _: Width, _: Duration, _: &[Metric]) -> Result<(DateTime<Utc>, Vec<Bucket>)> {
            Ok((DateTime::UNIX_EPOCH, Vec::new()))
        }
    }

    fn published(pulses: &[Pulse]) -> Vec<u64> {
        let count = |pulse: &Pulse| pulse.counts.iter().map(|Count { count, .. }| count).sum();
        pulses.iter().map(count).collect()
    }

    async fn wait(secs: f64) {
        tokio::time::sleep(Duration::from_secs_f64(secs)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn pulses_come_every_five_seconds_and_the_last_at_the_end() {
        let (wall, tally) = (Arc::new(Wall::default()), Arc::new(Tally::new()));
        let beating = Heart::new(wall.clone(), "relay/default", "me", tally.clone(), || Some("down".into())).start();
        wait(0.1).await;
        tally.add(Metric::Published, "", 5);
        wait(5.0).await;
        tally.add(Metric::Published, "", 2);
        beating.end().await;
        let pulses = wall.pulses.lock().unwrap().clone();
        assert_eq!(published(&pulses), [0, 5, 2]);
        assert!(pulses.iter().all(|pulse| pulse.breaker.as_deref() == Some("down") && pulse.owner == "me"));
        assert_eq!(*wall.withdrawn.lock().unwrap(), [("relay/default".to_owned(), "me".to_owned())]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_store_did_not_take_is_told_later() {
        let (wall, tally) = (Arc::new(Wall::default()), Arc::new(Tally::new()));
        wall.is_away.store(true, Ordering::Relaxed);
        let beating = Heart::new(wall.clone(), "g", "me", tally.clone(), || None).start();
        tally.add(Metric::Published, "", 5);
        wait(12.0).await;
        tally.add(Metric::Published, "", 3);
        wall.is_away.store(false, Ordering::Relaxed);
        wait(5.0).await;
        assert_eq!(published(&wall.pulses.lock().unwrap()), [8]);
        drop(beating);
        wait(0.1).await;
        assert_eq!(wall.withdrawn.lock().unwrap().len(), 1, "dropped, it ends all the same");
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_hangs_does_not_hold_up_the_end() {
        let (wall, tally) = (Arc::new(Wall::default()), Arc::new(Tally::new()));
        wall.hangs.store(true, Ordering::Relaxed);
        let beating = Heart::new(wall.clone(), "g", "me", tally, || None).start();
        wait(1.0).await;
        let began = tokio::time::Instant::now();
        beating.end().await;
        assert!(began.elapsed() <= END_WAIT + Duration::from_millis(10));
    }
}
