//! Finds the config file and puts the layers on top of each other: defaults, file, environment.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::Config;
use super::error::{Problem, Problems, nearest};
use super::expand::expand;
use super::settings::{Origin, Settings, Value};

/// The list of all settings. `postrider init` writes it out.
pub const DEFAULTS: &str = include_str!("defaults.toml");

/// The file that is read when none is named.
const FILE: &str = "postrider.toml";

/// What environment variables that are settings begin with.
const ENV_PREFIX: &str = "POSTRIDER__";

/// Loads the configuration: from `named`, else from `./postrider.toml` when it exists, else the defaults; the
/// environment wins over all of them.
pub fn load(named: Option<&Path>) -> Result<Config, Box<Problems>> {
    let path = match named {
        Some(path) => Some(path.to_owned()),
        None => Some(PathBuf::from(FILE)).filter(|path| path.exists()),
    };
    let file = match path {
        Some(path) => match std::fs::read_to_string(&path) {
            Ok(text) => Some((path, text)),
            Err(error) => {
                let message = format!("the config file {} cannot be read: {error}", path.display());
                let help =
                    "name an existing file with --config or POSTRIDER_CONFIG, or create one with `postrider init`";
                return Err(Box::new(Problems::new(None, vec![Problem::new(Origin::Default, message).help(help)])));
            }
        },
        None => None,
    };
    // A variable that is not UTF-8 cannot be one of ours, except by mistake; `lossy` lets the mistake be named.
    let environment: Vec<(String, String)> = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
        .collect();
    assemble(file, &environment)
}

/// The configuration of somebody who has none.
#[cfg(test)]
#[allow(clippy::expect_used)]
pub fn defaults_alone() -> Config {
    assemble(None, &[]).expect("the defaults are valid")
}

/// The configuration from a file's path and text and from an environment.
pub(super) fn assemble(
    file: Option<(PathBuf, String)>,
    environment: &[(String, String)],
) -> Result<Config, Box<Problems>> {
    let (defaults, lists) = defaults();
    let mut settings = Settings::new(defaults, lists);
    if let Some((_, text)) = &file {
        put_file(&mut settings, text, environment);
    }
    put_environment(&mut settings, environment);
    let config = super::typed::read(&mut settings, file.as_ref().map(|(path, _)| path.clone()));
    match config {
        Some(config) if settings.problems.is_empty() => Ok(config),
        _ => Err(Box::new(Problems::new(file, settings.problems))),
    }
}

type Values = BTreeMap<String, Value>;

/// The settings of sections, and those of sections that there may be several of.
fn defaults() -> (Values, BTreeMap<String, Values>) {
    let (mut values, mut lists) = (Values::new(), BTreeMap::<String, Values>::new());
    // The list is compiled in, and a test reads it: it cannot fail to parse here.
    let Ok(document) = DeTable::parse(DEFAULTS) else { return (values, lists) };
    for (section, table) in document.get_ref() {
        match table.get_ref() {
            DeValue::Table(table) => {
                for (key, value) in table {
                    values.insert(format!("{}.{}", section.get_ref(), key.get_ref()), plain(value.get_ref()));
                }
            }
            DeValue::Array(tables) => {
                let list = lists.entry(section.get_ref().to_string()).or_default();
                for (key, value) in tables.iter().filter_map(|table| table.get_ref().as_table()).flatten() {
                    list.insert(key.get_ref().to_string(), plain(value.get_ref()));
                }
            }
            _ => {}
        }
    }
    (values, lists)
}

fn put_file(settings: &mut Settings, text: &str, environment: &[(String, String)]) {
    let document = match DeTable::parse(text) {
        Ok(document) => document,
        Err(error) => {
            let span = error.span().unwrap_or(0..0);
            let problem =
                Problem::new(Origin::File(span), format!("the config file is not valid TOML: {}", error.message()));
            settings.problems.push(problem);
            return;
        }
    };
    let lookup = |name: &str| environment.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
    for (section, table) in document.get_ref() {
        let name = section.get_ref().as_ref();
        if settings.is_list(name) {
            put_list(settings, name, table, &lookup);
            continue;
        }
        if !settings.sections().contains(&name) {
            let problem = unknown_section(settings, name, table.get_ref());
            settings.problems.push(Problem::new(Origin::File(section.span()), problem.0).help(problem.1));
            continue;
        }
        let DeValue::Table(table) = table.get_ref() else {
            let problem = Problem::new(Origin::File(table.span()), format!("{name} is a section, not a setting"));
            settings
                .problems
                .push(problem.help(format!("write [{name}] on a line of its own, and its settings below")));
            continue;
        };
        for (key, value) in table {
            let full = format!("{name}.{}", key.get_ref());
            if settings.example(&full).is_none() {
                let (message, help) = unknown_key(settings, name, key.get_ref());
                settings.problems.push(Problem::new(Origin::File(key.span()), message).label("unknown").help(help));
                continue;
            }
            put_value(settings, &full, value, &lookup);
        }
    }
}

fn put_value(
    settings: &mut Settings,
    full: &str,
    value: &Spanned<DeValue<'_>>,
    lookup: &impl Fn(&str) -> Option<String>,
) {
    let origin = Origin::File(value.span());
    match plain(value.get_ref()) {
        Value::Text(text) => match expand(&text, lookup) {
            Ok(text) => settings.put(full, Value::Text(text), origin),
            Err(error) => settings.problems.push(Problem::new(origin, format!("{full} {error}"))),
        },
        value => settings.put(full, value, origin),
    }
}

