//! What Postrider's tests, crash runs and benchmarks stand on.

pub mod bench;
pub mod checker;
pub mod conformance;
pub mod crash;
pub mod faults;
pub mod planted;
pub mod testbed;
