use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::super::{HttpClient, HttpSettings, Request, Verdict};
use crate::error::Kind;
use crate::relay::Backoff;

/// Long enough for an honest answer on a busy machine, in tests that expect one.
const PATIENT: Duration = Duration::from_secs(20);
/// For tests that expect none.
const IMPATIENT: Duration = Duration::from_millis(300);

/// What the server does with a connection after it has read a request.
#[derive(Debug, Clone)]
enum Act {
    /// Writes this and closes.
    Write(String),
    /// Writes this and then says nothing more, without closing.
    Stall(String),
    /// Writes this and then the other again and again, slowly.
    Drip(String, &'static str),
    /// Writes this and then the other as fast as it can.
    Pour(String, String),
}

/// A server with one act for each connection, the last one for ever.
struct Server {
    addr: SocketAddr,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Server {
    async fn start(acts: Vec<Act>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let server = Self { addr, seen: seen.clone() };
        tokio::spawn(async move {
            for number in 0.. {
                let (stream, _) = listener.accept().await.unwrap();
                let act = acts[usize::min(number, acts.len() - 1)].clone();
                tokio::spawn(serve(stream, act, seen.clone()));
            }
        });
        server
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addr)
    }

    fn seen(&self) -> Vec<String> {
        self.seen.lock().unwrap().clone()
    }
}

/// Errors end the connection: the client has gone, which is what most tests are about.
async fn serve(mut stream: TcpStream, act: Act, seen: Arc<Mutex<Vec<String>>>) -> std::io::Result<()> {
    let request = read_request(&mut stream).await?;
    seen.lock().unwrap().push(request);
    match act {
        Act::Write(text) => stream.write_all(text.as_bytes()).await,
        Act::Stall(text) => {
            stream.write_all(text.as_bytes()).await?;
            // Ends when the client closes.
            stream.read_u8().await.map(|_| ())
        }
        Act::Drip(text, drop) => {
            stream.write_all(text.as_bytes()).await?;
            loop {
                stream.write_all(drop.as_bytes()).await?;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        Act::Pour(text, more) => {
            stream.write_all(text.as_bytes()).await?;
            loop {
                stream.write_all(more.as_bytes()).await?;
            }
        }
    }
}

/// Reads the head and as much of a body as `content-length` announces.
async fn read_request(stream: &mut TcpStream) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    loop {
        if stream.read_buf(&mut bytes).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length =
            head.lines().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
        if body.len() >= length.unwrap_or(0) {
            return Ok(text);
        }
    }
}

fn answer(status: &str, headers: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n{headers}\r\n{body}", body.len())
}

fn ok(body: &str) -> Act {
    Act::Write(answer("200 OK", "", body))
}

fn settings(timeout: Duration) -> HttpSettings {
    let backoff = Backoff { base: Duration::from_millis(1), max: Duration::from_millis(4), jitter: Duration::ZERO };
    HttpSettings { timeout, backoff, ..HttpSettings::default() }
}

fn client_with(settings: HttpSettings) -> HttpClient {
    // Without the system's certificates: no test needs them, and not every machine has them.
    HttpClient::with_builder(settings, reqwest::Client::builder().no_proxy().tls_certs_only([])).unwrap()
}

fn client(timeout: Duration) -> HttpClient {
    client_with(settings(timeout))
}

fn get(url: &str) -> Request {
    Request::get(url).unwrap()
}

#[tokio::test]
async fn a_request_arrives_whole_and_so_does_its_answer() {
    let act = Act::Write(answer("201 Created", "x-kind: test\r\n", "{\"id\":7}"));
    let server = Server::start(vec![act]).await;
    let url = format!("http://user:pass@{}/orders?a=b", server.addr);
    let request = Request::post(&url).unwrap().header("X-Tenant-ID", "7").unwrap();
    let request = request.json(&serde_json::json!({"order": "o-1"})).unwrap();

    let answer = client(PATIENT).send(&request).await.unwrap().accept().unwrap();
    assert_eq!(answer.status().as_u16(), 201);
    assert_eq!(answer.headers()["x-kind"], "test");
    assert_eq!(answer.json::<serde_json::Value>().unwrap()["id"], 7);
    assert_eq!(answer.verdict(), Verdict::Done);

    let seen = server.seen();
    let (head, body) = seen[0].split_once("\r\n\r\n").unwrap();
    let head = head.to_ascii_lowercase();
    assert!(head.starts_with("post /orders?a=b http/1.1\r\n"), "{head}");
    for line in ["x-tenant-id: 7", "content-type: application/json", "authorization: basic dxnlcjpwyxnz"] {
        assert!(head.lines().any(|found| found == line), "{line} in {head}");
    }
    assert_eq!(body, "{\"order\":\"o-1\"}");
}

#[tokio::test]
async fn silence_and_dripping_end_in_time() {
    let head = "HTTP/1.1 200 OK\r\n";
    let acts = [
        Act::Stall(String::new()),
        Act::Stall(head.to_owned()),
        Act::Stall(format!("{head}content-length: 10\r\n\r\nhalf")),
        Act::Drip(head.to_owned(), "x-drip: 1\r\n"),
        Act::Drip(format!("{head}content-length: 100000\r\n\r\n"), "x"),
        Act::Drip(format!("{head}transfer-encoding: chunked\r\n\r\n"), "1\r\nx\r\n"),
        Act::Drip(format!("{head}\r\n"), "x"),
        Act::Drip("HTTP/1.1 100 Continue\r\n\r\n".to_owned(), "HTTP/1.1 100 Continue\r\n\r\n"),
    ];
    for act in acts {
        let server = Server::start(vec![act.clone()]).await;
        let start = Instant::now();
        let error = client(IMPATIENT).send_once(&get(&server.url("/"))).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable, "{act:?}");
        assert!(error.message().ends_with("no whole answer within 300ms"), "{act:?}: {error}");
        assert!((IMPATIENT..PATIENT).contains(&start.elapsed()), "{act:?}");
    }
}

#[tokio::test]
async fn a_body_is_taken_up_to_its_limit() {
    let client = client_with(HttpSettings { body_bytes_max: 1000, ..settings(PATIENT) });
    let chunked = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
    let fits = "x".repeat(1000);
    for act in [ok(&fits), Act::Write(format!("{chunked}3e8\r\n{fits}\r\n0\r\n\r\n")), ok("")] {
        let server = Server::start(vec![act.clone()]).await;
        assert!(client.send_once(&get(&server.url("/"))).await.is_ok(), "{act:?}");
    }
    let more = "x".repeat(1001);
    let acts = [
        ok(&more),
        Act::Write(format!("{chunked}3e9\r\n{more}\r\n0\r\n\r\n")),
        Act::Stall("HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n".to_owned()),
        Act::Pour(chunked.to_owned(), format!("3e8\r\n{fits}\r\n")),
        Act::Pour("HTTP/1.1 200 OK\r\n\r\n".to_owned(), fits),
    ];
    for act in acts {
        let server = Server::start(vec![act]).await;
        let error = client.send_once(&get(&server.url("/"))).await.unwrap_err();
        assert_eq!(error.kind(), Kind::TooLarge);
        assert!(error.message().ends_with("the body of the answer is larger than 1000 bytes"), "{error}");
    }
}

#[tokio::test]
async fn the_length_that_head_announces_is_no_body() {
    let server = Server::start(vec![Act::Write("HTTP/1.1 200 OK\r\ncontent-length: 9999999\r\n\r\n".to_owned())]).await;
    let request = Request::new(reqwest::Method::HEAD, &server.url("/")).unwrap();
    let answer = client(PATIENT).send(&request).await.unwrap();
    assert_eq!((answer.body().len(), &answer.headers()["content-length"]), (0, &"9999999".parse().unwrap()));
}

#[tokio::test]
async fn a_redirect_is_an_answer_and_is_not_followed() {
    for status in ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"] {
        let elsewhere = Server::start(vec![ok("stolen")]).await;
        let location = format!("location: {}\r\n", elsewhere.url("/"));
        let server = Server::start(vec![Act::Write(answer(status, &location, ""))]).await;
        let request = get(&server.url("/")).header("authorization", "Bearer s3cret").unwrap();
        let answer = client(PATIENT).send(&request).await.unwrap();
        assert!(answer.status().is_redirection() && answer.headers().contains_key("location"));
        assert_eq!(answer.verdict(), Verdict::Retry { after: None });
        assert_eq!(answer.accept().unwrap_err().kind(), Kind::Mismatch);
        assert_eq!((server.seen().len(), elsewhere.seen().len()), (1, 0), "{status}");
    }
}

