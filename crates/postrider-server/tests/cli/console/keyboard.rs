//! Without a mouse.

use serde_json::json;

use super::{Bed, ENTER, ESCAPE, TAB};

/// Presses Tab until the focus is on an element that `script` recognises.
fn tab_to(browser: &super::Browser, what: &str, script: &str) {
    /// No page has more to tab through.
    const STEPS_MAX: usize = 120;
    for _ in 0..STEPS_MAX {
        browser.keys(&TAB.to_string());
        if browser.js(&format!("const at = document.activeElement; return {script}"), json!([])) == true {
            let is_seen = "const at = document.activeElement; const box = at.getBoundingClientRect();
                return at.matches(':focus-visible') && getComputedStyle(at).outlineStyle !== 'none' && box.width > 0";
            assert_eq!(browser.js(is_seen, json!([])), true, "the focus on {what} is not seen");
            return;
        }
    }
    panic!("{what} was not reached with the keyboard");
}

#[test]
fn a_dead_letter_is_opened_and_closed_by_keyboard() {
    let bed = Bed::failing();
    let browser = bed.browser("operator");
    let enter = ENTER.to_string();
    browser.open(&format!("{}#/dead", bed.address()));
    browser.finds("main tbody tr");
    // The first stop lets one pass over the menu.
    browser.js("document.activeElement.blur()", json!([]));
    tab_to(&browser, "the skip link", "at.className === 'skip'");
    browser.keys(&enter);
    assert_eq!(browser.js("return document.activeElement.id", json!([])), "main");
    tab_to(&browser, "a dead letter", "at.innerText === '#1'");
    browser.keys(&enter);
    browser.sees("Dead letter 1");
    browser.finds("[data-key=reveal]");
    tab_to(&browser, "the payload's button", "at.dataset.key === 'reveal'");
    browser.keys(&enter);
    browser.finds("dialog[open]");
    for _ in 0..6 {
        browser.keys(&TAB.to_string());
        let is_inside =
            "return document.activeElement === document.body || document.activeElement.closest('dialog') !== null";
        assert_eq!(browser.js(is_inside, json!([])), true, "the focus stays in the dialog");
    }
    browser.keys(&ESCAPE.to_string());
    browser.until("the end of the dialog", "return document.querySelector('dialog') === null", json!([]));
    assert_eq!(browser.js("return document.activeElement.dataset.key", json!([])), "reveal", "back where one was");
    // While figures come in, the focus stays.
    browser.js("document.querySelector('[data-key=replay]').focus()", json!([]));
    let is_redrawn = "window.marked ??= (document.querySelector('main time').firstChild.data = 'marked');
        return document.querySelector('main time').innerText !== 'marked'";
    browser.until("the next figures", is_redrawn, json!([]));
    assert_eq!(browser.js("return document.activeElement.dataset.key", json!([])), "replay");
    tab_to(&browser, "the way back", "at.dataset.key === 'back'");
    browser.keys(&enter);
    browser.finds("main tbody tr");
}
