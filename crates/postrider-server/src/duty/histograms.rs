//! Folds the samples of histograms into their buckets. The recorder keeps every sample until somebody asks for the
//! metrics; where nobody does, they would pile up.

use std::time::Duration;

use metrics_exporter_prometheus::PrometheusHandle;

use super::Duty;

/// The recorder's upkeep.
pub struct HistogramsDuty {
    metrics: PrometheusHandle,
}

impl HistogramsDuty {
    /// Of this recorder.
    pub fn new(metrics: PrometheusHandle) -> Self {
        Self { metrics }
    }
}

impl Duty for HistogramsDuty {
    const EVERY: Duration = Duration::from_secs(5);

    async fn run_once(&mut self) {
        self.metrics.run_upkeep();
    }
}
