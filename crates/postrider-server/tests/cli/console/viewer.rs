//! Those who may look but not touch.

use serde_json::json;

use super::{Bed, Browser, PAGES};

#[test]
fn a_viewer_has_no_buttons_and_is_refused_anyway() {
    let bed = Bed::failing();
    let browser = bed.browser("viewer");
    for page in PAGES.into_iter().chain(["/dead/1"]) {
        browser.visit(page);
        browser.finds("main h1");
        browser.until("the page", "return document.querySelector('main .loading') === null", json!([]));
        let buttons = browser
            .js("return [...document.querySelectorAll('main button')].map((button) => button.innerText)", json!([]));
        let is_harmless = |button: &&serde_json::Value| *button != "Filter";
        let buttons: Vec<_> = buttons.as_array().unwrap().iter().filter(is_harmless).cloned().collect();
        assert!(buttons.is_empty(), "{page} has {buttons:?}");
        assert!(!browser.has("main tbody input"), "{page}");
    }
    assert!(browser.text().contains("Viewer guest"), "{}", browser.text());

    // What the page does not offer is refused when it is sent all the same.
    let forged = "const { csrf } = await (await fetch('/api/v1/session')).json();
        const send = async (path, method, body) => (await fetch('/api/v1' + path, { method,
            headers: { 'content-type': 'application/json', 'x-postrider-csrf': csrf }, body: body && JSON.stringify(body) })).status;
        return [await send('/dead-letters/replays', 'POST', { all: true }),
            await send('/dead-letters/discards', 'POST', { all: true, reason: 'x' }),
            await send('/silences', 'POST', { rule: '', subject: '', for_secs: 60, reason: 'x' }),
            await send('/integrity', 'POST', {}),
            await send('/dead-letters/1/payload', 'GET')];";
    assert_eq!(browser.js_async(forged, json!([])), json!([403, 403, 403, 403, 403]));
    bed.wait_for_dead(super::EVENTS);

    // An operator's request without the token against forgery is refused too.
    let operator = bed.browser("operator");
    let forged = "return (await fetch('/api/v1/dead-letters/replays', { method: 'POST',
        headers: { 'content-type': 'application/json' }, body: '{\"all\":true}' })).status;";
    assert_eq!(operator.js_async(forged, json!([])), 403);
}

#[test]
fn logging_in_is_refused_kindly_and_ended() {
    let bed = Bed::new();
    let browser = Browser::start();
    browser.open(&bed.address());
    browser.write("input[name=token]", "prt_wrong");
    browser.click("button", "Sign in");
    browser.finds(".trouble");
    assert!(browser.js("return document.querySelector('.trouble .remedy')?.innerText.length > 0", json!([])) == true);
    drop(browser);

    let browser = bed.browser("operator");
    let cookie = browser.js("return document.cookie", json!([]));
    assert_eq!(cookie, "", "scripts cannot read the session");
    browser.click("button", "Sign out");
    browser.sees("Sign in to Postrider");
    browser.open(&bed.address());
    browser.sees("Sign in to Postrider");
}
