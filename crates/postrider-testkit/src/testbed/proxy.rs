//! A TCP proxy that does to connections what networks do.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::Result;

/// What is done to the connections now.
#[derive(Clone, Debug)]
struct Faults {
    is_cut: bool,
    is_held: bool,
    delay: Duration,
    /// Ends the connections of now.
    connections: CancellationToken,
}

/// Listens on a free loopback port and forwards to a target, until told otherwise.
#[derive(Debug)]
pub struct TcpProxy {
    address: SocketAddr,
    faults: Arc<watch::Sender<Faults>>,
    end: CancellationToken,
}

impl TcpProxy {
    /// A proxy in front of `127.0.0.1:port`.
    pub async fn start(port: u16) -> Result<TcpProxy> {
        Self::start_for(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await
    }

    /// A proxy in front of `target`, which need not listen yet.
    pub async fn start_for(target: SocketAddr) -> Result<TcpProxy> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let end = CancellationToken::new();
        let connections = end.child_token();
        let faults = Faults { is_cut: false, is_held: false, delay: Duration::ZERO, connections };
        let proxy = TcpProxy {
            address: listener.local_addr()?,
            faults: Arc::new(watch::Sender::new(faults)),
            end: end.clone(),
        };
        tokio::spawn(end.run_until_cancelled_owned(accept(listener, target, Arc::clone(&proxy.faults))));
        Ok(proxy)
    }

    /// Where clients connect to.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Closes every connection now, and each new one at once, until [`heal`](Self::heal).
    pub fn cut(&self) {
        self.faults.send_modify(|faults| {
            faults.is_cut = true;
            faults.connections.cancel();
            faults.connections = self.end.child_token();
        });
    }

    /// New connections work again.
    pub fn heal(&self) {
        self.faults.send_modify(|faults| faults.is_cut = false);
    }

    /// Takes what arrives, as far as the buffers reach, and forwards nothing, in both directions, until
    /// [`release`](Self::release): the peer that neither answers nor goes away.
    pub fn hold(&self) {
        self.faults.send_modify(|faults| faults.is_held = true);
    }

    /// Forwards what was held, in order, and what comes.
    pub fn release(&self) {
        self.faults.send_modify(|faults| faults.is_held = false);
    }

    /// Delays every piece by `delay`; zero ends that.
    pub fn slow(&self, delay: Duration) {
        self.faults.send_modify(|faults| faults.delay = delay);
    }
}

impl Drop for TcpProxy {
    fn drop(&mut self) {
        self.end.cancel();
    }
}

async fn accept(listener: TcpListener, target: SocketAddr, faults: Arc<watch::Sender<Faults>>) {
    loop {
        // Out of file descriptors, or the client has gone again: neither ends a proxy.
        let Ok((client, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let now = faults.borrow().clone();
        if now.is_cut {
            continue;
        }
        tokio::spawn(now.connections.run_until_cancelled_owned(forward(client, target, faults.subscribe())));
    }
}

async fn forward(client: TcpStream, target: SocketAddr, faults: watch::Receiver<Faults>) {
    let Ok(server) = TcpStream::connect(target).await else { return };
    // The delays are ours to choose.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (client_read, client_write) = client.into_split();
    let (server_read, server_write) = server.into_split();
    let there = pump(client_read, server_write, faults.clone());
    let back = pump(server_read, client_write, faults);
    // An error in one direction ends both; a mere end of the stream lets the other one finish.
    let _ = tokio::try_join!(there, back);
}

async fn pump(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut faults: watch::Receiver<Faults>) -> Result<()> {
    const PIECE_BYTES: usize = 16 * 1024;
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let length = from.read(&mut piece).await?;
        let delay = faults.wait_for(|faults| !faults.is_held).await?.delay;
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
            // It may have been held in the meantime.
            faults.wait_for(|faults| !faults.is_held).await?;
        }
        if length == 0 {
            return Ok(to.shutdown().await?);
        }
        to.write_all(&piece[..length]).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::{Instant, timeout};

    /// A server that sends back what it gets, and a proxy before it.
    async fn echo() -> TcpProxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = TcpProxy::start(listener.local_addr().unwrap().port()).await.unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut read, mut write) = stream.split();
                    let _ = tokio::io::copy(&mut read, &mut write).await;
                });
            }
        });
        proxy
    }

    async fn ask(stream: &mut TcpStream) -> std::io::Result<[u8; 4]> {
        stream.write_all(b"ping").await?;
        let mut answer = [0; 4];
        stream.read_exact(&mut answer).await?;
        Ok(answer)
    }

    #[tokio::test]
    async fn a_cut_ends_connections_and_heals() {
        let proxy = echo().await;
        let mut stream = TcpStream::connect(proxy.address).await.unwrap();
        assert_eq!(&ask(&mut stream).await.unwrap(), b"ping");
        proxy.cut();
        assert!(ask(&mut stream).await.is_err());
        let mut refused = TcpStream::connect(proxy.address).await.unwrap();
        assert!(ask(&mut refused).await.is_err());
        proxy.heal();
        let mut again = TcpStream::connect(proxy.address).await.unwrap();
        assert_eq!(&ask(&mut again).await.unwrap(), b"ping");
    }

    #[tokio::test]
    async fn held_bytes_arrive_after_the_release() {
        let proxy = echo().await;
        let mut stream = TcpStream::connect(proxy.address).await.unwrap();
        assert_eq!(&ask(&mut stream).await.unwrap(), b"ping");
        proxy.hold();
        let mut question = Box::pin(ask(&mut stream));
        assert!(timeout(Duration::from_millis(100), &mut question).await.is_err());
        proxy.release();
        assert_eq!(&question.await.unwrap(), b"ping");
    }

    #[tokio::test]
    async fn a_slow_proxy_delays_both_ways() {
        let proxy = echo().await;
        proxy.slow(Duration::from_millis(50));
        let mut stream = TcpStream::connect(proxy.address).await.unwrap();
        let asked = Instant::now();
        assert_eq!(&ask(&mut stream).await.unwrap(), b"ping");
        assert!(asked.elapsed() >= Duration::from_millis(100));
    }
}
