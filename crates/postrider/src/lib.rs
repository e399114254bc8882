//! Postrider carries events from one service's database to every other service: never lost, never overtaken within
//! their key, applied once.
//!
//! The modules follow the way of an event:
//!
//! 1. [`event`]: an immutable envelope around a payload.
//! 2. [`outbox`]: one insert in the caller's own transaction.
//! 3. [`source`]: the relay learns of committed rows.
//! 4. [`relay`]: keeps the order of each key, asks the breaker, publishes, settles under a fenced lease.
//! 5. [`broker`]: carries the event to every consumer.
//! 6. [`inbox`]: admits each event once, in the transaction of its effect.
//! 7. [`handler`]: applies it.
//!
//! What is given up on the way lies at the desk of [`dead`]. A handler that copies entities can ask [`newest`] whether a
//! change is newer than what it has. Payloads too large for a broker take
//! another way, see [`claim`].
//!
//! Beside the way stand [`store`] (PostgreSQL, MySQL or MariaDB, SQLite), [`lease`] (who does what, fenced) and [`upkeep`] (partitions,
//! retention, backlog). [`migrate`] and [`doctor`] are for the people who run it. With the feature `http` there is
//! `http`, a client for services that have no queue: retries, breaker, fallback. With the feature `redis` there is
//! `idempotency`, for effects that no SQL transaction holds.
//!
//! ```no_run
//! # #[cfg(feature = "postgres")]
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use postrider::{Event, Outbox};
//!
//! let pool = sqlx::PgPool::connect("postgres://localhost/shop").await?;
//! let outbox = Outbox::new();
//!
//! let mut tx = pool.begin().await?;
//! sqlx::query("UPDATE orders SET state = 'paid' WHERE id = 'o-1'").execute(&mut *tx).await?;
//! let event = Event::builder("orders.paid", "order.paid").key("o-1").json(&serde_json::json!({"order": "o-1"}))?.build()?;
//! outbox.append(&mut tx, &event).await?;
//! tx.commit().await?;
//! # Ok(())
//! # }
//! ```

pub mod error;
pub mod event;
pub mod outbox;
pub mod trigger;
pub mod source;
pub mod adopt;
pub mod recovery;
pub mod relay;
pub mod broker;
pub mod claim;
pub mod inbox;
pub mod handler;
pub mod newest;
pub mod dead;
pub mod lease;
pub mod pulse;
pub mod alert;
pub mod audit;
pub mod integrity;
pub mod upkeep;
pub mod migrate;
pub mod doctor;
pub mod metrics;
pub mod trace;
pub mod store;
#[cfg(feature = "http")]
pub mod http;
#[cfg(feature = "redis")]
pub mod idempotency;
#[cfg(feature = "redis")]
mod redis_server;
mod task;

pub use broker::topic::Route;
pub use error::{Error, Kind, Result, Retry};
pub use event::{Event, EventBuilder, Payload};
pub use handler::{Consumer, ConsumerSpec, Handler};
pub use outbox::Outbox;
pub use relay::{Relay, RelaySettings};
