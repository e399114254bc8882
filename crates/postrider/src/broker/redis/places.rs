//! The streams `{<prefix>}:place:<consumer>_error` and `…_skipped`, or the names that were configured: what a consumer could
//! not apply, with the reason in its headers. They are no shards, so no consumer reads them. Redis keeps them in memory, so
//! they keep the newest ones only; the store has all.

use redis::Value;

use super::error::of_streams;
use super::message;
use super::settings::RedisStreamSettings;
use crate::broker::Aside;
use crate::error::Result;
use crate::inbox::Body;
use crate::redis_server::Link;

pub(super) async fn set_aside(link: &Link, settings: &RedisStreamSettings, aside: &Aside<'_>) -> Result<()> {
    let Some(place) = aside.place_name() else { return Ok(()) };
    let mut command = redis::cmd("XADD");
    command.arg(settings.place(&place)).arg("MAXLEN").arg("~").arg(settings.places_entries_max).arg("*");
    let put = |name: &str, value: &[u8]| {
        command.arg(name).arg(value);
    };
    match aside.message {
        Body::Event(event) => message::fields(event, put),
        Body::Raw(raw) => message::raw_fields(raw, put),
    }
    for (name, value) in aside.reason() {
        command.arg(message::header(name)).arg(value);
    }
    let added: Result<Value> = link.call(async |connection| command.query_async(connection).await).await;
    added.map(|_| ()).map_err(of_streams)
}
