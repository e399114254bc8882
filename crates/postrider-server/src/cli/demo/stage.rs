//! The performance: producers, crew, story and view together, from the first event to the last.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use postrider::store::Store;
use postrider::store::sqlite::SqliteStore;
use tokio_util::sync::CancellationToken;

use super::DemoArgs;
use super::count::{self, Counts};
use super::crew::Crew;
use super::names::DATABASE;
use super::proof::{self, Proof};
use super::shop::{Pace, Shop};
use super::story::Story;
use super::view::{View, grouped};
use crate::cli::failure::Result;

/// How often the counts are read.
const TICK: Duration = Duration::from_millis(100);
/// How long nothing may move before the proof is taken as it is; longer than any takeover.
const STALL: Duration = Duration::from_secs(30);
/// After Ctrl-C the last events get this long.
const DRAIN_WAIT: Duration = Duration::from_secs(10);
/// The shells' exit code for a process that Ctrl-C ended.
const INTERRUPTED: u8 = 130;

const INTRODUCTION: &str = "\
4 producers write accounts and their events in one transaction, and roll some
back. 2 relays publish; the groups billing (2 consumers) and search (1) apply.
One SQLite file, 6 processes, nothing to install.
";
const NEXT: &str = "\
Next: `postrider run` in one terminal, and in another
  postrider send orders.created order.created --key o-1 --payload '{\"order\":\"o-1\"}'";

/// The demo while it runs.
pub struct Stage {
    args: DemoArgs,
    events: u64,
    store: SqliteStore,
    stop: CancellationToken,
    database: PathBuf,
    crew: Crew,
    story: Story,
    view: View,
}

impl Stage {
    /// Starts the crew on a store that is ready.
    pub fn new(
        args: DemoArgs,
        events: u64,
        store: SqliteStore,
        stop: CancellationToken,
        directory: &Path,
    ) -> Result<Self> {
        let (story, view) = (Story::new(events), View::new(events));
        let crew = Crew::start(directory)?;
        Ok(Self { args, events, store, stop, database: directory.join(DATABASE), crew, story, view })
    }

    /// The whole demo; the exit code says whether the proof holds.
    pub async fn perform(&mut self) -> Result<ExitCode> {
        self.view.line(INTRODUCTION);
        let shop = Shop::open(&self.store, &Pace::of(self.events), &self.stop);
        self.watch(shop, |stage, counts| stage.is_complete(counts)).await?;
        if self.stop.is_cancelled() {
            self.view.finish();
            eprintln!("Interrupted before the proof.");
            return Ok(ExitCode::from(INTERRUPTED));
        }
        self.view.say("all events are through; asking the database for the proof");
        self.view.finish();
        let mut proof = self.prove().await?;
        eprintln!();
        proof.print(self.args.json)?;
        self.conclude(&proof);
        if !self.args.exit {
            self.view.resume();
            proof = self.linger().await?;
        }
        Ok(if proof.holds { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    /// Shows what happens until `is_done`, until Ctrl-C, or until nothing moves any more.
    async fn watch(&mut self, mut shop: Shop, is_done: impl Fn(&Self, &Counts) -> bool) -> Result<()> {
        let mut last = (Instant::now(), Counts::default());
        let mut ticks = tokio::time::interval(TICK);
        loop {
            ticks.tick().await;
            let counts = count::read(&self.store).await?;
            self.view.show(&counts);
            self.crew.check()?;
            let is_sold = shop.check()?;
            self.story.step(&counts, &self.store, &mut self.crew, &self.view).await?;
            if counts != last.1 {
                last = (Instant::now(), counts);
            }
            let is_stalled = is_sold && last.0.elapsed() >= STALL;
            if is_stalled {
                self.view.say("nothing has moved for 30 s");
            }
            if self.stop.is_cancelled() || is_stalled || (is_sold && is_done(self, &counts)) {
                return Ok(shop.close().await?);
            }
        }
    }

    fn is_complete(&self, counts: &Counts) -> bool {
        let Counts { committed, billing, search, is_drained, .. } = *counts;
        self.story.is_over() && is_drained && billing >= committed && search >= committed
    }

    async fn prove(&self) -> Result<Proof> {
        proof::ask(&self.store, self.story.takeovers.clone(), self.view.elapsed().as_secs_f64()).await
    }

    /// Lets events trickle until Ctrl-C, then proves again what has come since.
    async fn linger(&mut self) -> Result<Proof> {
        let shop = Shop::open(&self.store, &Pace::trickle(), &self.stop);
        self.watch(shop, |_, _| false).await?;
        let deadline = Instant::now() + DRAIN_WAIT;
        loop {
            let counts = count::read(&self.store).await?;
            self.view.show(&counts);
            if self.is_complete(&counts) || Instant::now() >= deadline {
                break;
            }
            tokio::time::sleep(TICK).await;
        }
        self.view.finish();
        let proof = self.prove().await?;
        let verdict = if proof.holds { "the proof still holds" } else { "THE PROOF DOES NOT HOLD" };
        eprintln!("\n{} events in the end; {verdict}.", grouped(proof.committed));
        Ok(proof)
    }

    /// What the table means, and what to do next.
    fn conclude(&self, proof: &Proof) {
        let Proof { committed, rolled_back, republished, seconds, .. } = proof;
        if proof.holds {
            eprintln!(
                "\nThe proof holds, after {seconds:.1} s: all {} committed events were applied once and\n\
                 in order, none of the {} rolled-back ones; {} were published twice.\n",
                grouped(*committed),
                grouped(*rolled_back),
                grouped(*republished),
            );
        } else {
            eprintln!("\nTHE PROOF DOES NOT HOLD, after {seconds:.1} s. Please report it with this table.\n");
        }
        if self.args.exit {
            eprintln!("{NEXT}");
        } else {
            eprintln!("Events trickle on until Ctrl-C. Look inside meanwhile, from another terminal:");
            eprintln!("  export POSTRIDER__STORE__URL=sqlite:{}", self.database.display());
            eprintln!("  postrider status --watch\n");
        }
    }

    /// Stops everybody and closes the database.
    pub async fn clear(mut self) {
        self.view.finish();
        self.crew.stop().await;
        self.store.close().await;
    }
}
