//! Reads the typed configuration out of the settings, with the limits of each.

use std::path::PathBuf;
use std::time::Duration;

use postrider::ConsumerSpec;
use postrider::handler::{Place, SLOTS_MAX};
use postrider::http::{Request, Webhook};
use postrider::relay::Backoff;
use postrider::upkeep::Retention;
use tracing::level_filters::LevelFilter;

use super::settings::Settings;
use super::{
    BreakerConfig, Config, ConsumerConfig, DESTINATION, Hidden, LogConfig, LogFormat, RelayConfig, Secret, StoreUrl,
    TraceConfig,
};
use super::{access, alerts, broker, check, claim, outbox};

const DAY_MS: u64 = 24 * 60 * 60 * 1000;
/// Retention beyond ten years is a typing error.
const DAYS_MAX: u64 = 3650;

/// The configuration, or `None` when a mistake leaves a value unknown. The settings hold all mistakes afterwards.
pub fn read(settings: &mut Settings, file: Option<PathBuf>) -> Option<Config> {
    let store = settings.parsed("store.url", StoreUrl::parse);
    let broker = broker::read(settings, "broker");
    let relay = relay(settings);
    let breaker = breaker(settings);
    let retention = retention(settings);
    let redis = settings.parsed("redis.url", |url| match url {
        "" => Ok(None),
        url if url.starts_with("redis://") || url.starts_with("rediss://") => Ok(Some(Secret::new(url))),
        _ => Err("must be empty, or begin with \"redis://\" or \"rediss://\""),
    });
    let claim_check = claim::read(settings, broker.as_ref().map(|broker| broker.payload_bytes_max));
    let http = access::http(settings);
    let alerts = alerts::read(settings, relay.stale_after);
    let sinks = alerts::sinks(settings);
    let check = check::read(settings);
    let log = log(settings);
    let trace = trace(settings);
    let routes = broker::routes(settings);
    let outboxes = outbox::read(settings);
    let consumers = consumers(settings);
    let tokens = access::tokens(settings);
    let destinations: Vec<&str> = routes.iter().map(|route| route.name.as_str()).chain([DESTINATION]).collect();
    let wanted = outboxes.iter().map(|outbox| &outbox.destination).zip((1..).map(|n| format!("outbox.{n}")));
    let wanted = wanted
        .chain(consumers.iter().map(|consumer| &consumer.destination).zip((1..).map(|n| format!("consumer.{n}"))));
    for (destination, prefix) in wanted {
        if !destinations.contains(&destination.as_str()) {
            let help = format!("the destinations are {}", destinations.join(", "));
            settings.complain(&format!("{prefix}.destination"), "names no [[route]]", Some(help));
        }
    }
    Some(Config {
        file,
        store: store?,
        broker: broker?,
        relay,
        breaker,
        retention,
        redis: redis?,
        claim_check: claim_check?,
        http: http?,
        alerts: alerts?,
        sinks,
        check: check?,
        log: log?,
        trace: trace?,
        routes,
        outboxes,
        consumers,
        tokens,
    })
}

fn consumers(settings: &mut Settings) -> Vec<ConsumerConfig> {
    let mut consumers: Vec<ConsumerConfig> = Vec::new();
    for n in 1..=settings.items("consumer") {
        let Some(consumer) = consumer(settings, &format!("consumer.{n}")) else { continue };
        if consumers.iter().any(|other| other.spec.name == consumer.spec.name) {
            let help = "two consumers share no messages; for more instances of one, run more of Postrider";
            settings.complain(&format!("consumer.{n}.name"), "is taken by another consumer", Some(help.to_owned()));
        }
        consumers.push(consumer);
    }
    consumers
}

