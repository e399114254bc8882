//! What the store says of consumers, instances and alerts, as gauges.

use std::collections::BTreeMap;

use metrics::{Label, gauge};

use crate::alert::Alert;
use crate::pulse::Instance;
use crate::upkeep::ConsumerView;

/// Shows how things stand, again and again. What is gone since the last time is shown as none, and then left alone.
#[derive(Default)]
pub struct Standing {
    shown: Gauges,
}

type Gauges = BTreeMap<(&'static str, Vec<Label>), f64>;

impl Standing {
    /// Nothing shown yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Shows all consumers and instances that the store knows, and the alerts that hold.
    pub fn show(&mut self, consumers: &[ConsumerView], instances: &[Instance], alerts: &[Alert]) {
        let mut now = Gauges::new();
        for consumer in consumers {
            let label = || vec![Label::new("consumer", consumer.name.clone())];
            now.insert(("postrider_dead_letters", label()), consumer.dead as f64);
            now.insert(("postrider_held_oldest_seconds", label()), consumer.oldest_secs.unwrap_or(0) as f64);
            for (state, count) in [("retrying", consumer.retrying), ("waiting", consumer.waiting)] {
                let labels = vec![Label::new("consumer", consumer.name.clone()), Label::new("state", state)];
                now.insert(("postrider_held", labels), count as f64);
            }
        }
        for instance in instances {
            let label = || vec![Label::new("group", instance.group.clone())];
            let lost = f64::from(u8::from(instance.is_lost()));
            *now.entry(("postrider_instances", label())).or_default() += 1.0 - lost;
            *now.entry(("postrider_instances_lost", label())).or_default() += lost;
        }
        for alert in alerts {
            let labels = vec![Label::new("rule", alert.rule.clone()), Label::new("urgency", alert.urgency.as_str())];
            *now.entry(("postrider_alerts", labels)).or_default() += 1.0;
        }
        let gone = self.shown.keys().filter(|key| !now.contains_key(*key)).map(|key| (key, &0.0));
        for ((name, labels), value) in gone.chain(&now) {
            gauge!(*name, labels.clone()).set(*value);
        }
        self.shown = now;
    }
}
