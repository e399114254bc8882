//! Servers that go away: who is told, how soon, and that it is over by itself.

#![allow(clippy::expect_used, clippy::panic, reason = "a test that cannot go on must panic")]

mod own_servers {
    use std::collections::HashSet;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::path::PathBuf;
    use std::process::{Child, Command, Stdio};
    use std::sync::{Arc, Mutex};
    use std::time::{Duration, Instant};

    use postrider_testkit::testbed::{self, Postgres, RabbitMq, TcpProxy};
    use serde_json::Value;
    use sqlx::Connection as _;

    /// Takes alerts (`/alerts`) and events (everywhere else).
    #[derive(Clone)]
    struct Receiver {
        port: u16,
        alerts: Arc<Mutex<Vec<Value>>>,
        events: Arc<Mutex<HashSet<String>>>,
    }

    impl Receiver {
        fn start() -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let port = listener.local_addr().expect("an address").port();
            let receiver = Self { port, alerts: Arc::default(), events: Arc::default() };
            let kept = receiver.clone();
            std::thread::spawn(move || {
                for stream in listener.incoming().map_while(Result::ok) {
                    let kept = kept.clone();
                    std::thread::spawn(move || kept.serve(stream));
                }
            });
            receiver
        }

        fn serve(&self, mut stream: TcpStream) {
            let mut reader = BufReader::new(stream.try_clone().expect("a clone"));
            loop {
                let (mut line, mut id, mut length) = (String::new(), String::new(), 0);
                if reader.read_line(&mut line).unwrap_or(0) == 0 {
                    return;
                }
                loop {
                    let mut header = String::new();
                    if reader.read_line(&mut header).unwrap_or(0) == 0 || header.trim().is_empty() {
                        break;
                    }
                    let (name, value) = header.trim().split_once(": ").unwrap_or_default();
                    match name.to_lowercase().as_str() {
                        "content-length" => length = value.parse().expect("a number"),
                        "idempotency-key" => id = value.to_owned(),
                        _ => {}
                    }
                }
                let mut body = vec![0; length];
                reader.read_exact(&mut body).expect("a body");
                if line.contains("/alerts") {
                    self.alerts.lock().expect("whole").push(serde_json::from_slice(&body).expect("JSON"));
                } else {
                    self.events.lock().expect("whole").insert(id);
                }
                if stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").is_err() {
                    return;
                }
            }
        }

        /// Waits for an alert, and says how long that took.
        async fn told(&self, rule: &str, state: &str, within: Duration) -> (Value, Duration) {
            let began = Instant::now();
            loop {
                let alerts = self.alerts.lock().expect("whole").clone();
                if let Some(alert) = alerts.iter().find(|alert| alert["rule"] == rule && alert["state"] == state) {
                    return (alert.clone(), began.elapsed());
                }
                assert!(began.elapsed() < within, "{rule} {state} did not come within {within:?}: {alerts:?}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }

        async fn events(&self, count: usize) {
            let until = Instant::now() + Duration::from_secs(60);
            while self.events.lock().expect("whole").len() < count {
                assert!(Instant::now() < until, "only {} of {count} came", self.events.lock().expect("whole").len());
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }

    struct Running(Child);

    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn postrider(folder: &tempfile::TempDir, arguments: &[&str]) -> Command {
        let mut command = Command::new(PathBuf::from(env!("CARGO_BIN_EXE_crash")).with_file_name("postrider"));
        command.args(arguments).current_dir(folder.path()).stdin(Stdio::null());
        command.env("POSTRIDER__HTTP__LISTEN", "127.0.0.1:0");
        command
    }

    fn run(folder: &tempfile::TempDir) -> Running {
        let log = std::fs::File::create(folder.path().join("log")).expect("a file");
        let running = postrider(folder, &["run", "--migrate"]).stderr(log).stdout(Stdio::null()).spawn();
        Running(running.expect("`make test` builds postrider first"))
    }

    fn log(folder: &tempfile::TempDir) -> String {
        std::fs::read_to_string(folder.path().join("log")).unwrap_or_default()
    }

    async fn insert(database: &str, count: i32) {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let insert = async {
                let mut connection = sqlx::PgConnection::connect(database).await?;
                let insert = "INSERT INTO postrider.outbox (topic, key, type, payload) \
                     SELECT 'orders.paid', 'o-' || n % 7, 'order.paid', '{}' FROM generate_series(1, $1) n";
                sqlx::query(insert).bind(count).execute(&mut connection).await
            };
            match insert.await {
                Ok(_) => return,
                Err(error) => assert!(Instant::now() < until, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_broker_that_stops_is_told_within_30_s_and_resolved_by_itself() {
        let database = testbed::postgres().await.database(&testbed::unique("alerts")).await.expect("a database");
        let mut broker = RabbitMq::start_private().await.expect("starts");
        let receiver = Receiver::start();
        // A mail server that takes connections and says nothing: it must not delay the webhook.
        let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
        let (port, mail_port) = (receiver.port, silent.local_addr().expect("an address").port());
        let folder = tempfile::TempDir::new().expect("a folder");
        let config = format!(
            "[store]\nurl = \"{database}\"\n[broker]\nurl = \"{}\"\n[breaker]\nopen_ms = 3000\n\
             [[consumer]]\nname = \"billing\"\nurl = \"http://127.0.0.1:{port}/events\"\n\
             [[sink]]\nname = \"mail\"\nkind = \"smtp\"\nhost = \"127.0.0.1\"\nport = {mail_port}\ntls = \"none\"\n\
             from = \"a@shop.example\"\nto = [\"b@shop.example\"]\n\
             [[sink]]\nname = \"hook\"\nurl = \"http://127.0.0.1:{port}/alerts\"\nallow_private = true\n",
            broker.url()
        );
        std::fs::write(folder.path().join("postrider.toml"), config).expect("a file");
        let _running = run(&folder);
        insert(&database, 50).await;
        receiver.events(50).await;
        assert!(receiver.alerts.lock().expect("whole").is_empty(), "nothing is wrong yet");

        broker.stop().await.expect("stops");
        insert(&database, 50).await;
        let (alert, took) = receiver.told("breaker_open", "firing", Duration::from_secs(30)).await;
        println!("the alert came {:.1} s after the broker had stopped", took.as_secs_f64());
        assert_eq!((&alert["subject"], &alert["urgency"]), (&"relay/default".into(), &"critical".into()), "{alert}");
        let listed = postrider(&folder, &["alerts", "list", "--json"]).output().expect("runs");
        let listed: Value = serde_json::from_slice(&listed.stdout).expect("JSON");
        assert!(
            listed["alerts"].as_array().expect("a list").iter().any(|open| open["id"] == alert["alert"]),
            "{listed}"
        );

        broker.restart().await.expect("starts again");
        let (over, took) = receiver.told("breaker_open", "resolved", Duration::from_secs(90)).await;
        println!("it was over {:.1} s after the broker had started", took.as_secs_f64());
        assert_eq!(over["alert"], alert["alert"]);
        receiver.events(100).await;
        let told: Vec<String> = receiver.alerts.lock().expect("whole").iter().map(Value::to_string).collect();
        let of_relay =
            told.iter().filter(|text| text.contains("breaker_open") && text.contains("relay/default")).count();
        assert_eq!(of_relay, 2, "each is told once: {told:?}");
        assert!(log(&folder).contains("\"sink\":\"mail\""), "the mail server that hangs is named:\n{}", log(&folder));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_store_that_stops_is_told_from_memory() {
        let mut server = Postgres::start_private().await.expect("starts");
        let database = server.database(&testbed::unique("alerts")).await.expect("a database");
        let receiver = Receiver::start();
        let folder = tempfile::TempDir::new().expect("a folder");
        let config = format!(
            "[store]\nurl = \"{database}\"\n[[sink]]\nname = \"hook\"\n\
             url = \"http://127.0.0.1:{}/alerts\"\nallow_private = true\n",
            receiver.port
        );
        std::fs::write(folder.path().join("postrider.toml"), config).expect("a file");
        let _running = run(&folder);
        insert(&database, 1).await;
        let until = Instant::now() + Duration::from_secs(30);
        while !log(&folder).contains("this instance watches") {
            assert!(Instant::now() < until, "{}", log(&folder));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }

        server.stop().await.expect("stops");
        let (alert, took) = receiver.told("store_unreachable", "firing", Duration::from_secs(45)).await;
        println!("the alert came {:.1} s after the store had stopped", took.as_secs_f64());
        assert!(alert["alert"].is_null() && alert["remedy"].to_string().contains("nothing is lost"), "{alert}");
        assert!(!alert.to_string().contains("postgres://"), "{alert}");
        server.restart().await.expect("starts again");
        let (over, _) = receiver.told("store_unreachable", "resolved", Duration::from_secs(45)).await;
        assert_eq!(over["subject"], alert["subject"]);
        let told = receiver.alerts.lock().expect("whole").clone();
        assert_eq!(told.len(), 2, "told once: {told:?}");
    }

    /// One instance whose connections are cut `after` its start, for a moment, and which must come to work all the same.
    async fn starts_in_spite_of_a_cut(database: String, port: u16, after: Duration) {
        let proxy = TcpProxy::start(port).await.expect("a proxy");
        let folder = tempfile::TempDir::new().expect("a folder");
        let through = database.replace(&format!(":{port}/"), &format!(":{}/", proxy.port()));
        assert_ne!(through, database, "the port was replaced");
        let config = format!(
            "[store]\nurl = \"{through}\"\n[[outbox]]\ntable = \"outbox_events\"\nid = \"id\"\n\
             payload = \"payload\"\ntopic = \"{{event_type}}\"\nstatus = \"status\"\n[[consumer]]\nname = \"billing\"\nurl = \"http://127.0.0.1:9/events\"\n",
        );
        std::fs::write(folder.path().join("postrider.toml"), config).expect("a file");
        let mut running = run(&folder);
        tokio::time::sleep(after).await;
        proxy.cut();
        tokio::time::sleep(Duration::from_millis(200)).await;
        proxy.heal();
        let until = Instant::now() + Duration::from_secs(60);
        while !log(&folder).contains("is running") {
            assert!(Instant::now() < until, "cut after {after:?}: {}", log(&folder));
            let ended = running.0.try_wait().expect("a child");
            assert!(ended.is_none(), "cut after {after:?}, it ended: {}", log(&folder));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_store_that_goes_away_while_an_instance_starts_is_waited_for() {
        let server = Postgres::start_private().await.expect("starts");
        let database = server.database(&testbed::unique("start")).await.expect("a database");
        let port = database.parse::<sqlx::postgres::PgConnectOptions>().expect("an address").get_port();
        let mut connection = sqlx::PgConnection::connect(&database).await.expect("connects");
        let table = "CREATE TABLE outbox_events (id bigserial PRIMARY KEY, event_type text NOT NULL, \
             payload jsonb NOT NULL, status text NOT NULL DEFAULT 'pending', created_at timestamptz NOT NULL DEFAULT now())";
        sqlx::query(table).execute(&mut connection).await.expect("a table");
        let mut cuts = tokio::task::JoinSet::new();
        for step in 0..12 {
            cuts.spawn(starts_in_spite_of_a_cut(database.clone(), port, Duration::from_millis(40 * step)));
            if cuts.len() == 4 {
                cuts.join_next().await.expect("one of four").expect("it starts");
            }
        }
        while let Some(cut) = cuts.join_next().await {
            cut.expect("it starts");
        }
    }
}
