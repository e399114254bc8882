//! From the config to the library's trait objects.

use std::path::Path;
use std::sync::Arc;

use postrider::Route;
use postrider::adopt::{Adopted, AdoptedTables};
use postrider::broker::Broker;
use postrider::broker::embedded::Embedded;
use postrider::broker::rabbitmq::{self, RabbitMq, RabbitMqSettings};
use postrider::claim::s3::{S3, S3Settings};
use postrider::claim::{ClaimCheck, Claims, Folder, Objects};
use postrider::doctor::Finding;
use postrider::handler::RemoteHandler;
use postrider::http::{HttpClient, HttpSettings, Webhook};
use postrider::lease::{LeaseTimes, Leases};
use postrider::migrate::Schema;
use postrider::relay::{Backoff, BreakerSettings};
use postrider::store::Store;
use postrider::store::postgres::{self, PostgresStore};
use postrider::store::sqlite::{self, SqliteStore};
use postrider::{Error, Kind, Relay, RelaySettings, Result};

use crate::config::{
    BrokerConfig, BrokerUrl, ClaimConfig, ClaimUrl, Config, ConsumerConfig, DESTINATION, OutboxConfig, QueueType,
    Secret, StoreUrl,
};
use crate::duty::WitnessFile;

/// Opens the store; a SQLite file that does not exist is created.
pub async fn create_store(config: &Config) -> Result<Arc<dyn Store>> {
    match &config.store {
        StoreUrl::Sqlite(path) => Ok(Arc::new(SqliteStore::open(path).await?)),
        StoreUrl::Mysql(url) => mysql(url).await,
        StoreUrl::Postgres(url) => match PostgresStore::connect(url.expose()).await {
            Ok(store) => Ok(Arc::new(store)),
            Err(error) if error.kind() == Kind::Config => Err(error.context("store.url").with_remedy(
                "write it as postgres://user:password@host:port/database, special characters percent-encoded",
            )),
            Err(error) => Err(error),
        },
    }
}

/// Opens the store of a Postrider that has been set up: commands that only look or send must not create an empty
/// database where somebody mistyped a path, and leave events in it that nobody relays.
pub async fn open_store(config: &Config) -> Result<Arc<dyn Store>> {
    let store = open_unchecked(config).await?;
    store.schema().await?.require()?;
    Ok(store)
}

/// The same without a look at the schema.
pub async fn open_unchecked(config: &Config) -> Result<Arc<dyn Store>> {
    if let StoreUrl::Sqlite(path) = &config.store
        && !path.exists()
    {
        return Err(Error::new(Kind::Missing, format!("there is no database {}", path.display())).with_remedy(
            "create it with `postrider run` or `postrider migrate`, or name the right one (store.url, --config)",
        ));
    }
    create_store(config).await
}

/// The schema of the configured kind of store, without a database.
pub fn schema(config: &Config) -> Result<&'static Schema> {
    match &config.store {
        StoreUrl::Sqlite(_) => Ok(&sqlite::SCHEMA),
        StoreUrl::Postgres(_) => Ok(&postgres::SCHEMA),
        #[cfg(feature = "mysql")]
        StoreUrl::Mysql(_) => Ok(&postrider::store::mysql::SCHEMA),
        #[cfg(not(feature = "mysql"))]
        StoreUrl::Mysql(_) => Err(not_built("MySQL", "mysql")),
    }
}

/// A destination and its broker.
pub struct Destination {
    /// Its name and topics.
    pub route: Route,
    /// The broker, behind the claim check if that is on. Connects when it is first needed.
    pub broker: Arc<dyn Broker>,
}

