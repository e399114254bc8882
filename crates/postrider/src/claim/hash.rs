//! SHA-256 of a payload.

use std::fmt::{self, Write as _};

use sha2::{Digest, Sha256};

/// What `datahash` begins with.
const SCHEME: &str = "sha256:";

/// The SHA-256 of a payload. Shown as `sha256:<hex>`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Hash([u8; 32]);

impl Hash {
    /// The hash of these bytes. Takes a moment for large ones.
    pub fn of(content: &[u8]) -> Self {
        Self(Sha256::digest(content).into())
    }

    /// Reads what is shown.
    pub fn parse(text: &str) -> Option<Self> {
        let hex = text.strip_prefix(SCHEME)?.as_bytes();
        let (pairs, []) = hex.as_chunks::<2>() else { return None };
        let bytes =
            pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect::<Option<Vec<u8>>>()?;
        bytes.try_into().ok().map(Self)
    }

    /// Lower-case hexadecimal.
    pub fn hex(&self) -> String {
        hex(&self.0)
    }
}

/// Lower-case hexadecimal.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}", self.hex())
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::Hash;

    #[test]
    fn a_hash_is_read_as_it_is_shown() {
        let hash = Hash::of(b"abc");
        assert_eq!(hash.to_string(), "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(Hash::parse(&hash.to_string()), Some(hash));
        for wrong in ["", "sha256:", "md5:00", "sha256:zz", "sha256:ba78", &format!("{hash}0"), &format!("{hash}00")] {
            assert_eq!(Hash::parse(wrong), None, "{wrong}");
        }
    }
}
