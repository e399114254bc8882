//! `[alerts]` and `[[sink]]`: when something is wrong, and who is told.

use std::time::Duration;

use postrider::alert::Thresholds;
use postrider::http::{Request, Signer, check_public};

use super::Hidden;
use super::settings::Settings;

/// `[alerts]`
#[derive(Debug, Clone)]
pub struct AlertsConfig {
    /// Whether this instance may be the one that watches.
    pub enabled: bool,
    /// Where people find the console; empty if nowhere.
    pub url: String,
    /// From where on something is wrong.
    pub thresholds: Thresholds,
}

/// A `[[sink]]`: somebody who is told.
#[derive(Debug, Clone)]
pub struct SinkConfig {
    /// Its name, in deliveries and logs.
    pub name: String,
    /// What it is.
    pub kind: SinkKind,
}

/// What a sink is.
#[derive(Debug, Clone)]
#[allow(dead_code)] // e-mail is not built in by default
pub enum SinkKind {
    /// JSON over HTTP.
    Webhook(WebhookSink),
    /// The same, as Slack and those who are like it want it.
    Slack(WebhookSink),
    /// E-mail.
    Smtp(SmtpSink),
}

/// Where a webhook goes.
#[derive(Debug, Clone)]
pub struct WebhookSink {
    /// The address, which is a secret itself where its path says who may post.
    pub url: Hidden,
    /// What requests are signed with.
    pub secrets: Vec<Hidden>,
    /// The Authorization header.
    pub authorization: Option<Hidden>,
    /// Whether it may be an address that only we can reach.
    pub allow_private: bool,
}

/// How e-mail is sent.
#[derive(Debug, Clone)]
#[allow(dead_code)] // it is not built in by default
pub struct SmtpSink {
    /// The server.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// How the connection is protected.
    pub tls: SmtpTls,
    /// User and password, if it wants them.
    pub login: Option<(String, Hidden)>,
    /// From whom.
    pub from: String,
    /// To whom.
    pub to: Vec<String>,
}

/// How the connection to a mail server is protected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SmtpTls {
    /// Asked for on a plain connection, and required.
    StartTls,
    /// From the first byte.
    Tls,
    /// Not at all.
    None,
}

/// Reads `[alerts]`.
pub(super) fn read(settings: &mut Settings, stale_after: Duration) -> Option<AlertsConfig> {
    let url = settings.parsed("alerts.url", |url| match url {
        "" => Ok(String::new()),
        url if Request::get(url).is_ok() => Ok(url.trim_end_matches('/').to_owned()),
        _ => Err("must be empty, or the address of the console, such as \"https://postrider.example\""),
    });
    let mut secs = |key: &str, max: u64| Duration::from_secs(settings.integer(key, 1..=max));
    const MONTH: u64 = 30 * 24 * 60 * 60;
    let (failed_after, latency) = (secs("alerts.failed_after_s", MONTH), secs("alerts.latency_s", MONTH));
    let (stalled_after, lease_after) = (secs("alerts.stalled_after_s", 3_600), secs("alerts.lease_after_s", 3_600));
    let thresholds = Thresholds {
        stale_after,
        failed_after,
        latency,
        stalled_after,
        lease_after,
        dead_letters: settings.integer("alerts.dead_letters", 1..=1_000_000),
        error_rate: settings.share("alerts.error_rate"),
        attempts_min: settings.integer("alerts.attempts_min", 1..=1_000_000),
        certificate_before: Duration::from_secs(24 * 60 * 60 * settings.integer("alerts.certificate_days", 1..=365)),
    };
    Some(AlertsConfig { enabled: settings.flag("alerts.enabled"), url: url?, thresholds })
}

/// Every `[[sink]]`.
pub(super) fn sinks(settings: &mut Settings) -> Vec<SinkConfig> {
    let mut sinks: Vec<SinkConfig> = Vec::new();
    for n in 1..=settings.items("sink") {
        let prefix = format!("sink.{n}");
        let name = settings.parsed(&format!("{prefix}.name"), |name| match name {
            "" => Err("is missing"),
            name if sinks.iter().any(|sink| sink.name == name) => Err("is taken by another sink"),
            name if super::is_name(name) => Ok(name.to_owned()),
            _ => Err("must have 1 to 60 letters, digits, '-' or '_'"),
        });
        let kind = sink(settings, &prefix);
        if let (Some(name), Some(kind)) = (name, kind) {
            sinks.push(SinkConfig { name, kind });
        }
    }
    sinks
}

#[derive(Clone, Copy)]
enum Word {
    Webhook,
    Slack,
    Smtp,
}

fn sink(settings: &mut Settings, prefix: &str) -> Option<SinkKind> {
    let words = [("webhook", Word::Webhook), ("slack", Word::Slack), ("smtp", Word::Smtp)];
    match settings.choice(&format!("{prefix}.kind"), &words)? {
        Word::Webhook => webhook(settings, prefix).map(SinkKind::Webhook),
        Word::Slack => webhook(settings, prefix).map(SinkKind::Slack),
        Word::Smtp => smtp(settings, prefix).map(SinkKind::Smtp),
    }
}

