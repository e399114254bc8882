//! What a client can tell about the server's settings.

use super::link::Link;
use super::settings::NatsSettings;
use super::stream;
use crate::doctor::Finding;
use crate::error::Result;

pub(super) async fn inspect(link: &Link, settings: &NatsSettings) -> Result<Vec<Finding>> {
    let live = link.live().await?;
    let info = live.client.try_server_info().unwrap_or_default();
    let mut findings =
        vec![Finding::ok("nats.connection", format!("connected to {}, NATS {}", link.shown(), info.version))];
    match stream::find(&live, &settings.stream, link.shown()).await {
        Err(error) => findings.push(Finding::of("nats.stream", &error)),
        Ok(None) if settings.declare => findings.push(Finding::ok(
            "nats.stream",
            format!("the stream {:?} does not exist yet and will be declared", settings.stream),
        )),
        Ok(None) => findings.push(Finding::error(
            "nats.stream",
            format!("the stream {:?} does not exist", settings.stream),
            format!("create it on disk with the subjects {}, or set declare = true", settings.subjects()),
        )),
        Ok(Some(stream)) => {
            let faults = stream::faults(stream.cached_info(), settings);
            if !faults.iter().any(|finding| finding.check == "nats.stream") {
                findings.push(Finding::ok("nats.stream", format!("{:?} keeps events on disk", settings.stream)));
            }
            findings.extend(faults);
        }
    }
    if info.max_payload > 0 && settings.payload_bytes_max > info.max_payload {
        findings.push(Finding::warning(
            "nats.max_payload",
            format!(
                "the server takes messages of {} bytes with their headers, payload_bytes_max is {}",
                info.max_payload, settings.payload_bytes_max
            ),
            "raise max_payload in the server's configuration, or lower payload_bytes_max",
        ));
    }
    // No client can read it, and the default is two minutes.
    let remedy = match live.client.is_server_compatible(2, 10, 0) {
        true => "set sync_interval: always in the jetstream block of the server's configuration, or keep 3 replicas",
        false => "keep 3 replicas, or use NATS 2.10 or newer with sync_interval: always in its jetstream block",
    };
    findings.push(Finding::warning(
        "nats.sync_interval",
        "whether JetStream writes events to disk before it confirms them cannot be seen from here; by default a loss of \
         power loses up to two minutes of them",
        remedy,
    ));
    if link.is_plaintext_over_network() {
        findings.push(Finding::warning(
            "nats.tls",
            "password and events travel unencrypted",
            "use tls:// and the server's TLS settings",
        ));
    }
    Ok(findings)
}
