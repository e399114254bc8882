//! Which faults happen when: decided by the seed before the run, so that a run can be repeated.

use std::time::Duration;

use super::Options;
use super::broker::Outages;

/// What is done to whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// `kill -9` for a process of the fleet, by its number.
    Kill(usize),
    /// SIGSTOP for the relay that holds the lane, for longer than its lease, then SIGCONT.
    Freeze,
    /// The broker's server gets `kill -9`.
    KillBroker,
    /// The broker's server is shut down in good order.
    StopBroker,
    /// Every process of the database gets `kill -9`.
    KillStore,
}

/// A fault of the plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Planned {
    /// When this share of all work is done. Not a time, because machines differ.
    pub at: f64,
    /// What happens.
    pub fault: Fault,
    /// How long until what was killed is started again, or what was stopped goes on.
    pub down: Duration,
}

/// Before this share of the work everything starts up, and after the last one it is quiet, so that the run ends.
const FROM: f64 = 0.02;
const UNTIL: f64 = 0.92;

/// The faults in their order. `fleet` is the number of processes, of which the first `relays` are relays.
pub(super) fn plan(options: &Options, relays: usize, fleet: usize) -> Vec<Planned> {
    let mut rng = fastrand::Rng::with_seed(options.seed);
    let mut plan = Vec::new();
    let store: Vec<f64> = spread(options.store_restarts, &mut rng);
    for (n, mut at) in spread(options.kills, &mut rng).into_iter().enumerate() {
        // The first of them fall together with the restarts of the database: whoever starts then finds no database.
        if let Some(&together) = store.get(n) {
            at = together;
        }
        // Half of them hit relays, although there are fewer.
        let victim = if rng.bool() { rng.usize(..relays) } else { rng.usize(relays..fleet) };
        plan.push(Planned { at, fault: Fault::Kill(victim), down: down(&mut rng) });
    }
    for at in spread(options.consumer_kills, &mut rng) {
        plan.push(Planned { at, fault: Fault::Kill(rng.usize(relays..fleet)), down: down(&mut rng) });
    }
    for at in store {
        plan.push(Planned { at, fault: Fault::KillStore, down: down(&mut rng) });
    }
    let outages = options.broker.outages();
    let broker_restarts = if outages == Outages::None { 0 } else { options.broker_restarts };
    for (n, at) in spread(broker_restarts, &mut rng).into_iter().enumerate() {
        let fault = if n % 2 == 0 && outages == Outages::KillAndStop { Fault::KillBroker } else { Fault::StopBroker };
        plan.push(Planned { at, fault, down: down(&mut rng) });
    }
    for at in spread(options.freezes, &mut rng) {
        plan.push(Planned { at, fault: Fault::Freeze, down: options.lease * 2 });
    }
    // At the same moment the database goes first.
    plan.sort_by(|a, b| a.at.total_cmp(&b.at).then_with(|| rank(a.fault).cmp(&rank(b.fault))));
    plan
}

/// `count` shares, one at random in each of as many equal parts.
fn spread(count: usize, rng: &mut fastrand::Rng) -> Vec<f64> {
    (0..count).map(|n| FROM + (UNTIL - FROM) * (n as f64 + rng.f64()) / count as f64).collect()
}

fn down(rng: &mut fastrand::Rng) -> Duration {
    Duration::from_millis(rng.u64(200..=2000))
}

fn rank(fault: Fault) -> u8 {
    u8::from(fault != Fault::KillStore)
}

#[cfg(test)]
mod tests {
    use super::super::BrokerKind;
    use super::*;

    #[test]
    fn the_seed_decides_everything() {
        let options = Options { seed: 7, ..Options::default() };
        let plan = |seed| super::plan(&Options { seed, ..options.clone() }, 2, 6);
        assert_eq!(plan(7), plan(7));
        assert_ne!(plan(7), plan(8));
    }

    #[test]
    fn a_broker_without_a_server_is_left_alone() {
        let options = Options { seed: 1, broker: BrokerKind::Embedded, ..Options::default() };
        let is_brokers = |planned: &Planned| matches!(planned.fault, Fault::KillBroker | Fault::StopBroker);
        assert!(!plan(&options, 2, 6).iter().any(is_brokers));
    }

    #[test]
    fn all_faults_are_planned_inside_the_run() {
        let options = Options { seed: 1, ..Options::default() };
        let plan = plan(&options, 2, 6);
        let count = |is: fn(Fault) -> bool| plan.iter().filter(|planned| is(planned.fault)).count();
        assert_eq!(count(|fault| matches!(fault, Fault::Kill(_))), options.kills);
        assert_eq!(count(|fault| fault == Fault::KillStore), options.store_restarts);
        assert_eq!(count(|fault| matches!(fault, Fault::KillBroker | Fault::StopBroker)), options.broker_restarts);
        assert_eq!(count(|fault| fault == Fault::StopBroker), options.broker_restarts / 2);
        assert_eq!(count(|fault| fault == Fault::Freeze), 1);
        assert!(plan.iter().all(|planned| (FROM..=UNTIL).contains(&planned.at)));
        assert!(plan.windows(2).all(|pair| pair[0].at <= pair[1].at));
    }
}
