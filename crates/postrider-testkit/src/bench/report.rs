//! The table: one line per figure, for people, for programs and for `docs/benchmarks.md`.

use std::fmt;

use comfy_table::{Cell, ContentArrangement, Table};
use serde::Serialize;

/// The lines that one figure gives.
pub(super) type Lines = Vec<Line>;

/// Whether the target was reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It was.
    Met,
    /// It was not.
    Missed,
    /// There is no target; the figure is there to be known.
    Shown,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Verdict::Met => "met",
            Verdict::Missed => "MISSED",
            Verdict::Shown => "–",
        })
    }
}

/// One line of the table.
#[derive(Debug, Clone, Serialize)]
pub struct Line {
    /// What was measured.
    pub figure: String,
    /// What it should be.
    pub target: String,
    /// What it is, with what it was compared with.
    pub measured: String,
    /// Measured through compared; for an upper limit, measured through the limit.
    pub ratio: f64,
    /// Whether the target was reached.
    pub verdict: Verdict,
}

impl Line {
    /// A figure that should reach a share of what it is compared with in the same run.
    pub(super) fn at_least(figure: impl Into<String>, share: f64, ratio: f64, measured: impl Into<String>) -> Line {
        let verdict = if ratio >= share { Verdict::Met } else { Verdict::Missed };
        Line { figure: figure.into(), target: format!("≥ {share} ×"), measured: measured.into(), ratio, verdict }
    }

    /// A figure that should not pass a limit; its ratio is the part of the limit that is used.
    pub(super) fn at_most(figure: impl Into<String>, limit: f64, value: f64, unit: &str) -> Line {
        let verdict = if value <= limit { Verdict::Met } else { Verdict::Missed };
        Line {
            figure: figure.into(),
            target: format!("≤ {limit} {unit}"),
            measured: format!("{} {unit}", short(value)),
            ratio: value / limit,
            verdict,
        }
    }

    /// A figure without a target.
    pub(super) fn shown(figure: impl Into<String>, ratio: f64, measured: impl Into<String>) -> Line {
        let verdict = Verdict::Shown;
        Line { figure: figure.into(), target: "–".to_owned(), measured: measured.into(), ratio, verdict }
    }

    /// Adds what is worth knowing beside the measured value.
    pub(super) fn with(mut self, note: impl fmt::Display) -> Line {
        self.measured = format!("{} ({note})", self.measured);
        self
    }

    fn ratio(&self) -> String {
        if self.ratio.is_nan() { "–".to_owned() } else { format!("{:.2}", self.ratio) }
    }

    fn cells(&self) -> [String; 5] {
        [self.figure.clone(), self.target.clone(), self.measured.clone(), self.ratio(), self.verdict.to_string()]
    }
}

/// Everything that was measured.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Cores, memory, versions.
    pub machine: String,
    /// Whether it was the small run, whose figures are not to be quoted.
    pub is_quick: bool,
    /// The table.
    pub lines: Vec<Line>,
}

const HEADER: [&str; 5] = ["figure", "target", "measured", "ratio", "verdict"];

impl Report {
    /// Whether every target was reached.
    pub fn is_met(&self) -> bool {
        self.lines.iter().all(|line| line.verdict != Verdict::Missed)
    }

    /// The table as `docs/benchmarks.md` has it.
    pub fn markdown(&self) -> String {
        let row = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let mut text = format!("{}\n\n", self.title());
        text.push_str(&row(&HEADER.map(str::to_owned)));
        text.push_str("|---|---|---|---|---|\n");
        for line in &self.lines {
            text.push_str(&row(&line.cells()));
        }
        text
    }

    fn title(&self) -> String {
        let warning = if self.is_quick { " Quick run: not to be quoted." } else { "" };
        format!("{}{warning}", self.machine)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(comfy_table::presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(HEADER.map(|name| Cell::new(name.to_uppercase())));
        for line in &self.lines {
            table.add_row(line.cells());
        }
        write!(f, "{}\n\n{}", self.title(), table.trim_fmt())
    }
}

/// As many digits as say something.
pub(super) fn short(value: f64) -> String {
    match value.abs() {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Events per second, in thousands.
pub(super) fn rate(per_second: f64) -> String {
    format!("{:.1} k/s", per_second / 1000.0)
}

/// All rounds of a rate, so that their spread can be seen.
pub(super) fn rates(all: &[f64]) -> String {
    all.iter().map(|rate| format!("{:.1}", rate / 1000.0)).collect::<Vec<_>>().join(" ")
}

/// The value in the middle; of an even number, the mean of the two there. NaN of none.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted.get(sorted.len().saturating_sub(1) / 2), sorted.get(sorted.len() / 2));
    match (low, high) {
        (Some(low), Some(high)) => (low + high) / 2.0,
        _ => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_lies_between_two() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn a_limit_is_missed_only_beyond_it() {
        assert_eq!(Line::at_most("memory", 40.0, 40.0, "MB").verdict, Verdict::Met);
        assert_eq!(Line::at_most("memory", 40.0, 40.1, "MB").verdict, Verdict::Missed);
        assert_eq!(Line::at_least("drain", 0.9, 0.89, "").verdict, Verdict::Missed);
    }
}
