//! Adopted tables: the outboxes of the seeds as their services made them, and tables that are odd.

#![allow(clippy::expect_used, clippy::panic, reason = "a test that cannot go on must panic")]

mod bed;
mod mistakes;
mod mysql;
mod order;
mod schemas;
