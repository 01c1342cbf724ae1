//! A directory, a key and a watchdog for each test.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ocgpu_core::{GpuKey, Pacer, Place, Schedule, Settings, Share};

/// A directory that goes with the test.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ocgpu-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).expect("a scratch directory");
        Self(path)
    }

    pub(crate) fn place(&self) -> Place {
        Place::new(&self.0, Share::Machine)
    }

    pub(crate) fn segment(&self) -> PathBuf {
        self.0.join("opencoti-gpu-test")
    }

    pub(crate) fn settings(&self, name: &str) -> Settings {
        Settings {
            key: key(),
            place: self.place(),
            weight: 1.0,
            name: name.into(),
            gated: true,
            schedule: Schedule::Turn,
        }
    }

    pub(crate) fn join(&self, name: &str) -> Pacer {
        Pacer::join(self.settings(name)).expect("a place among the peers")
    }

    /// The segment's bytes, to be read and written as another process would.
    pub(crate) fn bytes(&self) -> Bytes {
        let file = fs::File::options().read(true).write(true).open(self.segment());
        Bytes(file.expect("a segment that was joined"))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn key() -> GpuKey {
    GpuKey::new("test").expect("a legal key")
}

/// A segment, field by field.
pub(crate) struct Bytes(fs::File);

impl Bytes {
    pub(crate) fn read(&self, at: usize, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.0.read_exact_at(&mut bytes, at as u64).expect("readable");
        bytes
    }

    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        self.0.write_all_at(bytes, at as u64).expect("writable");
    }

    pub(crate) fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.read(at, 8).try_into().expect("8 bytes"))
    }
}

#[expect(clippy::disallowed_methods, reason = "a test's watchdog is not the core's clock")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = now() + Duration::from_secs(10);
    while !condition() {
        assert!(now() < deadline, "not within 10 s: {what}");
        pause();
    }
}

#[expect(clippy::disallowed_methods, reason = "between two looks at a condition")]
pub(crate) fn pause() {
    std::thread::sleep(Duration::from_millis(1));
}