fn put_list(
    settings: &mut Settings,
    list: &str,
    tables: &Spanned<DeValue<'_>>,
    lookup: &impl Fn(&str) -> Option<String>,
) {
    let not_a_list = |span| {
        Problem::new(Origin::File(span), format!("{list} is a list of sections"))
            .help(format!("write [[{list}]] with two brackets, once for each"))
    };
    let DeValue::Array(tables) = tables.get_ref() else {
        settings.problems.push(not_a_list(tables.span()));
        return;
    };
    for table in tables.iter() {
        let DeValue::Table(entries) = table.get_ref() else {
            settings.problems.push(not_a_list(table.span()));
            continue;
        };
        let prefix = settings.add_item(list, Origin::File(table.span()));
        for (key, value) in entries {
            let full = format!("{prefix}.{}", key.get_ref());
            if settings.example(&full).is_none() {
                let keys = settings.item_keys(list);
                let help = match nearest(key.get_ref(), &keys) {
                    Some(meant) => format!("did you mean {meant}?"),
                    None => format!("its settings are {}", keys.join(", ")),
                };
                let message = format!("[[{list}]] has no setting {}", key.get_ref());
                settings.problems.push(Problem::new(Origin::File(key.span()), message).label("unknown").help(help));
                continue;
            }
            put_value(settings, &full, value, lookup);
        }
    }
}

fn put_environment(settings: &mut Settings, environment: &[(String, String)]) {
    for (name, text) in environment {
        let Some(path) = name.strip_prefix(ENV_PREFIX) else { continue };
        let origin = Origin::Env(name.clone());
        let key = path.to_ascii_lowercase().replacen("__", ".", 1);
        let Some(example) = settings.example(&key) else {
            let known: Vec<String> = settings.keys().map(variable).collect();
            let known: Vec<&str> = known.iter().map(String::as_str).collect();
            let help = match nearest_variable(name, &known) {
                Some(meant) => format!("did you mean {meant}?"),
                None => "`postrider init` writes a file with all settings".to_owned(),
            };
            settings.problems.push(Problem::new(origin, "there is no such setting").help(help));
            continue;
        };
        let value = match example {
            Value::Integer(_) => text.trim().parse().map(Value::Integer).unwrap_or(Value::Text(text.clone())),
            Value::Float(_) => text.trim().parse().map(Value::Float).unwrap_or(Value::Text(text.clone())),
            Value::Flag(_) => text.trim().parse().map(Value::Flag).unwrap_or(Value::Text(text.clone())),
            Value::Text(_) | Value::Texts(_) | Value::Other(_) => Value::Text(text.clone()),
        };
        settings.put(&key, value, origin);
    }
}

/// The environment variable of a key.
fn variable(key: &str) -> String {
    format!("{ENV_PREFIX}{}", key.replace('.', "__").to_ascii_uppercase())
}

/// Compares without the prefix, which all share and which would make all look alike.
fn nearest_variable<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    let strip = |name: &str| name.trim_start_matches(ENV_PREFIX).to_ascii_lowercase();
    let names: Vec<String> = known.iter().map(|name| strip(name)).collect();
    let refs: Vec<&str> = names.iter().map(String::as_str).collect();
    let meant = nearest(&strip(name), &refs)?;
    refs.iter().position(|name| *name == meant).map(|at| known[at])
}

fn unknown_section(settings: &Settings, name: &str, value: &DeValue<'_>) -> (String, String) {
    let sections = settings.sections();
    if !matches!(value, DeValue::Table(_)) {
        // A setting above the first section header, or one that lost its section.
        let place = settings.keys().find(|key| key.split_once('.').is_some_and(|(_, key)| key == name));
        let help = match place.and_then(|key| key.split_once('.')) {
            Some((section, _)) => format!("{name} belongs below [{section}]"),
            None => format!("settings stand below one of the sections {}", sections.join(", ")),
        };
        return (format!("{name} stands outside of any section"), help);
    }
    let help = match nearest(name, &sections) {
        Some(meant) => format!("did you mean [{meant}]?"),
        None => format!("the sections are {}", sections.join(", ")),
    };
    (format!("there is no section [{name}]"), help)
}

fn unknown_key(settings: &Settings, section: &str, key: &str) -> (String, String) {
    let keys = settings.keys_of(section);
    let elsewhere = settings.keys().find(|known| known.split_once('.').is_some_and(|(_, name)| name == key));
    let help = match (nearest(key, &keys), elsewhere) {
        (_, Some(place)) => format!("did you mean {place}? It has a section of its own"),
        (Some(meant), None) => format!("did you mean {meant}?"),
        (None, None) => format!("the settings of [{section}] are {}", keys.join(", ")),
    };
    (format!("there is no setting {section}.{key}"), help)
}

fn plain(value: &DeValue<'_>) -> Value {
    match value {
        DeValue::String(text) => Value::Text(text.clone().into_owned()),
        DeValue::Integer(number) => match i64::from_str_radix(number.as_str(), number.radix()) {
            Ok(number) => Value::Integer(number),
            Err(_) => Value::Other("a number too large to be kept"),
        },
        DeValue::Float(number) => match number.as_str().parse() {
            Ok(number) => Value::Float(number),
            Err(_) => Value::Other("a number that cannot be read"),
        },
        DeValue::Boolean(flag) => Value::Flag(*flag),
        DeValue::Datetime(_) => Value::Other("a date"),
        DeValue::Array(items) => {
            let texts = items.iter().map(|item| item.get_ref().as_str().map(str::to_owned));
            texts.collect::<Option<Vec<_>>>().map_or(Value::Other("a list"), Value::Texts)
        }
        DeValue::Table(_) => Value::Other("a section"),
    }
}
