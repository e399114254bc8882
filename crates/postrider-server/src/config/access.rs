//! `[http]` and `[[token]]`: where HTTP listens, and who may use it.

use std::net::SocketAddr;

use postrider::doctor::Finding;

use super::settings::Settings;
use super::{Hidden, is_name};
use crate::access::{Hash, Role, Token};

/// A shorter key could be guessed.
const SESSION_KEY_BYTES_MIN: usize = 32;

/// `[http]`
#[derive(Debug, Clone)]
pub struct HttpConfig {
    /// Where to listen.
    pub listen: SocketAddr,
    /// Whether `/metrics` needs no token.
    pub metrics_public: bool,
    /// Whether the session cookie goes over TLS alone.
    pub secure_cookie: CookieSecurity,
    /// What signs sessions; none for one that ends with the process.
    pub session_key: Option<Hidden>,
}

/// Whether the session cookie goes over TLS alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CookieSecurity {
    /// Unless it listens on loopback and nobody says that there is TLS in front.
    Auto,
    /// Yes.
    Always,
    /// No.
    Never,
}

/// Reads `[http]`.
pub(super) fn http(settings: &mut Settings) -> Option<HttpConfig> {
    let listen = settings.parsed("http.listen", |text| {
        text.parse().map_err(|_| "must be an address and a port, such as \"127.0.0.1:7070\" or \"[::1]:7070\"")
    });
    let choices =
        [("auto", CookieSecurity::Auto), ("always", CookieSecurity::Always), ("never", CookieSecurity::Never)];
    let secure_cookie = settings.choice("http.secure_cookie", &choices);
    let session_key = settings.parsed("http.session_key", |key| match key {
        "" => Ok(None),
        key if key.len() < SESSION_KEY_BYTES_MIN => {
            Err(format!("has fewer than {SESSION_KEY_BYTES_MIN} characters; `openssl rand -hex 32` makes one"))
        }
        key => Ok(Some(Hidden::new(key))),
    });
    let metrics_public = settings.flag("http.metrics_public");
    Some(HttpConfig { listen: listen?, metrics_public, secure_cookie: secure_cookie?, session_key: session_key? })
}

/// Reads every `[[token]]`.
pub(super) fn tokens(settings: &mut Settings) -> Vec<Token> {
    let mut tokens: Vec<Token> = Vec::new();
    for n in 1..=settings.items("token") {
        let key = |name: &str| format!("token.{n}.{name}");
        let Some(token) = token(settings, &key) else { continue };
        if tokens.iter().any(|other| other.name == token.name) {
            settings.complain(&key("name"), "is taken by another token", None);
        }
        if tokens.iter().any(|other| other.hash == token.hash) {
            let help = "a token is one program's or person's, so that the audit table says who it was";
            settings.complain(&key("hash"), "is the hash of another token", Some(help.to_owned()));
        }
        tokens.push(token);
    }
    tokens
}

fn token(settings: &mut Settings, key: &impl Fn(&str) -> String) -> Option<Token> {
    let name = settings.parsed(&key("name"), |name| match name {
        "" => Err("is missing"),
        name if is_name(name) => Ok(name.to_owned()),
        _ => Err("must be 1 to 60 letters, digits, '-' or '_'"),
    });
    let roles = [Role::Viewer, Role::Operator, Role::Producer].map(|role| (role.as_str(), role));
    let role = settings.choice(&key("role"), &roles);
    let hash = settings.parsed(&key("hash"), Hash::parse);
    Some(Token { name: name?, role: role?, hash: hash? })
}

