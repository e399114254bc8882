//! Waking a relay that sleeps: a shared advisory lock says that someone sleeps, a notification wakes it.
//!
//! Everything here only saves time. Whatever fails, polling finds the events.

use std::time::Duration;

use sqlx::PgPool;
use sqlx::pool::PoolConnection;
use sqlx::postgres::PgListener;
use sqlx::{Connection as _, Postgres};
use tokio::sync::{Mutex, Notify};
use tokio::task::JoinHandle;

/// The same number as in the trigger `postrider.wake`.
const ASLEEP_LOCK: i64 = 7_062_611_490_211_870_000;
/// What the trigger on the outbox notifies.
const OUTBOX: &str = "postrider_outbox";
/// What an append to the embedded broker's log notifies.
pub(super) const QUEUE: &str = "postrider_queue";
/// After a lost connection.
const LISTEN_AGAIN: Duration = Duration::from_secs(1);

pub(super) struct Wake {
    pool: PgPool,
    notify: std::sync::Arc<Channels>,
    state: Mutex<State>,
}

#[derive(Default)]
struct Channels {
    outbox: Notify,
    queue: Notify,
}

#[derive(Default)]
struct State {
    listener: Option<JoinHandle<()>>,
    /// Holds the advisory lock; it belongs to the session, so it must always be the same connection.
    holder: Option<PoolConnection<Postgres>>,
    sleepers: u32,
}

impl Wake {
    pub fn new(pool: PgPool) -> Self {
        Self { pool, notify: Default::default(), state: Mutex::default() }
    }

    /// Says that one more (or one fewer) lane of this process sleeps.
    pub async fn set_asleep(&self, is_asleep: bool) {
        let mut state = self.state.lock().await;
        self.listen(&mut state);
        let before = state.sleepers;
        state.sleepers = if is_asleep { before + 1 } else { before.saturating_sub(1) };
        let result = match (before, state.sleepers) {
            (0, 1..) => self.lock(&mut state, "SELECT pg_try_advisory_lock_shared($1)").await,
            (1.., 0) => self.lock(&mut state, "SELECT pg_advisory_unlock_shared($1)").await,
            _ => Ok(()),
        };
        if let Err(error) = result {
            tracing::debug!(error = %super::error::classify(&error), "no wake-up, polling goes on");
            state.holder = None;
        }
    }

    async fn lock(&self, state: &mut State, query: &'static str) -> sqlx::Result<()> {
        if state.holder.is_none() {
            state.holder = Some(self.pool.acquire().await?);
        }
        if let Some(holder) = &mut state.holder {
            sqlx::query(query).bind(ASLEEP_LOCK).execute(&mut **holder).await?;
        }
        Ok(())
    }

    fn listen(&self, state: &mut State) {
        if state.listener.is_none() {
            state.listener = Some(tokio::spawn(listen(self.pool.clone(), self.notify.clone())));
        }
    }

    pub async fn woken(&self) {
        self.notify.outbox.notified().await;
    }

    pub async fn appended(&self) {
        {
            let mut state = self.state.lock().await;
            self.listen(&mut state);
        }
        self.notify.queue.notified().await;
    }

    pub async fn close(&self) {
        let mut state = self.state.lock().await;
        if let Some(listener) = state.listener.take() {
            listener.abort();
        }
        if let Some(holder) = state.holder.take() {
            // The session ends, and its lock with it.
            let _ = holder.detach().close().await;
        }
    }
}

async fn listen(pool: PgPool, notify: std::sync::Arc<Channels>) {
    while !pool.is_closed() {
        match listen_once(&pool, &notify).await {
            Ok(()) => return,
            Err(error) => tracing::debug!(error = %super::error::classify(&error), "listening again"),
        }
        tokio::time::sleep(LISTEN_AGAIN).await;
    }
}

async fn listen_once(pool: &PgPool, notify: &Channels) -> sqlx::Result<()> {
    let mut listener = PgListener::connect_with(pool).await?;
    listener.listen_all([OUTBOX, QUEUE]).await?;
    loop {
        let notification = listener.recv().await?;
        // Wakes all that wait now, and leaves one permit for one that is just about to.
        let channel = if notification.channel() == QUEUE { &notify.queue } else { &notify.outbox };
        channel.notify_waiters();
        channel.notify_one();
    }
}
