//! Which faults happen when: decided by the seed before the run, so that a run can be repeated.

use std::time::Duration;

use super::Options;

/// What is done to whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// `kill -9` for a process of the fleet, by its number.
    Kill(usize),
    /// SIGSTOP for the relay that holds the lane, for longer than its lease, then SIGCONT.
    Freeze,
    /// RabbitMQ's Erlang machine gets `kill -9`.
    KillRabbit,
    /// RabbitMQ is shut down in good order.
    StopRabbit,
    /// Every process of PostgreSQL gets `kill -9`.
    KillPostgres,
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
    let postgres: Vec<f64> = spread(options.postgres_restarts, &mut rng);
    for (n, mut at) in spread(options.kills, &mut rng).into_iter().enumerate() {
        // The first of them fall together with the restarts of PostgreSQL: whoever starts then finds no database.
        if let Some(&together) = postgres.get(n) {
            at = together;
        }
        // Half of them hit relays, although there are fewer.
        let victim = if rng.bool() { rng.usize(..relays) } else { rng.usize(relays..fleet) };
        plan.push(Planned { at, fault: Fault::Kill(victim), down: down(&mut rng) });
    }
    for at in spread(options.consumer_kills, &mut rng) {
        plan.push(Planned { at, fault: Fault::Kill(rng.usize(relays..fleet)), down: down(&mut rng) });
    }
    for at in postgres {
        plan.push(Planned { at, fault: Fault::KillPostgres, down: down(&mut rng) });
    }
    for (n, at) in spread(options.rabbit_restarts, &mut rng).into_iter().enumerate() {
        let fault = if n % 2 == 0 { Fault::KillRabbit } else { Fault::StopRabbit };
        plan.push(Planned { at, fault, down: down(&mut rng) });
    }
    for at in spread(options.freezes, &mut rng) {
        plan.push(Planned { at, fault: Fault::Freeze, down: options.lease * 2 });
    }
    // At the same moment PostgreSQL goes first.
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
    u8::from(fault != Fault::KillPostgres)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_decides_everything() {
        let options = Options { seed: 7, ..Options::default() };
        let plan = |seed| super::plan(&Options { seed, ..options.clone() }, 2, 6);
        assert_eq!(plan(7), plan(7));
        assert_ne!(plan(7), plan(8));
    }

    #[test]
    fn all_faults_are_planned_inside_the_run() {
        let options = Options { seed: 1, ..Options::default() };
        let plan = plan(&options, 2, 6);
        let count = |is: fn(Fault) -> bool| plan.iter().filter(|planned| is(planned.fault)).count();
        assert_eq!(count(|fault| matches!(fault, Fault::Kill(_))), options.kills);
        assert_eq!(count(|fault| fault == Fault::KillPostgres), options.postgres_restarts);
        assert_eq!(count(|fault| matches!(fault, Fault::KillRabbit | Fault::StopRabbit)), options.rabbit_restarts);
        assert_eq!(count(|fault| fault == Fault::StopRabbit), options.rabbit_restarts / 2);
        assert_eq!(count(|fault| fault == Fault::Freeze), 1);
        assert!(plan.iter().all(|planned| (FROM..=UNTIL).contains(&planned.at)));
        assert!(plan.windows(2).all(|pair| pair[0].at <= pair[1].at));
    }
}
