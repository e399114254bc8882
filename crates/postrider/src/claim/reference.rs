//! Where the payload of an event waits, among its headers.

use chrono::NaiveDate;

use super::Hash;
use crate::event::{Event, PAYLOAD_BYTES_MAX};

/// The path of the object: CloudEvents' extension for payloads that are elsewhere.
pub(super) const DATAREF: &str = "dataref";
/// The size of the payload in bytes.
pub(super) const DATASIZE: &str = "datasize";
/// The hash of the payload, `sha256:<hex>`.
pub(super) const DATAHASH: &str = "datahash";

/// S3 takes no longer key.
const PATH_BYTES_MAX: usize = 1024;

/// Whether the event says that its payload is elsewhere. A `dataref` beside a payload, or without a hash, is somebody
/// else's and none of our business.
pub(crate) fn is_claimed(event: &Event) -> bool {
    event.payload.is_empty() && event.headers.contains_key(DATAREF) && event.headers.contains_key(DATAHASH)
}

/// Whether a header of this name is part of a reference.
pub(crate) fn is_reference_header(name: &str) -> bool {
    matches!(name, DATAREF | DATASIZE | DATAHASH)
}

/// What an event says about its payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reference {
    pub path: String,
    pub size: usize,
    pub hash: Hash,
}

impl Reference {
    /// The event without its payload, with the reference in its place.
    pub fn put_into(&self, event: &Event) -> Event {
        let mut slim = Event { payload: bytes::Bytes::new(), ..event.clone() };
        slim.headers.insert(DATAREF.to_owned(), self.path.clone());
        slim.headers.insert(DATASIZE.to_owned(), self.size.to_string());
        slim.headers.insert(DATAHASH.to_owned(), self.hash.to_string());
        slim
    }

    /// The reference of an event, if it may be followed: whoever wrote it, it must not lead anywhere but to the object
    /// of this event under `prefix`. The error says what is wrong.
    pub fn read(event: &Event, prefix: &str) -> Result<Self, String> {
        let header = |name: &str| event.headers.get(name).map(String::as_str).unwrap_or_default();
        let path = header(DATAREF);
        if !is_path(path) {
            return Err(format!("{} is no path of an object", shown(path)));
        }
        if !is_under(path, prefix) {
            return Err(format!("{} is outside of {prefix:?}, the only place that is read", shown(path)));
        }
        if path.rsplit('/').next() != Some(event.id.hyphenated().to_string().as_str()) {
            return Err(format!("{} belongs to another event", shown(path)));
        }
        let size = header(DATASIZE).parse().ok().filter(|size| *size <= PAYLOAD_BYTES_MAX);
        let size = size.ok_or_else(|| format!("{} has no size of up to {PAYLOAD_BYTES_MAX} bytes", shown(path)))?;
        let hash = Hash::parse(header(DATAHASH)).ok_or_else(|| format!("{} has no readable hash", shown(path)))?;
        Ok(Self { path: path.to_owned(), size, hash })
    }
}

/// The event as it was before it was claimed.
pub(super) fn whole(event: &Event, payload: bytes::Bytes) -> Event {
    let mut whole = Event { payload, ..event.clone() };
    whole.headers.retain(|name, _| !is_reference_header(name));
    whole
}

/// The path for an event's payload: always the same, however often it is published.
pub(super) fn path_of(event: &Event, prefix: &str) -> String {
    // Four digits for the year, whatever the producer's clock says.
    let (first, last) = (NaiveDate::from_ymd_opt(1, 1, 1), NaiveDate::from_ymd_opt(9999, 12, 31));
    let day = event.time.date_naive();
    let day = day.clamp(first.unwrap_or(day), last.unwrap_or(day));
    join(prefix, &format!("{}/{}", day.format("%Y-%m-%d"), event.id.hyphenated()))
}

/// The day that a path under `prefix` belongs to, if it is one of ours.
pub(super) fn day_of(path: &str, prefix: &str) -> Option<NaiveDate> {
    let rest = if prefix.is_empty() { path } else { path.strip_prefix(prefix)?.strip_prefix('/')? };
    let (day, name) = rest.split_once('/')?;
    if day.len() != 10 || name.is_empty() || name.contains('/') {
        return None;
    }
    NaiveDate::parse_from_str(day, "%Y-%m-%d").ok()
}

pub(super) fn join(prefix: &str, rest: &str) -> String {
    if prefix.is_empty() { rest.to_owned() } else { format!("{prefix}/{rest}") }
}

