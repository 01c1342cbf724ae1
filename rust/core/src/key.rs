//! The name that all three primitives share.

use std::fmt;

use crate::error::{Error, Result};

/// What a key must look like, for messages.
pub const GPU_KEY_FORM: &str = "1 to 64 of `A-Z a-z 0-9 . _ -`";
/// Keys become file names; 64 holds a GPU UUID (40) and a MIG UUID (40) with room to spare.
const LENGTH_MAX: usize = 64;

/// A checked GPU key: what names the segment and the lease of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GpuKey(String);

impl GpuKey {
    /// Check a key.
    ///
    /// # Errors
    /// `InvalidArgument` when it is empty, longer than 64 characters or has a character that is not allowed.
    ///
    /// ```
    /// assert!(ocgpu_core::GpuKey::new("GPU-8c6f").is_ok());
    /// assert!(ocgpu_core::GpuKey::new("../etc").is_err());
    /// ```
    pub fn new(key: &str) -> Result<Self> {
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if key.is_empty() || key.len() > LENGTH_MAX || !key.bytes().all(legal) {
            return Err(Error::InvalidArgument {
                name: "gpu",
                value: format!("{key:?}"),
                legal: GPU_KEY_FORM,
            });
        }
        Ok(Self(key.to_owned()))
    }

    /// The key as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for GpuKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_could_leave_the_directory_or_hide_are_refused() {
        for key in ["", "a/b", "a b", "a\0", "é", &"k".repeat(65)] {
            assert!(GpuKey::new(key).is_err(), "{key:?}");
        }
    }

    #[test]
    fn uuids_and_plain_names_are_accepted() {
        for key in ["GPU-8c6f5f2e-0000-1111-2222-333344445555", "metal-0", "a.b_c-D9", &"k".repeat(64)] {
            assert!(GpuKey::new(key).is_ok(), "{key:?}");
        }
    }
}
