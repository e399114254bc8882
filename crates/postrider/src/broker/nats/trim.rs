//! Purges what is old and done by every consumer of the stream. JetStream's own `max_age` asks nobody.

use std::time::Duration;

use async_nats::jetstream::consumer::{DeliverPolicy, Info};
use async_nats::jetstream::stream::Stream;
use futures_util::TryStreamExt;

use super::error::classify;
use crate::error::Result;

/// Purges and returns how many messages are gone.
pub(super) async fn trim(stream: &Stream, retention: Duration, shown: &str) -> Result<u64> {
    const DOING: &str = "purge what every consumer has done";
    let info = stream.get_info().await.map_err(|error| classify(error, DOING, shown))?;
    // Asked after the stream: what they have done by then includes what it had.
    let consumers: Vec<Info> = stream.consumers().try_collect().await.map_err(|error| classify(error, DOING, shown))?;
    // A cluster leaves out those whose server is away just now.
    if consumers.len() < info.state.consumer_count {
        return Ok(0);
    }
    let Some(done) = consumers.iter().map(|consumer| done_to(consumer, info.state.last_sequence)).min() else {
        return Ok(0);
    };
    // A wrong clock of ours keeps events for a longer or shorter time, and never touches what is not done.
    let before = chrono::Utc::now().timestamp().saturating_sub_unsigned(retention.as_secs());
    // The first sequence that stays: bisected by the times of messages, which rise with their sequences.
    let (mut low, mut high) = (info.state.first_sequence, done.min(info.state.last_sequence) + 1);
    while low < high {
        let middle = low + (high - low) / 2;
        let Ok(message) = stream.get_raw_message(middle).await else {
            // One that somebody has deleted says nothing; what is below it can wait.
            high = middle;
            continue;
        };
        match message.time.unix_timestamp() < before {
            true => low = middle + 1,
            false => high = middle,
        }
    }
    if low <= info.state.first_sequence {
        return Ok(0);
    }
    let purged = stream.purge().sequence(low).await.map_err(|error| classify(error, DOING, shown))?;
    tracing::debug!(total = purged.purged, "purged what every consumer has done");
    Ok(purged.purged)
}

/// Up to which sequence a consumer has done everything that it wants. One that wants nothing more has done all there was.
fn done_to(consumer: &Info, last: u64) -> u64 {
    if consumer.num_pending == 0 && consumer.num_ack_pending == 0 {
        return last;
    }
    let before = match consumer.config.deliver_policy {
        DeliverPolicy::ByStartSequence { start_sequence } => start_sequence.saturating_sub(1),
        _ => 0,
    };
    consumer.ack_floor.stream_sequence.max(before)
}