fn consumer(settings: &mut Settings, prefix: &str) -> Option<ConsumerConfig> {
    let key = |name: &str| format!("{prefix}.{name}");
    let name = settings.parsed(&key("name"), |name| match name {
        "" => Err("is missing"),
        name => Ok(name.to_owned()),
    });
    let url = settings.parsed(&key("url"), |url| match url {
        "" => Err("is missing; write the address that events are posted to, such as \"http://127.0.0.1:3000/events\""),
        url if Request::post(url).is_err() => Err("is no address such as \"https://host:port/path\""),
        url => Ok(Secret::new(url)),
    });
    let timeout = settings.millis(&key("timeout_ms"), 1..=600_000);
    let backoff = Backoff {
        base: settings.millis(&key("backoff_base_ms"), 1..=3_600_000),
        max: settings.millis(&key("backoff_max_ms"), 1..=DAY_MS),
        jitter: settings.millis(&key("jitter_ms"), 0..=60_000),
    };
    let spec = ConsumerSpec {
        name: name?,
        topics: settings.texts(&key("topics")),
        prefetch: settings.count(&key("prefetch"), 1..=10_000) as u16,
        concurrency: settings.count(&key("concurrency"), 1..=1_000) as u16,
        slots: settings.count(&key("slots"), 1..=SLOTS_MAX),
        retries: settings.count(&key("retries"), 0..=1_000),
        backoff,
        // The client's own time-out comes first, so that its breaker learns of what is slow.
        handler_timeout: timeout + Duration::from_secs(5),
        dead_letters_to: match settings.text(&key("dead_letters_to")).as_str() {
            "" => Place::Usual,
            "none" => Place::Nowhere,
            name => Place::Named(name.to_owned()),
        },
        ..ConsumerSpec::new("", &[])
    };
    if let Err(error) = spec.validate() {
        // The library's words begin with the consumer's name.
        let what = error.message().split_once(": ").map_or(error.message(), |(_, what)| what);
        settings.complain(&key("name"), format_args!("names a consumer that cannot be: {what}"), None);
    }
    let authorization = Some(settings.text(&key("authorization"))).filter(|text| !text.is_empty());
    let secret = settings.text(&key("secret"));
    let secrets: Vec<Hidden> = secret.split_whitespace().map(Hidden::new).collect();
    for secret in &secrets {
        if let Err(error) = Webhook::check_secret(secret.expose()) {
            settings.complain(
                &key("secret"),
                "is not \"whsec_\" and 24 to 64 bytes in base64",
                Some(error.remedy().to_owned()),
            );
        }
    }
    let destination = settings.text(&key("destination"));
    Some(ConsumerConfig {
        spec,
        destination,
        url: url?,
        secrets,
        authorization: authorization.map(Hidden::new),
        timeout,
    })
}

fn relay(settings: &mut Settings) -> RelayConfig {
    let relay = RelayConfig {
        enabled: settings.flag("relay.enabled"),
        poll: settings.millis("relay.poll_ms", 10..=60_000),
        page: settings.count("relay.page", 1..=10_000) as usize,
        batch: settings.count("relay.batch", 1..=10_000) as usize,
        in_flight: settings.count("relay.in_flight", 1..=256) as usize,
        lanes: settings.count("relay.lanes", 1..=64),
        // Shorter than a second, a pause of the scheduler would cost the lease.
        lease: settings.millis("relay.lease_ms", 1_000..=300_000),
        attempts_max: settings.count("relay.attempts_max", 1..=1_000),
        backoff_base: settings.millis("relay.backoff_base_ms", 1..=3_600_000),
        backoff_max: settings.millis("relay.backoff_max_ms", 1..=DAY_MS),
        jitter: settings.millis("relay.jitter_ms", 0..=60_000),
        stale_after: Duration::from_secs(settings.integer("relay.stale_after_s", 1..=30 * 24 * 60 * 60)),
        witness: settings.text("relay.witness"),
    };
    if relay.backoff_max < relay.backoff_base {
        settings.complain("relay.backoff_max_ms", "is below relay.backoff_base_ms", None);
    }
    relay
}

