//! Where the registry and the lease live, and who may use them.
//!
//! One directory, never chosen by fallback: a second resolution order silently splits a machine into two.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// tmpfs on every Linux; the seed's binaries meet us there.
const DIRECTORY: &str = "/dev/shm";

/// Who may join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    /// Every user of the machine (0666): any of them can then disturb the pacing, never crash a peer.
    Machine,
    /// The creating user alone (0600).
    User,
}

/// The directory of all segments and lease files, and the mode of files created there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    directory: PathBuf,
    share: Share,
}

impl Place {
    /// A place by name, for tests and tools.
    #[must_use]
    pub fn new(directory: impl Into<PathBuf>, share: Share) -> Self {
        Self { directory: directory.into(), share }
    }

    /// `OCGPU_DIR` (else the platform's directory) and `OCGPU_SHARE` (`machine` or `user`).
    ///
    /// # Errors
    /// `InvalidArgument` when `OCGPU_SHARE` is something else, or `OCGPU_DIR` is not an absolute path.
    pub fn from_env() -> Result<Self> {
        Self::parse(env::var_os("OCGPU_DIR"), env::var_os("OCGPU_SHARE"))
    }

    /// The same from given texts; none and an empty one mean the default.
    ///
    /// # Errors
    /// As `from_env`.
    pub fn parse(directory: Option<OsString>, share: Option<OsString>) -> Result<Self> {
        let directory = match directory.filter(|value| !value.is_empty()) {
            None => PathBuf::from(DIRECTORY),
            Some(value) => PathBuf::from(value),
        };
        if !directory.is_absolute() {
            let value = directory.display().to_string();
            return Err(Error::InvalidArgument { name: "OCGPU_DIR", value, legal: "an absolute path" });
        }
        let share = match share.filter(|value| !value.is_empty()) {
            None => Share::Machine,
            Some(value) if value == "machine" => Share::Machine,
            Some(value) if value == "user" => Share::User,
            Some(value) => {
                let value = value.to_string_lossy().into_owned();
                return Err(Error::InvalidArgument {
                    name: "OCGPU_SHARE",
                    value,
                    legal: "`machine` or `user`",
                });
            }
        };
        Ok(Self { directory, share })
    }

    /// The directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Permission bits of files created here.
    #[must_use]
    pub fn mode(&self) -> u32 {
        match self.share {
            Share::Machine => 0o666,
            Share::User => 0o600,
        }
    }
}
