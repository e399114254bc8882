//! `calls`: retries, breaker, budget and fallback over a scripted wire, on a clock that stands still. `figures`: what
//! metrics say of them. `network`: the real wire against a server that misbehaves.

mod calls;
mod figures;
mod network;
mod script;
