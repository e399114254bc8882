//! The specification, as code. Every store, source and broker runs the same suites.
//!
//! A suite is a list of async functions that panic when the contract is broken. A backend's test file makes a *bed*
//! and calls [`crate::suite!`] with it; the planted bugs of [`crate::planted`] run the same functions and must be
//! caught by them.

#![allow(clippy::expect_used, reason = "a suite says that a contract is broken by a panic")]

pub mod alert;
pub mod bed;
pub mod broker;
pub mod consumer;
pub mod dead;
pub mod integrity;
pub mod lease;
pub mod log;
pub mod newest;
pub mod pulse;
pub mod recovery;
pub mod relay;
pub mod routes;
pub mod source;
pub mod view;

/// Makes one `#[tokio::test]` per function of a suite.
///
/// ```text
/// suite!(source, postgres_bed().await, [late_commit_is_not_skipped, rolled_back_events_are_never_read]);
/// ```
#[macro_export]
macro_rules! suite {
    ($suite:ident, $bed:expr, [$($name:ident),* $(,)?]) => {
        mod $suite {
            #[allow(unused_imports)]
            use super::*;
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    let bed = $bed;
                    $crate::conformance::$suite::$name(&bed).await;
                }
            )*
        }
    };
}
