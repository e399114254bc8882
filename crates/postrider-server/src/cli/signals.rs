//! SIGTERM and SIGINT: the first asks to stop, the second ends the process at once (which is equally safe).

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::failure::{Result, io};

/// The shells' exit code for a process that Ctrl-C ended.
const INTERRUPTED: i32 = 130;

/// A token that the first signal cancels.
pub fn stop_on_signal() -> Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate()).map_err(|error| io("SIGTERM cannot be handled", error))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(|error| io("SIGINT cannot be handled", error))?;
    let stop = CancellationToken::new();
    let token = stop.clone();
    tokio::spawn(async move {
        loop {
            let name = tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            };
            if token.is_cancelled() {
                tracing::warn!(signal = name, "ending at once");
                std::process::exit(INTERRUPTED);
            }
            tracing::info!(signal = name, "stopping; a second signal ends at once");
            token.cancel();
        }
    });
    Ok(stop)
}
