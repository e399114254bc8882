//! The real binary, on SQLite files in temporary folders.

// Helpers of tests are tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod alerts;
mod access;
mod api;
mod claims;
mod commands;
mod console;
mod daemon;
mod dead;
mod delivery;
mod desk;
mod docs;
mod events;
mod harness;
mod logs;
mod mistakes;
mod ops;
mod schema;
mod stream;
mod trace;
mod unpublished;