/// Whether it is a path that means the same to every storage, and to none a place above its root: parts of letters,
/// digits, `-`, `_` and `.` that do not begin with `.`, with `/` between them.
pub fn is_path(path: &str) -> bool {
    let is_part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
    };
    path.len() <= PATH_BYTES_MAX && path.split('/').all(is_part)
}

fn is_under(path: &str, prefix: &str) -> bool {
    prefix.is_empty() || path.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('/'))
}

/// A path that anybody may have written.
fn shown(path: &str) -> String {
    const CHARS_MAX: usize = 200;
    format!("{DATAREF} {:?}", path.chars().take(CHARS_MAX).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> Event {
        let time = chrono::DateTime::from_timestamp(1_700_000_000, 0).unwrap();
        Event::builder("a", "b").time(time).payload("text/plain", "payload").build().unwrap()
    }

    fn claimed(path: &str) -> Event {
        Reference { path: path.to_owned(), size: 7, hash: Hash::of(b"payload") }.put_into(&event_of(path))
    }

    /// An event whose id is the last part of the path, if that is an id.
    fn event_of(path: &str) -> Event {
        let id = path.rsplit('/').next().and_then(|id| uuid::Uuid::try_parse(id).ok());
        let builder = event().rebuild();
        id.map_or(builder.clone(), |id| builder.id(id)).build().unwrap()
    }

    #[test]
    fn a_reference_comes_back_and_leaves_no_trace() {
        let event = event();
        let path = path_of(&event, "orders");
        assert_eq!(path, format!("orders/2023-11-14/{}", event.id()));
        let reference = Reference { path, size: 7, hash: Hash::of(event.payload()) };
        let slim = reference.put_into(&event);
        assert!(is_claimed(&slim) && !is_claimed(&event));
        assert_eq!((slim.id(), slim.content_type()), (event.id(), event.content_type()));
        assert_eq!(Reference::read(&slim, "orders"), Ok(reference));
        assert_eq!(whole(&slim, event.payload().clone()), event);
    }

    #[test]
    fn a_reference_leads_nowhere_else() {
        const ID: &str = "018f0000-0000-7000-8000-000000000001";
        assert!(Reference::read(&claimed(&format!("orders/2023-11-14/{ID}")), "orders").is_ok());
        for path in [
            format!("orders/../billing/{ID}"),
            format!("orders/./{ID}"),
            format!("../{ID}"),
            format!("/orders/{ID}"),
            format!("orders//{ID}"),
            format!("orders\\..\\{ID}"),
            format!("orders/%2e%2e/{ID}"),
            format!("https://elsewhere/orders/{ID}"),
            format!("s3://elsewhere/orders/{ID}"),
            format!("orders/{ID}?versionId=1"),
            format!("orders/\0/{ID}"),
            format!("billing/2023-11-14/{ID}"),
            format!("ordersx/2023-11-14/{ID}"),
            "orders".to_owned(),
            String::new(),
            format!("orders/{}/{ID}", "x".repeat(2000)),
        ] {
            assert!(Reference::read(&claimed(&path), "orders").is_err(), "{path:?}");
        }
    }

    #[test]
    fn a_reference_to_another_events_object_is_refused() {
        let other = path_of(&event(), "");
        let mut slim = claimed(&other);
        slim.id = uuid::Uuid::now_v7();
        assert!(Reference::read(&slim, "").unwrap_err().contains("another event"));
    }

    #[test]
    fn a_size_beyond_the_limit_is_refused() {
        let path = path_of(&event(), "");
        for size in ["", "-1", "x", "16777217"] {
            let mut slim = claimed(&path);
            slim.headers.insert(DATASIZE.to_owned(), size.to_owned());
            assert!(Reference::read(&slim, "").unwrap_err().contains("size"), "{size}");
        }
    }

    #[test]
    fn the_day_is_read_from_our_own_paths_only() {
        let day = NaiveDate::from_ymd_opt(2023, 11, 14);
        assert_eq!(day_of("2023-11-14/x", ""), day);
        assert_eq!(day_of("a/b/2023-11-14/.x.part", "a/b"), day);
        for other in ["2023-11-14", "2023-11-14/", "2023-11-14/a/b", "x/2023-11-14/a", "2023-13-14/a", "1/x"] {
            assert_eq!(day_of(other, ""), None, "{other}");
        }
    }

    #[test]
    fn any_time_gives_a_path() {
        for seconds in [-200_000_000_000, 0, 500_000_000_000] {
            let time = chrono::DateTime::from_timestamp(seconds, 0).unwrap();
            let event = event().rebuild().time(time).build().unwrap();
            let path = path_of(&event, "p");
            assert!(is_path(&path) && day_of(&path, "p").is_some(), "{path}");
        }
    }
}
