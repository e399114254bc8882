//! The client: joins wire, breaker, budget, backoff and cache.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::answer::Answer;
use super::cache::Cache;
use super::destination::{Destination, Destinations};
use super::error::{self, Failure};
use super::fallback::Supplied;
use super::request::Request;
use super::settings::HttpSettings;
use super::verdict::{self, Again};
use super::wire::{Network, Wire};
use crate::error::{Error, Kind, Result};
use crate::metrics::http as metrics;
use crate::relay::BreakerState;

/// Calls destinations over HTTP. Clones share connections, breakers, budgets and cache; make one for a process.
///
/// ```no_run
/// # async fn example() -> postrider::Result<()> {
/// use postrider::http::{HttpClient, HttpSettings, Request, Supplied, Verdict};
///
/// let client = HttpClient::new(HttpSettings::default())?;
///
/// // Tried up to four times; the key makes a POST repeatable.
/// let order = Request::post("https://shop.example/orders")?
///     .header("Idempotency-Key", "o-1")?
///     .json(&serde_json::json!({"order": "o-1"}))?;
/// client.send(&order).await?.accept()?;
///
/// // The last good prices, or none, while the shop is away.
/// let prices = Request::get("https://shop.example/prices")?;
/// match client.send_or(&prices, |_| Some("[]".into())).await? {
///     Supplied::Fresh(answer) => println!("now: {} bytes", answer.accept()?.body().len()),
///     Supplied::Cached { answer, age } => println!("{} s ago: {} bytes", age.as_secs(), answer.body().len()),
///     Supplied::Default(_) => println!("no prices today"),
/// }
///
/// // One try; the caller decides what comes next.
/// match client.send_once(&order).await?.verdict() {
///     Verdict::Done => println!("delivered"),
///     Verdict::Rejected => println!("refused for good"),
///     Verdict::Retry { after } => println!("later, after {after:?}"),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct HttpClient {
    inner: Arc<Inner>,
}

struct Inner {
    settings: HttpSettings,
    wire: Box<dyn Wire>,
    destinations: Destinations,
    cache: Mutex<Cache>,
    rng: Mutex<fastrand::Rng>,
}

/// The monotonic clock that tests can stop.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

impl HttpClient {
    /// A client that trusts the system's certificates and uses no proxy, whatever the environment says.
    pub fn new(settings: HttpSettings) -> Result<Self> {
        Self::with_builder(settings, reqwest::Client::builder().no_proxy())
    }

    /// A client with certificates, an identity or a proxy of your own. The builder's choices about redirects, retries
    /// and the time to connect are replaced by ours.
    pub fn with_builder(settings: HttpSettings, builder: reqwest::ClientBuilder) -> Result<Self> {
        settings.validate()?;
        let network = Network::new(&settings, builder)?;
        Ok(Self::over(settings, Box::new(network), fastrand::Rng::new()))
    }

    pub(super) fn over(settings: HttpSettings, wire: Box<dyn Wire>, rng: fastrand::Rng) -> Self {
        let cache = Mutex::new(Cache::new(settings.cache));
        let inner = Inner { settings, wire, destinations: Destinations::new(), cache, rng: Mutex::new(rng) };
        Self { inner: Arc::new(inner) }
    }

    /// Sends a request, and again if that may help: after network errors, time-outs, 5xx and 429, and only if the
    /// request [is repeatable](Request::is_repeatable).
    ///
    /// Whatever else the destination says (2xx, 3xx, 4xx) is an answer; [`Answer::accept`] turns all but 2xx into an
    /// error. A 5xx or 429 that is left after the last try is an error of kind [`Kind::Unavailable`].
    ///
    /// The future may be dropped at any time. The destination may have done what was asked nevertheless, and its
    /// breaker hears nothing of a try that is dropped: rather choose a shorter [`HttpSettings::timeout`].
    pub async fn send(&self, request: &Request) -> Result<Answer> {
        let destination = self.destination(request);
        let (result, tries) = self.try_often(&destination, request).await;
        metrics::called(&destination.label, outcome(&result));
        let error = match result {
            Ok(answer) if verdict::again(answer.status, None).is_none() => return Ok(answer),
            Ok(answer) => error::of_status(answer.status, &answer.shown),
            Err(failure) => failure.into_error(request),
        };
        Err(if tries > 1 { error.context(format_args!("tried {tries} times")) } else { error })
    }

    /// Sends a request once. Every status is an answer; see [`Answer::verdict`]. For callers that keep retries
    /// themselves. Breaker, time-out and size limit are those of [`Self::send`].
    pub async fn send_once(&self, request: &Request) -> Result<Answer> {
        self.try_raw(request).await.map_err(|failure| failure.into_error(request))
    }

    /// The same, for those who must tell why it failed.
    pub(super) async fn try_raw(&self, request: &Request) -> Result<Answer, Failure> {
        let destination = self.destination(request);
        let result = self.try_once(&destination, request).await;
        metrics::called(&destination.label, outcome(&result));
        result
    }

