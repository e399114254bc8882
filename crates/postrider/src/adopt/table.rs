//! A table as the catalogue describes it.

use std::fmt;

/// The name of a table, with its schema (on MySQL: its database) if one was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableName {
    /// The schema; `None` for the first one on the search path that has the table.
    pub schema: Option<String>,
    /// The table.
    pub name: String,
}

impl TableName {
    /// Reads `table`, `schema.table` or `"My Schema"."my.table"`: a name in double quotes may hold anything, `""` stands for
    /// one of them. Names count letter by letter, quoted or not.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut names = Vec::new();
        let mut rest = text;
        loop {
            let (name, after) = match rest.strip_prefix('"') {
                Some(quoted) => quoted_name(quoted)?,
                None => {
                    let end = rest.find('.').unwrap_or(rest.len());
                    (rest[..end].to_owned(), &rest[end..])
                }
            };
            if name.is_empty() || name.contains('\0') {
                return Err("names no table; write \"table\" or \"schema.table\"".to_owned());
            }
            names.push(name);
            match after.strip_prefix('.') {
                Some(after) => rest = after,
                None if after.is_empty() => break,
                None => return Err("has text after a closing quote".to_owned()),
            }
        }
        let mut names = names.into_iter();
        match (names.next(), names.next(), names.next()) {
            (Some(name), None, _) => Ok(Self { schema: None, name }),
            (Some(schema), Some(name), None) => Ok(Self { schema: Some(schema), name }),
            _ => Err("has more than a schema and a table; put a name with dots into double quotes".to_owned()),
        }
    }
}

fn quoted_name(quoted: &str) -> Result<(String, &str), String> {
    let mut name = String::new();
    let mut chars = quoted.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' if chars.peek().is_some_and(|(_, next)| *next == '"') => {
                chars.next();
                name.push('"');
            }
            '"' => return Ok((name, &quoted[at + 1..])),
            c => name.push(c),
        }
    }
    Err("has an opening quote without a closing one".to_owned())
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |name: &str| match name.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '$') {
            true => name.to_owned(),
            false => format!("\"{}\"", name.replace('"', "\"\"")),
        };
        match &self.schema {
            Some(schema) => write!(f, "{}.{}", shown(schema), shown(&self.name)),
            None => f.write_str(&shown(&self.name)),
        }
    }
}

/// What a column can hold, as far as a mapping cares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnKind {
    /// Whole numbers.
    Integer,
    /// A UUID.
    Uuid,
    /// Text of any kind, enumerations too.
    Text,
    /// JSON.
    Json,
    /// Bytes.
    Bytes,
    /// True or false.
    Boolean,
    /// A point in time, with its zone or in the zone of the session.
    Instant,
    /// A date and time without a zone.
    DateTime,
    /// Anything else.
    Other,
}

impl ColumnKind {
    /// Whether it is a point in time.
    pub fn is_time(self) -> bool {
        matches!(self, ColumnKind::Instant | ColumnKind::DateTime)
    }
}

/// A column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnInfo {
    /// Its name.
    pub name: String,
    /// What it holds.
    pub kind: ColumnKind,
    /// Its type, in the database's words.
    pub type_name: String,
    /// How many characters it holds at most, where that is limited.
    pub chars_max: Option<u32>,
    /// How many digits of a second a time holds; none for other types.
    pub second_digits: Option<u32>,
    /// The words that an enumeration allows; empty for other types.
    pub words: Vec<String>,
    /// Whether it may be null.
    pub is_nullable: bool,
    /// Its default, as the catalogue shows it.
    pub default: Option<String>,
}

/// An index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexInfo {
    /// Its name.
    pub name: String,
    /// Its columns, in order; an expression has the name "".
    pub columns: Vec<String>,
    /// The condition of a partial index, as the catalogue shows it.
    pub condition: Option<String>,
    /// Whether it is unique.
    pub is_unique: bool,
}

/// A table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableInfo {
    /// Its schema, or database.
    pub schema: String,
    /// Its name.
    pub name: String,
    /// The database's name.
    pub database: String,
    /// Its columns.
    pub columns: Vec<ColumnInfo>,
    /// The columns of its primary key.
    pub primary_key: Vec<String>,
    /// Its indexes, the primary key's too.
    pub indexes: Vec<IndexInfo>,
    /// What this user may not do with it: `SELECT`, `UPDATE`.
    pub missing_rights: Vec<String>,
}

impl TableInfo {
    /// The column of that name.
    pub fn column(&self, name: &str) -> Option<&ColumnInfo> {
        self.columns.iter().find(|column| column.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        for (text, schema, name) in [
            ("outbox", None, "outbox"),
            ("shop.OutboxMessages", Some("shop"), "OutboxMessages"),
            (r#""My Schema"."my.""table""""#, Some("My Schema"), "my.\"table\""),
            ("sự_kiện", None, "sự_kiện"),
        ] {
            let parsed = TableName::parse(text).unwrap();
            assert_eq!((parsed.schema.as_deref(), parsed.name.as_str()), (schema, name));
            assert_eq!(TableName::parse(&parsed.to_string()).unwrap(), parsed);
        }
        for text in ["", ".", "a.", "a.b.c", "\"a", "\"a\"b", "\"\""] {
            assert!(TableName::parse(text).is_err(), "{text}");
        }
    }
}
