//! The two names of a segment.
//!
//! The seed's own binaries are Cosmopolitan programs, whose `shm_open` hashes the name and opens a regular file
//! (`libc/calls/shm_path_np.c`); a glibc program opens the plain name. Both names are hard links to one inode.

use std::fmt::Write;
use std::io;
use std::path::{Path, PathBuf};

use blake2::digest::consts::U32;
use blake2::{Blake2b, Digest};

use crate::key::GpuKey;
use crate::place::Place;
use crate::sys::Identity;

/// Where the segment of one key lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SegmentPath {
    /// The name that Cosmopolitan programs open; ours too.
    hashed: PathBuf,
    /// The name that glibc's `shm_open` opens.
    plain: PathBuf,
}

impl SegmentPath {
    pub(crate) fn new(place: &Place, key: &GpuKey) -> Self {
        let name = shared_name(key);
        let mut file = String::with_capacity(68);
        for byte in Blake2b::<U32>::digest(name.as_bytes()) {
            // Writing to a String cannot fail.
            let _ = write!(file, "{byte:02x}");
        }
        file.push_str(".sem");
        Self { hashed: place.directory().join(file), plain: place.directory().join(&name[1..]) }
    }

    /// The name to open.
    pub(crate) fn main(&self) -> &Path {
        &self.hashed
    }

    /// The other name.
    pub(crate) fn plain(&self) -> &Path {
        &self.plain
    }

    /// The file whose flock shows that the owner of `slot` lives, where the kernel has no OFD locks.
    pub(crate) fn slot_file(&self, slot: usize) -> PathBuf {
        self.beside(&format!(".slot{slot}"))
    }

    /// The file whose flock is held by whoever creates the segment, where the kernel has no OFD locks.
    pub(crate) fn init_file(&self) -> PathBuf {
        self.beside(".init")
    }

    fn beside(&self, ending: &str) -> PathBuf {
        let mut name = self.plain.clone().into_os_string();
        name.push(ending);
        name.into()
    }

    /// Give an existing segment that has the plain name alone its hashed one too, before it is opened.
    pub(crate) fn adopt_plain(&self) -> io::Result<()> {
        if Identity::at(&self.hashed)?.is_some() || Identity::at(&self.plain)?.is_none() {
            return Ok(());
        }
        // Not passed over where it is forbidden: we would meet under another name than those who have this one.
        ignore(std::fs::hard_link(&self.plain, &self.hashed), &[io::ErrorKind::AlreadyExists])
    }

    /// Give the segment its plain name where nothing has it, after it was opened and as long as it is used.
    pub(crate) fn link_plain(&self) -> io::Result<()> {
        if Identity::at(&self.plain)?.is_some() {
            return Ok(());
        }
        // The file may not be ours to link (`fs.protected_hardlinks`): then its owner sees to the other name.
        let harmless = [io::ErrorKind::AlreadyExists, io::ErrorKind::PermissionDenied];
        ignore(std::fs::hard_link(&self.hashed, &self.plain), &harmless)
    }
}

/// What `shm_open` is called with, slash included; shown in messages.
pub(crate) fn shared_name(key: &GpuKey) -> String {
    format!("/opencoti-gpu-{key}")
}

fn ignore(result: io::Result<()>, harmless: &[io::ErrorKind]) -> io::Result<()> {
    match result {
        Err(error) if harmless.contains(&error.kind()) => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::Share;

    #[test]
    fn the_hashed_name_is_the_one_that_cosmopolitan_computes() {
        let key = GpuKey::new("metal-0").expect("a legal key");
        let path = SegmentPath::new(&Place::new("/dev/shm", Share::Machine), &key);

        let expected = "/dev/shm/cb197ce2155862306e88937979e9708a186916bc14243a9c60cb9e266efa04fc.sem";
        assert_eq!(path.main(), Path::new(expected));
        assert_eq!(path.plain, Path::new("/dev/shm/opencoti-gpu-metal-0"));
    }
}
