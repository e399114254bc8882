//! What came from outside, on every page, in both languages, on a phone.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use postrider::broker::embedded::Embedded;
use postrider::handler::HandlerError;
use postrider::store::sqlite::SqliteStore;
use postrider::{Consumer, ConsumerSpec, Event, Handler};
use serde_json::{Value, json};
use sqlx::{Sqlite, Transaction};
use tokio_util::sync::CancellationToken;

use super::{Bed, PAGES};

const HOSTILE: &str = "<img src=x onerror=\"window.pwned=1\"><script>window.pwned=1</script>'\"; DROP TABLE";

/// A consumer whose errors are markup.
struct Hostile;

#[async_trait]
impl Handler<Transaction<'static, Sqlite>> for Hostile {
    async fn handle(&self, _: &mut Transaction<'static, Sqlite>, _: &Event) -> Result<(), HandlerError> {
        Err(HandlerError::reject(format!("{HOSTILE} {}", "x".repeat(10_000))))
    }
}

/// Dead letters of which every text is hostile or long.
async fn fill(bed: &Bed) {
    let store = SqliteStore::open(&bed.place.path("postrider.db")).await.unwrap();
    let broker = Arc::new(Embedded::new(Arc::new(store.clone())));
    let stop = CancellationToken::new();
    let spec = ConsumerSpec { retries: 0, ..ConsumerSpec::new("hostile", &["evil.#"]) };
    let consumer = Consumer::new(spec, broker, Arc::new(store.clone()), Arc::new(store.clone()), Hostile).unwrap();
    let consumer = tokio::spawn(consumer.run(stop.clone()));
    tokio::task::block_in_place(|| {
        for key in [HOSTILE.to_owned(), "k".repeat(255)] {
            let event = json!({ "topic": "evil.things", "type": HOSTILE, "key": key, "tenant": HOSTILE,
                "payload": { "text": HOSTILE } });
            let answer = bed.ask("POST", "/api/v1/events", &event.to_string());
            assert!(answer.status < 300, "{}", answer.body);
        }
        bed.wait_for_dead(2);
    });
    stop.cancel();
    consumer.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_came_from_outside_is_text_on_every_page() {
    let bed = Bed::new();
    fill(&bed).await;
    tokio::task::block_in_place(|| look(&bed));
}

fn look(bed: &Bed) {
    let browser = bed.browser("operator");
    browser.requests();
    let long = "k".repeat(10_000);
    let filters = [format!("/dead?key={long}"), "/dead?consumer=%3Cscript%3E%22'&error=%00&since=yesterday".to_owned()];
    let pages: Vec<String> = PAGES
        .into_iter()
        .map(str::to_owned)
        .chain(filters)
        .chain(["/dead/1".to_owned(), "/dead/2".to_owned(), "/dead/999".to_owned(), "/nowhere/<b>".to_owned()])
        .collect();
    for (language, width) in [("en", 1280), ("vi", 1280), ("vi", 390)] {
        browser.resize(width, 844);
        let reload = "localStorage.setItem('postrider.language', arguments[0]); window.isOld = true; location.reload()";
        browser.js(reload, json!([language]));
        let is_new = "return window.isOld === undefined && document.querySelector('main h1') !== null";
        browser.until("the page is loaded again", is_new, json!([]));
        for page in &pages {
            browser.visit(page);
            let is_there = "return document.querySelector('main h1') !== null && document.querySelector('main > .loading') === null";
            browser.until(&format!("{} in {language} at {width}", &page[..page.len().min(60)]), is_there, json!([]));
            let shown = browser.js(
                "return { width: document.documentElement.scrollWidth, language: document.documentElement.lang,
                    made: document.querySelectorAll('main img, main script, main b b, [onerror], main iframe').length,
                    untranslated: (document.body.innerText.match(/\\b(nav|dead|card|letter|unit|live|act|list)\\.[a-z_]+\\b/) ?? [])[0] ?? null }",
                json!([]),
            );
            let wanted = json!({ "width": width, "language": language, "made": 0, "untranslated": null });
            assert_eq!(shown, wanted, "{} in {language} at {width}", &page[..page.len().min(60)]);
        }
    }
    browser.visit("/dead/1");
    browser.click("[data-key=reveal]", "");
    browser.click("dialog button[type=submit]", "");
    browser.finds("pre[data-key=payload]");
    let shown = browser.js("return document.querySelector('pre[data-key=payload]').innerText", json!([]));
    assert!(shown.as_str().unwrap().contains("<script>window.pwned=1</script>"), "{shown}");
    assert_eq!(browser.js("return window.pwned ?? null", json!([])), Value::Null);

    // Nothing was asked of anybody else, and nothing was against the rules of the page.
    let asked = browser.requests();
    let elsewhere: Vec<&String> =
        asked.iter().filter(|url| !url.starts_with(&bed.address()) && !url.starts_with("data:")).collect();
    assert!(asked.len() > 50 && elsewhere.is_empty(), "{elsewhere:?}");
    // An answer that is not 2xx is a complaint of the browser's; those are asked for here.
    let is_expected = |line: &String| line.contains("dead-letters") && (line.contains("400") || line.contains("404"));
    let complaints: Vec<String> = browser.complaints().into_iter().filter(|line| !is_expected(line)).collect();
    assert!(complaints.is_empty(), "{complaints:#?}");
}

#[test]
fn both_languages_say_everything() {
    let bed = Bed::new();
    let browser = super::Browser::start();
    browser.open(&bed.address());
    let words = |language: &str| -> BTreeMap<String, Value> {
        let script = "return (await import(`/console/i18n/${arguments[0]}.js`)).default";
        serde_json::from_value(browser.js_async(script, json!([language]))).unwrap()
    };
    let (english, vietnamese) = (words("en"), words("vi"));
    assert!(english.len() > 300, "{}", english.len());
    assert_eq!(english.keys().collect::<Vec<_>>(), vietnamese.keys().collect::<Vec<_>>());
    for (key, text) in &english {
        assert_eq!(names(text), names(&vietnamese[key]), "{key}: the names in braces");
        assert!(vietnamese[key].as_str().is_some_and(|text| !text.is_empty()), "{key}");
    }
}

/// The names in braces, each once; a text that differs by number has them where it is general.
fn names(text: &Value) -> Vec<String> {
    let text = text.as_str().or_else(|| text["other"].as_str()).unwrap();
    let mut names: Vec<String> =
        text.split('{').skip(1).map(|part| part.split('}').next().unwrap().to_owned()).collect();
    names.sort();
    names.dedup();
    names
}
