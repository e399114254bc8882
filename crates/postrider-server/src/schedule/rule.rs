//! The rule at the end of a zone's file: POSIX notation, `CET-1CEST,M3.5.0,M10.5.0/3`.

use chrono::{DateTime, Datelike, Days, NaiveDate};

/// Standard time all year, or with a summer time that begins and ends every year.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Seconds east of UTC.
    standard: i32,
    summer: Option<Summer>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Summer {
    offset: i32,
    begins: Change,
    ends: Change,
}

/// A day of the year and the seconds since its midnight, by the clock that counts until then.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Change {
    day: Day,
    secs: i64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Day {
    /// 1 to 365; 29 February is never counted.
    Julian(u32),
    /// 0 to 365; 29 February counts.
    Ordinal(u32),
    /// The n-th weekday (0 is Sunday) of a month; the fifth is the last.
    Weekday { month: u32, nth: u32, weekday: u32 },
}

impl Rule {
    /// Reads the notation.
    pub fn parse(text: &str) -> Option<Self> {
        let (standard, rest) = offset(name(text)?)?;
        if rest.is_empty() {
            return Some(Self { standard, summer: None });
        }
        let rest = name(rest)?;
        let (offset, rest) = match rest.starts_with(',') {
            true => (standard + 3600, rest),
            false => offset(rest)?,
        };
        let (begins, ends) = rest.strip_prefix(',')?.split_once(',')?;
        let summer = Summer { offset, begins: Change::parse(begins)?, ends: Change::parse(ends)? };
        Some(Self { standard, summer: Some(summer) })
    }

    /// The changes of the years around these times, in order: from when on which offset counts.
    pub fn transitions(&self, from: i64, until: i64) -> Vec<(i64, i32)> {
        let year = |time: i64| DateTime::from_timestamp(time, 0).map_or(1970, |time| time.year());
        let years = year(from).saturating_sub(1)..=year(until).saturating_add(1);
        let Some(summer) = &self.summer else { return Vec::new() };
        let mut transitions: Vec<(i64, i32)> = years
            .flat_map(|year| {
                let begins = summer.begins.in_year(year).map(|at| (at - i64::from(self.standard), summer.offset));
                let ends = summer.ends.in_year(year).map(|at| (at - i64::from(summer.offset), self.standard));
                [begins, ends]
            })
            .flatten()
            .collect();
        transitions.sort_unstable();
        transitions
    }
}

impl Change {
    fn parse(text: &str) -> Option<Self> {
        let (day, time) = text.split_once('/').unwrap_or((text, "2"));
        let secs = i64::from(clock(time).filter(|(_, rest)| rest.is_empty())?.0);
        let day = if let Some(day) = day.strip_prefix('J') {
            Day::Julian(day.parse().ok().filter(|day| (1..=365).contains(day))?)
        } else if let Some(day) = day.strip_prefix('M') {
            let mut parts = day.split('.').map(|part| part.parse::<u32>().ok());
            let (month, nth, weekday) = (parts.next()??, parts.next()??, parts.next()??);
            let is_day = (1..=12).contains(&month) && (1..=5).contains(&nth) && weekday <= 6;
            Some(Day::Weekday { month, nth, weekday }).filter(|_| is_day && parts.next().is_none())?
        } else {
            Day::Ordinal(day.parse().ok().filter(|day| *day <= 365)?)
        };
        Some(Self { day, secs })
    }

    /// The local time of that change, as if it were Unix time.
    fn in_year(&self, year: i32) -> Option<i64> {
        let first = NaiveDate::from_ymd_opt(year, 1, 1)?;
        let day = match self.day {
            Day::Ordinal(day) => first.checked_add_days(Days::new(day.into()))?,
            Day::Julian(day) => {
                let leaps = u32::from(first.leap_year() && day > 59);
                first.checked_add_days(Days::new((day - 1 + leaps).into()))?
            }
            Day::Weekday { month, nth, weekday } => {
                let first = NaiveDate::from_ymd_opt(year, month, 1)?;
                let ahead = (7 + weekday - first.weekday().num_days_from_sunday()) % 7;
                let nth_day = |nth: u32| first.checked_add_days(Days::new((ahead + 7 * (nth - 1)).into()));
                nth_day(nth).filter(|day| day.month() == month).or_else(|| nth_day(nth - 1))?
            }
        };
        Some(day.and_hms_opt(0, 0, 0)?.and_utc().timestamp() + self.secs)
    }
}

