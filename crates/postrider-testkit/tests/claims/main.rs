//! Large payloads wait in storage, and handlers do not notice.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

mod batches;
mod bed;
mod folder;
mod s3;
