//! The machine-wide lease: who may be resident on the card.
//!
//! A lease is an flock(2) on one file, so the kernel itself excludes the others and frees everything of a holder that
//! dies, however it dies. Nothing here polls. There is no upgrade and no downgrade, because flock drops the shared
//! lock when an upgrade fails, and no recursion: a second acquisition would wait for the first for ever.
//!
//! | file | what it holds |
//! |---|---|
//! | `ocgpu-<key>.lease` | the lock, and a record of who took it last |
//! | `ocgpu-<key>.lease.q` | the queue; the state byte, which shows whether and how it is held; hints for people |
//!
//! What happens to an object in each state (`docs/proofs/lease.md` says why):
//!
//! | event | free | waiting | held |
//! |---|---|---|---|
//! | `try_acquire` | held, or false | `LeaseMisuse` | `LeaseMisuse` |
//! | `acquire` | held, or waiting | `LeaseMisuse` | `LeaseMisuse` |
//! | `release`, by any thread | – | free; the wait says `LeaseInterrupted` | free |
//! | the wait's time is over | | held if the lease came first, else free | |
//! | the waiting call is interrupted or cancelled | | free, whatever came first | |
//! | dropped; the process exits, dies, executes another program | free | free | free |
//! | forked: the child's copy | free | free, the parent waits on | free, the parent holds on |

mod claim;
mod files;
mod gate;
mod hint;
mod mode;
mod record;
mod status;
mod wait;

use std::fs::File;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::clock;
use crate::error::{Error, Result};
use crate::key::GpuKey;
use crate::place::Place;
use crate::sys::{self, PerProcess};
pub use claim::LeaseWait;
use claim::{Claim, State, take_files, template};
use files::{Files, Spot};
pub use mode::LeaseMode;
use record::REASON_BYTES_MAX;
pub use status::{LeaseParty, LeaseStatus};
use wait::{Errand, Waiting};

/// A waiting caller looks for signals this often.
const SLICE: Duration = Duration::from_millis(20);

/// What a lease is made of.
#[derive(Debug, Clone)]
pub struct LeaseOptions {
    /// How it is to be held.
    pub mode: LeaseMode,
    /// Why, for those who have to wait: at most 200 bytes of UTF-8.
    pub reason: Option<String>,
    /// False: never signal a waiting thread; a cancelled one sleeps on and hands the lease straight back.
    pub signals: bool,
}

/// A claim on one GPU, taken and given back any number of times, by any thread.
///
/// Two `Lease` values exclude each other, in one process as in two. A forked child's copy is not held and frees
/// nothing; it can be acquired there for itself. Dropping it gives it back.
///
/// ```
/// # let directory = std::env::temp_dir().join(format!("ocgpu-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&directory)?;
/// use ocgpu_core::{Lease, LeaseMode, LeaseOptions};
///
/// let options = LeaseOptions { mode: LeaseMode::Exclusive, reason: None, signals: true };
/// let lease = Lease::at_path(&directory.join("gpu.lease"), 0o600, options)?;
/// assert!(lease.try_acquire()?);
/// assert!(lease.held());
/// lease.release();
/// # std::fs::remove_dir_all(&directory)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Lease {
    spot: Spot,
    options: LeaseOptions,
    claim: PerProcess<Arc<Claim>>,
}

impl Lease {
    /// The lease of a GPU. Nothing is opened or created before the first acquisition.
    ///
    /// # Errors
    /// `InvalidArgument` when the reason is too long.
    pub fn new(place: &Place, key: &GpuKey, options: LeaseOptions) -> Result<Self> {
        Self::at_path(&lease_path(place, key), place.mode(), options)
    }

    /// A lease on a file of the caller's choice, created with `permissions` when it is not there.
    ///
    /// # Errors
    /// `InvalidArgument` when the reason is too long, `Io` when the path cannot be made absolute.
    pub fn at_path(path: &Path, permissions: u32, options: LeaseOptions) -> Result<Self> {
        if let Some(reason) = options.reason.as_ref().filter(|reason| reason.len() > REASON_BYTES_MAX) {
            let value = format!("{} bytes", reason.len());
            return Err(Error::InvalidArgument {
                name: "reason",
                value,
                legal: "at most 200 bytes of UTF-8",
            });
        }
        let claim = PerProcess::new(Claim::new(&options));
        Ok(Self { spot: Spot::new(absolute(path)?, permissions), options, claim })
    }