#[tokio::test]
async fn broken_connections_are_tried_again() {
    let acts = vec![
        Act::Write(String::new()),
        Act::Write("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf".to_owned()),
        Act::Write(answer("503 Busy", "retry-after: 0\r\n", "busy")),
        ok("whole"),
    ];
    let server = Server::start(acts).await;
    let answer = client(PATIENT).send(&get(&server.url("/"))).await.unwrap();
    assert_eq!(&answer.body()[..], b"whole");
    assert_eq!(server.seen().len(), 4);
}

#[tokio::test]
async fn whatever_is_no_http_is_an_unavailable_destination() {
    let junk = [
        "SSH-2.0-OpenSSH_9.2\r\n",
        "\0\0\0\0",
        "HTTP/1.1 s3cret OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\nbad header s3cret\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: s3cret\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\ns3cret\r\n",
    ];
    for text in junk {
        let server = Server::start(vec![Act::Write(text.to_owned())]).await;
        let error = client(PATIENT).send_once(&get(&server.url("/s3cret?q=s3cret"))).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable, "{text:?}");
        assert!(!error.causes().is_empty(), "{text:?}");
        assert!(!format!("{error:?}").contains("s3cret"), "{error:?}");
    }
}

#[tokio::test]
async fn a_head_without_end_does_not_fill_the_memory() {
    let server = Server::start(vec![Act::Pour("HTTP/1.1 200 OK\r\n".to_owned(), "x-more: 1\r\n".repeat(100))]).await;
    let error = client(PATIENT).send_once(&get(&server.url("/"))).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable);
    assert!(!error.message().contains("within"), "it ends by its size, not by its time: {error}");
}

