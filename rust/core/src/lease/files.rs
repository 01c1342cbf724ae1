//! The two files of a lease, and what is done to them without waiting.
//!
//! Exclusion rests on flock(2) of the lease file alone, so that `flock(1)`, gpulease and filelock exclude us and are
//! excluded. The second file, `….q`, carries what must not touch that lock: the state byte, by which anybody can see
//! whether and how the lease is held. Looking at the lock itself would mean taking it for a moment, and somebody who
//! tries without waiting would be told "busy" for no reason.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::record::{RECORD_BYTES, Record, RecordTemplate};
use super::{LeaseMode, clock};
use crate::error::{Error, Result};
use crate::sys::{self, Identity, ProcessFile};

/// The state byte, far beyond the end of the gate file: write-locked = held exclusively, read-locked = shared.
const STATE_BYTE: i64 = 1 << 38;
/// How often a file may be replaced under us in one attempt before we call it an error.
const REPLACED_MAX: u32 = 100;

/// Where a lease lives.
#[derive(Debug, Clone)]
pub(super) struct Spot {
    pub(super) lock: PathBuf,
    pub(super) gate: PathBuf,
    /// Permission bits of files created here.
    pub(super) permissions: u32,
}

impl Spot {
    pub(super) fn new(lock: PathBuf, permissions: u32) -> Self {
        let mut gate = lock.clone().into_os_string();
        gate.push(".q");
        Self { lock, gate: gate.into(), permissions }
    }
}

/// Both files, open. Each `Files` has descriptions of its own, so that two of one process exclude each other.
#[derive(Debug)]
pub(super) struct Files {
    lock: ProcessFile,
    /// None where it cannot be used: that costs what others can see, never exclusion.
    gate: Option<ProcessFile>,
    identity: Identity,
    /// Another process was given the descriptions: an unlock would end its lease too.
    lent: bool,
}

impl Files {
    pub(super) fn open(spot: &Spot) -> Result<Self> {
        // The lease file first: the kernel closes a dead process's files from the highest number down (measured), so
        // the state byte is free before the lease is, and the next holder finds it so.
        let lock = ProcessFile::open(|| open_lock(spot)).map_err(|error| unusable(&spot.lock, &error))?;
        let identity = Identity::of(&lock).map_err(|error| unusable(&spot.lock, &error))?;
        let gate = ProcessFile::open(|| sys::open_or_create(&spot.gate, spot.permissions)).ok();
        Ok(Self { lock, gate, identity, lent: false })
    }

    /// Take the lease now, or see that another has it (`None` in the first place, with the files in the second).
    pub(super) fn try_claim(kept: Option<Self>, spot: &Spot, mode: LeaseMode) -> Result<(bool, Self)> {
        let mut kept = kept;
        for _ in 0..REPLACED_MAX {
            let files = match kept.take() {
                Some(files) => files,
                None => Self::open(spot)?,
            };
            let got = sys::lock_file(&files.lock, mode.into(), false)
                .map_err(|error| unusable(&spot.lock, &error))?;
            if files.is_current(spot)? {
                return Ok((got, files));
            }
            // Replaced or removed: dropping the files drops the lock on what is no longer the lease.
        }
        let reason = "it is replaced again and again while it is being locked; see who does that".to_owned();
        Err(Error::LeaseUnavailable { path: spot.lock.clone(), reason })
    }

    /// Sleep until the lock is ours. `Ok(false)`: a signal ended the sleep.
    pub(super) fn claim_waiting(&self, spot: &Spot, mode: LeaseMode) -> Result<bool> {
        match sys::lock_file(&self.lock, mode.into(), true) {
            Ok(got) => Ok(got),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(false),
            Err(error) => Err(unusable(&spot.lock, &error)),
        }
    }

    /// Whether the path still names the file that we have open: only then does its lock mean anything.
    pub(super) fn is_current(&self, spot: &Spot) -> Result<bool> {
        let named = Identity::at(&spot.lock).map_err(|error| unusable(&spot.lock, &error))?;
        Ok(named.is_some_and(|identity| identity.same_file(self.identity)))
    }

    /// Tell others that the lease is held, how, and by whom. Failures cost hints only.
    pub(super) fn announce(&self, mode: LeaseMode, template: &RecordTemplate) {
        if let Some(gate) = &self.gate {
            let _ = sys::lock_byte(gate, STATE_BYTE, mode.into(), false);
        }
        self.write_record(template);
    }

    pub(super) fn write_record(&self, template: &RecordTemplate) {
        let _ = self.lock.write_all_at(&template.stamp(clock::wall_us()), 0);
    }

    /// Give the lease back; `None` when the files had to be closed for that.
    pub(super) fn release(self) -> Option<Self> {
        if self.lent {
            return None;
        }
        if let Some(gate) = &self.gate {
            let _ = sys::unlock_byte(gate, STATE_BYTE);
        }
        sys::unlock_file(&self.lock).ok().map(|()| self)
    }

    /// Copies of both descriptors for a child process, which then holds the lease together with us.
    pub(super) fn lend(&mut self) -> io::Result<Vec<File>> {
        let mut copies = vec![self.lock.try_clone()?];
        if let Some(gate) = &self.gate {
            copies.push(gate.try_clone()?);
        }
        self.lent = true;
        Ok(copies)
    }

    pub(super) fn identity(&self) -> Identity {
        self.identity
    }
}

/// What the files say about a lease without touching its lock.
#[derive(Debug, Default)]
pub(super) struct Look {
    pub(super) identity: Option<Identity>,
    pub(super) state: Option<LeaseMode>,
    pub(super) record: Record,
}

impl Look {
    pub(super) fn at(spot: &Spot) -> Result<Self> {
        let Some(lock) = sys::open_existing(&spot.lock).map_err(|error| unusable(&spot.lock, &error))? else {
            let there = sys::check_directory(&spot.lock).map_err(|error| unusable(&spot.lock, &error));
            return there.map(|()| Self::default());
        };
        let mut bytes = [0; RECORD_BYTES];
        let length = lock.read_at(&mut bytes, 0).unwrap_or(0);
        let state = sys::open_existing(&spot.gate)
            .ok()
            .flatten()
            .and_then(|gate| sys::byte_lock_held(&gate, STATE_BYTE).ok().flatten())
            .map(LeaseMode::from);
        Ok(Self { identity: Identity::of(&lock).ok(), state, record: Record::parse(&bytes[..length]) })
    }
}

/// flock(2) needs no right to write: another user's file of mode 0644 (gpulease's) is locked all the same.
fn open_lock(spot: &Spot) -> io::Result<File> {
    match sys::open_or_create(&spot.lock, spot.permissions) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            sys::open_existing(&spot.lock)?.ok_or(error)
        }
        opened => opened,
    }
}

fn unusable(path: &Path, error: &io::Error) -> Error {
    let remedy = match error.kind() {
        io::ErrorKind::NotFound => "create its directory or set `OCGPU_DIR` to one that exists",
        io::ErrorKind::PermissionDenied => {
            "let this user read it or set `OCGPU_DIR` to a directory of its own"
        }
        _ => "remove what stands there or name another `path`",
    };
    Error::LeaseUnavailable { path: path.to_owned(), reason: format!("{error}; {remedy}") }
}
