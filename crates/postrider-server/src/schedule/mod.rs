//! Once a day at a time on the clock of a time zone, across the days on which that clock is changed.

use chrono::{DateTime, Days, NaiveDate, NaiveTime, TimeDelta, Utc};

mod rule;
mod zone;

pub use zone::Zone;

/// A time of day in a zone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Daily {
    /// The time on the clock.
    pub at: NaiveTime,
    /// Whose clock.
    pub zone: Zone,
}

impl Daily {
    /// The last moment that was due, at or before `now`.
    pub fn previous(&self, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        self.around(now).rfind(|moment| *moment <= now)
    }

    /// The next moment after `now`.
    pub fn next(&self, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        self.around(now).find(|moment| *moment > now)
    }

    fn around(&self, now: DateTime<Utc>) -> impl DoubleEndedIterator<Item = DateTime<Utc>> {
        // Whatever the zone, its date differs from UTC's by at most a day.
        let first = now.date_naive().checked_sub_days(Days::new(3)).unwrap_or(NaiveDate::MIN);
        (0..=6).filter_map(move |n| self.moment(first.checked_add_days(Days::new(n))?))
    }

    /// The first moment of that date at which the clock shows the time, or a later one: a time that the clock skips is
    /// due when it has jumped, and one that it shows twice the first time.
    fn moment(&self, date: NaiveDate) -> Option<DateTime<Utc>> {
        const AROUND: i64 = TimeDelta::days(2).num_seconds();
        let shown = date.and_time(self.at).and_utc().timestamp();
        let pieces = self.zone.pieces(shown - AROUND, shown + AROUND);
        pieces.into_iter().find_map(|piece| {
            let moment = piece.from.max(shown - i64::from(piece.offset));
            (moment < piece.until).then(|| DateTime::from_timestamp(moment, 0)).flatten()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn daily(at: &str, zone: &str) -> Daily {
        Daily { at: NaiveTime::parse_from_str(at, "%H:%M").unwrap(), zone: Zone::load(zone).unwrap() }
    }

    fn time(text: &str) -> DateTime<Utc> {
        text.parse().unwrap()
    }

    /// The moments that are due from `from` on.
    fn due(daily: &Daily, from: &str, count: usize) -> Vec<String> {
        let mut now = time(from);
        let mut next = || {
            now = daily.next(now).unwrap();
            assert_eq!(daily.previous(now), Some(now));
            assert!(daily.previous(now - TimeDelta::seconds(1)).unwrap() < now);
            now.format("%d %H:%M").to_string()
        };
        (0..count).map(|_| next()).collect()
    }

    #[test]
    fn a_time_that_the_clock_skips_is_due_when_it_has_jumped() {
        let berlin = daily("02:00", "Europe/Berlin");
        assert_eq!(due(&berlin, "2026-03-27T12:00:00Z", 3), ["28 01:00", "29 01:00", "30 00:00"]);
        let half_past = daily("02:30", "Europe/Berlin");
        assert_eq!(due(&half_past, "2026-03-27T12:00:00Z", 3), ["28 01:30", "29 01:00", "30 00:30"]);
        let new_york = daily("02:00", "America/New_York");
        assert_eq!(due(&new_york, "2026-03-06T12:00:00Z", 3), ["07 07:00", "08 07:00", "09 06:00"]);
    }

    #[test]
    fn a_time_that_the_clock_shows_twice_is_due_once() {
        let berlin = daily("02:00", "Europe/Berlin");
        assert_eq!(due(&berlin, "2026-10-23T12:00:00Z", 3), ["24 00:00", "25 00:00", "26 01:00"]);
        let new_york = daily("01:30", "America/New_York");
        assert_eq!(due(&new_york, "2026-10-30T12:00:00Z", 3), ["31 05:30", "01 05:30", "02 06:30"]);
    }

    #[test]
    fn a_zone_without_changes_is_due_every_24_hours() {
        let saigon = daily("02:00", "Asia/Ho_Chi_Minh");
        assert_eq!(due(&saigon, "2026-03-28T12:00:00Z", 2), ["28 19:00", "29 19:00"]);
        let utc = daily("02:00", "UTC");
        assert_eq!(due(&utc, "2026-03-28T02:00:00Z", 2), ["29 02:00", "30 02:00"]);
        assert_eq!(utc.previous(time("2026-03-28T01:59:59Z")), Some(time("2026-03-27T02:00:00Z")));
    }

    /// Samoa went to the other side of the date line: its 30 December 2011 never was.
    #[test]
    fn a_day_that_never_was_delays_nothing() {
        let apia = daily("02:00", "Pacific/Apia");
        assert_eq!(due(&apia, "2011-12-28T13:00:00Z", 3), ["29 12:00", "30 10:00", "30 12:00"]);
    }

    /// Beyond the last transition that the file lists, its rule counts.
    #[test]
    fn far_years_follow_the_rule_of_the_zone() {
        let berlin = daily("02:00", "Europe/Berlin");
        assert_eq!(due(&berlin, "2061-03-26T12:00:00Z", 2), ["27 01:00", "28 00:00"]);
        let sydney = daily("02:30", "Australia/Sydney");
        assert_eq!(due(&sydney, "2061-10-01T00:00:00Z", 2), ["01 16:00", "02 15:30"]);
    }
}