/// What is risky about it.
pub(super) fn warning(http: &HttpConfig, tokens: &[Token]) -> Option<Finding> {
    let (check, listen) = ("config.http.listen", http.listen);
    if listen.ip().to_canonical().is_loopback() {
        return None;
    }
    if tokens.is_empty() {
        return Some(Finding::warning(
            check,
            format!(
                "{listen} is reachable from other machines, and no token is configured: nobody can use the API or the console"
            ),
            "make a token with `postrider token new` and put it into the configuration, or listen on 127.0.0.1",
        ));
    }
    if http.secure_cookie == CookieSecurity::Never {
        return Some(Finding::warning(
            "config.http.secure_cookie",
            format!("{listen} is reachable from other machines, and tokens and session cookies may travel unencrypted"),
            "put a proxy with TLS in front, and set http.secure_cookie = \"auto\"",
        ));
    }
    Some(Finding::warning(
        check,
        format!(
            "{listen} is reachable from other machines, without TLS: tokens travel unencrypted unless a proxy encrypts them"
        ),
        "put a proxy with TLS in front and let nobody else reach the port, or listen on 127.0.0.1",
    ))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::Config;
    use super::super::load::assemble;
    use super::*;

    const HASH: &str = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    fn from(text: &str) -> Result<Config, String> {
        assemble(Some((PathBuf::from("postrider.toml"), text.to_owned())), &[]).map_err(|error| error.to_string())
    }

    fn token(name: &str, role: &str, hash: &str) -> String {
        format!("[[token]]\nname = \"{name}\"\nrole = \"{role}\"\nhash = \"{hash}\"\n")
    }

    #[test]
    fn tokens_are_read_and_not_shown() {
        let other = HASH.replace("ba78", "0000");
        let config = from(&format!("{}{}", token("ops", "operator", HASH), token("ci", "producer", &other)));
        let config = config.expect("valid");
        assert_eq!((config.tokens[0].name.as_str(), config.tokens[0].role), ("ops", Role::Operator));
        assert!(config.tokens[0].hash == Hash::of("abc"));
        assert!(!format!("{config:?}").contains("7816"), "{config:?}");
    }

    #[test]
    fn mistakes_are_found_with_their_place() {
        for (text, part) in [
            (token("", "viewer", HASH), "token.1.name is missing"),
            (token("a b", "viewer", HASH), "token.1.name must be 1 to 60 letters"),
            (token("a", "admin", HASH), "token.1.role must be one of \"viewer\", \"operator\", \"producer\""),
            (token("a", "viewer", ""), "token.1.hash is missing"),
            (token("a", "viewer", "prt_12"), "token.1.hash is a token, not its hash"),
            (token("a", "viewer", "sha256:12"), "token.1.hash must be \"sha256:\" and 64"),
            (format!("{0}{0}", token("a", "viewer", HASH)), "token.2.name is taken"),
            (format!("{0}{0}", token("a", "viewer", HASH)), "token.2.hash is the hash of another token"),
            ("[http]\nsession_key = \"short\"\n".to_owned(), "http.session_key has fewer than 32"),
            ("[http]\nsecure_cookie = \"yes\"\n".to_owned(), "http.secure_cookie must be one of"),
        ] {
            let said = from(&text).expect_err(part);
            assert!(said.contains(part), "{part:?} is missing in:\n{said}");
        }
        let said = from("[http]\nsession_key = \"s3cret\"\n").expect_err("short");
        assert!(!said.contains("s3cret"), "{said}");
    }

    #[test]
    fn an_open_port_wants_tokens_and_tls() {
        let open = "[http]\nlisten = \"0.0.0.0:7070\"\n";
        let checks = |text: &str| -> Vec<String> {
            from(text).expect("valid").warnings().into_iter().map(|finding| finding.check).collect()
        };
        assert_eq!(checks(open), ["config.http.listen"]);
        assert_eq!(checks(&format!("{open}{}", token("a", "viewer", HASH))), ["config.http.listen"]);
        assert_eq!(checks(&token("a", "viewer", HASH)), Vec::<String>::new(), "on loopback");
        let never = format!("{open}secure_cookie = \"never\"\n{}", token("a", "viewer", HASH));
        assert_eq!(checks(&never), ["config.http.secure_cookie"]);
    }
}
