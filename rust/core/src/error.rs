//! What can go wrong in the core, as data; the words for a person are made in `Display`.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::lease::LeaseParty;

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Every way in which the core can fail.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// An argument outside its legal form.
    InvalidArgument {
        /// The argument's name.
        name: &'static str,
        /// The value as given.
        value: String,
        /// What would have been legal.
        legal: &'static str,
    },
    /// The segment cannot be used: no directory, no permission, no space, foreign bytes.
    RegistryUnavailable {
        /// The segment's path.
        path: PathBuf,
        /// What failed and what to do about it.
        reason: String,
    },
    /// Another process holds the lease and the caller did not want to wait.
    LeaseBusy {
        /// The lease file.
        path: PathBuf,
        /// One who holds it, where that is known.
        holder: Option<LeaseParty>,
    },
    /// The lease was not granted in time.
    LeaseTimeout {
        /// The lease file.
        path: PathBuf,
        /// How long the caller wanted to wait.
        timeout: Duration,
        /// One who holds it, where that is known.
        holder: Option<LeaseParty>,
    },
    /// A wait for the lease was ended from outside: by a signal, or by a release from another thread.
    LeaseInterrupted {
        /// The lease file.
        path: PathBuf,
    },
    /// The lease was used against its rules.
    LeaseMisuse {
        /// The lease file.
        path: PathBuf,
        /// What was wrong and what to do instead.
        reason: &'static str,
    },
    /// The lease file cannot be used: no directory, no permission, not a regular file.
    LeaseUnavailable {
        /// The lease file.
        path: PathBuf,
        /// What failed and what to do about it.
        reason: String,
    },
    /// An operating system call failed where nothing more telling applies.
    Io {
        /// The call or the aim, in the present tense.
        doing: &'static str,
        /// The file it was about.
        path: PathBuf,
        /// The system's own error.
        source: std::io::Error,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidArgument { name, value, legal } => {
                write!(f, "invalid `{name}`: {value}; use {legal}")
            }
            Self::RegistryUnavailable { path, reason } => {
                write!(f, "registry unavailable: `{}`: {reason}", path.display())
            }
            Self::LeaseBusy { path, holder } => {
                write!(f, "lease busy: `{}` is held by {}", path.display(), Holder(holder.as_ref()))
            }
            Self::LeaseTimeout { path, timeout, holder } => {
                let (path, holder, seconds) =
                    (path.display(), Holder(holder.as_ref()), timeout.as_secs_f64());
                write!(f, "lease not granted within {seconds} s: `{path}` is held by {holder}")
            }
            Self::LeaseInterrupted { path } => {
                write!(f, "wait for the lease ended: `{}` was released while waiting", path.display())
            }
            Self::LeaseMisuse { path, reason } => write!(f, "lease misused: `{}`: {reason}", path.display()),
            Self::LeaseUnavailable { path, reason } => {
                write!(f, "lease unavailable: `{}`: {reason}", path.display())
            }
            Self::Io { doing, path, source } => write!(f, "cannot {doing} `{}`: {source}", path.display()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// A holder in a message, known or not.
struct Holder<'a>(Option<&'a LeaseParty>);

impl fmt::Display for Holder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(holder) => holder.fmt(f),
            None => f.write_str("an unknown process"),
        }
    }
}
