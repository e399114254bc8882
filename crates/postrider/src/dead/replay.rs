//! A staged replay: one dead letter, then ten, then a hundred …, so that a handler that is still broken does little harm.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Serialize;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{DeadFilter, DeadLetters, ReplayProgress, Taken};
use crate::error::Result;
use crate::metrics;
use crate::pulse::{Count, Metric, Pulse, Pulses};

/// A replay gives back at most this many per second, unless it is told otherwise.
pub const REPLAY_RATE: u32 = 100;
/// Each stage is this many times the one before.
const STAGE_FACTOR: usize = 10;
/// No stage is larger; progress is asked for by number.
const STAGE_MAX: usize = 1000;
/// How often progress is asked for.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// A replay of many dead letters.
#[derive(Debug, Clone)]
pub struct Replay {
    /// Which.
    pub filter: DeadFilter,
    /// At most this many per second.
    pub rate: u32,
    /// Who asks, for the audit table.
    pub actor: String,
}

/// What a replay has come to, so far or in the end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Replayed {
    /// Given back so far. How many will follow is not known before they are taken.
    pub total: u64,
    /// Applied or published, and gone.
    pub applied: u64,
    /// Given up again.
    pub failed: u64,
    /// Taken back, because the replay was cancelled.
    pub recalled: u64,
    /// Not decided yet.
    pub open: u64,
    /// Why it ended early.
    pub stopped: Option<Stopped>,
}

/// Why a replay ended before all were given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stopped {
    /// Somebody asked for it.
    Cancelled,
    /// Half of a stage failed again.
    HalfFailed,
}

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stopped::Cancelled => "cancelled",
            Stopped::HalfFailed => "half of the last stage failed again",
        })
    }
}

impl Replay {
    /// Gives back stage after stage, and waits until each is decided. Ends when there are no more, when half of a stage
    /// fails again, or on `stop`, which takes back what was not begun. `progress` hears of every change.
    ///
    /// Run it to its end: what it has given back is tried again in any case.
    pub async fn run(
        self,
        desk: &(impl DeadLetters + Pulses + ?Sized),
        stop: &CancellationToken,
        progress: &watch::Sender<Replayed>,
    ) -> Result<Replayed> {
        // What fails again keeps its number and dies anew; only what was dead before is taken, by the clock it dies by.
        let now = desk.dead_now().await?;
        let until = self.filter.until.map_or(now, |until| until.min(now));
        let filter = DeadFilter { until: Some(until), ..self.filter };
        let (mut sum, mut stage) = (Replayed::default(), 1);
        while !stop.is_cancelled() {
            let began = Instant::now();
            let limit = stage.min(self.rate.max(1) as usize).min(STAGE_MAX);
            let taken = desk.dead_replay(&filter, limit, &self.actor).await?;
            if taken.is_empty() {
                return Ok(sum);
            }
            let ids: Vec<i64> = taken.iter().map(|taken| taken.id).collect();
            sum.total += ids.len() as u64;
            let mut decided = watch_stage(desk, &ids, stop, sum, progress).await?;
            count(desk, &taken).await?;
            if decided.open > 0 {
                sum.recalled = desk.dead_recall(&ids, &self.actor).await?;
                // Some may have been decided meanwhile. What was taken back is a dead letter too, but has not failed.
                decided = desk.dead_progress(&ids).await?;
                decided.failed = decided.failed.saturating_sub(sum.recalled);
            }
            sum = Replayed { open: decided.open, ..add(sum, decided) };
            if decided.failed * 2 >= ids.len() as u64 && !stop.is_cancelled() {
                sum.stopped = Some(Stopped::HalfFailed);
            }
            tell(progress, sum);
            if sum.stopped.is_some() {
                return Ok(sum);
            }
            // So many per second, whatever the stage.
            let pace = Duration::from_secs_f64(ids.len() as f64 / f64::from(self.rate.max(1)));
            tokio::select! {
                () = stop.cancelled() => {}
                () = tokio::time::sleep_until(began + pace) => {}
            }
            stage = stage.saturating_mul(STAGE_FACTOR);
        }
        sum.stopped = Some(Stopped::Cancelled);
        tell(progress, sum);
        Ok(sum)
    }
}

