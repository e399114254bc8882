//! The real binary, on SQLite files in temporary folders.

// Helpers of tests are tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod claims;
mod commands;
mod daemon;
mod dead;
mod delivery;
mod desk;
mod events;
mod harness;
mod mistakes;
mod unpublished;
