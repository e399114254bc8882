//! What the `postrider` binary does: relay, embedded broker, HTTP and command line for services in any language.
//!
//! `cli` has one file per command, `config` reads `postrider.toml`, `wire` turns the config into the library's trait
//! objects; `api` is the HTTP side of `postrider run`, `access` who may use it, `console` what a browser shows of it, `duty`
//! what it does in the background, `watch` finds what is wrong and `sink` tells it, `integrity` and `schedule` are the daily
//! check.
//!
//! A library, so that cargo can compile it beside the code of `postrider` instead of after it; nobody else is meant to use it.

use std::process::ExitCode;

use clap::Parser;

mod access;
mod api;
mod cli;
mod config;
mod console;
mod duty;
mod integrity;
mod logging;
mod schedule;
mod sink;
mod status;
mod task;
mod watch;
mod trace;
mod wire;

/// Runs the command line.
pub fn main() -> ExitCode {
    // Two TLS users with two providers in one process would panic at the first handshake; the first one wins here.
    if rustls::crypto::aws_lc_rs::default_provider().install_default().is_err() {
        eprintln!("warning: another TLS provider was installed first");
    }
    let cli = cli::Cli::parse();
    match cli::run(cli) {
        Ok(code) => code,
        Err(failure) => failure.report(),
    }
}
