//! `postrider alerts`: what is wrong, and silences.

use std::process::ExitCode;
use std::time::Duration;

use chrono::Utc;
use clap::{Args, Subcommand};
use comfy_table::{Cell, Color};
use postrider::alert::{Alert, RULES, STORE_UNREACHABLE, Urgency};
use postrider::store::Store;
use postrider::{Error, Kind};

use super::dead::actor;
use super::failure::{Result, tell};
use super::output;
use crate::config::{Config, nearest};
use crate::sink::{self, Message};
use crate::wire;

/// Longer than this nobody means.
const SILENCE_MAX: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Arguments of `alerts`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  postrider alerts list
  postrider alerts list --all --json
  postrider alerts silence --rule breaker_open --subject relay/default --for 2h --reason 'broker is being moved'
  postrider alerts unsilence 3
  postrider alerts test")]
pub struct AlertsArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// What is wrong now, newest first, and which silences there are
    List {
        /// Those that are over too
        #[arg(long)]
        all: bool,
        /// At most this many
        #[arg(long, default_value_t = 100)]
        limit: usize,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Tell nobody of some alerts for a while; the log and the console still show them
    Silence {
        /// The rule, such as `breaker_open`; all if it is not given
        #[arg(long, required_unless_present = "subject")]
        rule: Option<String>,
        /// What it is about, such as `relay/default`; everything if it is not given
        #[arg(long)]
        subject: Option<String>,
        /// For how long: `90s`, `30m`, `2h`, `1d`
        #[arg(long = "for", value_parser = length)]
        length: Duration,
        /// Why; it is written into the audit table
        #[arg(long)]
        reason: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Send a message to every [[sink]] of this configuration, and say who took it
    Test,
    /// End a silence; alerts that are open are told then
    Unsilence {
        /// Its number
        id: i64,
    },
}

/// Runs a verb.
pub async fn run(args: AlertsArgs, config: Config) -> Result<ExitCode> {
    // What is wrong with the words is found without a database.
    if let Verb::Silence { rule: Some(rule), .. } = &args.verb {
        known(rule)?;
    }
    if let Verb::Test = args.verb {
        return test(&config).await;
    }
    let store = wire::open_store(&config).await?;
    match args.verb {
        Verb::Test => Ok(()),
        Verb::List { all, limit, json } => list(store.as_ref(), all, limit, json).await,
        Verb::Silence { rule, subject, length, reason, json } => {
            let (rule, subject) = (rule.unwrap_or_default(), subject.unwrap_or_default());
            silence(store.as_ref(), &rule, &subject, length, &reason, json).await
        }
        Verb::Unsilence { id } => unsilence(store.as_ref(), id).await,
    }?;
    store.close().await;
    Ok(ExitCode::SUCCESS)
}

/// `2h` and its like.
fn length(text: &str) -> std::result::Result<Duration, String> {
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let secs = match unit {
        "s" => 1,
        "m" | "min" => 60,
        "h" => 60 * 60,
        "d" => 24 * 60 * 60,
        _ => return Err("write a number and s, m, h or d, such as 2h".to_owned()),
    };
    let number: u64 = digits.parse().map_err(|_| "write a number and s, m, h or d, such as 2h".to_owned())?;
    let length = Duration::from_secs(number.saturating_mul(secs));
    match length {
        Duration::ZERO => Err("must be longer than nothing".to_owned()),
        long if long > SILENCE_MAX => Err("must be at most 30d".to_owned()),
        length => Ok(length),
    }
}

fn known(rule: &str) -> Result<()> {
    let rules: Vec<&str> = RULES.iter().map(|(rule, _)| *rule).filter(|rule| *rule != STORE_UNREACHABLE).collect();
    if rules.contains(&rule) {
        return Ok(());
    }
    if rule == STORE_UNREACHABLE {
        let what = "store_unreachable cannot be silenced: a silence is kept in the store";
        return Err(Error::new(Kind::Config, what).with_remedy("stop the instances while the store is away").into());
    }
    let remedy = match nearest(rule, &rules) {
        Some(meant) => format!("did you mean {meant}?"),
        None => format!("the rules are {}", rules.join(", ")),
    };
    Err(Error::new(Kind::Config, format!("there is no rule {rule:?}")).with_remedy(remedy).into())
}

async fn list(store: &dyn Store, is_all: bool, limit: usize, is_json: bool) -> Result<()> {
    let (alerts, silences) = (store.alerts(!is_all, None, limit).await?, store.silences().await?);
    if is_json {
        return output::json(&serde_json::json!({ "alerts": alerts, "silences": silences }));
    }
    if alerts.is_empty() {
        output::line(if is_all { "there was no alert" } else { "nothing is wrong" })?;
    } else {
        let mut table = output::table(&["id", "state", "rule", "subject", "since", "lasted", "summary"]);
        for alert in &alerts {
            table.add_row(row(alert));
        }
        output::print(table)?;
    }
    if !silences.is_empty() {
        output::line("")?;
        let mut table = output::table(&["silence", "rule", "subject", "until", "by", "reason"]);
        let all = |text: &str| if text.is_empty() { "(all)".to_owned() } else { text.to_owned() };
        for silence in &silences {
            let until = silence.until.format("%Y-%m-%d %H:%M:%S").to_string();
            let (rule, subject) = (all(&silence.rule), all(&silence.subject));
            table.add_row([
                silence.id.to_string(),
                rule,
                subject,
                until,
                silence.actor.clone(),
                silence.reason.clone(),
            ]);
        }
        output::print(table)?;
    }
    if let Some(alert) = alerts.iter().find(|alert| alert.resolved_at.is_none()) {
        eprintln!("alert {}: {}", alert.id, alert.remedy);
    }
    Ok(())
}

fn row(alert: &Alert) -> Vec<Cell> {
    let state = match (alert.resolved_at, alert.silenced, alert.urgency) {
        (Some(_), ..) => Cell::new("over"),
        (None, true, _) => Cell::new("silenced"),
        (None, false, Urgency::Warning) => output::coloured("warning", Color::Yellow),
        (None, false, Urgency::Critical) => output::coloured("critical", Color::Red),
    };
    let lasted = (alert.resolved_at.unwrap_or_else(Utc::now) - alert.fired_at).to_std().unwrap_or_default();
    vec![
        Cell::new(alert.id),
        state,
        Cell::new(&alert.rule),
        Cell::new(&alert.subject),
        Cell::new(alert.fired_at.format("%Y-%m-%d %H:%M:%S")),
        Cell::new(output::duration(lasted)),
        Cell::new(&alert.summary),
    ]
}

async fn silence(
    store: &dyn Store,
    rule: &str,
    subject: &str,
    length: Duration,
    reason: &str,
    is_json: bool,
) -> Result<()> {
    if reason.trim().is_empty() {
        return Err(Error::new(Kind::Config, "the reason is empty").with_remedy("say why, for those who ask").into());
    }
    let id = store.silence(rule, subject, length, reason, &actor()).await?;
    if is_json {
        return output::json(&serde_json::json!({ "id": id }));
    }
    let length = output::duration(length);
    output::line(&format!("silence {id} ends in {length}; `postrider alerts unsilence {id}` ends it now"))
}

/// Tells every sink once. Needs no store.
async fn test(config: &Config) -> Result<ExitCode> {
    let sinks = sink::build(&config.sinks)?;
    if sinks.is_empty() {
        let none = Error::new(Kind::Config, "there is no [[sink]]: alerts go to the log alone");
        return Err(none.with_remedy("docs/guides/alerts.md says how to add one").into());
    }
    let alert = Alert {
        id: 0,
        rule: "test".to_owned(),
        subject: String::new(),
        urgency: Urgency::Warning,
        summary: "this is a test: nothing is wrong".to_owned(),
        remedy: "nothing".to_owned(),
        fired_at: Utc::now(),
        resolved_at: None,
        silenced: false,
    };
    let id = format!("test-{}", alert.fired_at.timestamp_millis());
    let message = Message::of(id, &alert, false, &config.log.service, &config.alerts);
    let mut code = ExitCode::SUCCESS;
    for sink in &sinks {
        match sink.tell(&message).await {
            Ok(()) => output::line(&format!("{}: told", sink.name))?,
            Err(error) => {
                code = ExitCode::FAILURE;
                output::line(&format!("{}: not told", sink.name))?;
                eprintln!("{}", tell(&error, false));
            }
        }
    }
    Ok(code)
}

async fn unsilence(store: &dyn Store, id: i64) -> Result<()> {
    if !store.unsilence(id, &actor()).await? {
        return Err(Error::new(Kind::Missing, format!("there is no silence {id}, or it has ended"))
            .with_remedy("`postrider alerts list` shows which there are")
            .into());
    }
    output::line(&format!("silence {id} has ended"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_read() {
        for (text, secs) in [("90s", 90), ("30m", 1800), ("30min", 1800), ("2h", 7200), ("30d", 2_592_000)] {
            assert_eq!(length(text), Ok(Duration::from_secs(secs)), "{text}");
        }
        for wrong in ["", "2", "h", "0h", "31d", "2 h", "-1h", "1.5h", "2w", "99999999999999999999d"] {
            assert!(length(wrong).is_err(), "{wrong}");
        }
    }
}
