//! The few things that are done to addresses here.

use super::{Error, Result};

/// `scheme://user:password@host:port/path?query`, taken apart but not decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Url {
    pub(super) scheme: String,
    pub(super) user: String,
    pub(super) password: String,
    pub(super) host: String,
    pub(super) port: Option<u16>,
    /// With its question mark, or empty.
    query: String,
}

impl std::str::FromStr for Url {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        // The text may hold a password, so it is not repeated in the errors.
        let (scheme, rest) = text.split_once("://").ok_or("an address starts with scheme://")?;
        let (rest, query) = rest.find('?').map_or((rest, ""), |at| rest.split_at(at));
        let authority = rest.split_once('/').map_or(rest, |(authority, _)| authority);
        let (login, place) = authority.rsplit_once('@').unwrap_or(("", authority));
        let (user, password) = login.split_once(':').unwrap_or((login, ""));
        let (host, port) = match place.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => {
                (host, Some(port.parse().map_err(|_| "the port of an address is a number up to 65535")?))
            }
            _ => (place, None),
        };
        Ok(Url {
            scheme: scheme.to_owned(),
            user: user.to_owned(),
            password: password.to_owned(),
            host: host.to_owned(),
            port,
            query: query.to_owned(),
        })
    }
}

impl Url {
    /// The same server, with another database or virtual host.
    pub(super) fn with_path(&self, path: &str) -> String {
        let Url { scheme, user, password, host, query, .. } = self;
        let login = match (user.is_empty(), password.is_empty()) {
            (true, _) => String::new(),
            (false, true) => format!("{user}@"),
            (false, false) => format!("{user}:{password}@"),
        };
        let port = self.port.map(|port| format!(":{port}")).unwrap_or_default();
        format!("{scheme}://{login}{host}{port}/{path}{query}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_path_changes() {
        for (text, expected) in [
            ("postgres://127.0.0.1:5432/postgres", "postgres://127.0.0.1:5432/new"),
            ("postgres://me@[::1]/x?sslmode=disable", "postgres://me@[::1]/new?sslmode=disable"),
            ("amqp://guest:p%40ss@host/%2f", "amqp://guest:p%40ss@host/new"),
            ("amqps://host", "amqps://host/new"),
        ] {
            assert_eq!(text.parse::<Url>().unwrap().with_path("new"), expected);
        }
        assert!("host:5432".parse::<Url>().is_err());
    }
}
