//! W3C trace context.

use std::fmt;

/// The part of a `traceparent` that everybody understands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Context {
    /// The trace.
    pub trace_id: u128,
    /// The span that comes before.
    pub parent: u64,
    /// Whether somebody records this trace.
    pub is_sampled: bool,
}

impl Context {
    /// Of a `traceparent`; none if it is none. A version that is newer than ours is read as far as we know it.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let version = hex(parts.next()?, 2)?;
        let trace_id = hex(parts.next()?, 32)?;
        let parent = hex(parts.next()?, 16)? as u64;
        let flags = hex(parts.next()?, 2)?;
        let is_ours = version == 0 && parts.next().is_none();
        let is_newer = version > 0 && version < 0xff;
        let is_valid = (is_ours || is_newer) && trace_id != 0 && parent != 0;
        is_valid.then_some(Self { trace_id, parent, is_sampled: flags & 1 == 1 })
    }
}

/// As a `traceparent`.
impl fmt::Display for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace_id, self.parent, u8::from(self.is_sampled))
    }
}

/// Lower case alone, as the standard asks.
fn hex(text: &str, length: usize) -> Option<u128> {
    let is_hex = text.len() == length && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    is_hex.then(|| u128::from_str_radix(text, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_traceparent_is_read_and_written() {
        let text = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let context = Context::parse(text).unwrap();
        assert_eq!((context.parent, context.is_sampled), (0xb7ad_6b71_6920_3331, true));
        assert_eq!(context.to_string(), text);
        let newer = "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-02-more";
        assert!(!Context::parse(newer).unwrap().is_sampled);
    }

    #[test]
    fn what_is_no_traceparent_is_left_alone() {
        for bad in [
            "",
            "00",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "00-0af7651916cd43dd8448eb211c80319é-b7ad6b716920333-01",
        ] {
            assert_eq!(Context::parse(bad), None, "{bad}");
        }
    }
}
