//! A segment of a test's own.

use std::path::PathBuf;

use crate::key::GpuKey;
use crate::place::{Place, Share};
use crate::registry::{MappedSegment, Owner, SegmentPath};
use crate::sys::{ProcessIdentity, process_identity};

/// A directory with a segment, which goes with the test.
pub(crate) struct Fixture {
    directory: PathBuf,
    place: Place,
    pub(crate) path: SegmentPath,
}

impl Fixture {
    pub(crate) fn new(name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("ocgpu-unit-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a scratch directory");
        let place = Place::new(&directory, Share::Machine);
        let path = SegmentPath::new(&place, &GpuKey::new("test").expect("a legal key"));
        Self { directory, place, path }
    }

    /// A handle of its own, as another process has it. Dropping it is that process's death: the kernel frees its locks.
    pub(crate) fn open(&self) -> MappedSegment {
        MappedSegment::open(&self.place, &self.path).expect("a usable segment")
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Somebody with this pid.
pub(crate) fn owner(pid: u32) -> Owner {
    let identity = ProcessIdentity { pid, ..process_identity() };
    Owner { identity, name: format!("peer {pid}"), weight: 1.0, flags: 0 }
}
