//! A lease of its own for each test, and those who take it.

use std::fs;
use std::io::Read;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use ocgpu_core::{Error, Lease, LeaseMode, LeaseOptions, lease_status_at, monotonic_us};

/// Far beyond what any of these waits takes on a loaded machine.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(10);
pub(crate) const WATCHDOG_US: u64 = 10_000_000;

/// A directory that goes with the test.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ocgpu-lease-{test}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.0.join("gpu.lease")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn options(mode: LeaseMode) -> LeaseOptions {
    LeaseOptions { mode, reason: None, signals: true }
}

pub(crate) fn lease(path: &Path, mode: LeaseMode) -> Lease {
    Lease::at_path(path, 0o600, options(mode)).unwrap()
}

pub(crate) fn exclusive(path: &Path) -> Lease {
    lease(path, LeaseMode::Exclusive)
}

pub(crate) fn acquire(lease: &Lease, timeout: Option<Duration>) -> Result<(), Error> {
    lease.acquire(timeout, || ControlFlow::Continue(()))
}

/// Look at `condition` until it is true, under a watchdog.
pub(crate) fn until(what: &str, condition: impl Fn() -> bool) {
    let start = monotonic_us();
    while !condition() {
        assert!(monotonic_us() - start < WATCHDOG_US, "not within 10 s: {what}");
        thread::yield_now();
    }
}

/// Wait until so many wait.
pub(crate) fn until_waiters(path: &Path, count: usize) {
    until(&format!("{count} waiters"), || lease_status_at(path).unwrap().waiters.len() == count);
}

/// `flock(1)` that holds the file until its standard input closes.
pub(crate) fn foreign_holder(path: &Path, mode: &str) -> Child {
    let mut child = Command::new("flock")
        .args([mode, &path.display().to_string(), "sh", "-c", "echo held; cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();
    child
}

/// Wait until so many sleep in flock(2) on the file.
pub(crate) fn until_asleep(path: &Path, count: usize) {
    let inode = std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap());
    until(&format!("{count} sleepers"), || {
        let locks = fs::read_to_string("/proc/locks").unwrap();
        let ours = |line: &&str| line.contains("-> FLOCK") && line.contains(&format!(":{inode} "));
        locks.lines().filter(ours).count() >= count
    });
}
