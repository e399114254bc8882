//! Time zones, read from the system's files (TZif, RFC 9636). A library would bring all zones of the world along, compiled
//! in and ageing; the system keeps its own up to date.

use std::path::Path;

use super::rule::Rule;

/// Where systems keep them; `TZDIR` names another place.
const FOLDERS: [&str; 4] = ["/usr/share/zoneinfo", "/usr/lib/zoneinfo", "/usr/share/lib/zoneinfo", "/etc/zoneinfo"];
/// No zone's file is larger.
const BYTES_MAX: usize = 1024 * 1024;

/// A time zone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Zone {
    /// Offset before the first transition, in seconds east of UTC.
    first: i32,
    /// From when on (Unix time) which offset counts.
    transitions: Vec<(i64, i32)>,
    /// What counts after the last transition.
    rule: Option<Rule>,
}

/// A time with one offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Its first second, Unix time.
    pub from: i64,
    /// The second after its last.
    pub until: i64,
    /// Seconds east of UTC.
    pub offset: i32,
}

impl Zone {
    /// The zone of that name, `Europe/Berlin`. The error says what the setting must be.
    pub fn load(name: &str) -> Result<Self, String> {
        if name == "UTC" {
            return Ok(Self { first: 0, transitions: Vec::new(), rule: None });
        }
        let is_name = !name.is_empty()
            && !name.starts_with(['/', '.'])
            && !name.contains("..")
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"/_+-".contains(&b));
        if !is_name {
            return Err("must be a time zone such as \"UTC\" or \"Asia/Ho_Chi_Minh\"".to_owned());
        }
        let own = std::env::var("TZDIR").ok();
        let folders: Vec<&str> =
            own.as_deref().into_iter().chain(FOLDERS).filter(|at| Path::new(at).is_dir()).collect();
        if folders.is_empty() {
            return Err("needs the system's time zone data: install the package tzdata, or use \"UTC\"".to_owned());
        }
        let found = folders.iter().find_map(|folder| std::fs::read(Path::new(folder).join(name)).ok());
        let bytes = found.ok_or("names no time zone that this system knows, such as \"Asia/Ho_Chi_Minh\"")?;
        Self::parse(&bytes).ok_or_else(|| "names a time zone whose file cannot be read".to_owned())
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() > BYTES_MAX {
            return None;
        }
        // The first block has times of 32 bits, for programs of another century; what counts stands behind it.
        let old = Counts::read(bytes)?;
        let rest = bytes.get(HEADER_BYTES + old.bytes(4)?..)?;
        let counts = Counts::read(rest)?;
        let data = rest.get(HEADER_BYTES..)?;
        let (times, data) = data.split_at_checked(counts.times.checked_mul(8)?)?;
        let (kinds, data) = data.split_at_checked(counts.times)?;
        let (types, _) = data.split_at_checked(counts.types.checked_mul(6)?)?;
        let offset = |kind: usize| Some(i32::from_be_bytes(types.get(kind * 6..kind * 6 + 4)?.try_into().ok()?));
        let mut transitions = Vec::with_capacity(counts.times);
        for (time, kind) in times.chunks_exact(8).zip(kinds) {
            transitions.push((i64::from_be_bytes(time.try_into().ok()?), offset(usize::from(*kind))?));
        }
        if !transitions.is_sorted_by_key(|(time, _)| *time) {
            return None;
        }
        let footer = rest.get(HEADER_BYTES + counts.bytes(8)?..)?;
        let footer = std::str::from_utf8(footer.strip_prefix(b"\n")?).ok()?;
        let rule = match footer.split('\n').next()? {
            "" => None,
            text => Some(Rule::parse(text)?),
        };
        Some(Self { first: offset(0)?, transitions, rule })
    }

    /// The pieces of one offset between two times, in order and without gaps.
    pub fn pieces(&self, from: i64, until: i64) -> Vec<Piece> {
        let last = self.transitions.last().map_or(i64::MIN, |(time, _)| *time);
        let ruled = self.rule.iter().flat_map(|rule| rule.transitions(from, until)).filter(|(time, _)| *time > last);
        let mut starts: Vec<(i64, i32)> = vec![(i64::MIN, self.first)];
        starts.extend(&self.transitions);
        // Behind the last transition the rule counts at once; it agrees with it, or there would be another one.
        starts.extend(ruled);
        let ends = starts.iter().skip(1).map(|(time, _)| *time).chain([i64::MAX]);
        let pieces = starts.iter().zip(ends).map(|((start, offset), end)| Piece {
            from: (*start).max(from),
            until: end.min(until),
            offset: *offset,
        });
        pieces.filter(|piece| piece.from < piece.until).collect()
    }
}

const HEADER_BYTES: usize = 44;

/// How much of everything a block has.
struct Counts {
    is_utc: usize,
    is_standard: usize,
    leaps: usize,
    times: usize,
    types: usize,
    chars: usize,
}

impl Counts {
    fn read(bytes: &[u8]) -> Option<Self> {
        let header = bytes.get(..HEADER_BYTES)?;
        // Version 1 has no second block, and nobody has written it for decades.
        if !header.starts_with(b"TZif") || header[4] < b'2' {
            return None;
        }
        let count = |n: usize| {
            let at = 20 + n * 4;
            let number = u32::from_be_bytes(header.get(at..at + 4)?.try_into().ok()?);
            usize::try_from(number).ok().filter(|number| *number < BYTES_MAX)
        };
        Some(Self {
            is_utc: count(0)?,
            is_standard: count(1)?,
            leaps: count(2)?,
            times: count(3)?,
            types: count(4)?,
            chars: count(5)?,
        })
    }

    /// The size of the block behind the header, with times of that many bytes.
    fn bytes(&self, time: usize) -> Option<usize> {
        let sizes = [
            self.times * (time + 1),
            self.types * 6,
            self.chars,
            self.leaps * (time + 4),
            self.is_standard,
            self.is_utc,
        ];
        sizes.into_iter().try_fold(0_usize, usize::checked_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_zones_are_refused() {
        for name in ["", "Europe/Berln", "../etc/passwd", "/etc/passwd", "Europe/../../etc/passwd", "a b", "zone.tab"] {
            let error = Zone::load(name).unwrap_err();
            assert!(
                error.starts_with("must be a time zone") || error.starts_with("names no time zone"),
                "{name}: {error}"
            );
        }
        // A folder, and a file that is no zone.
        assert!(Zone::load("Europe").is_err());
        assert!(Zone::load("tzdata").is_err() && Zone::parse(b"TZif2").is_none() && Zone::parse(b"").is_none());
    }

    #[test]
    fn damaged_files_are_refused_and_never_end_the_process() {
        let Ok(bytes) = std::fs::read("/usr/share/zoneinfo/Europe/Berlin") else { panic!("install tzdata") };
        assert!(Zone::parse(&bytes).is_some());
        for length in 0..bytes.len() {
            let _ = Zone::parse(&bytes[..length]);
        }
        for at in 0..bytes.len().min(2000) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0xff;
            let _ = Zone::parse(&damaged);
        }
    }

    #[test]
    fn pieces_join_without_gaps() {
        let berlin = Zone::load("Europe/Berlin").unwrap();
        // 2026-03-28T00:00Z to 2026-03-30T00:00Z
        let (from, until) = (1_774_656_000, 1_774_828_800);
        let pieces = berlin.pieces(from, until);
        let spring = 1_774_746_000;
        let expected = [Piece { from, until: spring, offset: 3600 }, Piece { from: spring, until, offset: 7200 }];
        assert_eq!(pieces, expected);
    }
}
