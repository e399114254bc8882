//! What all that keep something in Redis share: the connection, the meaning of its errors, and what it says of itself.

use redis::{Client, ConnectionAddr};

use crate::error::{Error, Kind, Result};

mod error;
mod info;
mod link;

pub(crate) use info::Info;
pub(crate) use link::{Link, is_demoted};

/// The driver for an address. [`Kind::Config`] when it cannot be read.
pub(crate) fn client(url: &str) -> Result<Client> {
    // The parser's error may quote the URL and with it the password, so it is not kept.
    let client = Client::open(url).map_err(|_| {
        Error::new(Kind::Config, "the Redis URL cannot be read")
            .with_remedy("write it as redis://user:password@host:port/db, special characters percent-encoded")
    })?;
    if matches!(client.get_connection_info().addr(), ConnectionAddr::TcpTls { .. }) {
        // The driver takes the process's default. Without one, or with several to choose from, it would panic; an
        // error here means that there is one by now.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    }
    Ok(client)
}
