//! A backlog of events through the relay to each other broker, compared with a bare publisher to the same one.

use std::time::{Duration, Instant};

use super::bed::{Bed, fill};
use super::carrier::{self, Carrier};
use super::drain::settled;
use super::relay::Relay;
use super::report::{Line, Lines, median, rate, rates};
use super::sample::Sampling;
use crate::testbed::{Result, machine_cpu};

/// Bare publisher and relay take turns this often.
const ROUNDS: usize = 3;
/// After a large place was emptied the broker frees memory and files; the next round should not pay for it.
const REST: Duration = Duration::from_secs(2);

pub(super) async fn measure(bed: &Bed) -> Result<Lines> {
    let mut lines = Vec::new();
    for mut carrier in carrier::all(bed).await? {
        let name = carrier.name();
        lines.push(compare(bed, carrier.as_mut()).await.map_err(|error| format!("{name}: {error}"))?);
    }
    Ok(lines)
}

async fn compare(bed: &Bed, carrier: &mut dyn Carrier) -> Result<Line> {
    let relay = Relay::start_to(bed, "brokers", &carrier.config()).await?;
    carrier.set_database(&relay.database);
    carrier.empty().await?;
    let (mut bare, mut ours, mut costs) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        let busy = Busy::start()?;
        let bare_rate = carrier.bare(bed.scale.events).await?;
        let bare_busy = busy.stop(bed.scale.events)?;
        tokio::time::sleep(REST).await;
        let (our_rate, our_busy) = drain(bed, &relay, carrier).await?;
        let cost = format!("bare {bare_busy}; {our_busy}");
        eprintln!("  {}, round {round}: bare {}, relay {}; {cost}", carrier.name(), rate(bare_rate), rate(our_rate));
        bare.push(bare_rate);
        ours.push(our_rate);
        costs.push(cost);
    }
    relay.stop().await?;
    let ratios: Vec<f64> = ours.iter().zip(&bare).map(|(ours, bare)| ours / bare).collect();
    let (ours_rate, bare_rate) = (rate(median(&ours)), rate(median(&bare)));
    Ok(Line::at_least(
        format!("drain {} events, PostgreSQL → {}, confirmed", bed.scale.events, carrier.name()),
        0.9,
        median(&ratios),
        format!("{ours_rate} [{}], bare publisher {bare_rate} [{}]", rates(&ours), rates(&bare)),
    )
    .with(costs.pop().unwrap_or_default()))
}

/// Commits the backlog at once and waits until the broker has all of it: events per second, and who was busy meanwhile.
async fn drain(bed: &Bed, relay: &Relay, carrier: &dyn Carrier) -> Result<(f64, String)> {
    let events = bed.scale.events;
    let mut connection = relay.connect().await?;
    fill(&mut connection, events).await?;
    let committed = Instant::now();
    let (sampling, cpu, busy) = (Sampling::start(bed, relay)?, carrier.cpu(), Busy::start()?);
    carrier::fill_up(carrier, events).await?;
    let took = committed.elapsed().as_secs_f64();
    let busy = busy.stop(events)?;
    let used = carrier.cpu().zip(cpu).map(|(now, then)| now.saturating_sub(then).as_secs_f64());
    let cost = sampling.stop().await?;
    settled(&mut connection).await?;
    // What was published after the broker had all that it should have was published twice.
    carrier::fill_up(carrier, events).await?;
    sqlx::query("TRUNCATE postrider.outbox").execute(&mut connection).await?;
    carrier.empty().await?;
    tokio::time::sleep(REST).await;
    let each = |seconds: f64| seconds / events as f64 * 1e6;
    let used = used.map(|used| format!(", broker {:.0}", each(used))).unwrap_or_default();
    let busy = format!(
        "ours {busy}: relay {:.0}, PostgreSQL {:.0}{used}; relay's memory {:.0} MB",
        each(cost.relay_s),
        each(cost.postgres_s),
        cost.rss_bytes as f64 / 1e6
    );
    Ok((events as f64 / took, busy))
}

/// How busy the machine is, whoever it is busy for: where the cores are full, more work for an event means fewer events.
struct Busy {
    began: Instant,
    cpu: Duration,
}

impl Busy {
    fn start() -> Result<Self> {
        Ok(Self { began: Instant::now(), cpu: machine_cpu()? })
    }

    fn stop(self, events: u64) -> Result<String> {
        let used = machine_cpu()?.saturating_sub(self.cpu).as_secs_f64();
        let cores = std::thread::available_parallelism()?.get() as f64;
        let share = used / (self.began.elapsed().as_secs_f64() * cores) * 100.0;
        Ok(format!("{:.0} µs CPU an event, cores {share:.0} % busy", used / events as f64 * 1e6))
    }
}
