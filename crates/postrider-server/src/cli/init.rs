//! `postrider init`: writes the list of defaults as a config file to start from.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use postrider::{Error, Kind};

use super::failure::{Result, io};
use super::output;
use crate::config::DEFAULTS;

/// Arguments of `init`.
#[derive(Debug, Args)]
#[command(after_help = "\
Every setting is written commented out, with its default and what it does; uncomment what you change.

Examples:
  postrider init                        write ./postrider.toml
  postrider init /etc/postrider.toml    write another file
  postrider init -                      show it")]
pub struct InitArgs {
    /// Where to write it; `-` for stdout [default: the file of --config, else ./postrider.toml]
    #[arg(value_name = "FILE")]
    path: Option<PathBuf>,
    /// Replace an existing file
    #[arg(long)]
    force: bool,
}

/// Writes the file.
pub fn run(args: &InitArgs, config: Option<PathBuf>) -> Result<ExitCode> {
    let path = args.path.clone().or(config).unwrap_or_else(|| PathBuf::from("postrider.toml"));
    let text = starting_config();
    if path.as_os_str() == "-" {
        output::line(text.trim_end())?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true);
    // Passwords may come to stand in it.
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    if args.force {
        options.truncate(true)
    } else {
        options.create_new(true)
    };
    let mut file = options.open(&path).map_err(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => Error::new(Kind::Config, format!("{} exists already", path.display()))
            .with_remedy("edit it, name another file, or replace it with --force"),
        std::io::ErrorKind::NotFound => {
            Error::new(Kind::Missing, format!("{}: there is no such folder", path.display()))
                .with_remedy("create the folder, or name another file")
        }
        _ => io(format!("{} cannot be written", path.display()), error),
    })?;
    file.write_all(text.as_bytes()).map_err(|error| io(format!("{} cannot be written", path.display()), error))?;
    output::line(&path.display().to_string())?;
    eprintln!("Wrote every setting with its default. Next: `postrider doctor`, then `postrider run`.");
    Ok(ExitCode::SUCCESS)
}

/// The list of defaults with every setting commented out, so that a later version's better default takes effect.
fn starting_config() -> String {
    let mut text = String::with_capacity(DEFAULTS.len() + 64);
    for line in DEFAULTS.lines() {
        // A [[consumer]] without settings would be a mistake.
        let is_setting = line.starts_with(|c: char| c.is_ascii_alphabetic()) || line.starts_with("[[");
        text.push_str(if is_setting { "#" } else { "" });
        text.push_str(line);
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::starting_config;

    #[test]
    fn the_starting_config_sets_nothing_and_is_valid() {
        let text = starting_config();
        assert!(text.contains("\n#poll_ms = 100\n"));
        let table: toml::Table = text.parse().unwrap();
        assert!(table.values().all(|section| section.as_table().is_some_and(toml::Table::is_empty)));
        let uncommented: toml::Table = text.replace("\n#poll_ms", "\npoll_ms").parse().unwrap();
        assert_eq!(uncommented["relay"]["poll_ms"].as_integer(), Some(100));
    }
}
