//! Addresses of stores and brokers, which may hold a password: shown only with `***` in its place.

use std::fmt;
use std::path::PathBuf;

/// An address with a possible password. `Display` and `Debug` hide the password.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// An address as it was configured.
    pub fn new(url: impl Into<String>) -> Self {
        Self(url.into())
    }

    /// The address with its password, for the driver alone.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Whether the address leads, unencrypted, to another machine.
    pub fn is_plaintext_over_network(&self) -> bool {
        ["amqp://", "kafka://", "nats://", "redis://"].iter().any(|scheme| is_plaintext_over_network(&self.0, scheme))
    }
}

/// Whether a URL of this scheme leads to another machine.
pub(super) fn is_plaintext_over_network(url: &str, scheme: &str) -> bool {
    let Some(rest) = url.strip_prefix(scheme) else { return false };
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let host = authority.rsplit('@').next().unwrap_or_default();
    let is_local = host.is_empty() || ["localhost", "127.", "[::1]"].iter().any(|local| host.starts_with(local));
    !is_local
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&redact(&self.0))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Which database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreUrl {
    /// A file.
    Sqlite(PathBuf),
    /// A PostgreSQL server.
    Postgres(Secret),
    /// A MySQL or MariaDB server.
    Mysql(Secret),
}

impl StoreUrl {
    /// Reads the setting; the error says what was meant, without the value.
    pub fn parse(url: &str) -> Result<Self, String> {
        if let Some(path) = url.strip_prefix("sqlite:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() {
                return Err("names no file; write \"sqlite:./postrider.db\"".to_owned());
            }
            if path.contains(":memory:") || path.contains("mode=memory") {
                return Err("is in memory, where events would be lost; name a file".to_owned());
            }
            if path.contains('?') {
                return Err("takes no ?options; name the file alone".to_owned());
            }
            return Ok(StoreUrl::Sqlite(PathBuf::from(path)));
        }
        if url.starts_with("postgres://") || url.starts_with("postgresql://") {
            return Ok(StoreUrl::Postgres(Secret::new(url)));
        }
        if url.starts_with("mysql://") || url.starts_with("mariadb://") {
            return Ok(StoreUrl::Mysql(Secret::new(url)));
        }
        Err("must begin with \"sqlite:\", \"postgres://\" or \"mysql://\"".to_owned())
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreUrl::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            StoreUrl::Postgres(url) | StoreUrl::Mysql(url) => write!(f, "{url}"),
        }
    }
}

/// Which broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BrokerUrl {
    /// A log in the store's database.
    Embedded,
    /// RabbitMQ.
    RabbitMq(Secret),
    /// Kafka.
    Kafka(Secret),
    /// NATS JetStream.
    Nats(Secret),
    /// Redis Streams.
    Redis(Secret),
}

impl BrokerUrl {
    /// Reads the setting; the error says what was meant, without the value.
    pub fn parse(url: &str) -> Result<Self, String> {
        if url == "embedded" {
            return Ok(BrokerUrl::Embedded);
        }
        if url.starts_with("amqp://") || url.starts_with("amqps://") {
            return Ok(BrokerUrl::RabbitMq(Secret::new(url)));
        }
        let begins = |names: &[&str]| names.iter().any(|name| url.starts_with(name));
        if begins(&["kafka://"]) {
            return Ok(BrokerUrl::Kafka(Secret::new(url)));
        }
        if begins(&["nats://", "tls://"]) {
            return Ok(BrokerUrl::Nats(Secret::new(url)));
        }
        if begins(&["redis://", "rediss://"]) {
            return Ok(BrokerUrl::Redis(Secret::new(url)));
        }
        Err("must be \"embedded\", or begin with \"amqp://\", \"amqps://\", \"kafka://\", \"nats://\" or \"redis://\""
            .to_owned())
    }
}

impl fmt::Display for BrokerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BrokerUrl::Embedded => f.write_str("embedded"),
            BrokerUrl::RabbitMq(url) | BrokerUrl::Kafka(url) | BrokerUrl::Nats(url) | BrokerUrl::Redis(url) => {
                write!(f, "{url}")
            }
        }
    }
}

/// The text with `***` in place of every password in a URL.
pub fn redact(text: &str) -> String {
    replace_passwords(text, |_| "***".to_owned())
}

