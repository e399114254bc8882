//! NATS JetStream, compared with a publisher that waits for the answers of 2,000 messages at once.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use async_nats::HeaderMap;
use async_nats::jetstream::stream::{Config, StorageType};
use async_nats::jetstream::{self, context::PublishAckFuture};
use async_trait::async_trait;
use uuid::Uuid;

use super::super::bed::{TOPIC, payload};
use super::{Carrier, IN_FLIGHT, attributes};
use crate::testbed::{Nats, Result, cpu};

/// The bare publisher's stream.
const BARE: &str = "bare";
/// The stream that relays publish to by default.
const STREAM: &str = "postrider";

pub(super) struct Server {
    nats: Nats,
    context: jetstream::Context,
}

impl Server {
    pub(super) async fn start() -> Result<Server> {
        let nats = Nats::start_private().await?;
        let context = jetstream::new(async_nats::connect(nats.url()).await?);
        Ok(Server { nats, context })
    }
}

#[async_trait(?Send)]
impl Carrier for Server {
    fn name(&self) -> &'static str {
        "NATS JetStream"
    }

    fn config(&self) -> String {
        format!("url = \"{}\"\n", self.nats.url())
    }

    fn cpu(&self) -> Option<Duration> {
        cpu(self.nats.pid().ok()?).ok()
    }

    async fn bare(&self, events: u64) -> Result<f64> {
        let config = Config {
            name: BARE.to_owned(),
            subjects: vec![format!("{BARE}.>")],
            storage: StorageType::File,
            duplicate_window: Duration::from_secs(120),
            ..Config::default()
        };
        let mut stream = self.context.create_stream(config).await?;
        let payload = bytes::Bytes::from(payload(0));
        let started = Instant::now();
        let mut waiting: VecDeque<PublishAckFuture> = VecDeque::with_capacity(IN_FLIGHT);
        for number in 0..events {
            if waiting.len() == IN_FLIGHT
                && let Some(next) = waiting.pop_front()
            {
                next.await?;
            }
            let mut headers = HeaderMap::new();
            headers.insert("Nats-Msg-Id", Uuid::now_v7().to_string());
            headers.insert("content-type", "application/json");
            for (name, value) in attributes(number) {
                headers.insert(format!("ce-{name}"), value);
            }
            let subject = format!("{BARE}.{:02}.{TOPIC}", number % 32);
            waiting.push_back(self.context.publish_with_headers(subject, headers, payload.clone()).await?);
        }
        for next in waiting {
            next.await?;
        }
        let rate = events as f64 / started.elapsed().as_secs_f64();
        let held = stream.info().await?.state.messages;
        self.context.delete_stream(BARE).await?;
        if held == events { Ok(rate) } else { Err(format!("the stream holds {held} of {events} messages").into()) }
    }

    async fn count(&self) -> Result<u64> {
        // The relay declares the stream when it publishes first.
        match self.context.get_stream(STREAM).await {
            Ok(stream) => Ok(stream.cached_info().state.messages),
            Err(_) => Ok(0),
        }
    }

    async fn empty(&self) -> Result<()> {
        if let Ok(stream) = self.context.get_stream(STREAM).await {
            stream.purge().await?;
        }
        Ok(())
    }
}
