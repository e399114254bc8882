//! A wire without a network: a destination that does what the test says.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use reqwest::StatusCode;
use reqwest::header::HeaderMap;
use tokio::time::Instant;

use super::super::error::Failure;
use super::super::wire::Wire;
use super::super::{Answer, HttpClient, HttpSettings, Request};
use crate::error::Result;

/// What the destination does with one try.
#[derive(Debug, Clone)]
pub enum Act {
    Say(u16),
    SayAfter(u16, Duration),
    Break,
    Hang,
    Flood,
}

/// A destination that follows a script, and its last act for ever.
#[derive(Clone)]
pub struct Script {
    acts: Arc<Mutex<VecDeque<Act>>>,
    tried_at: Arc<Mutex<Vec<Instant>>>,
}

impl Script {
    pub fn new(acts: &[Act]) -> Self {
        Self { acts: Arc::new(Mutex::new(acts.iter().cloned().collect())), tried_at: Arc::default() }
    }

    pub fn goes_on(&self, acts: &[Act]) {
        *self.acts.lock().unwrap() = acts.iter().cloned().collect();
    }

    pub fn tries(&self) -> usize {
        self.tried_at.lock().unwrap().len()
    }

    /// Whole seconds between the tries; the jitter is below one second.
    pub fn waits(&self) -> Vec<u64> {
        self.tried_at.lock().unwrap().windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect()
    }
}

#[async_trait]
impl Wire for Script {
    async fn exchange(&self, request: &Request) -> Result<Answer, Failure> {
        self.tried_at.lock().unwrap().push(Instant::now());
        let act = {
            let mut acts = self.acts.lock().unwrap();
            if acts.len() > 1 { acts.pop_front().unwrap() } else { acts[0].clone() }
        };
        let (code, retry_after) = match act {
            Act::Say(code) => (code, None),
            Act::SayAfter(code, wait) => (code, Some(wait)),
            Act::Break => return Err(Failure::Network("connection reset".to_owned())),
            Act::Flood => return Err(Failure::TooLarge(1)),
            Act::Hang => std::future::pending().await,
        };
        Ok(Answer {
            status: StatusCode::from_u16(code).unwrap(),
            headers: HeaderMap::new(),
            body: Bytes::from(format!("try {}", self.tries())),
            retry_after,
            shown: request.shown(),
        })
    }
}

pub fn client_with(settings: HttpSettings, script: &Script) -> HttpClient {
    HttpClient::over(settings, Box::new(script.clone()), fastrand::Rng::with_seed(7))
}

pub fn client(script: &Script) -> HttpClient {
    client_with(HttpSettings::default(), script)
}
