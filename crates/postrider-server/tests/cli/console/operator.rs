//! What somebody on call does, from the alert to its end.

use serde_json::json;

use super::{Bed, Browser, EVENTS};
use crate::harness::eventually;

#[test]
fn an_operator_sees_the_failure_replays_and_the_alert_resolves() {
    let bed = Bed::failing();
    let browser = bed.browser("operator");
    // The overview says what is wrong, and the consumer says how much.
    browser.until("the alert", "return document.querySelector('.verdict a')?.innerText === 'Dead letters'", json!([]));
    assert!(browser.text().contains("consumer/billing"));
    browser.click("#menu a", "Consumers");
    browser.sees("Progress in the last hour");
    browser.click("td a.bad", &EVENTS.to_string());
    browser.until(
        "the list",
        "return document.querySelectorAll('main tbody tr').length === arguments[0]",
        json!([EVENTS]),
    );
    assert!(browser.js("return location.hash", json!([])) == "#/dead?consumer=billing");

    // One of them, with its attempts; its payload only after a question, and that is written down.
    browser.click("main tbody a", "#1");
    browser.sees("Dead letter 1");
    browser.until("the attempts", "return document.querySelectorAll('main tbody tr').length === 2", json!([]));
    assert!(browser.text().contains("500") && !browser.text().contains("secret"), "{}", browser.text());
    browser.click("button", "Show the payload");
    browser.sees("written into the audit");
    browser.click("dialog button", "Show the payload");
    browser.sees("\"note\": \"secret\"");

    // One is given up, with a reason.
    browser.click("button", "Discard");
    browser.write("dialog input[name=reason]", "a test");
    browser.click("dialog button", "Discard");
    browser.sees("One discarded.");

    // Still broken: the replay stops by itself after its first stage.
    browser.visit("/dead?consumer=billing");
    browser.click("button", "Replay all that match");
    browser.sees(&format!("Replay {} dead letters?", EVENTS - 1));
    browser.click("dialog button", "Replay");
    browser.finds(".replay[data-state=stopped]");
    browser.sees("Half of the last stage failed again");
    browser.click(".replay button", "Hide");

    // Mended: it reaches its end, and there is nothing left.
    bed.mend();
    browser.click("button", "Replay all that match");
    browser.finds("dialog[open]");
    browser.js("document.querySelector('dialog input[name=rate]').value = '5'", json!([]));
    browser.click("dialog button", "Replay");
    let left = EVENTS - 1;
    let watched = watch_the_bar(&browser);
    assert!(watched.is_sorted() && watched.last() == Some(&(left as u64)), "{watched:?}");
    assert!(watched.iter().any(|value| (1..left as u64).contains(value)), "it moves on the way: {watched:?}");
    browser.sees(&format!("{left} of {left} decided"));
    let is_full = "const bar = document.querySelector('.replay progress'); return bar.value === bar.max && bar.max === arguments[0]";
    assert_eq!(browser.js(is_full, json!([left])), true);
    browser.sees("No dead letter matches.");
    browser.visit("/alerts");
    browser.sees("Nothing is wrong.");
    browser.until(
        "the alert among the past",
        "return [...document.querySelectorAll('main tbody')].at(-1)?.innerText.includes('Dead letters')",
        json!([]),
    );
    browser.visit("/audit");
    for action in ["Signed in", "Looked at a payload", "Discarded", "Replayed"] {
        browser.sees(action);
    }
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

/// Where the bar stood, until the replay is done.
fn watch_the_bar(browser: &Browser) -> Vec<u64> {
    let look = "const replay = document.querySelector('.replay');
        return [replay?.dataset.state ?? '', replay?.querySelector('progress').value ?? 0]";
    let mut watched = Vec::new();
    eventually("the end of the replay", || {
        let seen = browser.js(look, json!([]));
        watched.push(seen[1].as_f64().unwrap() as u64);
        watched.dedup();
        (seen[0] == "done").then_some(())
    });
    watched
}

#[test]
fn a_replay_is_cancelled_and_alerts_are_silenced() {
    let bed = Bed::failing();
    let browser = bed.browser("operator");
    browser.visit("/alerts");
    browser.click(".alerts button", "Silence");
    browser.write("dialog input[name=reason]", "known");
    browser.click("dialog button", "Silence");
    browser.sees("Silences");
    browser.sees("Silenced");
    browser.click("td button", "End");
    browser.sees("The silence has ended.");

    browser.visit("/integrity");
    browser.click("button", "Check now");
    browser.sees("Integrity report");
    browser.sees("Findings");

    // Two chosen by hand; one per second leaves time to change one's mind.
    bed.mend();
    browser.visit("/dead");
    browser.click("tbody input[type=checkbox]", "");
    browser.click("tbody tr:nth-child(2) input[type=checkbox]", "");
    browser.sees("Replay 2");
    browser.click("thead input[type=checkbox]", "");
    browser.click("button", &format!("Replay {EVENTS}"));
    browser.js("document.querySelector('dialog input[name=rate]').value = '1'", json!([]));
    browser.click("dialog button", "Replay");
    browser.click("button", "Cancel the replay");
    browser.finds(".replay[data-state=stopped]");
    browser.sees("Cancelled");
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn a_broker_that_is_away_is_shown_by_its_breaker() {
    let place = crate::harness::Place::new();
    // Nobody listens there any more once the listener is gone.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    place.write("postrider.toml", &format!("[broker]\nurl = \"amqp://guest:guest@127.0.0.1:{port}/%2f\"\n"));
    let daemon = place.daemon(&[]).ready();
    for number in 0..3 {
        let event =
            json!({ "topic": "orders.paid", "type": "order.paid", "key": format!("o-{number}"), "payload": {} });
        assert!(daemon.post(&event.to_string()).status < 300);
    }
    // Without tokens this machine is trusted: there is no log-in.
    let browser = Browser::start();
    browser.open(&format!("http://{}/", daemon.address()));
    browser.sees("Targets");
    browser.until("the breaker", "return /Open for .*/.test(document.querySelector('main').innerText)", json!([]));
    browser.until("the alert", "return document.querySelector('.verdict a')?.innerText === 'Breaker open'", json!([]));
    browser.visit("/outbox");
    browser.until("the events that wait", "return document.querySelector('.tiles b')?.innerText === '3'", json!([]));
    assert!(browser.text().contains("Open for"), "{}", browser.text());
    assert!(!browser.has("button.quiet"), "nobody can log out who did not log in");
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn a_lost_connection_is_shown_and_mended() {
    let mut bed = Bed::new();
    let browser = bed.browser("operator");
    browser.sees("Live");
    let address = bed.daemon.address().to_owned();
    bed.daemon.signal("KILL");
    bed.daemon.ended();
    browser.sees("Connection lost");
    browser.visit("/audit");
    browser.sees("The server cannot be reached");
    bed.again(&address);
    // Another process does not know the session: the key is drawn at its start.
    browser.sees("Sign in to Postrider");
}