/// The text of a config file with one `*` for every byte of a password in a URL and of a key, so that byte positions stay
/// what they are.
pub fn mask(text: &str) -> String {
    let text = replace_passwords(text, |password| "*".repeat(password.len()));
    mask_keys(&text)
}

/// What keys begin with whose values nobody needs to see to find a mistake; misspelt ones too.
const MASKED: [&str; 6] = ["secret", "access_key", "session_key", "hash", "pass", "auth"];

/// Masks the values of [`MASKED`] keys, and the addresses of sinks: whoever knows the address of a webhook may write to it.
fn mask_keys(text: &str) -> String {
    let (mut is_sink, mut until) = (false, None);
    let masked = text.split_inclusive('\n').map(|line| {
        if let Some(end) = until {
            until = (!line.contains(end)).then_some(end);
            return stars(line);
        }
        let start = line.trim_start_matches([' ', '\t', '[', '#']);
        if line.trim_start().starts_with('[') {
            is_sink = start.starts_with("sink");
        }
        let Some(at) = masked_at(line, is_sink || start.starts_with("sink")) else { return line.to_owned() };
        let value = line[at..].trim();
        if is_reference(value.trim_matches(['"', '\''])) {
            return line.to_owned();
        }
        // A text over several lines is hidden to its end.
        until = ["\"\"\"", "\'\'\'"]
            .into_iter()
            .find(|end| value.strip_prefix(end).is_some_and(|rest| !rest.contains(end)));
        format!("{}{}", &line[..at], stars(&line[at..]))
    });
    masked.collect()
}

/// Where the first value begins that is to be hidden; all that follows it in the line is hidden with it.
fn masked_at(line: &str, is_sink: bool) -> Option<usize> {
    line.match_indices('=').map(|(at, _)| at).find_map(|at| {
        let name = line[..at].trim_end().trim_end_matches(['"', '\'']);
        let key = name.rsplit(|c: char| !c.is_alphanumeric() && c != '_' && c != '-').next().unwrap_or_default();
        // Not a parameter of a URL, which was looked at before.
        let is_key = !name[..name.len() - key.len()].ends_with(['?', '&', ';']);
        let is_masked = MASKED.iter().any(|masked| key.starts_with(masked)) || (is_sink && key == "url");
        (is_key && is_masked).then_some(at + 1)
    })
}

fn stars(text: &str) -> String {
    text.bytes().map(|byte| if byte.is_ascii_whitespace() { char::from(byte) } else { '*' }).collect()
}

fn replace_passwords(text: &str, hide: impl Fn(&str) -> String) -> String {
    text.split_inclusive(|c: char| c.is_whitespace() || matches!(c, '"' | '\''))
        .map(|word| {
            let word = hide_userinfo(word, &hide);
            hide_parameter(&word, &hide)
        })
        .collect()
}

/// `scheme://user:password@host`, also without the scheme: what stands between the first `:` and the last `@`.
fn hide_userinfo(word: &str, hide: &impl Fn(&str) -> String) -> String {
    let start = word.find("://").map_or(0, |at| at + 3);
    let Some(end) = word.rfind('@').filter(|end| *end > start) else { return word.to_owned() };
    match word[start..end].find(':') {
        // `${NAME}` is a reference, not a password, and helps whoever reads the message.
        Some(colon) if !is_reference(&word[start + colon + 1..end]) => {
            let from = start + colon + 1;
            format!("{}{}{}", &word[..from], hide(&word[from..end]), &word[end..])
        }
        _ => word.to_owned(),
    }
}

/// `?password=…`, as PostgreSQL's URLs allow.
fn hide_parameter(word: &str, hide: &impl Fn(&str) -> String) -> String {
    let Some(at) = word.find("password=") else { return word.to_owned() };
    let from = at + "password=".len();
    let end = word[from..].find(['&', '"', '\'']).map_or(word.len(), |length| from + length);
    format!("{}{}{}", &word[..from], hide(&word[from..end]), &word[end..])
}

fn is_reference(text: &str) -> bool {
    text.starts_with("${") && text.find('}') == Some(text.len() - 1)
}

#[cfg(test)]
mod tests {
    use super::{BrokerUrl, Secret, StoreUrl, mask, redact};
    use crate::config::load::assemble;

