//! Free ports.

use std::net::{Ipv4Addr, TcpListener};

use super::Result;

/// Below the range that Linux takes the source ports of outgoing connections from (32768 and up): a server that is down
/// for a moment must find its port free when it comes back.
const PORTS: std::ops::Range<u16> = 12_000..30_000;

/// A port on 127.0.0.1 that nobody listens on now.
pub fn free_port() -> Result<u16> {
    const TRIES: u32 = 1_000;
    for _ in 0..TRIES {
        let port = fastrand::u16(PORTS);
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Ok(port);
        }
    }
    Err(format!("no free port between {} and {} in {TRIES} tries", PORTS.start, PORTS.end).into())
}
