//! What can go wrong in the core, as data; the words for a person are made in `Display`.

use std::fmt;
use std::path::PathBuf;

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
