//! What Postrider's tests, crash runs and benchmarks stand on.

pub mod testbed;
