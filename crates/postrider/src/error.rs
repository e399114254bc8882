//! One error for the whole library.
//!
//! An [`Error`] says three things: what kind of trouble it is ([`Kind`]), what to do about it on our side
//! ([`Kind::retry`]) and what an operator can do ([`Kind::remedy`]). Every backend classifies the errors of its driver
//! in one place, so nobody else needs to know SQLSTATEs or AMQP reply codes.

use std::fmt;

/// What went wrong, in the words an operator would use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A setting is wrong or missing.
    Config,
    /// The event itself breaks a rule (empty topic, key too long, invalid JSON …).
    Invalid,
    /// The event is larger than the destination accepts.
    TooLarge,
    /// The broker has no queue for the event.
    Unroutable,
    /// The broker took the event and said no (a full queue, for example).
    Refused,
    /// A server cannot be reached, or answers too slowly. It belongs to no event.
    Unavailable,
    /// Wrong user or password, or a missing right.
    Denied,
    /// A named thing (exchange, queue, table, database) does not exist.
    Missing,
    /// A named thing exists with settings that differ from what is needed.
    Mismatch,
    /// The database has no Postrider tables, or older ones.
    NotMigrated,
    /// The database was migrated by a newer Postrider.
    SchemaNewer,
    /// The database accepts no writes.
    ReadOnly,
    /// The disk is full.
    DiskFull,
    /// Another instance holds the lease now; what was to be written was not written.
    LeaseLost,
    /// A stored row or received message cannot be understood.
    Corrupt,
    /// A handler returned an error.
    Handler,
    /// Anything else; the source says more.
    Other,
}

/// Who tries again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// We do, after a while.
    Later,
    /// Nobody, until a person has changed something and asks for it.
    ByHand,
    /// Nobody: this piece of work has ended (another instance has it).
    Never,
}

impl Kind {
    /// What the relay and the consumers do with work that failed like this.
    pub fn retry(self) -> Retry {
        match self {
            Kind::Unroutable
            | Kind::Refused
            | Kind::Unavailable
            | Kind::Denied
            | Kind::Missing
            | Kind::Mismatch
            | Kind::NotMigrated
            | Kind::ReadOnly
            | Kind::DiskFull
            | Kind::Handler
            | Kind::Other => Retry::Later,
            Kind::Config | Kind::Invalid | Kind::TooLarge | Kind::SchemaNewer | Kind::Corrupt => Retry::ByHand,
            Kind::LeaseLost => Retry::Never,
        }
    }

    /// Whether the trouble belongs to one event. If not, it belongs to the place and costs the event no attempt.
    pub fn belongs_to_event(self) -> bool {
        match self {
            Kind::Invalid | Kind::TooLarge | Kind::Unroutable | Kind::Refused | Kind::Corrupt | Kind::Handler => true,
            Kind::Config
            | Kind::Unavailable
            | Kind::Denied
            | Kind::Missing
            | Kind::Mismatch
            | Kind::NotMigrated
            | Kind::SchemaNewer
            | Kind::ReadOnly
            | Kind::DiskFull
            | Kind::LeaseLost
            | Kind::Other => false,
        }
    }

    /// One sentence that tells an operator what to do. An error may carry a better one of its own.
    pub fn remedy(self) -> &'static str {
        match self {
            Kind::Config => "correct the setting and start again",
            Kind::Invalid => "correct the event where it is written",
            Kind::TooLarge => {
                "send a smaller payload, or raise the broker's limit and the destination's payload_bytes_max"
            }
            Kind::Unroutable => "declare a queue whose binding matches the topic; the event is sent again by itself",
            Kind::Refused => "make room in the queue or raise its limit; the event is sent again by itself",
            Kind::Unavailable => "start the server or correct its address; nothing is lost meanwhile",
            Kind::Denied => "correct the user, the password or the rights",
            Kind::Missing => "create what is named, or let Postrider declare it",
            Kind::Mismatch => "change the existing object, or the setting, so that both agree",
            Kind::NotMigrated => "run `postrider migrate`",
            Kind::SchemaNewer => "use a Postrider that is at least as new as the one that migrated the database",
            Kind::ReadOnly => "connect to the primary, or make the database writable",
            Kind::DiskFull => "free disk space; nothing is lost meanwhile",
            Kind::LeaseLost => "nothing: another instance has taken over",
            Kind::Corrupt => "look at the stored event; it was kept as it is",
            Kind::Handler => "look at the handler's error; the event is given to it again",
            Kind::Other => "look at the cause",
        }
    }

    /// The word used in logs, metrics and tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Config => "config",
            Kind::Invalid => "invalid",
            Kind::TooLarge => "too_large",
            Kind::Unroutable => "unroutable",
            Kind::Refused => "refused",
            Kind::Unavailable => "unavailable",
            Kind::Denied => "denied",
            Kind::Missing => "missing",
            Kind::Mismatch => "mismatch",
            Kind::NotMigrated => "not_migrated",
            Kind::SchemaNewer => "schema_newer",
            Kind::ReadOnly => "read_only",
            Kind::DiskFull => "disk_full",
            Kind::LeaseLost => "lease_lost",
            Kind::Corrupt => "corrupt",
            Kind::Handler => "handler",
            Kind::Other => "other",
        }
    }
}

/// The error of every fallible call in this crate. It never carries a payload or a secret.
#[derive(Debug)]
pub struct Error {
    kind: Kind,
    message: String,
    remedy: Option<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// `Result` with our [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error that names the thing in `message`, in a sentence without a full stop.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), remedy: None, source: None }
    }

    /// Replaces the kind's general remedy with a precise one.
    #[must_use]
    pub fn with_remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }

    /// Keeps the error that led to this one.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Puts what was being done in front of the message.
    #[must_use]
    pub fn context(mut self, doing: impl fmt::Display) -> Self {
        self.message = format!("{doing}: {}", self.message);
        self
    }

    /// What kind of trouble it is.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// What happened, without the remedy.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// What an operator can do.
    pub fn remedy(&self) -> &str {
        self.remedy.as_deref().unwrap_or_else(|| self.kind.remedy())
    }

    /// The chain of causes below this error, outermost first.
    pub fn causes(&self) -> Vec<String> {
        let mut causes = Vec::new();
        let mut next = std::error::Error::source(self);
        while let Some(cause) = next {
            causes.push(cause.to_string());
            next = cause.source();
        }
        causes
    }

    /// The same error for each of several items of a batch; the source is kept as text.
    pub fn duplicate(&self) -> Self {
        let mut message = self.message.clone();
        for cause in self.causes() {
            message.push_str(": ");
            message.push_str(&cause);
        }
        Self { kind: self.kind, message, remedy: self.remedy.clone(), source: None }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn std::error::Error + 'static))
    }
}
