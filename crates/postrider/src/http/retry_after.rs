//! `Retry-After`: when the destination wants to be asked again, in seconds or as a date.

use std::time::Duration;

use chrono::{DateTime, NaiveDateTime, Utc};
use reqwest::header::{DATE, HeaderMap, HeaderName, RETRY_AFTER};

/// The three ways to write a date in HTTP, all of which a recipient must read (RFC 9110, 5.6.7).
const DATE_FORMATS: [&str; 3] = ["%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %e %H:%M:%S %Y"];

/// How long to wait, or `None` when the header is missing or cannot be read. A date is compared with the destination's
/// own `Date`, so that a clock that is wrong on either side does no harm; without one, with `now`. A date in the past
/// is no wait.
pub(super) fn read(headers: &HeaderMap, now: DateTime<Utc>) -> Option<Duration> {
    let value = text(headers, RETRY_AFTER)?;
    if value.bytes().all(|byte| byte.is_ascii_digit()) && !value.is_empty() {
        // More seconds than a u64 holds are as good as for ever; the caller cuts them.
        return Some(Duration::from_secs(value.parse().unwrap_or(u64::MAX)));
    }
    let until = date(value)?;
    let since = text(headers, DATE).and_then(date).unwrap_or(now);
    Some((until - since).to_std().unwrap_or_default())
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok().map(str::trim)
}

fn date(value: &str) -> Option<DateTime<Utc>> {
    let read = |format| NaiveDateTime::parse_from_str(value, format).ok();
    DATE_FORMATS.into_iter().find_map(read).map(|time| time.and_utc())
}

#[cfg(test)]
mod tests {
    use reqwest::header::HeaderValue;

    use super::*;

    const NOW: &str = "Sun, 06 Nov 1994 08:49:37 GMT";

    fn wait(value: &str, date_header: Option<&str>) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        if let Some(date) = date_header {
            headers.insert(DATE, date.parse().unwrap());
        }
        read(&headers, date(NOW).unwrap())
    }

    #[test]
    fn seconds_are_read() {
        let cases = [("0", 0), ("1", 1), (" 120 ", 120), ("007", 7), ("99999999999999999999999999", u64::MAX)];
        for (value, secs) in cases {
            assert_eq!(wait(value, None), Some(Duration::from_secs(secs)), "{value}");
        }
    }

    #[test]
    fn all_three_date_formats_are_read() {
        for value in ["Sun, 06 Nov 1994 08:50:07 GMT", "Sunday, 06-Nov-94 08:50:07 GMT", "Sun Nov  6 08:50:07 1994"] {
            assert_eq!(wait(value, None), Some(Duration::from_secs(30)), "{value}");
        }
    }

    #[test]
    fn a_date_in_the_past_is_no_wait() {
        assert_eq!(wait("Sun, 06 Nov 1994 08:00:00 GMT", None), Some(Duration::ZERO));
    }

    #[test]
    fn a_date_is_measured_on_the_destinations_own_clock() {
        let value = "Mon, 07 Nov 1994 12:00:05 GMT";
        assert_eq!(wait(value, Some("Mon, 07 Nov 1994 12:00:00 GMT")), Some(Duration::from_secs(5)));
        // A `Date` that cannot be read is as none.
        assert_eq!(wait("Sun, 06 Nov 1994 08:49:47 GMT", Some("yesterday")), Some(Duration::from_secs(10)));
    }

    #[test]
    fn garbage_is_ignored() {
        for value in [
            "",
            "soon",
            "-1",
            "+5",
            "1.5",
            "5 s",
            "0x10",
            "1,2",
            "Sun, 06 Nov 1994 08:50:07",
            "Mon, 06 Nov 1994 08:50:07 GMT",
            "Sun, 06 Nov 1994 25:50:07 GMT",
            "1994-11-06T08:50:07Z",
            "Sun, 06 Nov 1994 08:50:07 GMT x",
            "\u{661}\u{662}",
        ] {
            assert_eq!(wait(value, None), None, "{value}");
        }
        assert_eq!(read(&HeaderMap::new(), Utc::now()), None);
    }
}
