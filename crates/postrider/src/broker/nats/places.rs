//! The subjects `<prefix>-places.<consumer>_error` and `…_skipped`, or the names that were configured: what a consumer could
//! not apply, with the reason in its headers.
//!
//! They are in a stream of their own: no consumer's pattern catches them, and JetStream does not take the copy for a
//! repetition of the event.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::error::classify;
use super::link::Link;
use super::settings::NatsSettings;
use super::{message, stream};
use crate::broker::Aside;
use crate::error::{Error, Kind, Result};
use crate::inbox::Body;

pub(super) struct Places {
    link: Arc<Link>,
    settings: Arc<NatsSettings>,
    /// Whether the stream was there when it was last used.
    is_ready: AtomicBool,
}

impl Places {
    pub fn new(link: Arc<Link>, settings: Arc<NatsSettings>) -> Self {
        Self { link, settings, is_ready: AtomicBool::new(false) }
    }

    pub async fn set_aside(&self, aside: &Aside<'_>) -> Result<()> {
        self.publish(aside).await.map_err(|error| self.link.explain(error))
    }

    async fn publish(&self, aside: &Aside<'_>) -> Result<()> {
        let Some(place) = aside.place_name() else { return Ok(()) };
        message::check_words("place", &place, Kind::Config)?;
        let live = self.link.live().await?;
        if !self.is_ready.load(Ordering::Relaxed) {
            stream::places(&live, &self.settings, self.link.shown()).await?;
        }
        // What fails leaves nothing behind: the next one looks again.
        self.is_ready.store(false, Ordering::Relaxed);
        let mut headers = match aside.message {
            Body::Event(event) => message::aside_headers(event),
            Body::Raw(raw) => message::raw_headers(raw),
        };
        for (name, value) in aside.reason() {
            message::put(&mut headers, name, &value.replace(['\r', '\n'], " "));
        }
        let subject = format!("{}.{place}", self.settings.places_prefix());
        let payload = bytes::Bytes::copy_from_slice(aside.message.payload());
        let failed = |error| classify(error, "set a message aside", self.link.shown());
        let answer = live.jetstream.publish_with_headers(subject, headers, payload).await.map_err(failed)?;
        let ack = answer.await.map_err(failed)?;
        if ack.stream != self.settings.places_stream() {
            return Err(Error::new(
                Kind::Mismatch,
                format!("the stream {:?} has taken what was set aside", ack.stream),
            ));
        }
        self.is_ready.store(true, Ordering::Relaxed);
        Ok(())
    }
}
