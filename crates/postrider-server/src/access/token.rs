//! Tokens, and what the configuration knows of them.

use std::fmt;

use aws_lc_rs::{constant_time, digest, rand};
use postrider::{Error, Kind};

use super::Role;

/// What every token begins with, so that people and scanners of source code recognise one.
const PREFIX: &str = "prt_";
/// What every hash begins with.
const HASH_PREFIX: &str = "sha256:";

/// A token of the configuration.
#[derive(Debug, Clone)]
pub struct Token {
    /// Who it is, in the audit table.
    pub name: String,
    /// What it may do.
    pub role: Role,
    /// What it is recognised by.
    pub hash: Hash,
}

/// The SHA-256 of a token. Compared in constant time.
#[derive(Clone, Copy)]
pub struct Hash([u8; 32]);

impl Hash {
    /// Of a token.
    pub fn of(token: &str) -> Self {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest::digest(&digest::SHA256, token.as_bytes()).as_ref());
        Self(bytes)
    }

    /// As `sha256:<64 hexadecimal digits>`. The error says what the value must be, and does not repeat it.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        if text.is_empty() {
            return Err("is missing; `postrider token new` makes a token and writes its hash");
        }
        if text.starts_with(PREFIX) {
            return Err("is a token, not its hash; make a new one with `postrider token new`, which writes the hash");
        }
        let hash = text.strip_prefix(HASH_PREFIX).and_then(unhex).map(Self);
        hash.ok_or("must be \"sha256:\" and 64 hexadecimal digits; `postrider token new` writes it")
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl PartialEq for Hash {
    fn eq(&self, other: &Self) -> bool {
        constant_time::verify_slices_are_equal(&self.0, &other.0).is_ok()
    }
}

impl Eq for Hash {}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{HASH_PREFIX}{}", hex(&self.0))
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// A token that nobody has.
pub fn new_token() -> postrider::Result<String> {
    Ok(format!("{PREFIX}{}", hex(&random::<32>()?)))
}

/// Bytes that nobody can foresee.
pub(super) fn random<const N: usize>() -> postrider::Result<[u8; N]> {
    let mut bytes = [0; N];
    match rand::fill(&mut bytes) {
        Ok(()) => Ok(bytes),
        Err(_) => Err(Error::new(Kind::Other, "the system gives no random numbers")),
    }
}

/// Bytes as hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    for (byte, at) in bytes.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(text.get(at..at + 2)?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_recognised_by_its_hash() {
        let (one, other) = (new_token().unwrap(), new_token().unwrap());
        assert_eq!(one.len(), "prt_".len() + 64);
        assert!(one != other && Hash::of(&one) != Hash::of(&other));
        assert_eq!(Hash::parse(&Hash::of(&one).to_string()), Ok(Hash::of(&one)));
        // As `printf abc | sha256sum` says.
        let known = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(Hash::of("abc").to_string(), known);
        assert_eq!(Hash::parse(&known.to_uppercase().replace("SHA", "sha")), Ok(Hash::of("abc")));
    }

    #[test]
    fn what_is_no_hash_is_told() {
        for (text, part) in [
            ("", "is missing"),
            ("prt_0123", "not its hash"),
            ("sha256:12", "64 hexadecimal digits"),
            ("sha512:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", "64 hexadecimal digits"),
            ("sha256:zz7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", "64 hexadecimal digits"),
            ("sha256:+a7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015a+", "64 hexadecimal digits"),
        ] {
            let said = Hash::parse(text).unwrap_err();
            assert!(said.contains(part), "{part:?} is missing in {said}");
        }
    }
}
