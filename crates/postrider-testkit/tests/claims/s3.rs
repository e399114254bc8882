//! The storage is a bucket. The server is s3s, which checks signatures, in this process.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use crate::bed::{ClaimBed, event, soon};
use bytes::Bytes;
use chrono::{TimeDelta, Utc};
use hyper_util::rt::{TokioExecutor, TokioIo};
use postrider::Kind;
use postrider::claim::s3::{S3, S3Settings};
use postrider::claim::{Claims, Hash, Objects};
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpSocket};
use tokio::task::JoinHandle;

const SECRET: &str = "wJalrXUtnFEMI/K7MDENG";

/// An S3 server with the bucket `claims`.
struct Server {
    folder: TempDir,
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Server {
    async fn start() -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        std::fs::create_dir(folder.path().join("claims")).expect("a bucket");
        let (address, task) = serve(folder.path(), SocketAddr::from(([127, 0, 0, 1], 0)));
        Self { folder, address, task }
    }

    /// Ends the server with all its connections.
    async fn stop(&mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }

    /// Starts it again, at the same address.
    fn restart(&mut self) {
        (_, self.task) = serve(self.folder.path(), self.address);
    }

    fn settings(&self) -> S3Settings {
        S3Settings {
            bucket: "claims".to_owned(),
            endpoint: Some(format!("http://{}", self.address)),
            region: "us-east-1".to_owned(),
            access_key: "AKIDEXAMPLE".to_owned(),
            secret_key: SECRET.to_owned(),
        }
    }

    fn bucket(&self) -> S3 {
        S3::new(self.settings()).expect("valid settings")
    }
}

fn serve(folder: &Path, address: SocketAddr) -> (SocketAddr, JoinHandle<()>) {
    let files = s3s_fs::FileSystem::new(folder).expect("a file system");
    let mut builder = S3ServiceBuilder::new(files);
    builder.set_auth(SimpleAuth::from_single("AKIDEXAMPLE", SECRET));
    let service = builder.build();
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_reuseaddr(true).expect("reusable");
    socket.bind(address).expect("bound");
    let listener: TcpListener = socket.listen(64).expect("listens");
    let address = listener.local_addr().expect("an address");
    let task = tokio::spawn(async move {
        let mut connections = tokio::task::JoinSet::new();
        let http = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
        while let Ok((stream, _)) = listener.accept().await {
            let connection = http.serve_connection(TokioIo::new(stream), service.clone()).into_owned();
            connections.spawn(async move {
                let _ = connection.await;
            });
        }
    });
    (address, task)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_stored_is_read_until_it_is_deleted() {
    let server = Server::start().await;
    let bucket = server.bucket();
    let content = Bytes::from(vec![7u8; 3_000_000]);
    let path = "shop/2023-11-14/x";
    assert_eq!(bucket.get(path, 9).await.expect("answers"), None);
    for _ in 0..2 {
        bucket.put(path, content.clone(), &Hash::of(&content)).await.expect("stored");
    }
    assert_eq!(bucket.get(path, content.len()).await.expect("answers"), Some(content.clone()));
    assert_eq!(bucket.get(path, 10).await.expect("answers").expect("there").len(), 11);
    for other in ["shop/2023-11-15/x", "shop/2023-11-14/y", "other/x"] {
        bucket.put(other, "x".into(), &Hash::of(b"x")).await.expect("stored");
    }
    let list = async |after: &str, limit| {
        let found = bucket.list("shop/", after, limit).await.expect("listed");
        found.into_iter().map(|object| object.path).collect::<Vec<_>>()
    };
    assert_eq!(list("shop/", 2).await, ["shop/2023-11-14/x", "shop/2023-11-14/y"]);
    assert_eq!(list("shop/2023-11-14/y", 9).await, ["shop/2023-11-15/x"]);
    for _ in 0..2 {
        bucket.delete(path).await.expect("deleted");
    }
    assert_eq!(bucket.get(path, 9).await.expect("answers"), None);

    let wrong = bucket.put(path, content, &Hash::of(b"something else")).await;
    assert!(wrong.is_err(), "the server compares content and hash");
    assert_eq!(bucket.get(path, 9).await.expect("answers"), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn trouble_is_named_and_never_an_objects_absence() {
    let mut server = Server::start().await;
    let inspect = async |settings: S3Settings| {
        let claims = Claims::new(Arc::new(S3::new(settings).expect("valid settings")));
        claims.inspect().await
    };
    inspect(server.settings()).await.expect("puts, gets and deletes");
    let wrong_key = S3Settings { secret_key: "other".to_owned(), ..server.settings() };
    let error = inspect(wrong_key).await.expect_err("denied");
    assert_eq!(error.kind(), Kind::Denied);
    let shown = format!("{error:?}");
    assert!(shown.contains("SignatureDoesNotMatch") && !shown.contains("other") && !shown.contains("AKID"), "{shown}");

    let no_bucket = S3::new(S3Settings { bucket: "nowhere".to_owned(), ..server.settings() }).expect("valid");
    // Asked for an object, s3s does not tell a missing bucket from a missing object; S3 and MinIO do.
    assert_eq!(no_bucket.list("", "", 9).await.expect_err("no bucket").kind(), Kind::Missing);
    server.stop().await;
    let error = server.bucket().get("x", 9).await.expect_err("away");
    assert_eq!(error.kind(), Kind::Unavailable);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_payload_survives_a_server_that_goes_away() {
    let mut server = Server::start().await;
    let bed = ClaimBed::new(Arc::new(server.bucket())).await;
    let broker = bed.over(bed.embedded());
    let crew = bed.start(&broker);
    let events = [event("k", 300_000), event("k", 10), event("k", 5_000_000), event("k", 20)];
    bed.send(&events[..2]).await;
    assert_eq!(bed.applied(2).await, events[..2]);
    crew.stop().await;

    // Away for the relay.
    server.stop().await;
    let relay = bed.relay(&broker);
    bed.send(&events[2..]).await;
    bed.asked(2).await;
    let backlog = bed.backlog().await;
    assert_eq!((backlog.pending, backlog.retrying, backlog.failed), (2, 0, 0));
    server.restart();
    soon("published", async || bed.backlog().await.pending == 0).await;
    relay.stop().await;

    // And for the consumer.
    server.stop().await;
    let crew = bed.consume(&broker, Some(bed.claims.clone()));
    soon("held", async || bed.held().await.len() == 2).await;
    bed.asked(6).await;
    assert!(bed.held().await.iter().all(|(attempts, bytes)| *attempts <= 1 && *bytes < 100), "{:?}", bed.held().await);
    server.restart();
    assert_eq!(bed.applied(4).await, events);
    crew.stop().await;
    bed.no_dead_letters().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_expire_in_a_bucket_too() {
    let server = Server::start().await;
    let bed = ClaimBed::new(Arc::new(server.bucket())).await;
    let broker = bed.over(bed.embedded());
    let old = event("k", 2_000).rebuild().time(Utc::now() - TimeDelta::days(3)).build().expect("valid");
    for event in [&old, &event("k", 2_000)] {
        assert!(broker.publish(&[Arc::new(event.clone())]).await[0].is_ok());
    }
    let day = old.time().format("%Y-%m-%d");
    let path = format!("shop/orders/{day}/{}", old.id());
    assert_eq!(bed.claims.expire(Utc::now() - TimeDelta::days(1)).await.expect("expired").deleted, 0, "stored today");
    assert_eq!(bed.claims.expire(Utc::now() + TimeDelta::seconds(90)).await.expect("expired").deleted, 1);
    assert_eq!(server.bucket().get(&path, 9).await.expect("answers"), None);
}
