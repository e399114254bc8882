//! A text made of columns: `orders.{event_type}`, `sync.{aggregate_type|lower}`.

use std::collections::BTreeMap;
use std::fmt;

use crate::error::{Error, Kind, Result};

/// A text with columns in it. `{name}` stands for a column, `{name|lower}` for its value in small letters, `{{` and `}}` for
/// braces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    text: String,
    parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Column { name: String, is_lower: bool },
}

impl Template {
    /// Reads it. The error says what is wrong with the text.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut plain = String::new();
        let mut chars = text.chars().peekable();
        while let Some(c) = chars.next() {
            match c {
                '{' | '}' if chars.peek() == Some(&c) => {
                    chars.next();
                    plain.push(c);
                }
                '}' => return Err("has a } without a {; a plain one is written }}".to_owned()),
                '{' => {
                    let inside: String = chars.by_ref().take_while(|c| *c != '}').collect();
                    if !plain.is_empty() {
                        parts.push(Part::Text(std::mem::take(&mut plain)));
                    }
                    parts.push(column(&inside)?);
                }
                c => plain.push(c),
            }
        }
        if !plain.is_empty() {
            parts.push(Part::Text(plain));
        }
        if text.matches('{').count() != text.matches('}').count() {
            return Err("has a { without a }; a plain one is written {{".to_owned());
        }
        Ok(Self { text: text.to_owned(), parts })
    }

    /// The value of one column.
    pub fn of_column(name: &str) -> Self {
        let parts = vec![Part::Column { name: name.to_owned(), is_lower: false }];
        Self { text: format!("{{{name}}}"), parts }
    }

    /// The columns that stand in it.
    pub fn columns(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().filter_map(|part| match part {
            Part::Text(_) => None,
            Part::Column { name, .. } => Some(name.as_str()),
        })
    }

    /// The text for one row. A column that is null is an error that names it.
    pub fn fill(&self, what: &str, values: &BTreeMap<String, String>) -> Result<String> {
        let mut filled = String::new();
        for part in &self.parts {
            match part {
                Part::Text(text) => filled.push_str(text),
                Part::Column { name, is_lower } => match values.get(name) {
                    Some(value) if *is_lower => filled.push_str(&value.to_lowercase()),
                    Some(value) => filled.push_str(value),
                    None => {
                        return Err(Error::new(
                            Kind::Invalid,
                            format!("the column {name:?} is null, and the {what} is made of it"),
                        ));
                    }
                },
            }
        }
        Ok(filled)
    }
}

fn column(inside: &str) -> Result<Part, String> {
    let (name, is_lower) = match inside.split_once('|') {
        Some((name, "lower")) => (name, true),
        Some((_, other)) => return Err(format!("knows no {other:?}; after | only \"lower\" may stand")),
        None => (inside, false),
    };
    match name {
        "" => Err("has {} without the name of a column".to_owned()),
        name => Ok(Part::Column { name: name.to_owned(), is_lower }),
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values() -> BTreeMap<String, String> {
        BTreeMap::from([("kind".to_owned(), "USER".to_owned()), ("My Column".to_owned(), "x".to_owned())])
    }

    #[test]
    fn columns_are_filled_in() {
        let template = Template::parse("sync.{kind|lower}.{My Column}.{{kept}}").unwrap();
        assert_eq!(template.columns().collect::<Vec<_>>(), ["kind", "My Column"]);
        assert_eq!(template.fill("topic", &values()).unwrap(), "sync.user.x.{kept}");
    }

    #[test]
    fn a_null_column_is_named() {
        let error = Template::parse("{other}").unwrap().fill("topic", &values()).unwrap_err();
        assert!(error.to_string().contains("\"other\"") && error.to_string().contains("topic"), "{error}");
    }

    #[test]
    fn mistakes_are_told() {
        for (text, part) in
            [("a{b", "without a }"), ("a}b", "without a {"), ("{}", "without the name"), ("{a|upper}", "lower")]
        {
            let error = Template::parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
