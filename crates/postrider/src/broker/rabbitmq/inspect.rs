//! What AMQP alone can tell about the broker's settings.

use std::time::Duration;

use lapin::uri::AMQPScheme;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::RabbitMq;
use super::settings::Address;
use super::topology::Topology;
use crate::broker::Broker;
use crate::doctor::Finding;
use crate::error::{Kind, Result};

/// What the client says first, and what we compare with.
const PROTOCOL_HEADER: &[u8] = b"AMQP\x00\x00\x09\x01";
/// `connection.start` lists the server's properties, about half a kilobyte.
const START_BYTES_MAX: usize = 4096;

pub(super) async fn inspect(broker: &RabbitMq) -> Result<Vec<Finding>> {
    let shown = &broker.address.shown;
    // Over the consuming connection: one that RabbitMQ has blocked answers nothing.
    let live = broker.consuming.live().await?;
    let version = server_version(&broker.address, broker.settings.connect_timeout).await;
    let mut findings = vec![match &version {
        Some(version) => Finding::ok("rabbitmq.connection", format!("connected to {shown}, {version}")),
        None => Finding::ok("rabbitmq.connection", format!("connected to {shown}")),
    }];

    let topology = Topology { live: &live, settings: &broker.settings, shown };
    let name = &broker.settings.exchange;
    findings.push(match topology.has_exchange().await {
        Err(error) => Finding::of("rabbitmq.exchange", &error),
        Ok(false) if broker.settings.declare => {
            Finding::ok("rabbitmq.exchange", format!("the exchange {name:?} does not exist yet and will be declared"))
        }
        Ok(false) => Finding::error(
            "rabbitmq.exchange",
            format!("the exchange {name:?} does not exist"),
            "create it as a durable topic exchange, or let Postrider declare it (declare = true)",
        ),
        // Passively declared, an exchange of any kind is found; declared again, it is compared.
        Ok(true) => match topology.redeclare_exchange().await {
            Ok(()) => Finding::ok("rabbitmq.exchange", format!("{name:?} is a durable topic exchange")),
            Err(error) if error.kind() == Kind::Denied && !broker.settings.declare => Finding::warning(
                "rabbitmq.exchange",
                format!("the exchange {name:?} exists; the user may not configure it, so its kind cannot be compared"),
                "make sure that it is a durable topic exchange (rabbitmqctl list_exchanges name type durable)",
            ),
            Err(error) => Finding::of("rabbitmq.exchange", &error),
        },
    });

    if let Some(reason) = broker.blocked() {
        findings.push(Finding::error(
            "rabbitmq.blocked",
            format!("RabbitMQ blocks publishers: {reason}"),
            "free the broker's memory or disk (rabbitmqctl status shows the alarm)",
        ));
    }
    if live.heartbeat().is_zero() {
        findings.push(Finding::warning(
            "rabbitmq.heartbeat",
            "heartbeats are switched off, so a dead peer is noticed late",
            "set heartbeat to about 10 seconds, here and on the broker",
        ));
    }
    if broker.address.uri.scheme == AMQPScheme::AMQP && !is_local(&broker.address.uri.authority.host) {
        findings.push(Finding::warning(
            "rabbitmq.tls",
            "password and events travel unencrypted",
            "use amqps:// and the broker's TLS listener",
        ));
    }
    Ok(findings)
}

fn is_local(host: &str) -> bool {
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// The server's product and version. lapin does not keep what `connection.start` says, so that is asked for on a
/// connection of its own, which goes no further. Nothing is said over TLS, where this would need a handshake too.
async fn server_version(address: &Address, timeout: Duration) -> Option<String> {
    if address.uri.scheme != AMQPScheme::AMQP {
        return None;
    }
    let start = async {
        let mut stream =
            TcpStream::connect((address.uri.authority.host.as_str(), address.uri.authority.port)).await.ok()?;
        stream.write_all(PROTOCOL_HEADER).await.ok()?;
        // A frame: type, channel, size, payload.
        let mut head = [0u8; 7];
        stream.read_exact(&mut head).await.ok()?;
        let size = u32::from_be_bytes([head[3], head[4], head[5], head[6]]) as usize;
        let mut payload = vec![0u8; size.min(START_BYTES_MAX)];
        stream.read_exact(&mut payload).await.ok()?;
        Some(payload)
    };
    let payload = tokio::time::timeout(timeout, start).await.ok()??;
    let product = property(&payload, "product")?;
    let version = property(&payload, "version")?;
    Some(format!("{product} {version}"))
}

/// A text out of AMQP's table of server properties: name, `S`, length, bytes.
fn property(table: &[u8], name: &str) -> Option<String> {
    let mut key = vec![u8::try_from(name.len()).ok()?];
    key.extend_from_slice(name.as_bytes());
    key.push(b'S');
    let at = table.windows(key.len()).position(|window| window == key)? + key.len();
    let length = u32::from_be_bytes(table.get(at..at + 4)?.try_into().ok()?) as usize;
    let value = table.get(at + 4..at + 4 + length)?;
    std::str::from_utf8(value).ok().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_property_is_found_in_the_table() {
        let table = b"\x07productS\x00\x00\x00\x08RabbitMQ\x07versionS\x00\x00\x00\x063.10.8";
        assert_eq!(property(table, "product").as_deref(), Some("RabbitMQ"));
        assert_eq!(property(table, "version").as_deref(), Some("3.10.8"));
        assert_eq!(property(table, "platform"), None);
        assert_eq!(property(b"\x07versionS\x00\x00\xff\xff3", "version"), None);
    }

    #[test]
    fn only_loopback_is_local() {
        assert!(is_local("localhost") && is_local("127.0.0.1") && is_local("::1"));
        assert!(!is_local("mq.example") && !is_local("10.0.0.1"));
    }
}
