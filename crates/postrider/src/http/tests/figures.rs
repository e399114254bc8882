use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

use super::super::Request;
use super::script::Act::{Break, Say};
use super::script::{Script, client};

const URL: &str = "https://user:s3cret@figures.example/s3cret?token=s3cret";

/// Keeps all figures. A gauge is kept as the bits of an `f64`; of a histogram only the existence counts.
#[derive(Default)]
struct Figures {
    values: Mutex<BTreeMap<String, Arc<AtomicU64>>>,
}

impl Figures {
    fn value(&self, key: &Key) -> Arc<AtomicU64> {
        let labels: Vec<String> = key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        let name = format!("{} {}", key.name(), labels.join(" "));
        self.values.lock().unwrap().entry(name).or_default().clone()
    }

    fn all(&self) -> BTreeMap<String, u64> {
        let values = self.values.lock().unwrap();
        values.iter().map(|(name, value)| (name.clone(), value.load(Ordering::SeqCst))).collect()
    }
}

impl Recorder for Figures {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.value(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.value(key))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        self.value(key).fetch_add(1, Ordering::SeqCst);
        Histogram::noop()
    }
}

#[test]
fn calls_retries_fallbacks_and_breakers_are_counted() {
    let figures = Figures::default();
    let label = crate::metrics::labels::DESTINATIONS.of("figures.example:443");
    let gauge = format!("postrider_http_breakers_open destination={label}");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    metrics::with_local_recorder(&figures, || {
        runtime.block_on(async {
            let request = Request::get(URL).unwrap().header("authorization", "s3cret").unwrap();
            let script = Script::new(&[Say(200), Say(404), Say(503), Say(200), Break]);
            let client = client(&script);
            client.send_or(&request, |_| None).await.unwrap();
            client.send(&request).await.unwrap();
            client.send(&request).await.unwrap();
            assert_eq!(f64::from_bits(figures.all()[&gauge]), 0.0);
            // Three good tries and one bad so far; with two more bad ones it is half of them.
            client.send_or(&request, |_| None).await.unwrap();
            client.send_or(&request, |_| None).await.unwrap();
            assert_eq!(f64::from_bits(figures.all()[&gauge]), 1.0);
        });
    });
    assert_eq!(f64::from_bits(figures.all()[&gauge]), 0.0, "a client that is gone has no open breaker");

    let mut all = figures.all();
    all.remove(&gauge);
    let expected = [
        ("calls_total", "outcome=answered", 2),
        ("calls_total", "outcome=breaker_open", 1),
        ("calls_total", "outcome=network", 1),
        ("calls_total", "outcome=rejected", 1),
        ("fallbacks_total", "origin=cached", 2),
        ("retries_total", "", 2),
        ("seconds", "", 6),
    ];
    let expected: BTreeMap<String, u64> = expected
        .into_iter()
        .map(|(name, more, count)| {
            (format!("postrider_http_{name} destination={label} {more}").trim_end().to_owned(), count)
        })
        .collect();
    assert_eq!(all, expected);
}
