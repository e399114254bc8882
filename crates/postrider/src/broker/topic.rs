//! Topic patterns, with AMQP's meaning on every broker: words between dots, `*` for one word, `#` for any number.

use crate::error::{Error, Kind};

/// Whether a topic matches a pattern.
pub fn matches(pattern: &str, topic: &str) -> bool {
    fn words(pattern: &[&str], topic: &[&str]) -> bool {
        match (pattern.split_first(), topic.split_first()) {
            (None, None) => true,
            (Some((&"#", rest)), _) => (0..=topic.len()).any(|skip| words(rest, &topic[skip..])),
            (Some((&"*", rest)), Some((_, topic))) => words(rest, topic),
            (Some((word, rest)), Some((first, topic))) => word == first && words(rest, topic),
            (Some(_), None) | (None, Some(_)) => false,
        }
    }
    let pattern: Vec<&str> = pattern.split('.').collect();
    let topic: Vec<&str> = topic.split('.').collect();
    words(&pattern, &topic)
}

/// Where events go: a destination and its topics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The destination's name.
    pub destination: String,
    /// What it gets.
    pub topics: TopicFilter,
}

impl Route {
    /// Everything to one destination.
    pub fn all(destination: impl Into<String>) -> Self {
        Self { destination: destination.into(), topics: TopicFilter::all() }
    }
}

/// Which topics a destination gets: those that match a pattern of its own, and none of the destinations before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicFilter {
    wanted: Vec<String>,
    unwanted: Vec<String>,
}

impl Default for TopicFilter {
    fn default() -> Self {
        Self::all()
    }
}

impl TopicFilter {
    /// Every topic.
    pub fn all() -> Self {
        Self { wanted: vec!["#".to_owned()], unwanted: Vec::new() }
    }

    /// The topics that a pattern of `wanted` matches and none of `unwanted`.
    pub fn new(wanted: impl IntoIterator<Item = String>, unwanted: impl IntoIterator<Item = String>) -> Self {
        Self { wanted: wanted.into_iter().collect(), unwanted: unwanted.into_iter().collect() }
    }

    /// Whether nothing is filtered.
    pub fn is_all(&self) -> bool {
        self.unwanted.is_empty() && self.wanted.iter().any(|pattern| pattern == "#")
    }

    /// Whether the destination gets this topic.
    pub fn wants(&self, topic: &str) -> bool {
        let any = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, topic));
        any(&self.wanted) && !any(&self.unwanted)
    }

    /// The same as a regular expression that PostgreSQL, MySQL and MariaDB understand; `None` for every topic.
    pub fn regex(&self) -> Option<String> {
        let any = |patterns: &[String]| patterns.iter().map(|pattern| regex(pattern)).collect::<Vec<_>>().join("|");
        match (self.is_all(), self.unwanted.is_empty()) {
            (true, _) => None,
            (false, true) => Some(format!("^(?:{})$", any(&self.wanted))),
            (false, false) => Some(format!("^(?!(?:{})$)(?:{})$", any(&self.unwanted), any(&self.wanted))),
        }
    }
}

/// How routes differ from what a store knows.
#[allow(dead_code)] // unused when no store is on
pub(crate) struct RouteChange<'r> {
    /// New ones, and those with other topics.
    pub changed: Vec<&'r Route>,
    /// Those that are not there any more.
    pub gone: Vec<String>,
}

/// The difference to what a store knows, destinations and their topics; `None` if there is none. A destination that nobody
/// has relayed to yet is no change as long as it is the only one: it begins at the beginning by itself.
#[allow(dead_code)] // unused when no store is on
pub(crate) fn change<'r>(
    known: &std::collections::BTreeMap<String, Option<String>>,
    routes: &'r [Route],
) -> Option<RouteChange<'r>> {
    let is_first = known.is_empty() && routes.len() == 1;
    let changed: Vec<_> = routes
        .iter()
        .filter(|route| !is_first && known.get(&route.destination) != Some(&route.topics.regex()))
        .collect();
    let is_route = |name: &str| routes.iter().any(|route| route.destination == name);
    let gone: Vec<_> = known.keys().filter(|name| !is_route(name)).cloned().collect();
    (!changed.is_empty() || !gone.is_empty()).then_some(RouteChange { changed, gone })
}

/// The error for routes that change while somebody relays.
#[allow(dead_code)] // unused when no store is on
pub(crate) fn still_relayed(owner: &str) -> Error {
    Error::new(Kind::Config, format!("the routes have changed, but {owner} still relays by the old ones"))
        .with_remedy("stop all instances before changing [[route]], then start them with the same routes")
}