/// Waits until all of a stage are decided, or a stop is asked for.
async fn watch_stage(
    desk: &(impl DeadLetters + ?Sized),
    ids: &[i64],
    stop: &CancellationToken,
    sum: Replayed,
    progress: &watch::Sender<Replayed>,
) -> Result<ReplayProgress> {
    loop {
        let found = desk.dead_progress(ids).await?;
        tell(progress, Replayed { open: found.open, ..add(sum, found) });
        if found.open == 0 || stop.is_cancelled() {
            return Ok(found);
        }
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
    }
}

/// Whoever waits for a change hears only of changes.
fn tell(progress: &watch::Sender<Replayed>, now: Replayed) {
    progress.send_if_modified(|last| std::mem::replace(last, now) != now);
}

fn add(sum: Replayed, found: ReplayProgress) -> Replayed {
    Replayed { applied: sum.applied + found.applied, failed: sum.failed + found.failed, ..sum }
}

/// Counts what was decided of a stage, for each consumer.
async fn count(desk: &(impl DeadLetters + Pulses + ?Sized), taken: &[Taken]) -> Result<()> {
    let mut consumers: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
    for Taken { id, consumer } in taken {
        consumers.entry(consumer).or_default().push(*id);
    }
    for (consumer, ids) in consumers {
        let found = desk.dead_progress(&ids).await?;
        metrics::replayed(consumer, found.applied, found.failed);
        let pulse = pulse(consumer, found);
        if let Err(error) = desk.pulse(&pulse).await {
            tracing::debug!(group = pulse.group, error_type = error.kind().as_str(), %error, "a replay was not counted");
        }
    }
    Ok(())
}