fn breaker(settings: &mut Settings) -> BreakerConfig {
    let breaker = BreakerConfig {
        failures: settings.count("breaker.failures", 1..=1_000),
        window: settings.count("breaker.window", 1..=1_000),
        ratio: settings.share("breaker.ratio"),
        calls_min: settings.count("breaker.calls_min", 1..=1_000),
        open: settings.millis("breaker.open_ms", 1..=3_600_000),
    };
    if breaker.calls_min > breaker.window {
        settings.complain("breaker.calls_min", "is above breaker.window, so the ratio would never count", None);
    }
    breaker
}

fn retention(settings: &mut Settings) -> Retention {
    let mut days = |key: &str| settings.integer(key, 1..=DAYS_MAX);
    Retention {
        outbox: Duration::from_millis(days("retention.outbox_days") * DAY_MS),
        inbox: Duration::from_millis(days("retention.inbox_days") * DAY_MS),
        queue: Duration::from_millis(days("retention.queue_days") * DAY_MS),
        dead: Duration::from_millis(days("retention.dead_letter_days") * DAY_MS),
    }
}

fn log(settings: &mut Settings) -> Option<LogConfig> {
    let formats = [("auto", LogFormat::Auto), ("json", LogFormat::Json), ("pretty", LogFormat::Pretty)];
    let levels = [
        ("error", LevelFilter::ERROR),
        ("warn", LevelFilter::WARN),
        ("info", LevelFilter::INFO),
        ("debug", LevelFilter::DEBUG),
        ("trace", LevelFilter::TRACE),
        ("off", LevelFilter::OFF),
    ];
    let format = settings.choice("log.format", &formats);
    let level = settings.choice("log.level", &levels);
    Some(LogConfig { format: format?, level: level?, service: settings.text("log.service") })
}

