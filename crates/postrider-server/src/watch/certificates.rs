//! When the certificates of servers that we call end: learnt by a handshake an hour, beside the watch. Whether a
//! certificate is trusted is decided where it is used; here it is only read.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use futures_util::FutureExt;
use postrider::alert::CertificateMeasure;
use postrider::http::is_public;
use postrider::http::reqwest::Url;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::net::{TcpStream, lookup_host};
use tokio_rustls::TlsConnector;

use crate::config::{BrokerUrl, Config, SinkKind};

/// A certificate is not renewed more often than somebody wants to know of it.
const EVERY: Duration = Duration::from_secs(60 * 60);
/// A server that does not answer is somebody else's alert.
const HANDSHAKE_WAIT: Duration = Duration::from_secs(10);

/// Looks now and then.
pub struct Certificates {
    /// Every server with TLS from the first byte.
    servers: Vec<Server>,
    looked_at: Option<Instant>,
    known: Arc<Mutex<Vec<CertificateMeasure>>>,
}

impl Certificates {
    /// The servers of a configuration.
    pub fn new(config: &Config) -> Self {
        let brokers = config.destinations().into_iter().filter_map(|(_, broker)| match &broker.url {
            BrokerUrl::RabbitMq(url) | BrokerUrl::Redis(url) => Server::of(url.expose(), true),
            // NATS begins without TLS, and Kafka is built without.
            BrokerUrl::Embedded | BrokerUrl::Kafka(_) | BrokerUrl::Nats(_) => None,
        });
        let consumers = config.consumers.iter().filter_map(|consumer| Server::of(consumer.url.expose(), true));
        let sinks = config.sinks.iter().filter_map(|sink| match &sink.kind {
            SinkKind::Webhook(sink) | SinkKind::Slack(sink) => Server::of(sink.url.expose(), sink.allow_private),
            SinkKind::Smtp(_) => None,
        });
        let claims = config.claim_check.iter().filter_map(|claims| Server::of(claims.endpoint.as_deref()?, true));
        let mut servers: Vec<Server> = brokers.chain(consumers).chain(sinks).chain(claims).collect();
        servers.sort();
        servers.dedup();
        Self { servers, looked_at: None, known: Arc::default() }
    }

    /// What is known by now. Looks anew when it is time, without waiting for the answers.
    pub fn known(&mut self) -> Vec<CertificateMeasure> {
        if !self.servers.is_empty() && self.looked_at.is_none_or(|at| at.elapsed() >= EVERY) {
            self.looked_at = Some(Instant::now());
            tokio::spawn(look(self.servers.clone(), self.known.clone()).boxed());
        }
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A server with TLS.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Server {
    host: String,
    port: u16,
    /// A webhook's host is called only where the webhook itself may go.
    allow_private: bool,
}

impl Server {
    /// The server of a URL; none without TLS.
    fn of(url: &str, allow_private: bool) -> Option<Self> {
        let url = Url::parse(url).ok()?;
        let port = match url.scheme() {
            "https" => 443,
            "amqps" => 5671,
            "rediss" => 6379,
            _ => return None,
        };
        let host = url.host_str()?.trim_start_matches('[').trim_end_matches(']').to_owned();
        Some(Self { host, port: url.port().unwrap_or(port), allow_private })
    }
}

/// One after the other. Who does not answer keeps what is known of him.
async fn look(servers: Vec<Server>, known: Arc<Mutex<Vec<CertificateMeasure>>>) {
    for called in servers {
        let server = format!("{}:{}", called.host, called.port);
        let ends_at = match tokio::time::timeout(HANDSHAKE_WAIT, handshake(&called)).await {
            Ok(Ok(Some(ends_at))) => ends_at,
            Ok(Ok(None)) => continue,
            Ok(Err(error)) => {
                tracing::debug!(server, %error, "its certificate cannot be read");
                continue;
            }
            Err(_) => continue,
        };
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|measure| measure.server != server);
        known.push(CertificateMeasure { server, ends_at });
    }
}

async fn handshake(server: &Server) -> std::io::Result<Option<DateTime<Utc>>> {
    let name = ServerName::try_from(server.host.clone()).map_err(std::io::Error::other)?;
    let addresses: Vec<SocketAddr> = lookup_host((server.host.as_str(), server.port)).await?.collect();
    if !server.allow_private && addresses.iter().any(|address| !is_public(address.ip())) {
        return Ok(None);
    }
    let provider = CryptoProvider::get_default().ok_or_else(|| std::io::Error::other("no TLS"))?.clone();
    let reader = Arc::new(Reader(provider.clone()));
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(std::io::Error::other)?.dangerous().with_custom_certificate_verifier(reader);
    let connector = TlsConnector::from(Arc::new(config.with_no_client_auth()));
    let stream = connector.connect(name, TcpStream::connect(addresses.as_slice()).await?).await?;
    let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
    Ok(certificates.first().and_then(|certificate| ends_at(certificate)))
}

fn ends_at(der: &[u8]) -> Option<DateTime<Utc>> {
    let (_, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
    DateTime::from_timestamp(certificate.validity().not_after.timestamp(), 0)
}

/// Takes every certificate: an expired one is what we are looking for, and nothing is ever sent over the connection.
#[derive(Debug)]
struct Reader(Arc<CryptoProvider>);

impl ServerCertVerifier for Reader {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_with_tls_are_looked_at() {
        let of = |url: &str| Server::of(url, true).map(|server| (server.host, server.port));
        assert_eq!(of("https://api.example/x"), Some(("api.example".to_owned(), 443)));
        assert_eq!(of("amqps://u:p@mq.example/%2f"), Some(("mq.example".to_owned(), 5671)));
        assert_eq!(of("rediss://[::1]:7000/0"), Some(("::1".to_owned(), 7000)));
        for plain in ["http://api.example/", "amqp://mq.example/", "embedded", "https://"] {
            assert_eq!(of(plain), None, "{plain}");
        }
    }

    #[tokio::test]
    async fn private_servers_are_not_called_for_a_webhook_that_may_not_go_there() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = Server::of(&format!("https://localhost:{port}/"), false).unwrap();
        // With a provider installed or without: nothing connects.
        assert_eq!(handshake(&server).await.unwrap(), None);
        assert!(tokio::time::timeout(Duration::from_millis(50), listener.accept()).await.is_err());
    }
}
