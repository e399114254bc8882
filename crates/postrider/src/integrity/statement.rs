//! A check that a user wrote: one query, and only one.

use crate::error::{Error, Kind, Result};

/// A value in a finding is cut to this many characters.
pub(crate) const VALUE_CHARS_MAX: usize = 200;

/// The query without a semicolon at its end. An error if it is empty, holds a second statement, or does not begin like a
/// query. That it cannot write is the database's to see to.
pub(crate) fn single(sql: &str) -> Result<&str> {
    let refused = |text: &str| {
        Err(Error::new(Kind::Config, text)
            .with_remedy("write one SELECT that returns a row for each thing that is wrong"))
    };
    let query = sql.trim().trim_end_matches(';').trim_end();
    let word = query.split(|c: char| !c.is_ascii_alphabetic()).next().unwrap_or_default();
    if query.is_empty() {
        return refused("the check has no SQL");
    }
    if !["select", "with", "values"].iter().any(|known| word.eq_ignore_ascii_case(known)) {
        return refused("the check's SQL does not begin with SELECT or WITH");
    }
    if has_semicolon(query) {
        return refused("the check's SQL has more than one statement");
    }
    Ok(query)
}

/// Outside of quotes and comments. What only one of the databases takes for a quote may hide none: it is then refused.
fn has_semicolon(sql: &str) -> bool {
    let mut rest = sql.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            ';' => return true,
            // A doubled quote ends one text and begins the next.
            '\'' | '"' | '`' => while rest.next().is_some_and(|inner| inner != c) {},
            '[' => while rest.next().is_some_and(|inner| inner != ']') {},
            '-' if rest.peek() == Some(&'-') => while rest.next().is_some_and(|inner| inner != '\n') {},
            '/' if rest.peek() == Some(&'*') => {
                let mut before = ' ';
                rest.next();
                for inner in rest.by_ref() {
                    if before == '*' && inner == '/' {
                        break;
                    }
                    before = inner;
                }
            }
            _ => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_query_is_taken_without_its_semicolon() {
        for sql in ["SELECT 1", " select 1 ; ", "WITH a AS (SELECT ';') SELECT * FROM a;", "select \";\" -- ; \n, `;`"]
        {
            let query = single(sql).unwrap();
            assert!(sql.contains(query) && !query.ends_with(';'), "{query}");
        }
        assert_eq!(single("SELECT 'it''s; ' /* ; */;;").unwrap(), "SELECT 'it''s; ' /* ; */");
    }

    #[test]
    fn anything_else_is_refused() {
        for sql in [
            "",
            " ; ",
            "DELETE FROM a",
            "SELECT 1; DELETE FROM a",
            "selecting 1",
            "SELECT ''';'; COMMIT",
            "(SELECT 1)",
            "SELECT ['] ; COMMIT --'",
        ] {
            let error = single(sql).unwrap_err();
            assert_eq!(error.kind(), Kind::Config, "{sql}");
        }
    }
}
