//! The console: files that are part of the binary. There is no build step; a browser gets them as they stand in
//! `console/`.
//!
//! They are the same for everybody and hold no data, so no log-in is needed for them; what they show they ask `/api/v1`
//! for. Everything that came from outside is shown as text (`console/dom.js` has no way to do otherwise), and the headers
//! of [`crate::access`] allow no inline script or style.

use std::hash::{DefaultHasher, Hasher};
use std::sync::LazyLock;

use axum::Router;
use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::api::Problem;

/// One file.
struct File {
    path: &'static str,
    body: &'static str,
}

macro_rules! files {
    ($($path:literal,)*) => {
        &[$(File { path: $path, body: include_str!(concat!("../console/", $path)) }),*]
    };
}

const FILES: &[File] = files![
    "index.html",
    "icon.svg",
    "base.css",
    "frame.css",
    "parts.css",
    "tables.css",
    "charts.css",
    "desk.css",
    "theme.js",
    "app.js",
    "api.js",
    "dom.js",
    "format.js",
    "i18n.js",
    "i18n/en.js",
    "i18n/vi.js",
    "live.js",
    "pages/alerts.js",
    "pages/audit.js",
    "pages/consumers.js",
    "pages/dead.js",
    "pages/errors.js",
    "pages/health.js",
    "pages/integrity.js",
    "pages/letter.js",
    "pages/login.js",
    "pages/missing.js",
    "pages/outbox.js",
    "pages/overview.js",
    "parts/chart.js",
    "parts/decide.js",
    "parts/dialog.js",
    "parts/frame.js",
    "parts/icon.js",
    "parts/replays.js",
    "parts/table.js",
    "parts/toast.js",
    "parts/words.js",
];

/// The ETags of [`FILES`]: another binary with another file has another one.
static TAGS: LazyLock<Vec<String>> = LazyLock::new(|| FILES.iter().map(|file| tag(file.body)).collect());

fn tag(body: &str) -> String {
    let mut hasher = DefaultHasher::new();
    hasher.write(body.as_bytes());
    format!("\"{:016x}\"", hasher.finish())
}

/// `/` and `/console/…`.
pub fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new().route("/", get(index)).route("/console/{*path}", get(file))
}

async fn index(headers: HeaderMap) -> Response {
    // The first of the list.
    answer(0, &headers)
}

async fn file(path: Result<Path<String>, PathRejection>, uri: Uri, headers: HeaderMap) -> Response {
    let path = path.map(|Path(path)| path).unwrap_or_default();
    match FILES.iter().position(|file| file.path == path) {
        Some(found) => answer(found, &headers),
        None => {
            let detail = format!("there is nothing at {}", uri.path());
            Problem::new(StatusCode::NOT_FOUND, "not_found", "Not found", detail)
                .remedy("the console is at /")
                .into_response()
        }
    }
}

/// A file; not again to a browser that has it. A browser asks each time, so that it never mixes two versions.
fn answer(number: usize, headers: &HeaderMap) -> Response {
    let (file, tag) = (&FILES[number], TAGS[number].as_str());
    let known = [(header::ETAG, tag), (header::CACHE_CONTROL, "no-cache")];
    let has = headers.get(header::IF_NONE_MATCH).and_then(|tags| tags.to_str().ok()).unwrap_or_default();
    if has.split(',').any(|has| has.trim().trim_start_matches("W/") == tag) {
        return (StatusCode::NOT_MODIFIED, known).into_response();
    }
    (known, [(header::CONTENT_TYPE, kind(file.path))], file.body).into_response()
}

