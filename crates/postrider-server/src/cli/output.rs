//! Data for stdout: tables for people, JSON for programs.

use std::io::{IsTerminal, Write};

use comfy_table::{Cell, Color, ContentArrangement, Table};
use serde::Serialize;

use super::failure::{Failure, Result, io};

/// Below this a table has no room for its words.
const WIDTH_MIN: u16 = 40;
/// For a terminal that does not tell.
const WIDTH_DEFAULT: u16 = 100;

/// Writes one line.
pub fn line(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).map_err(|error| match error.kind() {
        std::io::ErrorKind::BrokenPipe => Failure::OutputClosed,
        _ => io("the output cannot be written", error).into(),
    })
}

/// Writes a value as JSON, on one line.
pub fn json<T: Serialize>(value: &T) -> Result<()> {
    let text = serde_json::to_string(value).map_err(|error| {
        postrider::Error::new(postrider::Kind::Other, "the output cannot be written as JSON").with_source(error)
    })?;
    line(&text)
}

/// A table without frames, as wide as the terminal allows; in a pipe, one line per row.
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    if std::io::stdout().is_terminal() {
        table.set_content_arrangement(ContentArrangement::Dynamic);
        // A terminal that does not know its width says 0.
        if table.width().is_none_or(|width| width < WIDTH_MIN) {
            table.set_width(WIDTH_DEFAULT);
        }
    } else {
        table.set_content_arrangement(ContentArrangement::Disabled);
        table.force_no_tty();
    }
    table.set_header(header.iter().map(|name| Cell::new(name.to_uppercase())));
    table
}

/// Writes a table.
pub fn print(mut table: Table) -> Result<()> {
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    line(&table.trim_fmt())
}

/// A cell in a colour that only a terminal shows.
pub fn coloured(text: &str, color: Color) -> Cell {
    let cell = Cell::new(text);
    if std::env::var_os("NO_COLOR").is_some() { cell } else { cell.fg(color) }
}

/// A duration in the largest unit that says enough: `850ms`, `12s`, `3m 20s`, `2h 5m`, `4d 3h`.
pub fn duration(duration: std::time::Duration) -> String {
    let secs = duration.as_secs();
    match secs {
        0 => format!("{}ms", duration.as_millis()),
        1..60 => format!("{secs}s"),
        60..3_600 => format!("{}m {}s", secs / 60, secs % 60),
        3_600..86_400 => format!("{}h {}m", secs / 3_600, secs % 3_600 / 60),
        _ => format!("{}d {}h", secs / 86_400, secs % 86_400 / 3_600),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    #[test]
    fn durations_are_short() {
        for (millis, text) in [(850, "850ms"), (12_999, "12s"), (200_000, "3m 20s"), (7_500_000, "2h 5m")] {
            assert_eq!(super::duration(Duration::from_millis(millis)), text);
        }
    }
}
