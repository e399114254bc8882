//! The names that parent and children agree on.

use std::time::Duration;

/// The database inside of the demo's directory.
pub const DATABASE: &str = "demo.db";
/// The directory's name begins like this; nothing else is ever removed.
pub const DIRECTORY_PREFIX: &str = "postrider-demo-";
/// The relays. One holds the lane, the other stands by.
pub const RELAYS: [&str; 2] = ["relay A", "relay B"];
/// What the accounts' events are published as.
pub const TOPIC: &str = "accounts.changed";
/// Shorter than the default, so that nobody waits long for a takeover.
pub const LEASE: Duration = Duration::from_secs(3);

/// A consumer group: the processes that share its slots.
#[derive(Debug)]
pub struct Group {
    /// Its name, and its inbox.
    pub name: &'static str,
    /// Its processes; one slot each.
    pub members: &'static [&'static str],
}

/// Whose consumer is killed.
pub const BILLING: Group = Group { name: "billing", members: &["billing 1", "billing 2"] };
/// The one that is left alone.
pub const SEARCH: Group = Group { name: "search", members: &["search 1"] };
/// Both.
pub const GROUPS: [&Group; 2] = [&BILLING, &SEARCH];
