//! Pages of lists, and the queries that ask for them.

use std::str::FromStr;

use serde::Serialize;

use super::Problem;

/// Items of a page, unless `limit` says otherwise.
const LIMIT: usize = 100;
/// Items of the longest page.
const LIMIT_MAX: usize = 1000;

/// A page of a list.
#[derive(Debug, Serialize)]
pub struct Page<T> {
    /// The items.
    pub items: Vec<T>,
    /// What `after` or `before` must be for the next page; none when this is the last.
    pub next: Option<i64>,
}

impl<T> Page<T> {
    /// A page of up to `limit` items; there may be more when it is full.
    pub fn new(items: Vec<T>, limit: usize, number: impl Fn(&T) -> i64) -> Self {
        let next = items.last().filter(|_| items.len() >= limit).map(number);
        Self { items, next }
    }

    /// All there are.
    pub fn whole(items: Vec<T>) -> Self {
        Self { items, next: None }
    }
}

/// The parameters of a query. One without a value is as good as none.
#[derive(Debug)]
pub struct Query {
    pairs: Vec<(String, String)>,
    remedy: &'static str,
}

impl Query {
    /// Reads a query; what is not among `known` is refused, with the remedy.
    pub fn read(query: Option<&str>, known: &[&str], remedy: &'static str) -> Result<Self, Problem> {
        let unreadable = || Problem::bad_request("the query cannot be read").remedy(remedy);
        let uri = format!("/?{}", query.unwrap_or_default()).parse().map_err(|_| unreadable())?;
        let pairs = axum::extract::Query::<Vec<(String, String)>>::try_from_uri(&uri).map_err(|_| unreadable())?.0;
        let query = Self { pairs: pairs.into_iter().filter(|(_, value)| !value.is_empty()).collect(), remedy };
        for (name, value) in &query.pairs {
            if !known.contains(&name.as_str()) {
                return Err(query.wrong(name, format!("there is no parameter {:?}", shorten(name))));
            }
            if value.contains('\0') {
                return Err(query.wrong(name, format!("{name} has a zero byte in it")));
            }
            if query.pairs.iter().filter(|(other, _)| other == name).count() > 1 {
                return Err(query.wrong(name, format!("{name} is there twice")));
            }
        }
        Ok(query)
    }

    /// A text.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.pairs.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Something that stands in a text.
    pub fn parsed<T: FromStr>(&self, name: &str, what: &str) -> Result<Option<T>, Problem> {
        let Some(text) = self.text(name) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| self.wrong(name, format!("{name} is not {what}")))
    }

    /// How many items are asked for.
    pub fn limit(&self) -> Result<usize, Problem> {
        let limit = self.parsed("limit", "a number")?.unwrap_or(LIMIT);
        match (1..=LIMIT_MAX).contains(&limit) {
            true => Ok(limit),
            false => Err(self.wrong("limit", format!("the limit is {limit}, it must be 1 to {LIMIT_MAX}"))),
        }
    }

    /// Where the page begins: below this number.
    pub fn before(&self) -> Result<Option<i64>, Problem> {
        self.parsed("before", "a number")
    }

    /// A parameter that cannot be what it is.
    pub fn wrong(&self, name: &str, detail: String) -> Problem {
        Problem::bad_request(detail).with("parameter", &shorten(name)).remedy(self.remedy)
    }
}

/// Enough of it to recognise it.
fn shorten(name: &str) -> String {
    name.chars().take(50).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_page_says_where_the_next_begins() {
        assert_eq!(Page::new(vec![9, 8, 7], 3, |id| *id).next, Some(7));
        assert_eq!(Page::new(vec![9, 8], 3, |id| *id).next, None);
        assert_eq!(Page::new(Vec::<i64>::new(), 3, |id| *id).next, None);
    }

    #[test]
    fn what_is_not_understood_is_named() {
        let read = |query: &str| Query::read(Some(query), &["state", "before", "limit"], "use state, before, limit");
        let query = read("state=a%20b&before=&limit=7").unwrap();
        assert_eq!((query.text("state"), query.before().unwrap(), query.limit().unwrap()), (Some("a b"), None, 7));
        assert_eq!(Query::read(None, &[], "").unwrap().limit().unwrap(), LIMIT);
        let long = format!("{}=1", "x".repeat(10_000));
        for (query, part) in [
            ("stat=a", "there is no parameter"),
            (&long, "there is no parameter"),
            ("state=%00", "zero byte"),
            ("state=a&state=b", "twice"),
            ("%3Cscript%3E=1", "there is no parameter"),
            ("<script>=1", "cannot be read"),
        ] {
            let said = format!("{:?}", read(query).unwrap_err());
            assert!(said.contains(part) && said.len() < 600, "{part:?} is missing in {said}");
        }
        for (query, part) in [("limit=0", "1 to 1000"), ("limit=1001", "1 to 1000"), ("limit=-1", "not a number")] {
            assert!(format!("{:?}", read(query).unwrap().limit().unwrap_err()).contains(part));
        }
        assert!(read("before=x").unwrap().before().is_err());
    }
}
