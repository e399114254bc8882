//! How often somebody may be wrong. Nobody guesses 256 random bits; this keeps those who try from filling the audit table.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Counting begins anew after this long.
const WINDOW: Duration = Duration::from_secs(60);
/// Failures of one peer in that time.
const PEER_MAX: u32 = 10;
/// Failures of all peers together.
const TOTAL_MAX: u32 = 100;
/// Peers that are remembered. Beyond that only the total counts.
const PEERS_MAX: usize = 1024;

/// Counts failures by peer and in all.
#[derive(Default)]
pub(super) struct Limiter {
    counts: Mutex<Counts>,
}

#[derive(Default)]
struct Counts {
    total: Option<Window>,
    peers: HashMap<IpAddr, Window>,
}

#[derive(Clone, Copy)]
struct Window {
    began: Instant,
    failures: u32,
}

impl Window {
    fn is_over(&self, now: Instant) -> bool {
        now.duration_since(self.began) >= WINDOW
    }
}

impl Limiter {
    /// Counts an attempt that failed. The error says how long to wait; then it was not counted, and nothing is to be
    /// written down.
    pub fn attempt(&self, peer: IpAddr, now: Instant) -> Result<(), Duration> {
        let mut counts = self.lock();
        let fresh = Window { began: now, failures: 0 };
        let current = |window: Option<&Window>| window.copied().filter(|window| !window.is_over(now)).unwrap_or(fresh);
        let peer = network(peer);
        let (mut total, mut own) = (current(counts.total.as_ref()), current(counts.peers.get(&peer)));
        for (window, max) in [(own, PEER_MAX), (total, TOTAL_MAX)] {
            if window.failures >= max {
                return Err(WINDOW.saturating_sub(now.duration_since(window.began)).max(Duration::from_secs(1)));
            }
        }
        total.failures += 1;
        own.failures += 1;
        if counts.peers.len() >= PEERS_MAX {
            counts.peers.retain(|_, window| !window.is_over(now));
        }
        if counts.peers.len() < PEERS_MAX || counts.peers.contains_key(&peer) {
            counts.peers.insert(peer, own);
        }
        counts.total = Some(total);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        // Nothing panics while it is held, so a poisoned lock still guards a whole value.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whoever has an IPv6 address has 2^64 of them.
fn network(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(n: u32) -> IpAddr {
        IpAddr::from(n.to_be_bytes())
    }

    #[test]
    fn a_peer_is_slowed_down_and_others_are_not() {
        let (limiter, start) = (Limiter::default(), Instant::now());
        for _ in 0..PEER_MAX {
            assert!(limiter.attempt(peer(1), start).is_ok());
        }
        assert_eq!(limiter.attempt(peer(1), start + Duration::from_secs(20)), Err(Duration::from_secs(40)));
        assert!(limiter.attempt(peer(2), start).is_ok());
        assert!(limiter.attempt(peer(1), start + WINDOW).is_ok(), "a minute later it may try again");
    }

    #[test]
    fn all_together_are_slowed_down_and_memory_is_bounded() {
        let (limiter, start) = (Limiter::default(), Instant::now());
        let let_in = (0..10_000).filter(|n| limiter.attempt(peer(*n), start).is_ok()).count();
        assert_eq!(let_in, TOTAL_MAX as usize);
        for minute in 0..100 {
            let now = start + WINDOW * minute;
            for n in 0..TOTAL_MAX {
                let _ = limiter.attempt(peer(minute * 1000 + n), now);
            }
        }
        assert!(limiter.lock().peers.len() <= PEERS_MAX);
    }

    #[test]
    fn a_network_is_one_peer() {
        let (one, other) = ("2001:db8::1".parse().unwrap(), "2001:db8::ffff:2".parse().unwrap());
        assert_eq!(network(one), network(other));
        assert_ne!(network(one), network("2001:db8:0:1::1".parse().unwrap()));
        assert_eq!(network("::ffff:10.0.0.1".parse().unwrap()), peer(0x0a00_0001));
    }
}
