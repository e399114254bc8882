//! Screenshots for the documentation: `make screenshots`. Not a test of anything, so not part of a test run.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;
use sqlx::sqlite::SqlitePoolOptions;

use super::{Bed, Browser};

/// A day of a shop's traffic, as its instances would have told it, and what went wrong in it.
async fn tell_of_a_day(bed: &Bed) {
    let file = format!("sqlite:{}", bed.place.path("postrider.db").display());
    let pool = SqlitePoolOptions::new().connect(&file).await.unwrap();
    // The first events of a process that starts are slow; what is told of them would be all that the chart shows.
    let told = "SELECT count(DISTINCT group_name) FROM bucket WHERE metric = 'latency'";
    while sqlx::query_scalar::<_, i64>(told).fetch_one(&pool).await.unwrap() < 2 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    sqlx::query("DELETE FROM bucket WHERE metric IN ('latency', 'latency_ms')").execute(&pool).await.unwrap();
    let traffic = "WITH RECURSIVE minute(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM minute WHERE n < 1439),
        now(ms) AS (SELECT CAST(unixepoch('subsec') * 1000 AS INTEGER)),
        -- Waves of an hour and of a day, with some noise on them.
        wave AS (SELECT n, (now.ms - now.ms % 60000) - n * 60000 AS at,
            1700 + abs(n % 1440 - 720) * 2 + abs(n % 38 - 19) * 22 + abs(random() % 400) AS events FROM minute, now),
        counted AS (
            SELECT at, 'relay/default' AS g, 'published' AS m, '' AS l, events AS c FROM wave
            UNION ALL SELECT at, 'consumer/' || name, 'applied', '', events / share FROM wave,
                (SELECT 'search-index' AS name, 1 AS share UNION SELECT 'mail', 3 UNION SELECT 'billing', 2)
            UNION ALL SELECT at, 'consumer/search-index', 'latency', bucket, events * part / 1000 FROM wave,
                (SELECT '4' AS bucket, 500 AS part UNION SELECT '6', 300 UNION SELECT '8', 150 UNION SELECT '10', 42 UNION SELECT '13', 8)
            UNION ALL SELECT at, 'consumer/search-index', 'latency_ms', '', events * 8 FROM wave
            UNION ALL SELECT at, 'consumer/billing', 'failed', 'LedgerClosed', 3 + abs(random() % 9) FROM wave WHERE n BETWEEN 4 AND 19
            UNION ALL SELECT at, 'consumer/mail', 'failed', 'HttpStatus503', abs(random() % 3) FROM wave WHERE n % 7 = 0)
        INSERT INTO bucket (width, at, group_name, metric, label, count)
        SELECT 60, at, g, m, l, c FROM counted WHERE c > 0
        UNION ALL SELECT 900, at - at % 900000, g, m, l, sum(c) FROM counted GROUP BY 2, 3, 4, 5 HAVING sum(c) > 0
        UNION ALL SELECT 3600, at - at % 3600000, g, m, l, sum(c) FROM counted GROUP BY 2, 3, 4, 5 HAVING sum(c) > 0
        ON CONFLICT DO UPDATE SET count = bucket.count + excluded.count";
    sqlx::query(traffic).execute(&pool).await.unwrap();
    let past = "INSERT INTO alert (rule, subject, urgency, summary, remedy, fired_at, resolved_at, is_told)
        SELECT rule, subject, 'warning', summary, 'look at the page Errors', ms - began * 60000, ms - ended * 60000, 1 FROM (
            SELECT 'latency' AS rule, 'consumer/search-index' AS subject, 'p99 is 41 s, the limit is 30 s' AS summary, 610 AS began, 598 AS ended
            UNION ALL SELECT 'error_rate', 'consumer/mail', '2.4 % of 5,120 attempts failed, the limit is 1 %', 1500, 1483),
            (SELECT CAST(unixepoch('subsec') * 1000 AS INTEGER) AS ms)";
    sqlx::query(past).execute(&pool).await.unwrap();
    pool.close().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "writes docs/images/console; run by make screenshots"]
async fn pictures_of_every_page() {
    let bed = Bed::failing_beside(&["search-index", "mail"]);
    tell_of_a_day(&bed).await;
    tokio::task::block_in_place(|| take(&bed));
}

fn take(bed: &Bed) {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/images/console"));
    std::fs::create_dir_all(&folder).unwrap();
    let browser = Browser::start();
    browser.resize(1280, 800);
    browser.open(&bed.address());
    browser.sees("Sign in to Postrider");
    let shoot = |name: &str, width: u32| {
        // As high as the page, within reason.
        browser.resize(width, 600);
        let height = browser.js("return document.getElementById('root').scrollHeight", json!([])).as_u64().unwrap();
        browser.resize(width, u32::try_from(height).unwrap().clamp(600, 1500));
        // Two frames later everything is drawn.
        browser.js_async(
            "await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))",
            json!([]),
        );
        browser.picture(&folder.join(format!("{name}.png")));
    };
    shoot("login", 1280);
    drop(browser);

    let browser = bed.browser("operator");
    let go = |page: &str, shown: &str| {
        browser.visit(page);
        browser.sees(shown);
        browser.until("the page", "return document.querySelector('main .loading') === null", json!([]));
    };
    let shoot = |name: &str, width: u32| {
        browser.resize(width, 600);
        let height = browser.js("return document.querySelector('main').scrollHeight", json!([])).as_u64().unwrap();
        browser.resize(width, u32::try_from(height).unwrap().clamp(700, 1500));
        browser.js_async(
            "await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))",
            json!([]),
        );
        browser.picture(&folder.join(format!("{name}.png")));
    };
    // An integrity report and a silence, so that their pages have something to show.
    go("/integrity", "Check now");
    browser.click("button", "Check now");
    browser.sees("Findings");
    browser.until("its end", "return document.querySelector('main .loading') === null", json!([]));
    shoot("report", 1280);
    go("/alerts", "consumer/billing");
    shoot("alerts", 1280);
    for (page, shown, name) in [
        ("/", "Targets", "overview"),
        ("/?window=day", "Targets", "overview-day"),
        ("/outbox", "Parked keys", "outbox"),
        ("/consumers", "Progress in the last hour", "consumers"),
        ("/dead", "billing", "dead"),
        ("/dead/1", "Attempts", "letter"),
        ("/errors?window=hour", "By type", "errors"),
        ("/integrity", "Reports", "integrity"),
        ("/audit", "Signed in", "audit"),
        ("/health", "What the doctor says", "health"),
    ] {
        go(page, shown);
        shoot(name, 1280);
    }
    // A replay under way, slow enough for its picture.
    bed.mend();
    go("/dead?consumer=billing", "billing");
    browser.click("button", "Replay all that match");
    browser.js("document.querySelector('dialog input[name=rate]').value = '2'", json!([]));
    shoot("replay-question", 1280);
    browser.click("dialog button", "Replay");
    browser.until("some progress", "return (document.querySelector('.replay progress')?.value ?? 0) >= 3", json!([]));
    shoot("replay", 1280);
    // Dark, in Vietnamese, on a phone.
    let as_chosen = "localStorage.setItem('postrider.language', 'vi'); localStorage.setItem('postrider.theme', 'dark'); location.reload()";
    browser.visit("/");
    browser.js(as_chosen, json!([]));
    browser.sees("Mục tiêu");
    shoot("overview-dark-vi", 1280);
    browser.resize(390, 844);
    browser.picture(&folder.join("phone-overview.png"));
    go("/dead", "Phát lại");
    browser.picture(&folder.join("phone-dead.png"));
}
