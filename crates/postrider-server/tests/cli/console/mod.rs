//! The console in a browser, served by the real binary.

mod bed;
mod browser;
mod keyboard;
mod operator;
mod outside;
mod pictures;
mod viewer;

use bed::{Bed, EVENTS};
use browser::{Browser, ENTER, ESCAPE, TAB};

/// Every page.
const PAGES: [&str; 9] =
    ["/", "/outbox", "/consumers", "/dead", "/errors?window=day", "/alerts", "/integrity", "/audit", "/health"];
