//! From the config to the library's trait objects.

use std::sync::Arc;

use postrider::Route;
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
    BrokerUrl, ClaimConfig, ClaimUrl, Config, ConsumerConfig, DESTINATION, QueueType, Secret, StoreUrl,
};

/// Opens the store; a SQLite file that does not exist is created.
pub async fn create_store(config: &Config) -> Result<Arc<dyn Store>> {
    match &config.store {
        StoreUrl::Sqlite(path) => Ok(Arc::new(SqliteStore::open(path).await?)),
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
pub fn schema(config: &Config) -> &'static Schema {
    match &config.store {
        StoreUrl::Sqlite(_) => &sqlite::SCHEMA,
        StoreUrl::Postgres(_) => &postgres::SCHEMA,
    }
}

/// The broker, behind the claim check if that is on. Connects when it is first needed.
pub fn broker(config: &Config, store: &Arc<dyn Store>) -> Result<Arc<dyn Broker>> {
    let broker = match server(config)? {
        Some(broker) => broker,
        None => Arc::new(Embedded::new(store.clone()).payload_bytes_max(config.broker.payload_bytes_max)),
    };
    Ok(match (claims(config)?, &config.claim_check) {
        (Some(claims), Some(claim_check)) => {
            Arc::new(ClaimCheck::new(broker, claims).above_bytes(claim_check.above_bytes))
        }
        _ => broker,
    })
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
pub fn server(config: &Config) -> Result<Option<Arc<dyn Broker>>> {
    let BrokerUrl::RabbitMq(url) = &config.broker.url else { return Ok(None) };
    let settings = RabbitMqSettings {
        exchange: config.broker.exchange.clone(),
        declare: config.broker.declare,
        payload_bytes_max: config.broker.payload_bytes_max,
        publish_timeout: config.broker.publish_timeout,
        queue_type: match config.broker.queue_type {
            QueueType::Quorum => rabbitmq::QueueType::Quorum,
            QueueType::Classic => rabbitmq::QueueType::Classic,
        },
        ..RabbitMqSettings::new(url.expose())
    };
    let broker = RabbitMq::new(settings).map_err(|error| error.context("broker.url"))?;
    Ok(Some(Arc::new(broker)))
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
    Err(Error::new(Kind::Config, "redis.url is set, but this postrider was built without Redis")
        .with_remedy("build it with `cargo build --release --features redis`"))
}

/// The relay to the one destination.
pub fn relay(config: &Config, store: &Arc<dyn Store>, broker: &Arc<dyn Broker>) -> Relay {
    let source = store.source(&Route::all(DESTINATION), config.relay.lanes);
    let leases: Arc<dyn Leases> = store.clone();
    Relay::new(DESTINATION, source, leases, broker.clone(), relay_settings(config))
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
