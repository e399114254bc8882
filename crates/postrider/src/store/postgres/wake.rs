//! Waking a relay that sleeps: a shared advisory lock says that someone sleeps, a notification wakes it.
//!
//! Everything here only saves time. Whatever fails, polling finds the events.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use sqlx::PgPool;
use sqlx::pool::PoolConnection;
use sqlx::postgres::PgListener;
use sqlx::{Connection as _, Postgres, Row as _};
use tokio::sync::{Mutex, Notify};
use tokio::task::JoinHandle;

/// The same number as in the trigger `postrider.wake`.
const ASLEEP_LOCK: i64 = 7_062_611_490_211_870_000;
/// What the trigger on the outbox notifies.
const OUTBOX: &str = "postrider_outbox";
/// What an append to the embedded broker's log notifies.
pub(super) const QUEUE: &str = "postrider_queue";
/// A connection that has silently gone must not keep anyone.
const LOCK_WAIT: Duration = Duration::from_secs(3);
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
    is_listening: AtomicBool,
    /// How often lanes were asked to look.
    rings: AtomicU64,
}

#[derive(Default)]
struct State {
    listener: Option<JoinHandle<()>>,
    /// Holds the advisory lock; it belongs to the session, so it must always be the same connection.
    holder: Option<PoolConnection<Postgres>>,
    is_locked: bool,
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
        state.sleepers = if is_asleep { state.sleepers + 1 } else { state.sleepers.saturating_sub(1) };
        let locked = tokio::time::timeout(LOCK_WAIT, self.lock(&mut state)).await;
        if let Err(error) = locked.unwrap_or(Err(sqlx::Error::PoolTimedOut)) {
            tracing::debug!(error = %super::error::classify(&error), "no wake-up, polling goes on");
            // The lock goes with its session; the next call takes it anew.
            drop(state.holder.take().map(PoolConnection::detach));
            state.is_locked = false;
        }
    }

    /// Makes the advisory lock say what is so.
    async fn lock(&self, state: &mut State) -> sqlx::Result<()> {
        let should_lock = state.sleepers > 0;
        if should_lock == state.is_locked {
            return Ok(());
        }
        if state.holder.is_none() {
            state.holder = Some(self.pool.acquire().await?);
        }
        let Some(holder) = &mut state.holder else { return Ok(()) };
        let query = match should_lock {
            true => "SELECT pg_try_advisory_lock_shared($1)",
            false => "SELECT NOT pg_advisory_unlock_shared($1)",
        };
        state.is_locked = sqlx::query(query).bind(ASLEEP_LOCK).fetch_one(&mut **holder).await?.try_get(0)?;
        Ok(())
    }

    fn listen(&self, state: &mut State) {
        if state.listener.is_none() {
            state.listener = Some(tokio::spawn(listen(self.pool.clone(), self.notify.clone()).boxed()));
        }
    }

    /// How often lanes were asked to look.
    pub fn rings(&self) -> u64 {
        self.notify.rings.load(Ordering::SeqCst)
    }

    /// Whether producers see that someone sleeps, and their notifications are heard, and none came since there were that many
    /// `rings`: one that came while a lane was reading may have gone to another.
    pub fn is_sure(&self, rings: u64) -> bool {
        let is_locked = || self.state.try_lock().is_ok_and(|state| state.is_locked);
        self.notify.is_listening.load(Ordering::SeqCst) && is_locked() && self.rings() == rings
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
        notify.is_listening.store(false, Ordering::SeqCst);
        tokio::time::sleep(LISTEN_AGAIN).await;
    }
}

async fn listen_once(pool: &PgPool, notify: &Channels) -> sqlx::Result<()> {
    let mut listener = PgListener::connect_with(pool).await?;
    // By itself it would connect again and say nothing of what it missed.
    listener.eager_reconnect(false);
    listener.listen_all([OUTBOX, QUEUE]).await?;
    notify.is_listening.store(true, Ordering::SeqCst);
    // Nobody heard what was said before.
    notify.ring(OUTBOX);
    notify.ring(QUEUE);
    loop {
        let Some(notification) = listener.try_recv().await? else {
            return Err(sqlx::Error::Io(std::io::ErrorKind::ConnectionAborted.into()));
        };
        notify.ring(notification.channel());
    }
}

impl Channels {
    /// Wakes all that wait now, and leaves one permit for one that is just about to.
    fn ring(&self, name: &str) {
        let channel = if name == QUEUE { &self.queue } else { &self.outbox };
        self.rings.fetch_add(u64::from(name != QUEUE), Ordering::SeqCst);
        channel.notify_waiters();
        channel.notify_one();
    }
}
