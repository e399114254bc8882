//! The end of a run: waits until everything has arrived, and says what is missing when it does not.

use std::time::{Duration, Instant};

use super::{GROUPS, Run, SHOW_EVERY, groups};
use crate::testbed::Result;

/// How often the exact counts are asked for.
const COUNT_EVERY: Duration = Duration::from_secs(1);
/// Nothing has moved for this long: it never will. Longer than any back-off or breaker.
const STALL: Duration = Duration::from_secs(90);
/// Redeliveries and settles that are still under way when the last effect was done get this long.
const QUIET_WAIT: Duration = Duration::from_secs(30);

impl Run<'_> {
    /// Waits until every consumer has every committed event; returns what is wrong.
    pub(super) async fn drain(&self) -> Vec<String> {
        match self.arrive().await {
            Ok(()) => {}
            Err(problem) => return vec![problem.to_string()],
        }
        // Duplicates that are still at the broker must be refused by the inbox before the effects are counted.
        let began = Instant::now();
        loop {
            let problem = match self.left_over().await {
                Ok(None) => return Vec::new(),
                Ok(Some(left)) => left,
                Err(error) => error.to_string(),
            };
            if began.elapsed() > QUIET_WAIT {
                return vec![format!("{} s after the last effect: {problem}", QUIET_WAIT.as_secs())];
            }
            tokio::time::sleep(COUNT_EVERY).await;
        }
    }

    async fn arrive(&self) -> Result<()> {
        let (mut shown, mut moved) = (Instant::now(), (Instant::now(), 0));
        loop {
            let done = self.look().await;
            if done != moved.1 {
                moved = (Instant::now(), done);
            }
            if let Ok(true) = self.has_arrived().await {
                return Ok(());
            }
            self.faults.fleet.sweep().await?;
            if shown.elapsed() > SHOW_EVERY {
                self.show(1.0);
                shown = Instant::now();
            }
            self.check_time(moved.0).await?;
            tokio::time::sleep(COUNT_EVERY).await;
        }
    }

    async fn has_arrived(&self) -> Result<bool> {
        let committed = self.faults.ledger.committed().await?;
        for group in groups() {
            if self.faults.ledger.applied(group).await? < committed {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// What is still in the outbox or at the broker.
    async fn left_over(&self) -> Result<Option<String>> {
        let backlog = self.faults.ledger.backlog().await?;
        if backlog > 0 {
            return Ok(Some(format!("{backlog} events are not settled as published")));
        }
        self.faults.broker.lock().await.left_over(self.faults.ledger.as_ref()).await
    }

    /// An error when the run takes too long or nothing has moved since `moved`.
    pub(super) async fn check_time(&self, moved: Instant) -> Result<()> {
        let why = if self.started.elapsed() > self.options.deadline {
            format!("the run is not over after {} s", self.options.deadline.as_secs())
        } else if moved.elapsed() > STALL {
            format!("no event and no effect for {} s", STALL.as_secs())
        } else {
            return Ok(());
        };
        Err(format!("{why}\n{}", self.explain().await).into())
    }

    /// What is missing and where it may be.
    async fn explain(&self) -> String {
        let mut lines = Vec::new();
        let ledger = &self.faults.ledger;
        match ledger.committed().await {
            Ok(committed) => lines.push(format!("{committed} events are committed")),
            Err(error) => lines.push(format!("the database: {error}")),
        }
        for (group, _) in GROUPS {
            match tokio::try_join!(ledger.applied(group), ledger.missing(group)) {
                Ok((applied, missing)) => {
                    lines.push(format!("{group} has applied {applied}; missing are for example:"));
                    lines.extend(missing.into_iter().map(|line| format!("  {line}")));
                }
                Err(error) => lines.push(format!("{group}: {error}")),
            }
        }
        lines.extend(ledger.relay_state().await.unwrap_or_default());
        let held = self.faults.broker.lock().await.state(ledger.as_ref()).await;
        lines.push(held.unwrap_or_else(|error| error.to_string()));
        lines.join("\n")
    }
}
