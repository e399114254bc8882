//! What every broker's place for set-aside messages has in common: its name, and the reason as headers.

use super::{Aside, AsideKind};
use crate::handler::Place;
use crate::inbox::Body;

/// Longer texts do not help, and headers must fit into one frame.
const TEXT_CHARS_MAX: usize = 4_000;

#[allow(dead_code)] // unused when no broker with such places is on
impl Aside<'_> {
    /// The name of the place, unless it is nowhere.
    pub(crate) fn place_name(&self) -> Option<String> {
        match (self.place, self.kind) {
            (Place::Nowhere, _) => None,
            (Place::Named(name), _) => Some(name.clone()),
            (Place::Usual, AsideKind::Dead) => Some(format!("{}_error", self.consumer)),
            (Place::Usual, AsideKind::Skipped) => Some(format!("{}_skipped", self.consumer)),
        }
    }

    /// The reason, as headers beside those of the message.
    pub(crate) fn reason(&self) -> Vec<(&'static str, String)> {
        let mut reason = Vec::new();
        let mut put = |name, value: &str| reason.push((name, value.chars().take(TEXT_CHARS_MAX).collect()));
        put("postrider-consumer", self.consumer);
        put("postrider-reason", if self.kind == AsideKind::Dead { "dead" } else { "skipped" });
        put("postrider-error-type", &self.failed.error_type);
        put("postrider-error", &self.failed.error);
        if !self.failed.causes.is_empty() {
            put("postrider-causes", &self.failed.causes.join("; "));
        }
        put("postrider-attempts", &self.attempts.to_string());
        if let Some(origin) = self.origin {
            put("postrider-exchange", &origin.exchange);
            put("postrider-routing-key", &origin.topic);
            put("postrider-queue", &origin.queue);
        } else if let Body::Event(event) = self.message {
            put("postrider-routing-key", event.topic());
        }
        reason
    }
}