/// The error for a relay that was started with routes of before.
#[allow(dead_code)] // unused when no store is on
pub(crate) fn routes_changed(destination: &str) -> Error {
    Error::new(Kind::Config, format!("the routes have changed: destination {destination:?} has other topics now"))
        .with_remedy("start all instances with the same [[route]] sections")
}

/// The error for a destination that goes although events are parked for it.
#[allow(dead_code)] // unused when no store is on
pub(crate) fn still_parked(destination: &str, parked: i64) -> Error {
    Error::new(Kind::Config, format!("destination {destination:?} is gone, but {parked} events are parked for it"))
        .with_remedy("bring it back until they are published or discarded: `postrider status`, `postrider dead`")
}

/// A pattern as a regular expression without anchors.
fn regex(pattern: &str) -> String {
    let words: Vec<&str> = pattern.split('.').collect();
    let mut regex = String::new();
    let mut has_before = false;
    for (index, word) in words.iter().enumerate() {
        if *word == "#" {
            // The dot beside it belongs to it: `a.#` matches `a`, `#.a` matches `a`.
            match (has_before, index + 1 == words.len()) {
                (true, _) => regex.push_str("(?:\\..*)?"),
                (false, true) => regex.push_str(".*"),
                (false, false) => regex.push_str("(?:.*\\.)?"),
            }
            continue;
        }
        if has_before {
            regex.push_str("\\.");
        }
        has_before = true;
        if *word == "*" {
            regex.push_str("[^.]*");
            continue;
        }
        for c in word.chars() {
            if c.is_ascii_punctuation() {
                regex.push('\\');
            }
            regex.push(c);
        }
    }
    regex
}

/// A stable hash of a key (FNV-1a), the same in every version: slots and stored hashes depend on it.
pub fn hash(key: &[u8]) -> u32 {
    let hash = fnv64(key.iter().copied());
    // The low bits of FNV are its weak ones.
    ((hash >> 32) ^ hash) as u32
}

/// FNV-1a, 64 bits.
pub(crate) fn fnv64(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// The hash that held messages are kept with: slots share them as they share messages.
pub(crate) fn shard(event: &crate::Event) -> u32 {
    event_hash(event) % crate::handler::SLOTS_MAX
}

/// The hash that decides an event's slot: of its key, or of its id when it has none.
pub fn event_hash(event: &crate::Event) -> u32 {
    match event.key() {
        Some(key) => hash(key.as_bytes()),
        None => hash(event.id().as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::{TopicFilter, matches};

    #[test]
    fn patterns_mean_what_amqp_says() {
        let yes = [
            ("orders.created", "orders.created"),
            ("orders.*", "orders.created"),
            ("#", "a.b.c"),
            ("orders.#", "orders"),
            ("orders.#", "orders.a.b"),
            ("#.done", "a.b.done"),
            ("a.#.z", "a.z"),
            ("*.*", "a.b"),
        ];
        for (pattern, topic) in yes {
            assert!(matches(pattern, topic), "{pattern} should match {topic}");
        }
        let no = [
            ("orders.*", "orders"),
            ("orders.*", "orders.a.b"),
            ("a.#.z", "a.b"),
            ("orders", "orders.x"),
            ("*", "a.b"),
        ];
        for (pattern, topic) in no {
            assert!(!matches(pattern, topic), "{pattern} should not match {topic}");
        }
    }

    #[test]
    fn a_destination_gets_what_earlier_ones_do_not() {
        let texts = |patterns: &[&str]| patterns.iter().map(|pattern| (*pattern).to_owned()).collect::<Vec<_>>();
        let filter = TopicFilter::new(texts(&["orders.#", "a.*"]), texts(&["orders.paid"]));
        assert!(filter.wants("orders") && filter.wants("orders.made") && filter.wants("a.b"));
        assert!(!filter.wants("orders.paid") && !filter.wants("b"));
        assert_eq!(filter.regex().unwrap(), r"^(?!(?:orders\.paid)$)(?:orders(?:\..*)?|a\.[^.]*)$");
        assert_eq!(TopicFilter::all().regex(), None);
    }

    #[test]
    fn the_hash_never_changes() {
        // Stored with every message: another value would move keys to other slots.
        assert_eq!(super::hash(b""), 0x4fd0_bfc1);
    }
}