/// All destinations; `[broker]` is the last.
pub fn destinations(config: &Config, store: &Arc<dyn Store>) -> Result<Vec<Destination>> {
    let claims = claims(config)?;
    config
        .destinations()
        .into_iter()
        .map(|(route, broker_config)| {
            let broker: Arc<dyn Broker> = match server(broker_config).map_err(|error| named(&route, error))? {
                Some(broker) => broker,
                None => Arc::new(Embedded::new(store.clone()).payload_bytes_max(broker_config.payload_bytes_max)),
            };
            let broker = match (&claims, &config.claim_check) {
                (Some(claims), Some(claim_check)) => {
                    Arc::new(ClaimCheck::new(broker, claims.clone()).above_bytes(claim_check.above_bytes))
                }
                _ => broker,
            };
            Ok(Destination { route, broker })
        })
        .collect()
}

fn named(route: &Route, error: Error) -> Error {
    match route.destination.as_str() {
        DESTINATION => error.context("broker.url"),
        name => error.context(format_args!("url of route {name:?}")),
    }
}

/// The broker of that destination; the configuration was checked to name one.
pub fn broker_of(destinations: &[Destination], name: &str) -> Result<Arc<dyn Broker>> {
    let found = destinations.iter().find(|destination| destination.route.destination == name);
    found
        .map(|destination| destination.broker.clone())
        .ok_or_else(|| Error::new(Kind::Config, format!("there is no destination {name:?}")))
}

/// Where large payloads are, if the claim check is on.
pub fn claims(config: &Config) -> Result<Option<Arc<Claims>>> {
    let Some(claim_check) = &config.claim_check else { return Ok(None) };
    let (objects, prefix): (Arc<dyn Objects>, &str) = match &claim_check.url {
        ClaimUrl::Folder(path) => (Arc::new(Folder::new(path)), ""),
        ClaimUrl::S3 { bucket, prefix } => (bucket_of(claim_check, bucket)?, prefix),
    };
    let claims = Claims::new(objects).prefix(prefix).map_err(|error| error.context("claim_check.url"))?;
    Ok(Some(Arc::new(claims)))
}

fn bucket_of(claim_check: &ClaimConfig, bucket: &str) -> Result<Arc<dyn Objects>> {
    let s3 = S3::new(S3Settings {
        bucket: bucket.to_owned(),
        endpoint: claim_check.endpoint.clone(),
        region: claim_check.region.clone(),
        access_key: claim_check.access_key.expose().to_owned(),
        secret_key: claim_check.secret_key.expose().to_owned(),
    });
    Ok(Arc::new(s3.map_err(|error| error.context("claim_check"))?))
}

/// The broker if it is a server of its own; the embedded one needs the store.
pub fn server(config: &BrokerConfig) -> Result<Option<Arc<dyn Broker>>> {
    match &config.url {
        BrokerUrl::Embedded => Ok(None),
        BrokerUrl::RabbitMq(url) => rabbitmq(config, url).map(Some),
        BrokerUrl::Kafka(url) => kafka(config, url).map(Some),
        BrokerUrl::Nats(url) => nats(config, url).map(Some),
        BrokerUrl::Redis(url) => redis_streams(config, url).map(Some),
    }
}

#[cfg(feature = "kafka")]
fn kafka(config: &BrokerConfig, url: &Secret) -> Result<Arc<dyn Broker>> {
    use postrider::broker::kafka::{Kafka, KafkaSettings};
    let settings = KafkaSettings {
        payload_bytes_max: config.payload_bytes_max,
        publish_timeout: config.publish_timeout,
        declare: config.declare,
        partitions: config.partitions,
        replication: config.replicas,
        properties: config.properties.clone(),
        ..KafkaSettings::new(url.expose())
    };
    Ok(Arc::new(Kafka::new(settings)?))
}

#[cfg(not(feature = "kafka"))]
fn kafka(_: &BrokerConfig, _: &Secret) -> Result<Arc<dyn Broker>> {
    Err(not_built("Kafka", "kafka"))
}