/// What a replay came to, for the figures. It is counted by who replays: this process is no instance.
fn pulse(consumer: &str, found: ReplayProgress) -> Pulse {
    // A relay's dead letters carry the name of its group.
    let group = if consumer.starts_with("relay/") { consumer.to_owned() } else { format!("consumer/{consumer}") };
    let count = |label: &str, count| Count { metric: Metric::Replayed, label: label.to_owned(), count };
    Pulse {
        group,
        owner: String::new(),
        version: String::new(),
        breaker: None,
        counts: vec![count("applied", found.applied), count("failed", found.failed)],
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use async_trait::async_trait;
    use chrono::{DateTime, Utc};

    use crate::pulse::{Bucket, Instance, Width};

    use super::super::{DeadCount, DeadDetail, DeadView};
    use super::*;

    /// A desk whose letters are numbers. What is given back is decided at the next look, as `fails` says.
    #[derive(Default)]
    struct Desk {
        dead: Mutex<Vec<i64>>,
        open: Mutex<Vec<i64>>,
        stages: Mutex<Vec<usize>>,
        fails: bool,
        is_still: bool,
        counted: Mutex<Vec<Pulse>>,
    }

    #[async_trait]
    impl Pulses for Desk {
        async fn pulse(&self, pulse: &Pulse) -> Result<()> {
            self.counted.lock().unwrap().push(pulse.clone());
            Ok(())
        }
        async fn withdraw(&self, _: &str, _: &str) -> Result<()> {
            Ok(())
        }
        async fn instances(&self) -> Result<Vec<Instance>> {
            Ok(Vec::new())
        }
        async fn buckets(&self, _: Width, _: Duration, _: &[Metric]) -> Result<(DateTime<Utc>, Vec<Bucket>)> {
            Ok((DateTime::UNIX_EPOCH, Vec::new()))
        }
    }

    impl Desk {
        fn of(count: i64) -> Self {
            Self { dead: Mutex::new((1..=count).collect()), ..Self::default() }
        }

        fn stages(&self) -> Vec<usize> {
            self.stages.lock().unwrap().clone()
        }
    }

    #[async_trait]
    impl DeadLetters for Desk {
        async fn dead_list(&self, _: &DeadFilter, _: i64, _: usize) -> Result<Vec<DeadView>> {
            Ok(Vec::new())
        }
        async fn dead_show(&self, _: i64) -> Result<Option<DeadDetail>> {
            Ok(None)
        }
        async fn dead_payload(&self, _: i64, _: &str) -> Result<Option<Vec<u8>>> {
            Ok(None)
        }
        async fn dead_stats(&self) -> Result<Vec<DeadCount>> {
            Ok(Vec::new())
        }
        async fn dead_now(&self) -> Result<DateTime<Utc>> {
            Ok(DateTime::UNIX_EPOCH)
        }
        async fn dead_replay(&self, filter: &DeadFilter, limit: usize, _: &str) -> Result<Vec<Taken>> {
            assert_eq!(filter.until, Some(DateTime::UNIX_EPOCH), "the desk's clock counts");
            let mut dead = self.dead.lock().unwrap();
            let count = limit.min(dead.len());
            let ids: Vec<i64> = dead.drain(..count).collect();
            self.stages.lock().unwrap().push(ids.len());
            self.open.lock().unwrap().extend(&ids);
            Ok(ids.into_iter().map(|id| Taken { id, consumer: "c".to_owned() }).collect())
        }
        async fn dead_progress(&self, ids: &[i64]) -> Result<ReplayProgress> {
            let mut open = self.open.lock().unwrap();
            if !self.is_still {
                open.clear();
            }
            let open = ids.iter().filter(|id| open.contains(id)).count() as u64;
            let dead = ids.iter().filter(|id| self.dead.lock().unwrap().contains(id)).count() as u64;
            let decided = ids.len() as u64 - open;
            Ok(if self.fails {
                ReplayProgress { applied: 0, failed: decided, open }
            } else {
                ReplayProgress { applied: decided - dead, failed: dead, open }
            })
        }
        async fn dead_recall(&self, ids: &[i64], _: &str) -> Result<u64> {
            // All but one, which somebody has begun with.
            let back = &ids[1..];
            self.open.lock().unwrap().retain(|id| !back.contains(id));
            self.dead.lock().unwrap().extend(back);
            Ok(back.len() as u64)
        }
        async fn dead_discard(&self, _: &DeadFilter, _: &str, _: &str) -> Result<u64> {
            Ok(0)
        }
    }

    async fn run(desk: &Desk, rate: u32, stop: &CancellationToken) -> Replayed {
        let filter = DeadFilter { until: Some(Utc::now()), ..DeadFilter::default() };
        let progress = watch::Sender::new(Replayed::default());
        let replay = Replay { filter, rate, actor: "test".to_owned() };
        let replayed = replay.run(desk, stop, &progress).await.unwrap();
        assert_eq!(*progress.borrow(), replayed, "the last that is told is the end");
        replayed
    }

    #[tokio::test(start_paused = true)]
    async fn stages_grow_up_to_the_rate_and_a_second_has_no_more() {
        let (desk, began) = (Desk::of(1500), Instant::now());
        let replayed = run(&desk, 200, &CancellationToken::new()).await;
        assert_eq!((replayed.total, replayed.applied, replayed.stopped), (1500, 1500, None));
        assert_eq!(desk.stages()[..4], [1, 10, 100, 200]);
        let counted = desk.counted.lock().unwrap().clone();
        let counts: u64 = counted.iter().flat_map(|pulse| &pulse.counts).map(|count| count.count).sum();
        assert_eq!((counts, counted[0].group.as_str(), counted[0].owner.as_str()), (1500, "consumer/c", ""));
        assert!(began.elapsed() >= Duration::from_secs_f64(1500.0 / 200.0));
        let desk = Desk::of(5000);
        run(&desk, 10_000, &CancellationToken::new()).await;
        assert_eq!(desk.stages(), [1, 10, 100, 1000, 1000, 1000, 1000, 889, 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stage_of_which_half_fails_is_the_last() {
        let desk = Desk { fails: true, ..Desk::of(50) };
        let replayed = run(&desk, 100, &CancellationToken::new()).await;
        assert_eq!((replayed.total, replayed.failed, replayed.stopped), (1, 1, Some(Stopped::HalfFailed)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancel_takes_back_what_was_not_begun() {
        let desk = Desk { is_still: true, ..Desk::of(50) };
        let stop = CancellationToken::new();
        stop.cancel();
        assert_eq!(run(&desk, 100, &stop).await.total, 0, "nothing was begun with");

        let stop = CancellationToken::new();
        let cancelling = async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            stop.cancel();
        };
        let (replayed, ()) = tokio::join!(run(&desk, 100, &stop), cancelling);
        assert_eq!((replayed.total, replayed.recalled, replayed.open, replayed.failed), (1, 0, 1, 0));
        assert_eq!(replayed.stopped, Some(Stopped::Cancelled));
    }
}
