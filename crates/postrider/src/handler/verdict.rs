//! What a handler may answer besides "done".

use std::fmt;
use std::time::Duration;

use crate::error::Error;
use crate::inbox::Failed;

/// Why an event was not applied, and what to do with it. Any error converts into a retry, so `?` works in a handler.
///
/// ```
/// use std::time::Duration;
/// use postrider::handler::HandlerError;
///
/// fn read(text: &str) -> Result<u32, HandlerError> {
///     if text.is_empty() {
///         // Trying again would not help: straight to the dead letters.
///         return Err(HandlerError::reject("the amount is missing"));
///     }
///     if text == "later" {
///         // Not a failure, and not counted as one.
///         return Err(HandlerError::snooze(Duration::from_secs(30)));
///     }
///     Ok(text.parse()?)
/// }
/// assert!(read("x").is_err());
/// ```
pub struct HandlerError(pub(crate) Verdict);

#[derive(Debug)]
pub(crate) enum Verdict {
    Retry { failed: Failed, after: Option<Duration> },
    Snooze(Duration),
    Reject(Failed),
    Skip,
    Away(Error),
}

impl HandlerError {
    /// Try again, after the consumer's usual wait. Counts as an attempt.
    pub fn retry(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(Verdict::Retry { failed: failed("handler", error.into().as_ref()), after: None })
    }

    /// Try again after this long. Counts as an attempt.
    pub fn retry_after(after: Duration, error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(Verdict::Retry { failed: failed("handler", error.into().as_ref()), after: Some(after) })
    }

    /// Not yet: try again after this long. Does not count as an attempt. The later events of the key wait.
    pub fn snooze(after: Duration) -> Self {
        Self(Verdict::Snooze(after))
    }

    /// Never: the event goes to the dead letters at once.
    pub fn reject(reason: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(Verdict::Reject(failed("rejected", reason.into().as_ref())))
    }

    /// The place where effects go cannot be used at the moment, which is nobody's fault: not counted. The message waits
    /// unacked, and so do others, until the place is back.
    pub fn away(error: Error) -> Self {
        Self(Verdict::Away(error))
    }

    /// Nobody here handles such events: it is counted, and marked in the inbox as skipped.
    pub fn skip() -> Self {
        Self(Verdict::Skip)
    }
}

impl fmt::Debug for HandlerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Not an error itself, as its conversion from all errors would contradict itself.
impl<E: std::error::Error + Send + Sync + 'static> From<E> for HandlerError {
    fn from(error: E) -> Self {
        Self(Verdict::Retry { failed: failed("handler", &error), after: None })
    }
}

/// An error with its causes.
pub(crate) fn failed(error_type: &str, error: &(dyn std::error::Error + 'static)) -> Failed {
    let mut causes = Vec::new();
    let mut source = error.source();
    while let Some(cause) = source {
        causes.push(cause.to_string());
        source = cause.source();
    }
    Failed::new(error_type, error.to_string(), causes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_error_is_a_retry_with_its_causes() {
        let inner = std::io::Error::other("disk");
        let error: HandlerError = crate::Error::new(crate::Kind::Other, "outer").with_source(inner).into();
        let Verdict::Retry { failed, after: None } = error.0 else { panic!("{error:?}") };
        assert_eq!((failed.error_type.as_str(), failed.error.as_str()), ("handler", "outer"));
        assert_eq!(failed.causes, ["disk"]);
    }
}
