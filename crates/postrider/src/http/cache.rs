//! The last good answers, for the time when a destination gives none.
//!
//! This is no HTTP cache: a fresh answer is always asked for first. An answer is found again only by a request that
//! must get the same one: the same URL, and the same headers or the same [`Request::cache_scope`]. Otherwise one tenant
//! could be shown what another one asked for.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use reqwest::Method;
use reqwest::header::{CACHE_CONTROL, HeaderMap};

use super::answer::Answer;
use super::request::Request;

/// Headers that differ from request to request and never decide what an answer holds.
const TRACING: [&str; 5] = ["traceparent", "tracestate", "baggage", "x-request-id", "x-correlation-id"];

/// How much is kept, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheSettings {
    /// At most this many answers. Zero keeps none.
    pub entries_max: usize,
    /// At most this many bytes of URLs, headers and bodies together.
    pub bytes_max: usize,
    /// An answer that is older than this is not given any more.
    pub age_max: Duration,
}

impl Default for CacheSettings {
    fn default() -> Self {
        Self { entries_max: 256, bytes_max: 16 * 1024 * 1024, age_max: Duration::from_secs(300) }
    }
}

/// It has no `Debug`: URLs and headers hold secrets.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    url: String,
    scope: Scope,
}

#[derive(Clone, PartialEq, Eq, Hash)]
enum Scope {
    Named(String),
    Headers(Vec<(String, Vec<u8>)>),
}

impl Key {
    fn of(request: &Request) -> Self {
        let scope = match &request.cache_scope {
            Some(name) => Scope::Named(name.clone()),
            None => Scope::Headers(deciding(&request.headers)),
        };
        Self { url: request.url.to_string(), scope }
    }

    fn weight(&self) -> usize {
        let scope = match &self.scope {
            Scope::Named(name) => name.len(),
            Scope::Headers(headers) => headers.iter().map(|(name, value)| name.len() + value.len()).sum(),
        };
        self.url.len() + scope
    }
}

/// The headers that may decide what an answer holds, in an order of their own.
fn deciding(headers: &HeaderMap) -> Vec<(String, Vec<u8>)> {
    let mut deciding: Vec<_> = headers
        .iter()
        .filter(|(name, _)| !TRACING.contains(&name.as_str()))
        .map(|(name, value)| (name.as_str().to_owned(), value.as_bytes().to_vec()))
        .collect();
    deciding.sort();
    deciding
}

struct Entry {
    answer: Answer,
    weight: usize,
    kept_at: Instant,
}

/// The last good answers. Time is passed in.
pub(super) struct Cache {
    settings: CacheSettings,
    entries: HashMap<Key, Entry>,
    bytes: usize,
}

impl Cache {
    pub fn new(settings: CacheSettings) -> Self {
        Self { settings, entries: HashMap::new(), bytes: 0 }
    }

    /// Keeps a good answer to a `GET`, and lets the oldest ones go for it.
    pub fn keep(&mut self, request: &Request, answer: &Answer, now: Instant) {
        if request.method != Method::GET || !answer.status.is_success() || is_not_to_be_stored(answer) {
            return;
        }
        let key = Key::of(request);
        let weight = key.weight() + weight(answer);
        self.remove(&key);
        if weight > self.settings.bytes_max || self.settings.entries_max == 0 {
            return;
        }
        while self.entries.len() >= self.settings.entries_max || self.bytes + weight > self.settings.bytes_max {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.kept_at).map(|(key, _)| key.clone());
            let Some(oldest) = oldest else { break };
            self.remove(&oldest);
        }
        self.bytes += weight;
        self.entries.insert(key, Entry { answer: answer.clone(), weight, kept_at: now });
    }

    /// The last good answer to the same request, and its age.
    pub fn find(&mut self, request: &Request, now: Instant) -> Option<(Answer, Duration)> {
        if request.method != Method::GET {
            return None;
        }
        let key = Key::of(request);
        let entry = self.entries.get(&key)?;
        let age = now.saturating_duration_since(entry.kept_at);
        if age > self.settings.age_max {
            self.remove(&key);
            return None;
        }
        Some((entry.answer.clone(), age))
    }

    fn remove(&mut self, key: &Key) {
        if let Some(entry) = self.entries.remove(key) {
            self.bytes -= entry.weight;
        }
    }
}

fn weight(answer: &Answer) -> usize {
    let headers: usize = answer.headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    answer.body.len() + headers
}