#[cfg(feature = "nats")]
fn nats(config: &BrokerConfig, url: &Secret) -> Result<Arc<dyn Broker>> {
    use postrider::broker::nats::{Nats, NatsSettings};
    let settings = NatsSettings {
        stream: config.stream.clone(),
        prefix: config.stream.clone(),
        payload_bytes_max: config.payload_bytes_max,
        publish_timeout: config.publish_timeout,
        declare: config.declare,
        replicas: usize::from(config.replicas),
        ..NatsSettings::new(url.expose())
    };
    Ok(Arc::new(Nats::new(settings)?))
}

#[cfg(not(feature = "nats"))]
fn nats(_: &BrokerConfig, _: &Secret) -> Result<Arc<dyn Broker>> {
    Err(not_built("NATS", "nats"))
}

#[cfg(feature = "redis")]
fn redis_streams(config: &BrokerConfig, url: &Secret) -> Result<Arc<dyn Broker>> {
    use postrider::broker::redis::{RedisStreamSettings, RedisStreams};
    let settings = RedisStreamSettings {
        prefix: config.stream.clone(),
        payload_bytes_max: config.payload_bytes_max,
        publish_timeout: config.publish_timeout,
        ..RedisStreamSettings::new(url.expose())
    };
    Ok(Arc::new(RedisStreams::new(settings)?))
}

#[cfg(not(feature = "redis"))]
fn redis_streams(_: &BrokerConfig, _: &Secret) -> Result<Arc<dyn Broker>> {
    Err(not_built("Redis", "redis"))
}

#[cfg(feature = "mysql")]
async fn mysql(url: &Secret) -> Result<Arc<dyn Store>> {
    match postrider::store::mysql::MysqlStore::connect(url.expose()).await {
        Ok(store) => Ok(Arc::new(store)),
        Err(error) if error.kind() == Kind::Config => Err(error.context("store.url")),
        Err(error) => Err(error),
    }
}

#[cfg(not(feature = "mysql"))]
async fn mysql(_: &Secret) -> Result<Arc<dyn Store>> {
    Err(not_built("MySQL", "mysql"))
}

#[allow(dead_code)] // unused when everything is built in
pub fn not_built(name: &str, feature: &str) -> Error {
    Error::new(Kind::Config, format!("this postrider was built without {name}"))
        .with_remedy(format!("build it with `cargo build --release --features {feature}`"))
}

fn rabbitmq(config: &BrokerConfig, url: &Secret) -> Result<Arc<dyn Broker>> {
    let settings = RabbitMqSettings {
        exchange: config.exchange.clone(),
        declare: config.declare,
        payload_bytes_max: config.payload_bytes_max,
        publish_timeout: config.publish_timeout,
        queue_type: match config.queue_type {
            QueueType::Quorum => rabbitmq::QueueType::Quorum,
            QueueType::Classic => rabbitmq::QueueType::Classic,
        },
        ..RabbitMqSettings::new(url.expose())
    };
    Ok(Arc::new(RabbitMq::new(settings)?))
}

/// What is wrong with the Redis that consumers remember in, if one is configured.
#[cfg(feature = "redis")]
pub async fn inspect_redis(url: &Secret) -> Result<Vec<Finding>> {
    use postrider::idempotency::{RedisIdempotency, RedisSettings};
    let redis = RedisIdempotency::new(RedisSettings::new(url.expose())).map_err(|error| error.context("redis.url"))?;
    redis.inspect().await
}

/// This build cannot say.
#[cfg(not(feature = "redis"))]
pub async fn inspect_redis(url: &Secret) -> Result<Vec<Finding>> {
    let _ = url;
    Err(not_built("Redis", "redis").context("redis.url"))
}

/// The relay to a destination.
pub fn relay(config: &Config, store: &Arc<dyn Store>, destination: &Destination) -> Relay {
    let Destination { route, broker } = destination;
    let source = store.source(route, config.relay.lanes);
    let leases: Arc<dyn Leases> = store.clone();
    Relay::new(route.destination.as_str(), source, leases, broker.clone(), relay_settings(config))
}

