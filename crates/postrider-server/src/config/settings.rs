//! Layers of values by key (`relay.poll_ms`), read as types. Every mistake is collected, none stops at the first.

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};
use std::time::Duration;

use super::error::Problem;

/// A value as it was written.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// A string.
    Text(String),
    /// A whole number.
    Integer(i64),
    /// A number with a point.
    Float(f64),
    /// `true` or `false`.
    Flag(bool),
    /// A list of strings.
    Texts(Vec<String>),
    /// Something that no setting takes; the word names it.
    Other(&'static str),
}

impl Value {
    /// What it is, for messages.
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::Text(_) => "a text in quotes",
            Value::Integer(_) => "a whole number",
            Value::Float(_) => "a number",
            Value::Flag(_) => "true or false",
            Value::Texts(_) => "a list of texts in quotes",
            Value::Other(name) => name,
        }
    }
}

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The list of defaults, or no particular place.
    Default,
    /// Bytes of the config file.
    File(Range<usize>),
    /// An environment variable.
    Env(String),
}

/// All settings by key, the highest layer's value of each, and what is wrong with them.
pub struct Settings {
    values: BTreeMap<String, (Value, Origin)>,
    /// The settings that each section of a list (`[[consumer]]`) has.
    lists: BTreeMap<String, BTreeMap<String, Value>>,
    /// How many of each there are.
    counts: BTreeMap<String, usize>,
    pub(super) problems: Vec<Problem>,
}

impl Settings {
    /// The lowest layer: it decides which keys exist and which type each has.
    pub fn new(defaults: BTreeMap<String, Value>, lists: BTreeMap<String, BTreeMap<String, Value>>) -> Self {
        let values = defaults.into_iter().map(|(key, value)| (key, (value, Origin::Default))).collect();
        Self { values, lists, counts: BTreeMap::new(), problems: Vec::new() }
    }

    /// Whether there may be several sections of this name.
    pub fn is_list(&self, name: &str) -> bool {
        self.lists.contains_key(name)
    }

    /// How many sections a list has; their keys begin with `<list>.1` and so on.
    pub fn items(&self, list: &str) -> usize {
        self.counts.get(list).copied().unwrap_or_default()
    }

    /// One more section of a list at this place; returns what its keys begin with (`consumer.1`).
    pub fn add_item(&mut self, list: &str, origin: Origin) -> String {
        let count = self.counts.entry(list.to_owned()).or_default();
        *count += 1;
        let prefix = format!("{list}.{count}");
        for (key, value) in self.lists.get(list).into_iter().flatten() {
            self.values.insert(format!("{prefix}.{key}"), (value.clone(), origin.clone()));
        }
        prefix
    }

    /// The keys of a list's sections.
    pub fn item_keys(&self, list: &str) -> Vec<&str> {
        self.lists.get(list).into_iter().flatten().map(|(key, _)| key.as_str()).collect()
    }

    /// The type that the key's default has.
    pub fn example(&self, key: &str) -> Option<&Value> {
        self.values.get(key).map(|(value, _)| value)
    }

    /// All keys.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }

    /// The keys of one section, without its name.
    pub fn keys_of(&self, section: &str) -> Vec<&str> {
        let names = self.keys().filter_map(|key| key.split_once('.'));
        names.filter(|(of, _)| *of == section).map(|(_, name)| name).collect()
    }

    /// The names of all sections.
    pub fn sections(&self) -> Vec<&str> {
        let mut sections: Vec<&str> = self.keys().filter_map(|key| key.split_once('.')).map(|(of, _)| of).collect();
        sections.dedup();
        sections
    }

    /// Puts a higher layer's value over the one that is there. Refuses another type, except a whole number for a
    /// number with a point.
    pub fn put(&mut self, key: &str, value: Value, origin: Origin) {
        let Some((known, place)) = self.values.get_mut(key) else { return };
        let value = match (&*known, value) {
            (Value::Float(_), Value::Integer(whole)) => Value::Float(whole as f64),
            (_, value) => value,
        };
        if std::mem::discriminant(known) != std::mem::discriminant(&value) {
            let message = format!("{key} must be {}, not {}", known.type_name(), value.type_name());
            let problem = Problem::new(origin, message).label(format!("expected {}", known.type_name()));
            self.problems.push(problem.help(format!("the default is {}", show(known))));
            return;
        }
        *known = value;
        *place = origin;
    }

