//! Short waits. Timers of tokio go by the millisecond and come up to two late, and a lane that looks at its outbox every half
//! millisecond would spend most of an event's time in them. A thread that sleeps is exact, so one sleeps for the lane.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// From here on a millisecond more does not matter.
const SHORT: Duration = Duration::from_millis(4);

/// The thread calls little.
const STACK_BYTES: usize = 64 * 1024;

/// Waits for a time. Used by one task at a time.
pub(super) struct Nap {
    /// None where no thread could be had: waits are then those of tokio.
    alarm: Option<Arc<Alarm>>,
}

#[derive(Default)]
struct Alarm {
    setting: Mutex<Setting>,
    is_set: Condvar,
    rings: Notify,
}

#[derive(Default)]
struct Setting {
    at: Option<Instant>,
    is_over: bool,
}

impl Nap {
    /// Its thread ends when it is dropped.
    pub fn new() -> Self {
        let alarm = Arc::new(Alarm::default());
        let thread = std::thread::Builder::new().name("nap".to_owned()).stack_size(STACK_BYTES);
        let ringing = alarm.clone();
        Self { alarm: thread.spawn(move || ringing.ring()).is_ok().then_some(alarm) }
    }

    /// Returns at that time, or a little later. Cancel-safe: what counts is the last call.
    pub async fn until(&self, at: Instant) {
        let is_short = at.saturating_duration_since(Instant::now()) < SHORT;
        let Some(alarm) = self.alarm.as_ref().filter(|_| is_short) else {
            return tokio::time::sleep_until(at.into()).await;
        };
        // A time that is past must not keep other tasks waiting, as a timer of tokio would not.
        tokio::task::consume_budget().await;
        // A wait that was given up may ring too.
        while Instant::now() < at {
            alarm.setting().at = Some(at);
            alarm.is_set.notify_one();
            alarm.rings.notified().await;
        }
    }
}

impl Drop for Nap {
    fn drop(&mut self) {
        if let Some(alarm) = &self.alarm {
            alarm.setting().is_over = true;
            alarm.is_set.notify_one();
        }
    }
}

impl Alarm {
    fn ring(&self) {
        let mut setting = self.setting();
        while !setting.is_over {
            let wait = setting.at.map(|at| at.saturating_duration_since(Instant::now()));
            setting = match wait {
                None => self.is_set.wait(setting).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => {
                    setting.at = None;
                    self.rings.notify_one();
                    continue;
                }
                Some(wait) => self.is_set.wait_timeout(setting, wait).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    fn setting(&self) -> MutexGuard<'_, Setting> {
        self.setting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_wait_ends_at_its_time_also_after_one_that_was_given_up() {
        let nap = Nap::new();
        assert!(nap.alarm.is_some());
        for micros in [0, 100, 900, 2_500, 5_000] {
            // On a busy machine it may be over before it is looked at, and is then not given up.
            let given_up = nap.until(Instant::now() + Duration::from_micros(1_500));
            let _ = tokio::time::timeout(Duration::ZERO, given_up).await;
            let at = Instant::now() + Duration::from_micros(micros);
            nap.until(at).await;
            assert!(Instant::now() >= at, "{micros} µs were not waited for");
        }
    }

    #[tokio::test]
    async fn its_thread_ends_with_it() {
        let nap = Nap::new();
        let alarm = Arc::downgrade(nap.alarm.as_ref().expect("a thread"));
        nap.until(Instant::now() + Duration::from_millis(1)).await;
        drop(nap);
        let until = Instant::now() + Duration::from_secs(10);
        while alarm.strong_count() > 0 {
            assert!(Instant::now() < until, "the thread still has it");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}
