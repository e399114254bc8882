//! Chromium without a window, driven over the WebDriver protocol (W3C): JSON over HTTP, which chromedriver speaks.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::harness::{SOON, eventually};

/// What WebDriver calls an element in JSON.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// Keys by their places in the protocol.
pub const TAB: char = '\u{E004}';
pub const ENTER: char = '\u{E007}';
pub const ESCAPE: char = '\u{E00C}';

/// A browser with one page. It ends with this value.
pub struct Browser {
    driver: Child,
    port: u16,
    session: String,
}

impl Browser {
    pub fn start() -> Self {
        // chromedriver cannot choose a port and tell it in one step that a test could rely on.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let driver = Command::new("chromedriver")
            .arg(format!("--port={port}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("chromedriver is needed: make setup");
        let mut browser = Self { driver, port, session: String::new() };
        eventually("chromedriver", || browser.call("GET", "/status", None).ok());
        let arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--lang=en-US",
            "--window-size=1280,900",
        ];
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "goog:loggingPrefs": { "browser": "ALL", "performance": "ALL" },
            "goog:chromeOptions": { "args": arguments },
        }}});
        let made = browser.call("POST", "/session", Some(&wanted)).unwrap();
        browser.session = format!("/session/{}", made["sessionId"].as_str().unwrap());
        browser
    }

    fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value, String> {
        let told = |error: std::io::Error| error.to_string();
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).map_err(told)?;
        stream.set_read_timeout(Some(SOON)).map_err(told)?;
        let body = body.map(Value::to_string).unwrap_or_default();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).map_err(told)?;
        let (mut reader, mut length) = (BufReader::new(stream), 0);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).map_err(told)? == 0 || line.trim().is_empty() {
                break;
            }
            if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse().unwrap_or(0);
            }
        }
        let mut answer = vec![0; length];
        reader.read_exact(&mut answer).map_err(told)?;
        let mut answer: Value = serde_json::from_slice(&answer).map_err(|error| error.to_string())?;
        match answer["value"]["error"].as_str() {
            Some(_) => Err(answer["value"]["message"].as_str().unwrap_or_default().to_owned()),
            None => Ok(answer["value"].take()),
        }
    }

    #[track_caller]
    fn command(&self, method: &str, path: &str, body: Value) -> Value {
        let body = (method == "POST").then_some(&body);
        self.call(method, &format!("{}{path}", self.session), body).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    #[track_caller]
    pub fn open(&self, address: &str) {
        self.command("POST", "/url", json!({ "url": address }));
    }

    /// Goes to a page of the console that is open.
    #[track_caller]
    pub fn visit(&self, hash: &str) {
        self.js("location.hash = arguments[0]", json!([hash]));
    }

    /// Runs a function's body in the page.
    #[track_caller]
    pub fn js(&self, script: &str, arguments: Value) -> Value {
        self.command("POST", "/execute/sync", json!({ "script": script, "args": arguments }))
    }

    /// The same for one that returns a promise.
    #[track_caller]
    pub fn js_async(&self, script: &str, arguments: Value) -> Value {
        let script = format!(
            "const done = arguments[arguments.length - 1]; (async function () {{ {script} }})\
             .apply(null, arguments).then(done, (error) => done('failed: ' + error));"
        );
        self.command("POST", "/execute/async", json!({ "script": script, "args": arguments }))
    }

    /// The text that a person sees.
    pub fn text(&self) -> String {
        self.js("return document.body.innerText", json!([])).as_str().unwrap_or_default().to_owned()
    }

    /// Waits until a person sees this text.
    #[track_caller]
    pub fn sees(&self, text: &str) {
        let until = std::time::Instant::now() + SOON;
        while !self.text().contains(text) {
            assert!(std::time::Instant::now() < until, "{text:?} did not appear in:\n{}", self.text());
            std::thread::park_timeout(std::time::Duration::from_millis(50));
        }
    }

    /// Waits for an element.
    #[track_caller]
    pub fn finds(&self, selector: &str) {
        self.until(selector, "return document.querySelector(arguments[0]) !== null", json!([selector]));
    }

    pub fn has(&self, selector: &str) -> bool {
        self.js("return document.querySelector(arguments[0]) !== null", json!([selector])) == true
    }

    /// Waits until a script says true.
    #[track_caller]
    pub fn until(&self, what: &str, script: &str, arguments: Value) {
        eventually(what, || (self.js(script, arguments.clone()) == true).then_some(()));
    }

    /// Clicks an element as a person would, once it is there; with a text, the one that says it.
    #[track_caller]
    pub fn click(&self, selector: &str, text: &str) {
        let find = "return [...document.querySelectorAll(arguments[0])]\
                    .find((found) => !arguments[1] || found.innerText.trim() === arguments[1]) ?? null";
        eventually(&format!("a click on {selector} {text:?}"), || {
            let found = self.js(find, json!([selector, text]));
            let id = found[ELEMENT].as_str()?;
            // The page may have drawn it anew meanwhile.
            self.call("POST", &format!("{}/element/{id}/click", self.session), Some(&json!({}))).ok()
        });
    }

    /// Writes into a field.
    #[track_caller]
    pub fn write(&self, selector: &str, text: &str) {
        self.finds(selector);
        self.js("document.querySelector(arguments[0]).focus()", json!([selector]));
        self.keys(text);
    }

    /// Presses keys, whatever has the focus.
    #[track_caller]
    pub fn keys(&self, keys: &str) {
        let pressed: Vec<Value> = keys
            .chars()
            .flat_map(|key| [json!({ "type": "keyDown", "value": key }), json!({ "type": "keyUp", "value": key })])
            .collect();
        self.command("POST", "/actions", json!({ "actions": [{ "type": "key", "id": "keys", "actions": pressed }] }));
    }

    /// The size of the screen; a narrow one is a phone.
    #[track_caller]
    pub fn resize(&self, width: u32, height: u32) {
        let parameters = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500 });
        let command = json!({ "cmd": "Emulation.setDeviceMetricsOverride", "params": parameters });
        self.command("POST", "/goog/cdp/execute", command);
    }

    /// What the browser complained of since the last call: errors of scripts, files that were refused.
    #[track_caller]
    pub fn complaints(&self) -> Vec<String> {
        let lines = self.command("POST", "/se/log", json!({ "type": "browser" }));
        let is_bad = |line: &&Value| matches!(line["level"].as_str(), Some("SEVERE" | "WARNING"));
        lines.as_array().unwrap().iter().filter(is_bad).map(|line| line["message"].to_string()).collect()
    }

    /// Every address that was asked for since the last call.
    #[track_caller]
    pub fn requests(&self) -> Vec<String> {
        let lines = self.command("POST", "/se/log", json!({ "type": "performance" }));
        let read = |line: &Value| -> Option<String> {
            let told: Value = serde_json::from_str(line["message"].as_str()?).ok()?;
            let told = &told["message"];
            (told["method"] == "Network.requestWillBeSent")
                .then(|| told["params"]["request"]["url"].as_str().unwrap().to_owned())
        };
        lines.as_array().unwrap().iter().filter_map(read).collect()
    }

    /// Writes what is on the screen into a file.
    #[track_caller]
    pub fn picture(&self, file: &Path) {
        let text = self.command("GET", "/screenshot", Value::Null);
        std::fs::write(file, decoded(text.as_str().unwrap())).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Asked politely it takes Chromium along.
        if !self.session.is_empty() {
            let _ = self.call("DELETE", &self.session, None);
        }
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

/// Base64 (RFC 4648).
fn decoded(text: &str) -> Vec<u8> {
    const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bytes, mut held, mut bits) = (Vec::new(), 0u32, 0);
    for letter in text.bytes().filter_map(|byte| LETTERS.iter().position(|letter| *letter == byte)) {
        held = (held << 6) | letter as u32;
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push((held >> bits) as u8);
            held &= (1 << bits) - 1;
        }
    }
    bytes
}

#[test]
fn base64_is_read() {
    assert_eq!(decoded("cG9zdHJpZGVy"), b"postrider");
    assert_eq!(decoded("cG9zdA=="), b"post");
}