/// The file that remembers what was published, if one is wanted. A relative path begins at the config file, so that the relay
/// and a person's command mean the same one.
pub async fn witness_file(config: &Config, store: &dyn Store) -> Result<Option<WitnessFile>> {
    if config.relay.witness.is_empty() {
        return Ok(None);
    }
    let folder = config.file.as_deref().and_then(Path::parent).unwrap_or(Path::new(""));
    Ok(Some(WitnessFile::new(folder.join(&config.relay.witness), store.lineage().await?)))
}

/// The relay of an adopted table.
pub async fn adopted(
    config: &Config,
    store: &Arc<dyn Store>,
    outbox: &OutboxConfig,
    destinations: &[Destination],
) -> Result<Adopted> {
    let table = adopted_tables(store.as_ref())?.adopt(&outbox.mapping).await?;
    let broker = broker_of(destinations, &outbox.destination)?;
    Ok(Adopted::new(outbox.mapping.clone(), table, broker, relay_settings(config)).pulses(store.clone()))
}

/// The store's side of adopted tables.
pub fn adopted_tables(store: &dyn Store) -> Result<&dyn AdoptedTables> {
    store.adopted().ok_or_else(|| {
        Error::new(Kind::Config, "tables can be adopted on PostgreSQL, MySQL and MariaDB alone")
            .with_remedy("name the service's database as store.url")
    })
}

/// What posts the events of a `[[consumer]]`. Each has a client of its own: its time-out is the consumer's.
pub fn webhook(config: &Config, consumer: &ConsumerConfig) -> Result<Arc<dyn RemoteHandler>> {
    let breaker = breaker_settings(config);
    let settings = HttpSettings {
        timeout: consumer.timeout,
        connect_timeout: consumer.timeout.min(HttpSettings::default().connect_timeout),
        // A probe must end before the next one begins.
        breaker: BreakerSettings { open: breaker.open.max(consumer.timeout), ..breaker },
        ..HttpSettings::default()
    };
    let make = || {
        let mut webhook = Webhook::new(HttpClient::new(settings)?, consumer.url.expose())?;
        if let Some(authorization) = &consumer.authorization {
            webhook = webhook.authorization(authorization.expose())?;
        }
        for secret in &consumer.secrets {
            webhook = webhook.secret(secret.expose())?;
        }
        Ok(webhook)
    };
    let webhook = make().map_err(|error: Error| error.context(format_args!("consumer {:?}", consumer.spec.name)))?;
    Ok(Arc::new(webhook))
}

fn breaker_settings(config: &Config) -> BreakerSettings {
    let breaker = &config.breaker;
    BreakerSettings {
        failures: breaker.failures,
        window: breaker.window as usize,
        ratio: breaker.ratio,
        calls_min: breaker.calls_min as usize,
        open: breaker.open,
    }
}

/// How the relay works.
pub fn relay_settings(config: &Config) -> RelaySettings {
    let relay = &config.relay;
    RelaySettings {
        lanes: relay.lanes,
        poll: relay.poll,
        page: relay.page,
        batch: relay.batch,
        in_flight: relay.in_flight,
        attempts_max: relay.attempts_max,
        backoff: Backoff { base: relay.backoff_base, max: relay.backoff_max, jitter: relay.jitter },
        breaker: breaker_settings(config),
        lease: LeaseTimes { ttl: relay.lease },
    }
}

/// An error when the event is heavier than the destination accepts; better told to the producer than found by the relay.
pub fn check_weight(event: &postrider::Event, payload_bytes_max: usize) -> Result<()> {
    let bytes = event.payload().len();
    if bytes <= payload_bytes_max {
        return Ok(());
    }
    let message = format!("the payload has {bytes} bytes, broker.payload_bytes_max is {payload_bytes_max}");
    Err(Error::new(Kind::TooLarge, message))
}