    /// [`Self::send`], with something to fall back on. When the destination does not serve ([`Kind::Unavailable`]) and
    /// the request is a `GET`, it is the last good answer to the same request, if that is not too old. Otherwise
    /// `default` is asked, which sees the error and may have nothing to offer; then the error is returned.
    ///
    /// Only good answers to requests that were sent with this method are kept. A 4xx is an answer, so nothing takes its
    /// place.
    pub async fn send_or(&self, request: &Request, default: impl FnOnce(&Error) -> Option<Bytes>) -> Result<Supplied> {
        let error = match self.send(request).await {
            Ok(answer) => {
                self.cache(|cache| cache.keep(request, &answer, now()));
                return Ok(Supplied::Fresh(answer));
            }
            Err(error) => error,
        };
        let supplied = self.fall_back(request, &error, default).ok_or(error)?;
        metrics::fell_back(&self.destination(request).label, supplied.origin());
        Ok(supplied)
    }

    /// The state of a destination's breaker (`host:port`), if the destination was called before.
    pub fn breaker(&self, destination: &str) -> Option<BreakerState> {
        self.inner.destinations.breaker(destination)
    }

    /// Why calls to a destination are held up, if so: see [`Breaker::trouble`](crate::relay::Breaker::trouble).
    pub fn trouble(&self, destination: &str) -> Option<String> {
        self.inner.destinations.trouble(destination, now())
    }

    fn fall_back(
        &self,
        request: &Request,
        error: &Error,
        default: impl FnOnce(&Error) -> Option<Bytes>,
    ) -> Option<Supplied> {
        if error.kind() == Kind::Unavailable
            && let Some((answer, age)) = self.cache(|cache| cache.find(request, now()))
        {
            return Some(Supplied::Cached { answer, age });
        }
        default(error).map(Supplied::Default)
    }

    fn destination(&self, request: &Request) -> Arc<Destination> {
        self.inner.destinations.get(request.destination(), &self.inner.settings, now())
    }

    fn cache<T>(&self, work: impl FnOnce(&mut Cache) -> T) -> T {
        // The cache's methods do not panic half-way, so a poisoned lock still guards a whole value.
        work(&mut self.inner.cache.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The last result, and how many tries led to it.
    async fn try_often(&self, destination: &Destination, request: &Request) -> (Result<Answer, Failure>, u32) {
        let mut tries = 1;
        let mut last = self.try_once(destination, request).await;
        if !matches!(last, Err(Failure::Open { .. })) {
            destination.called(now());
        }
        while let Some(wait) = self.next_wait(destination, request, &last, tries) {
            tokio::time::sleep(wait).await;
            let next = self.try_once(destination, request).await;
            // Another call opened the breaker meanwhile. Why this one failed says more.
            if matches!(next, Err(Failure::Open { .. })) {
                break;
            }
            metrics::retried(&destination.label);
            tries += 1;
            last = next;
        }
        (last, tries)
    }

    /// How long to wait before the next try, or `None` if there is none.
    fn next_wait(
        &self,
        destination: &Destination,
        request: &Request,
        last: &Result<Answer, Failure>,
        tries: u32,
    ) -> Option<Duration> {
        let again = match last {
            Ok(answer) => verdict::again(answer.status, answer.retry_after)?,
            Err(failure) => failure.is_destination_failing().then_some(Again::Backoff)?,
        };
        // The budget is asked last, because asking spends.
        let is_allowed = tries <= self.inner.settings.retries_max
            && request.is_repeatable()
            && !destination.is_open()
            && destination.take_retry(now());
        is_allowed.then(|| self.wait(again, tries))
    }

    fn wait(&self, again: Again, tries: u32) -> Duration {
        let backoff = self.inner.settings.backoff;
        let mut rng = self.inner.rng.lock().unwrap_or_else(PoisonError::into_inner);
        match again {
            Again::Backoff => backoff.delay_with(tries, &mut rng),
            // Everybody is told the same second; the jitter keeps them from coming back together.
            Again::After(wait) => wait.saturating_add(backoff.jitter.mul_f64(rng.f64())),
        }
    }

    /// One try: asks the breaker, bounds the time and reports the end to the breaker.
    async fn try_once(&self, destination: &Destination, request: &Request) -> Result<Answer, Failure> {
        let began = now();
        destination.permit(began)?;
        let limit = self.inner.settings.timeout;
        let result = tokio::time::timeout(limit, self.inner.wire.exchange(request))
            .await
            .unwrap_or(Err(Failure::Timeout(limit)));
        let ended = now();
        metrics::took(&destination.label, ended.saturating_duration_since(began));
        match &result {
            Ok(answer) if verdict::is_destination_failing(answer.status) => {
                destination.failed(began, ended, &error::of_status(answer.status, &answer.shown));
            }
            Err(failure) if failure.is_destination_failing() => {
                destination.failed(began, ended, &failure.clone().into_error(request));
            }
            // Nothing was sent, so nothing is known. A probe that ends like this is repeated when its time is over.
            Err(Failure::Unsendable(_)) => {}
            Ok(_) | Err(_) => destination.succeeded(),
        }
        result
    }
}

/// The word in the metric label `outcome`.
fn outcome(result: &Result<Answer, Failure>) -> &'static str {
    match result {
        Ok(answer) => match answer.status.as_u16() {
            ..=399 => "answered",
            400..=499 => "rejected",
            500.. => "failed",
        },
        Err(failure) => failure.as_str(),
    }
}

impl fmt::Debug for HttpClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpClient").field("settings", &self.inner.settings).finish_non_exhaustive()
    }
}