/// On when it has an address.
fn trace(settings: &mut Settings) -> Option<Option<TraceConfig>> {
    let url = settings.parsed("trace.url", |url| match url {
        "" => Ok(None),
        url if Request::post(url).is_ok() => Ok(Some(Secret::new(url))),
        _ => Err("must be empty, or the address of a collector, such as \"http://127.0.0.1:4318\""),
    })?;
    let authorization = Some(settings.text("trace.authorization")).filter(|text| !text.is_empty()).map(Hidden::new);
    Some(url.map(|url| TraceConfig { url, authorization }))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use super::super::load::assemble;
    use super::super::{BrokerUrl, Config, StoreUrl};

    fn from(text: &str) -> Result<Config, String> {
        with(text, &[])
    }

    fn with(text: &str, environment: &[(&str, &str)]) -> Result<Config, String> {
        let environment: Vec<(String, String)> =
            environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        assemble(Some((PathBuf::from("postrider.toml"), text.to_owned())), &environment)
            .map_err(|error| error.to_string())
    }

    fn assert_says(text: &str, parts: &[&str]) {
        let said = from(text).expect_err("a mistake");
        for part in parts {
            assert!(said.contains(part), "{part:?} is missing in:\n{said}");
        }
    }

    #[test]
    fn the_defaults_are_valid() {
        let config = assemble(None, &[]).expect("defaults");
        assert_eq!(config.store, StoreUrl::Sqlite("./postrider.db".into()));
        assert_eq!(config.broker.url, BrokerUrl::Embedded);
        assert_eq!(config.relay.poll, Duration::from_millis(100));
        assert_eq!(config.http.listen.to_string(), "127.0.0.1:7070");
        assert!(config.warnings().is_empty());
    }

    #[test]
    fn traces_go_where_they_are_told_to() {
        assert!(from("").expect("defaults").trace.is_none());
        let text = "[trace]\nurl = \"http://u:s3cret@c:4318\"\nauthorization = \"Bearer s3cret\"\n";
        let trace = from(text).expect("valid").trace.expect("on");
        assert_eq!(trace.url.expose(), "http://u:s3cret@c:4318");
        assert!(!format!("{trace:?}").contains("s3cret"), "{trace:?}");
        assert_says("[trace]\nurl = \"localhost:4318\"\n", &["trace.url must be empty, or the address of a collector"]);
    }

    #[test]
    fn the_library_has_the_same_defaults() {
        let config = assemble(None, &[]).expect("defaults");
        assert_eq!(config.retention, postrider::upkeep::Retention::default());
        let (ours, theirs) = (crate::wire::relay_settings(&config), postrider::RelaySettings::default());
        assert_eq!(format!("{ours:?}"), format!("{theirs:?}"));
    }

    #[test]
    fn a_misspelt_key_is_found_with_its_place() {
        assert_says(
            "[relay]\nlanes = 2\n  pol_ms = 100\n",
            &["there is no setting relay.pol_ms", "postrider.toml:3:3", "did you mean poll_ms?"],
        );
    }

    #[test]
    fn a_misspelt_section_is_found() {
        assert_says("[realy]\npoll_ms = 1\n", &["no section [realy]", "postrider.toml:1:2", "did you mean [relay]?"]);
        assert_says("poll_ms = 1\n", &["outside of any section", "belongs below [relay]"]);
        assert_says("relay = 1\n", &["relay is a section"]);
    }

    #[test]
    fn a_key_of_another_section_is_shown_its_place() {
        assert_says("[relay]\nlisten = \"x\"\n", &["no setting relay.listen", "did you mean http.listen?"]);
    }

    #[test]
    fn a_wrong_type_is_named() {
        assert_says(
            "[relay]\npoll_ms = \"fast\"\n",
            &[
                "relay.poll_ms must be a whole number, not a text in quotes",
                "postrider.toml:2:11",
                "the default is 100",
            ],
        );
        assert_says("[relay]\nenabled = 1\n", &["relay.enabled must be true or false"]);
        assert_says("[http]\nlisten = [\"a\"]\n", &["http.listen must be a text in quotes, not a list"]);
    }

    #[test]
    fn limits_are_kept() {
        assert_says("[relay]\npoll_ms = 1\n", &["relay.poll_ms must be between 10 and 60000, not 1", ":2:11"]);
        assert_says("[relay]\nlanes = -1\n", &["between 1 and 64, not -1"]);
        assert_says("[breaker]\nratio = 1.5\n", &["breaker.ratio must be above 0 and at most 1"]);
        assert_says("[breaker]\ncalls_min = 20\n", &["breaker.calls_min is above breaker.window"]);
        assert_says("[relay]\nbackoff_base_ms = 600000\n", &["relay.backoff_max_ms is below"]);
        assert!(from("[breaker]\nratio = 1\n").is_ok(), "a whole number is a number");
    }

    #[test]
    fn redis_is_used_when_it_has_an_address() {
        assert!(from("").expect("defaults").redis.is_none());
        let config = from("[redis]\nurl = \"rediss://shop:s3cret@redis.example/1\"\n").expect("valid");
        assert_eq!(config.redis.map(|url| url.to_string()).as_deref(), Some("rediss://shop:***@redis.example/1"));
        assert_says("[redis]\nurl = \"localhost:6379\"\n", &["redis.url must be empty, or begin with"]);
    }

    #[test]
    fn words_have_suggestions() {
        assert_says(
            "[log]\nformat = \"jsn\"\n",
            &["must be one of \"auto\", \"json\", \"pretty\"", "did you mean \"json\"?"],
        );
        assert_says("[log]\nlevel = \"verbose\"\n", &["log.level must be one of"]);
    }

    #[test]
    fn all_mistakes_are_shown_at_once() {
        assert_says("[relay]\npoll_ms = 1\nlane = 2\n[log]\nlevel = 3\n", &["poll_ms", "relay.lane", "log.level"]);
    }

    #[test]
    fn broken_toml_is_shown_with_its_place() {
        assert_says("[relay\npoll_ms = 1\n", &["not valid TOML", "postrider.toml:1:"]);
    }

    #[test]
    fn the_environment_wins_and_is_checked() {
        let config = with("[relay]\npoll_ms = 200\n", &[("POSTRIDER__RELAY__POLL_MS", "300")]).expect("valid");
        assert_eq!(config.relay.poll, Duration::from_millis(300));

        let said = with("", &[("POSTRIDER__RELAY__POL_MS", "300")]).expect_err("unknown");
        assert!(said.contains("POSTRIDER__RELAY__POL_MS: there is no such setting"), "{said}");
        assert!(said.contains("did you mean POSTRIDER__RELAY__POLL_MS?"), "{said}");

        let said = with("", &[("POSTRIDER__RELAY__POLL_MS", "fast")]).expect_err("wrong type");
        assert!(said.contains("POSTRIDER__RELAY__POLL_MS: relay.poll_ms must be a whole number"), "{said}");

        let said = with("", &[("POSTRIDER__RELAY__LANES", "0")]).expect_err("out of range");
        assert!(said.contains("POSTRIDER__RELAY__LANES: relay.lanes must be between 1 and 64"), "{said}");
    }

    #[test]
    fn references_come_from_the_environment() {
        let text = "[store]\nurl = \"postgres://app:${PW}@db/shop\"\n";
        let config = with(text, &[("PW", "s3cret")]).expect("valid");
        match &config.store {
            StoreUrl::Postgres(url) => assert_eq!(url.expose(), "postgres://app:s3cret@db/shop"),
            other => panic!("{other:?}"),
        }
        assert!(!format!("{config:?}").contains("s3cret"));
        assert_says(text, &["store.url refers to ${PW}, but the environment variable PW is not set", ":2:7"]);
    }

    #[test]
    fn passwords_are_not_shown_in_mistakes() {
        let said = from("[store]\nurl = \"oracle://app:s3cret@db/shop\"\n").expect_err("no Oracle");
        assert!(said.contains("store.url must begin with"), "{said}");
        assert!(!said.contains("s3cret"), "{said}");
    }

    #[test]
    fn consumers_are_read() {
        let text = "[[consumer]]\nname = \"billing\"\nurl = \"http://u:s3cret@h:1/e\"\ntopics = [\"orders.*\"]\n\
                    secret = \"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw ${NEXT}\"\nauthorization = \"Bearer s3cret\"\n\
                    [[consumer]]\nname = \"mail\"\nurl = \"https://mail/\"\ndead_letters_to = \"none\"\n";
        let next = ("NEXT", "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=");
        let config = with(text, &[next]).expect("valid");
        let [billing, mail] = config.consumers.as_slice() else { panic!("{:?}", config.consumers) };
        assert_eq!(
            (billing.spec.name.as_str(), billing.spec.topics.as_slice()),
            ("billing", ["orders.*".to_owned()].as_slice())
        );
        assert_eq!(billing.secrets.len(), 2);
        assert_eq!(mail.spec.topics, ["#"]);
        assert_eq!(mail.spec.dead_letters_to, postrider::handler::Place::Nowhere);
        assert_eq!(mail.timeout, Duration::from_secs(30));
        let defaults = postrider::ConsumerSpec {
            handler_timeout: mail.spec.handler_timeout,
            ..postrider::ConsumerSpec::new("mail", &["#"])
        };
        assert_eq!(
            postrider::ConsumerSpec { dead_letters_to: defaults.dead_letters_to.clone(), ..mail.spec.clone() },
            defaults
        );
        assert!(!format!("{config:?}").contains("s3cret") && !format!("{config:?}").contains("whsec"), "{config:?}");
    }

    #[test]
    fn mistakes_in_consumers_are_found_with_their_place() {
        let good = "[[consumer]]\nname = \"a\"\nurl = \"http://h/\"\n";
        assert_says("[consumer]\nname = \"a\"\n", &["write [[consumer]] with two brackets"]);
        assert_says("[[consumer]]\nurl = \"http://h/\"\n", &["consumer.1.name is missing", ":1:1"]);
        assert_says("[[consumer]]\nname = \"a\"\n", &["consumer.1.url is missing"]);
        assert_says("[[consumer]]\nname = \"a\"\nurl = \"h:1\"\n", &["consumer.1.url is no address", ":3:7"]);
        assert_says(&format!("{good}topic = [\"a\"]\n"), &["no setting topic", "did you mean topics?", ":4:1"]);
        assert_says(&format!("{good}topics = \"a\"\n"), &["topics must be a list of texts in quotes, not a text"]);
        assert_says(&format!("{good}topics = []\n"), &["topics is empty"]);
        assert_says(&format!("{good}secret = \"short\"\n"), &["consumer.1.secret is not \"whsec_\"", "head -c 32"]);
        assert_says(&format!("{good}slots = 33\n"), &["consumer.1.slots must be between 1 and 32"]);
        assert_says(&format!("{good}{good}"), &["consumer.2.name is taken by another consumer", ":5:8"]);
        assert_says(&format!("{good}name2 = 1\n"), &["[[consumer]] has no setting name2"]);
        assert_says("[[consumer]]\nname = \"a b\"\nurl = \"http://h/\"\n", &["letters, digits"]);
    }

    #[test]
    fn the_claim_check_is_off_until_it_has_a_place() {
        assert_eq!(from("[claim_check]\nabove_bytes = 1000\n").expect("valid").claim_check, None);
        let config = from("[claim_check]\nurl = \"file:///var/claims\"\n[broker]\npayload_bytes_max = 300000\n");
        let config = config.expect("valid");
        assert_eq!(config.payload_bytes_max(), postrider::event::PAYLOAD_BYTES_MAX);
        assert_eq!(config.claim_check.expect("on").above_bytes, postrider::claim::ABOVE_BYTES_DEFAULT);

        assert_says("[claim_check]\nurl = \"ftp://x\"\n", &["claim_check.url must begin with \"file:\"", ":2:7"]);
        assert_says("[claim_check]\nabove_bytes = 0\n", &["claim_check.above_bytes must be between 1 and", ":2:15"]);
        assert_says("[claim_check]\nendpoint = \"minio:9000\"\n", &["claim_check.endpoint must be", ":2:12"]);
        assert_says(
            "[broker]\npayload_bytes_max = 9\n[claim_check]\nurl = \"file:x\"\n",
            &["claim_check.above_bytes is above broker.payload_bytes_max"],
        );
    }

    #[test]
    fn a_bucket_needs_keys_that_are_never_shown() {
        let text = "[claim_check]\nurl = \"s3://claims/shop\"\naccess_key = \"AKID\"\nsecret_key = \"${KEY}\"\n";
        let config = with(text, &[("KEY", "s3cret")]).expect("valid");
        let shown = format!("{config:?}");
        assert!(!shown.contains("s3cret") && !shown.contains("AKID"), "{shown}");
        assert_eq!(config.claim_check.expect("on").secret_key.expose(), "s3cret");

        assert_says("[claim_check]\nurl = \"s3://claims\"\n", &["claim_check.secret_key is empty"]);
        let said = from("[claim_check]\nsecret_key = [\"s3cret\"]\n").expect_err("a list");
        assert!(!said.contains("s3cret"), "{said}");
    }

    #[test]
    fn an_open_port_is_a_warning() {
        let config = from("[http]\nlisten = \"0.0.0.0:7070\"\n").expect("valid");
        assert!(config.warnings().iter().any(|finding| finding.check == "config.http.listen"));
        assert_says("[http]\nlisten = \"7070\"\n", &["http.listen must be an address and a port"]);
    }
}