/// Skips the name of a time, `CET` or `<+07>`.
fn name(text: &str) -> Option<&str> {
    match text.strip_prefix('<') {
        Some(quoted) => quoted.split_once('>').map(|(_, rest)| rest),
        None => {
            let end = text.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(text.len());
            (end >= 3).then(|| &text[end..])
        }
    }
}

/// The offset, which POSIX counts to the west, and what is behind it.
fn offset(text: &str) -> Option<(i32, &str)> {
    clock(text).map(|(secs, rest)| (-secs, rest))
}

/// `[+-]hh[:mm[:ss]]` in seconds, and what is behind it.
fn clock(text: &str) -> Option<(i32, &str)> {
    let end = text.find(|c: char| !(c.is_ascii_digit() || "+-:".contains(c))).unwrap_or(text.len());
    let (clock, rest) = text.split_at(end);
    let (sign, digits) = match clock.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, clock.strip_prefix('+').unwrap_or(clock)),
    };
    let mut parts = digits.split(':').map(|part| part.parse::<i32>().ok().filter(|number| (0..=167).contains(number)));
    let hours = parts.next()??;
    let minutes = parts.next().unwrap_or(Some(0))?;
    let secs = parts.next().unwrap_or(Some(0))?;
    parts.next().is_none().then_some((sign * (hours * 3600 + minutes * 60 + secs), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_2026(text: &str) -> Vec<(String, i32)> {
        let rule = Rule::parse(text).unwrap();
        // July 2026
        let transitions = rule.transitions(1_783_000_000, 1_783_000_000);
        let shown = transitions.into_iter().map(|(at, offset)| (DateTime::from_timestamp(at, 0).unwrap(), offset));
        shown.filter(|(at, _)| at.year() == 2026).map(|(at, offset)| (at.to_rfc3339(), offset)).collect()
    }

    #[test]
    fn rules_are_read() {
        let berlin = in_2026("CET-1CEST,M3.5.0,M10.5.0/3");
        let expected = [("2026-03-29T01:00:00+00:00", 7200), ("2026-10-25T01:00:00+00:00", 3600)];
        assert_eq!(berlin, expected.map(|(at, offset)| (at.to_owned(), offset)));
        let new_york = in_2026("EST5EDT,M3.2.0,M11.1.0");
        let expected = [("2026-03-08T07:00:00+00:00", -14400), ("2026-11-01T06:00:00+00:00", -18000)];
        assert_eq!(new_york, expected.map(|(at, offset)| (at.to_owned(), offset)));
        // Summer time of half an hour, and one that begins the evening before.
        assert_eq!(in_2026("<+1030>-10:30<+11>-11,M10.1.0,M4.1.0")[0].0, "2026-04-04T15:00:00+00:00");
        assert_eq!(in_2026("<-02>2<-01>,M3.5.0/-1,M10.5.0/0")[0].0, "2026-03-29T01:00:00+00:00");
        assert_eq!(in_2026("IST-2IDT,J60,J305/26")[0].0, "2026-03-01T00:00:00+00:00");
        assert!(in_2026("<+07>-7").is_empty());
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "",
            "CE",
            "CET",
            "CET-1CEST",
            "CET-1CEST,M3.5.0",
            "CET-1CEST,M13.5.0,M10.5.0",
            "CET-x",
            "<+07-7",
            "CET-1CEST,M3.6.0,M10.5.0",
            "CET-1CEST,M3.5.7,M10.5.0",
            "CET-999",
            "CET-1CEST,J0,J1",
            "CET-1CEST,M3.5.0/,M1.1.1",
        ] {
            assert_eq!(Rule::parse(text), None, "{text}");
        }
    }
}
