//! Topic patterns, with AMQP's meaning on every broker: words between dots, `*` for one word, `#` for any number.

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
    use super::matches;

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
    fn the_hash_never_changes() {
        // Stored with every message: another value would move keys to other slots.
        assert_eq!(super::hash(b""), 0x4fd0_bfc1);
    }
}