    #[test]
    fn passwords_never_show() {
        for (given, shown) in [
            ("postgres://app:s3cret@db/shop", "postgres://app:***@db/shop"),
            ("postgres://app:a@b:c/d@db/shop", "postgres://app:***@db/shop"),
            ("app:s3cret@db", "app:***@db"),
            ("postgres://db/shop?user=a&password=s3cret&x=1", "postgres://db/shop?user=a&password=***&x=1"),
            ("postgres://app@db/shop", "postgres://app@db/shop"),
            ("url = \"amqp://u:${PW}@h\"", "url = \"amqp://u:${PW}@h\""),
            ("url = \"amqp://u:p@h\" # mail me@x.org", "url = \"amqp://u:***@h\" # mail me@x.org"),
        ] {
            assert_eq!(redact(given), shown);
            assert_eq!(mask(given).len(), given.len());
            assert!(!mask(given).contains("s3cret"));
        }
        assert_eq!(format!("{:?}", Secret::new("amqp://u:p@h")), "amqp://u:***@h");
    }

    #[test]
    fn keys_never_show() {
        for (given, shown) in [
            ("secret_key = \"s3cret\"\nregion = 1\n", "secret_key = ********\nregion = 1\n"),
            ("  access_key='s3cret'", "  access_key=********"),
            ("secret_key = \"${S3_KEY}\"", "secret_key = \"${S3_KEY}\""),
            ("secret = \"s3cret", "secret = *******"),
            ("\"password\" = \"s3cret\"", "\"password\" = ********"),
            ("# authorization = \"Bearer s\"", "# authorization = ******* **"),
            ("consumer.a.secret = 's3é'", "consumer.a.secret = ******"),
            ("a = { secret = \"s\" }", "a = { secret = *** *"),
            ("secret = \"\"\"a\nb\"\"\"\nc = 1", "secret = ****\n****\nc = 1"),
            (
                "[[sink]]\nurl = \"https://h/s\"\n[store]\nurl = \"x\"",
                "[[sink]]\nurl = *************\n[store]\nurl = \"x\"",
            ),
            ("# — … secret = 's'", "# — … secret = ***"),
            ("sink = [{ url = \"s\" }]", "sink = [{ url = *** **"),
        ] {
            assert_eq!(mask(given), shown);
            assert_eq!(mask(given).len(), given.len());
        }
    }

    #[test]
    fn a_mistake_beside_a_secret_does_not_show_it() {
        let text = "[[consumer]]\nname = \"a\"\nsecret = \"s3cret\" x\n";
        let wrong =
            "[[sink]]\nurl = 's3cret'\nsecret = ['s3cret']\nauthorization = { a = 's3cret' }\npassword = 's3cret\n";
        let typed = "[[sink]]\nkind = \"webhook\"\nurl = ['s3cret']\nsecret = ['s3cret']\npassword = ['s3cret']\n\
                     [trace]\nauthorization = ['s3cret']\nsecrets = 's3cret'\n";
        for text in [text, wrong, typed] {
            let said = assemble(Some(("p.toml".into(), text.to_owned())), &[]).unwrap_err().to_string();
            assert!(said.contains("p.toml") && said.contains("***"), "{said}");
            assert!(!said.contains("s3cret"), "{said}");
        }
    }

    #[test]
    fn addresses_name_their_backend() {
        assert_eq!(StoreUrl::parse("sqlite:a.db"), Ok(StoreUrl::Sqlite("a.db".into())));
        assert_eq!(StoreUrl::parse("sqlite:///var/a.db"), Ok(StoreUrl::Sqlite("/var/a.db".into())));
        assert!(StoreUrl::parse("sqlite::memory:").is_err());
        assert!(StoreUrl::parse("oracle://h/d").is_err());
        assert!(matches!(BrokerUrl::parse("amqps://h"), Ok(BrokerUrl::RabbitMq(_))));
        assert!(matches!(BrokerUrl::parse("kafka://h"), Ok(BrokerUrl::Kafka(_))));
        assert!(BrokerUrl::parse("pulsar://h").is_err());
    }

    #[test]
    fn plaintext_is_told_from_local() {
        assert!(Secret::new("amqp://u:p@mq.example.org:5672/x").is_plaintext_over_network());
        assert!(!Secret::new("amqp://u:p@localhost:5672/x").is_plaintext_over_network());
        assert!(!Secret::new("amqps://u:p@mq.example.org/x").is_plaintext_over_network());
    }
}
