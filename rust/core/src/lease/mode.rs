//! How a lease is held.

use crate::sys::LockMode;

/// How a lease is held: several may share, one excludes all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseMode {
    /// Together with other shared holders.
    Shared,
    /// Alone.
    Exclusive,
}

impl LeaseMode {
    /// The word that users write: `shared` or `exclusive`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Shared => "shared",
            Self::Exclusive => "exclusive",
        }
    }

    /// The mode of that word; `None` for any other.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Shared, Self::Exclusive].into_iter().find(|mode| mode.as_str() == name)
    }
}

impl From<LeaseMode> for LockMode {
    fn from(mode: LeaseMode) -> Self {
        match mode {
            LeaseMode::Shared => Self::Shared,
            LeaseMode::Exclusive => Self::Exclusive,
        }
    }
}

impl From<LockMode> for LeaseMode {
    fn from(mode: LockMode) -> Self {
        match mode {
            LockMode::Shared => Self::Shared,
            LockMode::Exclusive => Self::Exclusive,
        }
    }
}