#[tokio::test]
async fn a_destination_that_is_not_there_is_named_without_the_rest_of_the_url() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    drop(listener);
    let client = client(PATIENT);
    let request = get(&format!("http://user:s3cret@{addr}/s3cret?q=s3cret"));
    let error = client.send(&request).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable);
    assert_eq!(error.message(), format!("tried 4 times: GET to {addr}: the destination cannot be reached"));
    assert!(error.causes().concat().contains("refused"), "{:?}", error.causes());
    assert!(!format!("{error:?}").contains("s3cret"));

    client.send(&request).await.unwrap_err();
    let error = client.send(&request).await.unwrap_err();
    assert!(error.message().starts_with(&format!("the breaker of {addr} is open")), "{error}");
    assert!(error.causes().concat().contains("refused"), "{:?}", error.causes());
    assert!(!format!("{error:?}").contains("s3cret"));
}

#[tokio::test]
async fn a_server_without_tls_is_not_spoken_to_in_the_clear() {
    let server = Server::start(vec![ok("clear")]).await;
    let request = get(&format!("https://{}/", server.addr));
    let start = Instant::now();
    let error = client(IMPATIENT).send_once(&request).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable);
    assert!(start.elapsed() < PATIENT);
}

#[tokio::test]
async fn retry_after_is_cut_to_its_limit_and_garbage_is_ignored() {
    let cases = [
        ("7", Some(Duration::from_secs(7))),
        ("86400", Some(Duration::from_secs(60))),
        ("99999999999999999999999", Some(Duration::from_secs(60))),
        ("Fri, 31 Dec 9999 23:59:59 GMT", Some(Duration::from_secs(60))),
        ("Sun, 06 Nov 1994 08:49:37 GMT", Some(Duration::ZERO)),
        ("soon", None),
    ];
    for (value, wait) in cases {
        let act = Act::Write(answer("429 Too Many Requests", &format!("retry-after: {value}\r\n"), ""));
        let server = Server::start(vec![act]).await;
        let answer = client(PATIENT).send_once(&get(&server.url("/"))).await.unwrap();
        assert_eq!(answer.verdict(), Verdict::Retry { after: wait }, "{value}");
        assert_eq!(answer.retry_after(), wait);
    }
}

#[tokio::test]
async fn many_calls_at_once_are_answered_each() {
    let server = Server::start(vec![ok("here")]).await;
    let client = client(PATIENT);
    let calls = (0..50).map(|_| {
        let (client, request) = (client.clone(), get(&server.url("/")));
        tokio::spawn(async move { client.send(&request).await })
    });
    for call in calls.collect::<Vec<_>>() {
        assert_eq!(&call.await.unwrap().unwrap().body()[..], b"here");
    }
    assert_eq!(server.seen().len(), 50);
}
