//! RabbitMQ's management API, as far as tests need it: `rabbitmqctl` starts an Erlang machine for every call and takes a
//! second; this takes some milliseconds, and it works on a broker that somebody else runs.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::url::Url;
use super::{RABBITMQ_API_VAR, Result};

/// The port that the management plugin listens on when nobody says otherwise.
const DEFAULT_PORT: u16 = 15_672;

#[derive(Clone, Debug)]
pub(super) struct Api {
    host: String,
    port: u16,
    authorization: String,
}

impl Api {
    /// `http://user:password@host:port`
    pub(super) fn new(url: &Url) -> Result<Api> {
        if url.scheme != "http" {
            return Err(format!("{RABBITMQ_API_VAR} must start with http://").into());
        }
        Ok(Self::at(url, url.port.unwrap_or(DEFAULT_PORT)))
    }

    /// The API of the broker at `amqp`, on its usual port and with the same user.
    pub(super) fn beside(amqp: &Url) -> Api {
        Self::at(amqp, DEFAULT_PORT)
    }

    fn at(url: &Url, port: u16) -> Api {
        let login =
            if url.user.is_empty() { "guest:guest".to_owned() } else { format!("{}:{}", url.user, url.password) };
        Api { host: url.host.clone(), port, authorization: base64(login.as_bytes()) }
    }

    /// Creates a virtual host, in which the user of the API may do everything.
    pub(super) async fn add_vhost(&self, name: &str) -> Result<()> {
        self.put(&format!("/api/vhosts/{name}")).await
    }

    async fn put(&self, path: &str) -> Result<()> {
        let Api { host, port, authorization } = self;
        let mut stream = TcpStream::connect((host.as_str(), *port)).await.map_err(|error| {
            format!("RabbitMQ's management API on {host}:{port}: {error}; {RABBITMQ_API_VAR} says where it is")
        })?;
        let request = format!(
            "PUT {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Basic {authorization}\r\n\
             Content-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}"
        );
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        let answer = String::from_utf8_lossy(&answer);
        match answer.split_whitespace().nth(1) {
            Some("201" | "204") => Ok(()),
            _ => Err(format!("RabbitMQ's management API refused PUT {path}: {answer}").into()),
        }
    }
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().fold(0_u32, |word, &byte| word << 8 | u32::from(byte)) << (8 * (3 - chunk.len()));
        for place in 0..4 {
            let letter = LETTERS[(word >> (18 - 6 * place) & 63) as usize];
            text.push(if place <= chunk.len() { char::from(letter) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_pads_what_is_not_a_multiple_of_three() {
        for (text, expected) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("guest:guest", "Z3Vlc3Q6Z3Vlc3Q=")]
        {
            assert_eq!(base64(text.as_bytes()), expected);
        }
    }
}