    /// Notes a mistake at the place of the key's value.
    pub fn complain(&mut self, key: &str, what: impl std::fmt::Display, help: Option<String>) {
        let origin = self.values.get(key).map_or(Origin::Default, |(_, origin)| origin.clone());
        let problem = Problem::new(origin, format!("{key} {what}"));
        self.problems.push(match help {
            Some(help) => problem.help(help),
            None => problem,
        });
    }

    /// A text.
    pub fn text(&self, key: &str) -> String {
        match self.values.get(key) {
            Some((Value::Text(text), _)) => text.clone(),
            _ => String::new(),
        }
    }

    /// A list of texts.
    pub fn texts(&self, key: &str) -> Vec<String> {
        match self.values.get(key) {
            Some((Value::Texts(texts), _)) => texts.clone(),
            _ => Vec::new(),
        }
    }

    /// A text that `parse` understands; its error says what the value must be, and does not repeat it.
    pub fn parsed<T, E: std::fmt::Display>(&mut self, key: &str, parse: impl Fn(&str) -> Result<T, E>) -> Option<T> {
        match parse(&self.text(key)) {
            Ok(value) => Some(value),
            Err(error) => {
                self.complain(key, error, None);
                None
            }
        }
    }

    /// One word of several.
    pub fn choice<T: Copy>(&mut self, key: &str, choices: &[(&str, T)]) -> Option<T> {
        let text = self.text(key);
        if let Some((_, value)) = choices.iter().find(|(name, _)| *name == text) {
            return Some(*value);
        }
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        let quoted: Vec<String> = names.iter().map(|name| format!("\"{name}\"")).collect();
        let help = super::error::nearest(&text, &names).map(|name| format!("did you mean \"{name}\"?"));
        self.complain(key, format_args!("must be one of {}", quoted.join(", ")), help);
        None
    }

    /// `true` or `false`.
    pub fn flag(&self, key: &str) -> bool {
        matches!(self.values.get(key), Some((Value::Flag(true), _)))
    }

    /// A whole number within limits. Outside of them the lower limit is returned, and the mistake noted.
    pub fn integer(&mut self, key: &str, limits: RangeInclusive<u64>) -> u64 {
        let found = match self.values.get(key) {
            Some((Value::Integer(found), _)) => *found,
            _ => return *limits.start(),
        };
        match u64::try_from(found).ok().filter(|number| limits.contains(number)) {
            Some(number) => number,
            None => {
                let (low, high) = (limits.start(), limits.end());
                self.complain(key, format_args!("must be between {low} and {high}, not {found}"), None);
                *limits.start()
            }
        }
    }

    /// The same for numbers that a `u32` holds.
    pub fn count(&mut self, key: &str, limits: RangeInclusive<u32>) -> u32 {
        let number = self.integer(key, u64::from(*limits.start())..=u64::from(*limits.end()));
        u32::try_from(number).unwrap_or(u32::MAX)
    }

    /// Milliseconds.
    pub fn millis(&mut self, key: &str, limits: RangeInclusive<u64>) -> Duration {
        Duration::from_millis(self.integer(key, limits))
    }

    /// A share between 0 (excluded) and 1.
    pub fn share(&mut self, key: &str) -> f64 {
        let found = match self.values.get(key) {
            Some((Value::Float(found), _)) => *found,
            _ => return 1.0,
        };
        if !(found > 0.0 && found <= 1.0) {
            self.complain(key, format_args!("must be above 0 and at most 1, not {found}"), None);
        }
        found
    }
}

fn show(value: &Value) -> String {
    match value {
        Value::Text(text) => format!("{text:?}"),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::Flag(flag) => flag.to_string(),
        Value::Texts(texts) => format!("{texts:?}"),
        Value::Other(name) => (*name).to_owned(),
    }
}
