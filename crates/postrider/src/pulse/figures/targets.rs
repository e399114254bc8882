//! What a well-run system keeps (O9), and whether this one does.

use std::time::Duration;

use serde::Serialize;

use super::Figures;

/// Given up: less than this part of all that was decided.
const DEAD_SHARE_BELOW: f64 = 0.01;
/// Attempts that succeed: at least this part.
const SUCCESS_SHARE_MIN: f64 = 0.99;
/// Alerts last less than this in the mean.
const MENDED_BELOW: Duration = Duration::from_secs(30 * 60);
/// 99 of 100 events have their effect sooner.
const P99_BELOW: Duration = Duration::from_secs(5);

/// A target.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Target {
    /// Which: `dead_letters`, `success`, `mttr` (the mean time until an alert is over), `latency_p99`.
    pub name: &'static str,
    /// What it is now; none where nothing was measured.
    pub value: Option<f64>,
    /// What it should be.
    pub target: f64,
    /// Of both.
    pub unit: Unit,
    /// Whether the value should be below the target; otherwise it should be that at least.
    pub is_upper_bound: bool,
    /// Whether it is so; none where nothing was measured.
    pub is_met: Option<bool>,
}

/// What a target is measured in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// A part of one.
    Share,
    /// Seconds.
    Secs,
}

/// All targets, from the figures of a time and from how long alerts lasted.
pub fn targets(figures: &Figures, mended: Option<Duration>) -> [Target; 4] {
    let p99 = figures.latency_p99_ms.map(|ms| ms / 1e3);
    [
        below("dead_letters", figures.dead_share, DEAD_SHARE_BELOW, Unit::Share),
        Target {
            name: "success",
            value: figures.success_share,
            target: SUCCESS_SHARE_MIN,
            unit: Unit::Share,
            is_upper_bound: false,
            is_met: figures.success_share.map(|share| share >= SUCCESS_SHARE_MIN),
        },
        below("mttr", mended.map(|mended| mended.as_secs_f64()), MENDED_BELOW.as_secs_f64(), Unit::Secs),
        below("latency_p99", p99, P99_BELOW.as_secs_f64(), Unit::Secs),
    ]
}

fn below(name: &'static str, value: Option<f64>, target: f64, unit: Unit) -> Target {
    Target { name, value, target, unit, is_upper_bound: true, is_met: value.map(|value| value < target) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn met(figures: &Figures, mended_secs: Option<u64>) -> [Option<bool>; 4] {
        targets(figures, mended_secs.map(Duration::from_secs)).map(|target| target.is_met)
    }

    #[test]
    fn targets_are_met_up_to_their_bound() {
        let figures = |dead_share, success_share, latency_p99_ms| Figures {
            dead_share: Some(dead_share),
            success_share: Some(success_share),
            latency_p99_ms: Some(latency_p99_ms),
            ..Figures::default()
        };
        assert_eq!(met(&figures(0.0099, 0.99, 4999.0), Some(1799)), [Some(true); 4]);
        assert_eq!(met(&figures(0.01, 0.9899, 5000.0), Some(1800)), [Some(false); 4]);
        assert_eq!(met(&Figures::default(), None), [None; 4], "nothing measured is neither");
        let json = serde_json::to_value(targets(&figures(0.5, 0.5, 2500.0), None)).unwrap();
        assert_eq!((&json[3]["value"], &json[3]["unit"]), (&2.5.into(), &"secs".into()));
    }
}