fn kind(path: &str) -> &'static str {
    match path.rsplit('.').next() {
        Some("html") => "text/html; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("svg") => "image/svg+xml",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path as FilePath;

    use super::*;

    fn folder() -> &'static FilePath {
        FilePath::new(concat!(env!("CARGO_MANIFEST_DIR"), "/console"))
    }

    fn listed(under: &FilePath, found: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(under).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                listed(&path, found);
            } else {
                found.insert(path.strip_prefix(folder()).unwrap().to_str().unwrap().to_owned());
            }
        }
    }

    #[test]
    fn every_file_of_the_folder_is_served() {
        let mut found = BTreeSet::new();
        listed(folder(), &mut found);
        assert_eq!(found, FILES.iter().map(|file| file.path.to_owned()).collect());
        assert!(FILES.iter().all(|file| kind(file.path) != "application/octet-stream"));
        assert_eq!(FILES[0].path, "index.html");
    }

    #[test]
    fn what_a_file_asks_for_is_served() {
        for file in FILES.iter().filter(|file| file.path.ends_with(".js")) {
            let own = FilePath::new(file.path).parent().unwrap();
            for import in file.body.lines().filter_map(|line| line.strip_suffix("\";")?.rsplit_once(" from \"")) {
                let mut path = own.to_path_buf();
                for part in import.1.split('/') {
                    match part {
                        "." => {}
                        ".." => assert!(path.pop(), "{} leaves the folder", file.path),
                        part => path.push(part),
                    }
                }
                let is_there = FILES.iter().any(|file| FilePath::new(file.path) == path);
                assert!(is_there, "{} imports {}", file.path, import.1);
            }
        }
        for address in FILES[0].body.split('"').filter_map(|text| text.strip_prefix("/console/")) {
            assert!(FILES.iter().any(|file| file.path == address), "index.html asks for {address}");
        }
    }

    #[test]
    fn nothing_is_drawn_from_markup_or_inline() {
        for file in FILES {
            for word in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "new Function",
                "http://",
                "https://",
            ] {
                let body = file.body.replace("http://www.w3.org/2000/svg", "");
                assert!(!body.contains(word), "{word} in {}", file.path);
            }
            assert!(!file.body.contains(" style="), "{} has a style of its own", file.path);
        }
        assert!(!FILES[0].body.contains("<style") && !FILES[0].body.contains("<script>"));
    }

    /// The words that are named as they are; those that are put together are seen in the browser.
    #[test]
    fn every_word_has_a_translation() {
        let language = |path| FILES.iter().find(|file| file.path == path).unwrap().body;
        let (english, vietnamese) = (language("i18n/en.js"), language("i18n/vi.js"));
        let mut count = 0;
        for file in FILES.iter().filter(|file| file.path.ends_with(".js")) {
            for call in file.body.split("t(\"").skip(1) {
                let key = call.split('"').next().unwrap();
                // A call of another function that ends with the same letter.
                if !key.contains('.') || key.contains('/') {
                    continue;
                }
                count += 1;
                let entry = format!("\"{key}\":");
                assert!(english.contains(&entry), "{} says {key}, which is not in English", file.path);
                assert!(vietnamese.contains(&entry), "{} says {key}, which is not in Vietnamese", file.path);
            }
        }
        assert!(count > 200, "{count}");
    }

    /// What is written into the audit table, found in the source: the third argument of each call, if it is a word.
    fn actions(under: &FilePath, found: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(under).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                actions(&path, found);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            for begin in ["audit::write(", ".audit(", "audit(&shared, "] {
                for call in text.split(begin).skip(1) {
                    let call = call.split(';').next().unwrap_or_default();
                    let word = call.split('"').nth(1).unwrap_or_default();
                    if !word.is_empty() && word.chars().all(|c| c.is_ascii_lowercase() || c == '_') {
                        found.insert(word.to_owned());
                    }
                }
            }
        }
    }

    #[test]
    fn every_action_of_the_audit_has_a_name() {
        let mut found = BTreeSet::new();
        actions(&folder().join("../src/api"), &mut found);
        actions(&folder().join("../../postrider/src/store"), &mut found);
        let listed = [
            "cancel",
            "check",
            "discard",
            "login",
            "login_failed",
            "logout",
            "payload",
            "recall",
            "recover",
            "replay",
            "republish",
            "silence",
            "unsilence",
        ];
        assert_eq!(found, listed.map(str::to_owned).into());
        for path in ["i18n/en.js", "i18n/vi.js"] {
            let words = FILES.iter().find(|file| file.path == path).unwrap().body;
            for action in listed {
                assert!(words.contains(&format!("\"action.{action}\":")), "{path} has no name for {action}");
            }
        }
    }

    #[test]
    fn a_browser_that_has_a_file_does_not_get_it_again() {
        let first = answer(0, &HeaderMap::new());
        let tag = first.headers()[header::ETAG].clone();
        assert_eq!(first.headers()[header::CONTENT_TYPE], "text/html; charset=utf-8");
        for (has, status) in [(tag.to_str().unwrap(), 304), ("W/\"1\", \"2\"", 200), ("*x", 200)] {
            let headers = HeaderMap::from_iter([(header::IF_NONE_MATCH, has.parse().unwrap())]);
            assert_eq!(answer(0, &headers).status(), status, "{has}");
        }
    }
}