    /// The lease file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.spot.lock
    }

    /// How this lease is held when it is.
    #[must_use]
    pub fn mode(&self) -> LeaseMode {
        self.options.mode
    }

    /// Whether this process has the lease through this object.
    #[must_use]
    pub fn held(&self) -> bool {
        self.claim.get().is_some_and(|claim| matches!(*claim.lock(), State::Held(_)))
    }

    /// Take the lease if that needs no waiting; false when another has it.
    ///
    /// # Errors
    /// `LeaseMisuse` when this object holds it or waits for it, `LeaseUnavailable` when the file cannot be used.
    pub fn try_acquire(&self) -> Result<bool> {
        let claim = self.claim();
        let mut state = claim.lock();
        let (got, mut files) =
            Files::try_claim(take_files(&mut state, &self.spot)?, &self.spot, self.options.mode)?;
        if got {
            files.announce(self.options.mode, &claim.template);
            *state = State::Held(files);
        } else {
            *state = State::Free(Some(files));
        }
        Ok(got)
    }

    /// Take the lease, waiting up to `timeout` (`None`: for ever; zero: not at all). `go_on` is asked every 20 ms.
    ///
    /// # Errors
    /// As `try_acquire`; `LeaseBusy` when `timeout` is zero and another has it, `LeaseTimeout` when the time is over,
    /// `LeaseInterrupted` when `go_on` says break or another thread released this object. The lease is not held then.
    pub fn acquire(
        &self,
        timeout: Option<Duration>,
        mut go_on: impl FnMut() -> ControlFlow<()>,
    ) -> Result<()> {
        if timeout == Some(Duration::ZERO) {
            return if self.try_acquire()? { Ok(()) } else { Err(self.busy()) };
        }
        let start_us = clock::monotonic_us();
        let Some(wait) = self.start(false)? else { return Ok(()) };
        loop {
            let waited = Duration::from_micros(clock::monotonic_us() - start_us);
            let left = timeout.map(|timeout| timeout.saturating_sub(waited));
            if left == Some(Duration::ZERO) {
                return if wait.stop()? { Ok(()) } else { Err(self.timed_out(timeout.unwrap_or_default())) };
            }
            if wait.waiting.wait(left.unwrap_or(SLICE).min(SLICE)) {
                return wait.finish();
            }
            if go_on().is_break() {
                wait.cancel();
                return Err(Error::LeaseInterrupted { path: self.spot.lock.clone() });
            }
        }
    }

    /// Take the lease now (`None`) or begin to wait for it; `with_event` makes a handle for an event loop.
    ///
    /// # Errors
    /// As `try_acquire`; `Io` when no thread can be started.
    pub fn start(&self, with_event: bool) -> Result<Option<LeaseWait>> {
        let claim = self.claim();
        let mut state = claim.lock();
        let mode = self.options.mode;
        let (got, mut files) = Files::try_claim(take_files(&mut state, &self.spot)?, &self.spot, mode)?;
        if got {
            files.announce(mode, &claim.template);
            *state = State::Held(files);
            return Ok(None);
        }
        let template = Arc::clone(&claim.template);
        // Here and not in the thread: callers of one process are served in the order of their calls.
        files.enqueue(&self.spot, mode, &template);
        let errand = Errand { files, spot: self.spot.clone(), mode, template };
        let waiting = Waiting::start(errand, with_event, self.options.signals)?;
        *state = State::Waiting(Arc::clone(&waiting));
        Ok(Some(LeaseWait { claim: Arc::clone(claim), waiting, path: self.spot.lock.clone() }))
    }

    /// Give the lease back, or end a wait for it. Harmless in any state, from any thread and in a forked child.
    pub fn release(&self) {
        if let Some(claim) = self.claim.get() {
            claim.release();
        }
    }

    /// How many waiters queue behind this lease; 0 when it is not held. Costs a microsecond or so.
    ///
    /// Counted are ocgpu's waiters. Other programs asleep in flock(2) on the file are shown by `lease_status` alone.
    #[must_use]
    pub fn wanted(&self) -> usize {
        let Some(claim) = self.claim.get() else { return 0 };
        match &*claim.lock() {
            State::Held(files) => files.waiters(),
            _ => 0,
        }
    }

    /// Copies of the lease's handles for a child process that is to hold it as well: the lease is then free when the
    /// last of both has closed them or died, and `release` here no longer unlocks it. `None` when it is not held.
    ///
    /// # Errors
    /// `Io` when the process has no free descriptor.
    pub fn lend(&self) -> Result<Option<Vec<File>>> {
        let path = self.spot.lock.clone();
        match &mut *self.claim().lock() {
            State::Held(files) => files.lend().map(Some).map_err(|source| Error::Io {
                doing: "copy the handle of",
                path,
                source,
            }),
            _ => Ok(None),
        }
    }

    /// Name another process as the holder in the record, one that `lend` made a holder.
    pub fn record_as(&self, pid: u32, name: &str) {
        if let State::Held(files) = &mut *self.claim().lock() {
            files.announce_as(self.options.mode, &template(&self.options, pid, name));
        }
    }

    /// The error that says who has the lease.
    #[must_use]
    pub fn busy(&self) -> Error {
        Error::LeaseBusy { path: self.spot.lock.clone(), holder: self.holder() }
    }

    /// The error that says that `timeout` passed, and who has the lease.
    #[must_use]
    pub fn timed_out(&self, timeout: Duration) -> Error {
        Error::LeaseTimeout { path: self.spot.lock.clone(), timeout, holder: self.holder() }
    }

    fn holder(&self) -> Option<LeaseParty> {
        status::holder(&self.spot)
    }

    fn claim(&self) -> &Arc<Claim> {
        self.claim.get_or_make(|| Claim::new(&self.options))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.release();
    }
}

/// Look at a lease without touching it: takes no lock, creates no file, disturbs no acquisition.
///
/// # Errors
/// `LeaseUnavailable` when something that is not a lease file stands at the path, or it cannot be read.
pub fn lease_status(place: &Place, key: &GpuKey) -> Result<LeaseStatus> {
    lease_status_at(&lease_path(place, key))
}

/// As `lease_status`, for a lease on a file of the caller's choice.
///
/// # Errors
/// As `lease_status`; `Io` when the path cannot be made absolute.
pub fn lease_status_at(path: &Path) -> Result<LeaseStatus> {
    status::look(&Spot::new(absolute(path)?, 0))
}

/// Make this process the parent of its descendants that lose theirs: for a supervisor that keeps a lease for as long
/// as anybody it started may use the card.
///
/// # Errors
/// `Io` when the kernel does not offer it.
pub fn adopt_orphans() -> Result<()> {
    let path = PathBuf::from("/proc/self");
    sys::adopt_orphans().map_err(|source| Error::Io { doing: "adopt the orphans of", path, source })
}

fn lease_path(place: &Place, key: &GpuKey) -> PathBuf {
    place.directory().join(format!("ocgpu-{key}.lease"))
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|source| Error::Io { doing: "find", path: path.to_owned(), source })
}
