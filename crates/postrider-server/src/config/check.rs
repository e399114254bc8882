//! `[check]` and `[[check_sql]]`: the integrity check.

use std::time::Duration;

use chrono::NaiveTime;
use postrider::doctor::Severity;
use postrider::integrity::SqlCheck;

use super::settings::Settings;
use crate::schedule::{Daily, Zone};

/// `[check]`
#[derive(Debug, Clone)]
pub struct CheckConfig {
    /// When the check runs by itself; `None` for never.
    pub daily: Option<Daily>,
    /// Every `[[check_sql]]`
    pub queries: Vec<SqlCheck>,
}

/// Reads both.
pub(super) fn read(settings: &mut Settings) -> Option<CheckConfig> {
    let at = settings.parsed("check.at", |text| match NaiveTime::parse_from_str(text, "%H:%M") {
        Ok(at) => Ok(at),
        Err(_) => Err("must be a time of day such as \"02:00\""),
    });
    let zone = settings.parsed("check.time_zone", Zone::load);
    let queries = queries(settings);
    let is_on = settings.flag("check.enabled");
    let daily = Daily { at: at?, zone: zone? };
    Some(CheckConfig { daily: is_on.then_some(daily), queries })
}

fn queries(settings: &mut Settings) -> Vec<SqlCheck> {
    let mut queries: Vec<SqlCheck> = Vec::new();
    for n in 1..=settings.items("check_sql") {
        let key = |name: &str| format!("check_sql.{n}.{name}");
        let name = settings.parsed(&key("name"), |name| match name {
            "" => Err("is missing"),
            name if queries.iter().any(|query| query.name == name) => Err("is taken by another check"),
            name if super::is_name(name) => Ok(name.to_owned()),
            _ => Err("must have 1 to 60 letters, digits, '-' or '_'"),
        });
        let sql = settings.parsed(&key("sql"), |sql| match sql.trim().trim_end_matches(';').trim_end() {
            "" => Err("is missing; write a query whose rows are what should not be"),
            sql => Ok(sql.to_owned()),
        });
        let severity = settings.choice(&key("severity"), &[("warning", Severity::Warning), ("error", Severity::Error)]);
        let timeout = Duration::from_secs(settings.integer(&key("timeout_s"), 1..=600));
        let remedy = match settings.text(&key("remedy")) {
            remedy if remedy.is_empty() => "look at these rows: the check says that they should not be".to_owned(),
            remedy => remedy,
        };
        if let (Some(name), Some(sql), Some(severity)) = (name, sql, severity) {
            queries.push(SqlCheck { name, sql, severity, remedy, timeout });
        }
    }
    queries
}
