//! Connections: how many there are at once, and how long they may take to say what they want. Somebody who opens many and
//! says nothing, or says it a byte at a time, must not keep others out.

use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::ConnectInfo;
use axum::http::Request;
use futures_util::FutureExt;
use futures_util::{StreamExt, stream};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// When no connection can be taken (no file descriptors), it is tried again after this long.
const ACCEPT_WAIT: Duration = Duration::from_millis(500);

/// What a connection may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections at once. Others wait until one ends.
    pub connections: usize,
    /// From the beginning of a connection, or the end of an answer, to the end of the next request's headers.
    pub headers: Duration,
    /// From the end of the headers to the end of the body.
    pub body: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 512, headers: Duration::from_secs(30), body: Duration::from_secs(30) }
    }
}

/// Serves until `stop`, then until all requests are answered that were begun.
pub async fn serve(listener: TcpListener, router: Router, limits: Limits, stop: CancellationToken) {
    let (room, connections) = (Arc::new(Semaphore::new(limits.connections)), TaskTracker::new());
    loop {
        let next = async {
            let room = room.clone().acquire_owned().await;
            (room, listener.accept().await)
        };
        let (room, accepted) = tokio::select! {
            () = stop.cancelled() => break,
            next = next => next,
        };
        match accepted {
            Ok((stream, peer)) => {
                let connection = connection(stream, peer, router.clone(), limits, stop.clone());
                connections.spawn(connection.map(|()| drop(room)).boxed());
            }
            // The client's own doing.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                tracing::error!(error_type = "unavailable", %error, "HTTP cannot take a connection, trying again");
                tokio::time::sleep(ACCEPT_WAIT).await;
            }
        }
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

async fn connection(stream: TcpStream, peer: SocketAddr, router: Router, limits: Limits, stop: CancellationToken) {
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |request: Request<Incoming>| {
        let mut request = request.map(|body| in_time(Body::new(body), limits.body));
        request.extensions_mut().insert(ConnectInfo(peer));
        router.call(request)
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.headers);
    let mut served = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = served.as_mut() => ended,
        () = stop.cancelled() => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection over HTTP ended early");
    }
}

/// The body, which fails once its time is over.
fn in_time(body: Body, limit: Duration) -> Body {
    if body.is_end_stream() {
        return body;
    }
    let until = Instant::now() + limit;
    let parts = stream::unfold(Some(body.into_data_stream()), move |body| async move {
        let mut body = body?;
        match tokio::time::timeout_at(until, body.next()).await {
            Ok(part) => part.map(|part| (part, Some(body))),
            Err(_) => Some((Err::<Bytes, _>(axum::Error::new(io::Error::from(io::ErrorKind::TimedOut))), None)),
        }
    });
    Body::from_stream(parts)
}

/// Whether a body could not be read because its time was over.
pub(super) fn is_late(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::TimedOut) {
            return true;
        }
        cause = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use axum::extract::rejection::BytesRejection;
    use axum::routing::{get, post};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::super::Problem;
    use super::super::events::rejected;
    use super::*;

    const LIMITS: Limits =
        Limits { connections: 2, headers: Duration::from_millis(300), body: Duration::from_millis(300) };

    async fn read(body: Result<Bytes, BytesRejection>) -> Result<String, Problem> {
        Ok(format!("{} bytes", body.map_err(rejected)?.len()))
    }

    /// A server that says who asks, and how long a body is.
    async fn start(stop: &CancellationToken) -> (SocketAddr, tokio::task::JoinHandle<()>) {
        let peer = |ConnectInfo(peer): ConnectInfo<SocketAddr>| async move { peer.to_string() };
        let router = Router::new().route("/", get(peer)).route("/", post(read));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (address, tokio::spawn(serve(listener, router, LIMITS, stop.clone())))
    }

    /// What comes back for these bytes until the server hangs up.
    async fn said(address: SocketAddr, bytes: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(bytes.as_bytes()).await.unwrap();
        let mut answer = String::new();
        let reading = stream.read_to_string(&mut answer);
        tokio::time::timeout(Duration::from_secs(10), reading).await.expect("it hangs up").unwrap();
        answer
    }

    #[tokio::test]
    async fn a_slow_client_is_cut_and_others_are_served() {
        let stop = CancellationToken::new();
        let (address, server) = start(&stop).await;
        // Twice as many as there is room for; each is cut in its turn.
        let slow: Vec<_> =
            (0..4).map(|_| tokio::spawn(async move { said(address, "GET / HTTP/1.1\r\nhost: a").await })).collect();
        let silent = tokio::spawn(async move { said(address, "").await });
        let answer = said(address, "GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("127.0.0.1:"), "{answer}");
        for slow in slow {
            assert!(!slow.await.unwrap().contains("200 OK"));
        }
        assert_eq!(silent.await.unwrap(), "");
        stop.cancel();
        tokio::time::timeout(Duration::from_secs(5), server).await.expect("it ends").unwrap();
    }

    #[tokio::test]
    async fn a_body_has_its_time() {
        let stop = CancellationToken::new();
        let (address, _server) = start(&stop).await;
        let request = |length: usize| {
            format!("POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {length}\r\n\r\nabc")
        };
        let whole = said(address, &request(3)).await;
        assert!(whole.ends_with("3 bytes"), "{whole}");
        let late = said(address, &request(4)).await;
        assert!(late.starts_with("HTTP/1.1 408") && late.contains("urn:postrider:problem:too_slow"), "{late}");
        stop.cancel();
    }

    #[tokio::test]
    async fn a_stop_lets_an_answer_end_and_waits_for_nobody_else() {
        let stop = CancellationToken::new();
        let (address, server) = start(&stop).await;
        let mut idle = TcpStream::connect(address).await.unwrap();
        let asking =
            tokio::spawn(
                async move { said(address, "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\nabc").await },
            );
        tokio::time::sleep(Duration::from_millis(100)).await;
        stop.cancel();
        assert!(asking.await.unwrap().starts_with("HTTP/1.1 408"));
        tokio::time::timeout(Duration::from_secs(5), server).await.expect("it ends").unwrap();
        assert_eq!(idle.read(&mut [0; 8]).await.unwrap_or(0), 0);
    }
}