fn webhook(settings: &mut Settings, prefix: &str) -> Option<WebhookSink> {
    let key = |name: &str| format!("{prefix}.{name}");
    let allow_private = settings.flag(&key("allow_private"));
    let url = settings.parsed(&key("url"), |url| match url {
        "" => Err("is missing; write the address that alerts are posted to"),
        url if Request::post(url).is_err() => Err("is no address such as \"https://host:port/path\""),
        url if !allow_private && check_public(url).is_err() => {
            Err("leads to this machine or a private network; with allow_private = true it may")
        }
        url => Ok(Hidden::new(url)),
    });
    let secret = settings.text(&key("secret"));
    let secrets: Vec<Hidden> = secret.split_whitespace().map(Hidden::new).collect();
    for secret in &secrets {
        if let Err(error) = Signer::default().secret(secret.expose()) {
            let what = "is not \"whsec_\" and 24 to 64 bytes in base64";
            settings.complain(&key("secret"), what, Some(error.remedy().to_owned()));
        }
    }
    let authorization = Some(settings.text(&key("authorization"))).filter(|text| !text.is_empty()).map(Hidden::new);
    Some(WebhookSink { url: url?, secrets, authorization, allow_private })
}

fn smtp(settings: &mut Settings, prefix: &str) -> Option<SmtpSink> {
    let key = |name: &str| format!("{prefix}.{name}");
    let host = settings.parsed(&key("host"), |host| match host {
        "" => Err("is missing; name the mail server"),
        host if host.contains(['/', ':', '@', ' ']) => Err("must be a name or an address alone; the port is port"),
        host => Ok(host.to_owned()),
    });
    let words = [("starttls", SmtpTls::StartTls), ("tls", SmtpTls::Tls), ("none", SmtpTls::None)];
    let tls = settings.choice(&key("tls"), &words);
    let port = u16::try_from(settings.count(&key("port"), 0..=65_535)).unwrap_or(0);
    let from = settings.parsed(&key("from"), address);
    let to = settings.texts(&key("to"));
    if to.is_empty() {
        settings.complain(&key("to"), "is missing; name whom to tell, such as [\"ops@shop.example\"]", None);
    }
    for receiver in &to {
        if let Err(error) = address(receiver) {
            settings.complain(&key("to"), error, None);
        }
    }
    let (user, password) = (settings.text(&key("user")), Hidden::new(settings.text(&key("password"))));
    if tls == Some(SmtpTls::None) && !user.is_empty() {
        let what = "is set, but tls = \"none\" would send the password unprotected";
        settings.complain(&key("user"), what, Some("use tls = \"starttls\" or \"tls\"".to_owned()));
    }
    let login = (!user.is_empty()).then_some((user, password));
    let port = match (port, tls?) {
        (0, SmtpTls::StartTls) => 587,
        (0, SmtpTls::Tls) => 465,
        (0, SmtpTls::None) => 25,
        (port, _) => port,
    };
    Some(SmtpSink { host: host?, port, tls: tls?, login, from: from?, to })
}

/// An address of e-mail, as far as can be said without sending one.
fn address(text: &str) -> Result<String, &'static str> {
    let is_plain = !text.chars().any(|c| c.is_control() || c.is_whitespace() || "<>,;".contains(c));
    match text.rsplit_once('@') {
        Some((user, host)) if !user.is_empty() && !host.is_empty() && is_plain => Ok(text.to_owned()),
        _ => Err("must be an address such as \"ops@shop.example\", without a name"),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::load::assemble;
    use super::*;

    #[test]
    fn the_defaults_are_those_of_the_library() {
        let config = assemble(None, &[]).expect("defaults");
        assert_eq!(config.alerts.thresholds, Thresholds::default());
        assert!(config.alerts.enabled && config.sinks.is_empty() && config.check.daily.is_some());
    }

    #[test]
    fn sinks_are_read_and_their_secrets_never_shown() {
        let text = "[[sink]]\nname = \"chat\"\nkind = \"slack\"\nurl = \"https://hooks.example/s3cret\"\n\
                    secret = \"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\"\nauthorization = \"s3cret\"\n\
                    [[sink]]\nname = \"mail\"\nkind = \"smtp\"\nhost = \"mx.example\"\nuser = \"u\"\n\
                    password = \"s3cret\"\nfrom = \"a@b.example\"\nto = [\"c@d.example\"]\n";
        let config = assemble(Some((PathBuf::from("postrider.toml"), text.to_owned())), &[]).expect("valid");
        let shown = format!("{config:?}");
        assert!(!shown.contains("s3cret") && !shown.contains("whsec"), "{shown}");
        let [chat, mail] = config.sinks.as_slice() else { panic!("{:?}", config.sinks) };
        assert!(matches!(&chat.kind, SinkKind::Slack(sink) if sink.secrets.len() == 1 && !sink.allow_private));
        assert!(matches!(&mail.kind, SinkKind::Smtp(sink) if sink.port == 587 && sink.tls == SmtpTls::StartTls));
    }
}