fn is_not_to_be_stored(answer: &Answer) -> bool {
    let values = answer.headers.get_all(CACHE_CONTROL).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|directive| directive.trim().eq_ignore_ascii_case("no-store"))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use reqwest::StatusCode;

    use super::*;

    fn get(url: &str) -> Request {
        Request::get(url).unwrap()
    }

    fn answer(code: u16, body: &str) -> Answer {
        Answer {
            status: StatusCode::from_u16(code).unwrap(),
            headers: HeaderMap::new(),
            body: Bytes::from(body.to_owned()),
            retry_after: None,
            shown: "GET to h:80".to_owned(),
        }
    }

    fn body(cache: &mut Cache, request: &Request, now: Instant) -> Option<String> {
        cache.find(request, now).map(|(answer, _)| String::from_utf8(answer.body.to_vec()).unwrap())
    }

    #[test]
    fn the_last_good_answer_is_found_until_it_is_too_old() {
        let mut cache = Cache::new(CacheSettings::default());
        let start = Instant::now();
        let request = get("http://h/prices?of=tea");
        cache.keep(&request, &answer(200, "1"), start);
        cache.keep(&request, &answer(200, "2"), start);
        cache.keep(&request, &answer(404, "3"), start);
        cache.keep(&request, &answer(302, "4"), start);
        assert_eq!(body(&mut cache, &request, start).as_deref(), Some("2"));
        assert_eq!(body(&mut cache, &get("http://h/prices?of=milk"), start), None);
        let later = start + Duration::from_secs(300);
        assert_eq!(cache.find(&request, later).unwrap().1, Duration::from_secs(300));
        assert_eq!(body(&mut cache, &request, later + Duration::from_millis(1)), None);
        assert_eq!(cache.bytes, 0);
    }

    #[test]
    fn nobody_is_given_the_answer_of_another() {
        let mut cache = Cache::new(CacheSettings::default());
        let now = Instant::now();
        let of = |name: &str, value: &str| get("http://h/me").header(name, value).unwrap();
        cache.keep(&of("authorization", "Bearer a"), &answer(200, "a"), now);
        cache.keep(&of("x-tenant-id", "7"), &answer(200, "7"), now);
        cache.keep(&get("http://h/me").cache_scope("tenant-8"), &answer(200, "8"), now);
        cache.keep(&get("http://user:a@h/me"), &answer(200, "user a"), now);

        assert_eq!(body(&mut cache, &of("authorization", "Bearer a"), now).as_deref(), Some("a"));
        assert_eq!(body(&mut cache, &of("authorization", "Bearer b"), now), None);
        assert_eq!(body(&mut cache, &of("x-tenant-id", "8"), now), None);
        assert_eq!(body(&mut cache, &get("http://h/me"), now), None);
        assert_eq!(body(&mut cache, &get("http://user:b@h/me"), now), None);
        assert_eq!(body(&mut cache, &get("http://h/me").cache_scope("tenant-7"), now), None);
    }

    #[test]
    fn a_scope_takes_the_place_of_the_headers_and_tracing_is_left_out() {
        let mut cache = Cache::new(CacheSettings::default());
        let now = Instant::now();
        let scoped = |token: &str| get("http://h/").cache_scope("t").header("authorization", token).unwrap();
        cache.keep(&scoped("old"), &answer(200, "scoped"), now);
        assert_eq!(body(&mut cache, &scoped("renewed"), now).as_deref(), Some("scoped"));

        let traced = |trace: &str| get("http://h/").header("traceparent", trace).unwrap();
        cache.keep(&traced("00-1"), &answer(200, "traced"), now);
        assert_eq!(body(&mut cache, &traced("00-2"), now).as_deref(), Some("traced"));
    }

    #[test]
    fn only_answers_to_get_are_kept_and_only_with_leave() {
        let mut cache = Cache::new(CacheSettings::default());
        let now = Instant::now();
        cache.keep(&Request::put("http://h/").unwrap(), &answer(200, "put"), now);
        let mut secret = answer(200, "secret");
        secret.headers.insert(CACHE_CONTROL, "private, No-Store".parse().unwrap());
        cache.keep(&get("http://h/"), &secret, now);
        assert_eq!(body(&mut cache, &get("http://h/"), now), None);
        assert_eq!(body(&mut cache, &Request::put("http://h/").unwrap(), now), None);
        assert!(cache.entries.is_empty());
    }

    #[test]
    fn a_bad_answer_leaves_the_good_one_before() {
        let mut cache = Cache::new(CacheSettings::default());
        let now = Instant::now();
        cache.keep(&get("http://h/"), &answer(200, "1"), now);
        cache.keep(&get("http://h/"), &answer(500, "2"), now);
        assert_eq!(body(&mut cache, &get("http://h/"), now).as_deref(), Some("1"));
    }

    #[test]
    fn number_and_size_are_bounded_and_the_oldest_goes_first() {
        let start = Instant::now();
        let settings = CacheSettings { entries_max: 3, bytes_max: 100, ..CacheSettings::default() };
        let mut cache = Cache::new(settings);
        for number in 0..5_u64 {
            let now = start + Duration::from_secs(number);
            cache.keep(&get(&format!("http://h/{number}")), &answer(200, "x"), now);
            assert!(cache.entries.len() <= 3);
        }
        let now = start + Duration::from_secs(5);
        let kept: Vec<bool> = (0..5).map(|n| cache.find(&get(&format!("http://h/{n}")), now).is_some()).collect();
        assert_eq!(kept, [false, false, true, true, true]);

        cache.keep(&get("http://h/large"), &answer(200, &"x".repeat(80)), now);
        assert!(cache.bytes <= 100 && cache.find(&get("http://h/large"), now).is_some());
        cache.keep(&get("http://h/huge"), &answer(200, &"x".repeat(200)), now);
        assert!(cache.find(&get("http://h/huge"), now).is_none());
        assert!(cache.find(&get("http://h/large"), now).is_some(), "what cannot be kept drives nothing out");

        let mut none = Cache::new(CacheSettings { entries_max: 0, ..CacheSettings::default() });
        none.keep(&get("http://h/"), &answer(200, "x"), now);
        assert!(none.find(&get("http://h/"), now).is_none());
    }
}
