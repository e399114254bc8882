//! Kafka: a real cluster that somebody else runs, or librdkafka's own mock of three brokers inside this process.
//!
//! The mock speaks Kafka's protocol over loopback sockets, so other processes can use it too. It keeps everything in
//! memory, has no administrator's interface, and never changes a topic; what is proved on it is not proved on Apache Kafka.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::error::{KafkaResult, RDKafkaErrorCode};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use tokio::sync::oneshot;

use super::{KAFKA_VAR, Result};

/// How many brokers the mock has, and how many copies its topics.
const BROKERS: i32 = 3;
/// How long a real cluster may take to create a topic.
const ADMIN_WAIT: Duration = Duration::from_secs(20);
/// The mock's name for all of its brokers.
const ALL: i32 = -1;

type Mock = MockCluster<'static, DefaultProducerContext>;
type Order = Box<dyn FnOnce(&Mock) -> KafkaResult<()> + Send>;

/// A Kafka cluster.
#[derive(Debug)]
pub struct Kafka {
    bootstrap: String,
    /// The thread that has the mock; it ends with this value.
    mock: Option<mpsc::Sender<(Order, oneshot::Sender<KafkaResult<()>>)>>,
}

impl Kafka {
    /// The cluster that [`KAFKA_VAR`] names, or a mock.
    pub async fn start() -> Result<Kafka> {
        match std::env::var(KAFKA_VAR).ok().filter(|bootstrap| !bootstrap.is_empty()) {
            Some(bootstrap) => Ok(Kafka { bootstrap, mock: None }),
            None => Self::start_mock().await,
        }
    }

    /// A mock, whatever the environment says.
    pub async fn start_mock() -> Result<Kafka> {
        let (ready, started) = oneshot::channel();
        let (orders, received) = mpsc::channel::<(Order, oneshot::Sender<KafkaResult<()>>)>();
        // It must not be moved between threads, so it has one.
        thread::Builder::new().name("mock kafka".to_owned()).spawn(move || {
            let mock = match Mock::new(BROKERS) {
                Ok(mock) => mock,
                Err(error) => return drop(ready.send(Err(error))),
            };
            let _ = ready.send(Ok(mock.bootstrap_servers()));
            for (order, done) in received {
                let _ = done.send(order(&mock));
            }
        })?;
        Ok(Kafka { bootstrap: started.await??, mock: Some(orders) })
    }

    /// Where it is: `host:port,host:port`.
    pub fn bootstrap(&self) -> &str {
        &self.bootstrap
    }

    /// Whether it is the mock.
    pub fn is_mock(&self) -> bool {
        self.mock.is_some()
    }

    /// Creates a topic.
    pub async fn create_topic(&self, name: &str, partitions: u16) -> Result<()> {
        if self.mock.is_some() {
            let name = name.to_owned();
            return self.order(move |mock| mock.create_topic(&name, i32::from(partitions), BROKERS)).await;
        }
        let options = AdminOptions::new().request_timeout(Some(ADMIN_WAIT)).operation_timeout(Some(ADMIN_WAIT));
        let topic = NewTopic::new(name, i32::from(partitions), TopicReplication::Fixed(-1));
        for created in self.admin()?.create_topics([&topic], &options).await? {
            created.map_err(|(name, code)| format!("the topic {name} was not created: {code}"))?;
        }
        Ok(())
    }

    /// All brokers end their connections and take no new ones. What they have stays.
    pub async fn stop(&self) -> Result<()> {
        self.order(|mock| mock.broker_down(ALL)).await
    }

    /// All brokers serve again.
    pub async fn start_again(&self) -> Result<()> {
        self.order(|mock| mock.broker_up(ALL)).await
    }

    /// The next requests of this kind fail, each with one of these codes.
    pub async fn fail_next(&self, requests: RDKafkaApiKey, codes: &[RDKafkaRespErr]) -> Result<()> {
        let codes = codes.to_vec();
        self.order(move |mock| {
            mock.request_errors(requests, &codes);
            Ok(())
        })
        .await
    }

    async fn order(&self, order: impl FnOnce(&Mock) -> KafkaResult<()> + Send + 'static) -> Result<()> {
        let Some(mock) = &self.mock else {
            return Err(format!("{KAFKA_VAR} names a cluster that this process did not start").into());
        };
        let (done, answer) = oneshot::channel();
        mock.send((Box::new(order), done)).map_err(|_| "the mock has ended")?;
        Ok(answer.await??)
    }

    fn admin(&self) -> Result<AdminClient<DefaultClientContext>> {
        Ok(ClientConfig::new().set("bootstrap.servers", &self.bootstrap).create()?)
    }
}

/// The code as the mock wants it.
pub fn response(code: RDKafkaErrorCode) -> RDKafkaRespErr {
    use RDKafkaRespErr as Raw;
    match code {
        RDKafkaErrorCode::TopicAuthorizationFailed => Raw::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
        RDKafkaErrorCode::MessageSizeTooLarge => Raw::RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE,
        RDKafkaErrorCode::OutOfOrderSequenceNumber => Raw::RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER,
        RDKafkaErrorCode::BrokerTransportFailure => Raw::RD_KAFKA_RESP_ERR__TRANSPORT,
        _ => Raw::RD_KAFKA_RESP_ERR_UNKNOWN,
    }
}
