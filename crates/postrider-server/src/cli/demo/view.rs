//! The live view: bars on a terminal, plain lines otherwise. All on stderr.

use std::collections::VecDeque;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::count::Counts;

/// Rates are taken over this long.
const RATE_WINDOW: Duration = Duration::from_secs(2);
/// Without a terminal, a line of progress this often.
const LINE_EVERY: Duration = Duration::from_secs(2);
/// As wide as fits into 80 columns beside name, count and rate.
const BAR: &str = "  {prefix:<10} {bar:36.cyan/dim} {msg}";
const NAMES: [&str; 4] = ["committed", "relayed", "billing", "search"];

/// Shows what happens.
pub struct View {
    began: Instant,
    events: u64,
    samples: VecDeque<(Instant, [u64; 4])>,
    bars: Option<Bars>,
    last_line: Instant,
}

struct Bars {
    all: MultiProgress,
    bars: Vec<ProgressBar>,
}

impl View {
    /// A view of a demo with so many events.
    pub fn new(events: u64) -> Self {
        let now = Instant::now();
        let bars = std::io::stderr().is_terminal().then(|| Bars::new(events));
        Self { began: now, events, samples: VecDeque::new(), bars, last_line: now }
    }

    /// How long it has been going on.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// One line of what happens, with the time since the start.
    pub fn say(&self, text: &str) {
        self.line(&format!("{:5.1}s  {text}", self.elapsed().as_secs_f64()));
    }

    /// One line as it is.
    pub fn line(&self, text: &str) {
        match &self.bars {
            // A terminal that has gone away does not stop the demo.
            Some(bars) => drop(bars.all.println(text)),
            None => eprintln!("{text}"),
        }
    }

    /// Shows the counts.
    pub fn show(&mut self, counts: &Counts) {
        let now = Instant::now();
        let values = [counts.committed, counts.relayed, counts.billing, counts.search];
        self.samples.push_back((now, values));
        while self.samples.len() > 2 && self.samples.front().is_some_and(|(at, _)| now - *at > RATE_WINDOW) {
            self.samples.pop_front();
        }
        self.events = self.events.max(counts.committed);
        if let Some(bars) = &self.bars {
            for (index, (bar, value)) in bars.bars.iter().zip(values).enumerate() {
                bar.set_length(self.events);
                bar.set_position(value.min(self.events));
                bar.set_message(format!(
                    "{:>7} of {:<7} {:>6}/s",
                    grouped(value),
                    grouped(self.events),
                    grouped(self.rate(index))
                ));
            }
        } else if now - self.last_line >= LINE_EVERY {
            self.last_line = now;
            let figures: Vec<String> =
                NAMES.iter().zip(values).map(|(name, value)| format!("{name} {}", grouped(value))).collect();
            self.say(&format!("{} of {}", figures.join(", "), grouped(self.events)));
        }
    }

    fn rate(&self, index: usize) -> u64 {
        let (Some((from, first)), Some((to, last))) = (self.samples.front(), self.samples.back()) else { return 0 };
        let seconds = (*to - *from).as_secs_f64();
        let done = last[index].saturating_sub(first[index]) as f64;
        if seconds > 0.0 { (done / seconds).round() as u64 } else { 0 }
    }

    /// Leaves the bars as they are; what follows is written below them.
    pub fn finish(&mut self) {
        if let Some(bars) = self.bars.take() {
            for bar in &bars.bars {
                bar.abandon();
            }
        }
    }

    /// Takes new bars, below what has been written.
    pub fn resume(&mut self) {
        if std::io::stderr().is_terminal() {
            self.bars = Some(Bars::new(self.events));
        }
    }
}

impl Bars {
    fn new(events: u64) -> Self {
        let all = MultiProgress::new();
        let style = ProgressStyle::with_template(BAR).unwrap_or_else(|_| ProgressStyle::default_bar());
        let style = style.progress_chars("━━─");
        let bars = NAMES.iter().map(|name| {
            let bar = all.add(ProgressBar::new(events).with_style(style.clone()).with_prefix(*name));
            bar.tick();
            bar
        });
        Self { bars: bars.collect(), all }
    }
}

/// A number with its thousands set apart: `6,000`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::grouped;

    #[test]
    fn thousands_are_set_apart() {
        for (number, text) in [(0, "0"), (999, "999"), (6_000, "6,000"), (1_234_567, "1,234,567")] {
            assert_eq!(grouped(number), text);
        }
    }
}
