//! The two files of a lease, and what is done to them without waiting.
//!
//! Exclusion rests on flock(2) of the lease file alone, so that `flock(1)`, gpulease and filelock exclude us and are
//! excluded. The second file, `….q`, carries what must not touch that lock: the queue, and the state byte, by which
//! anybody can see whether and how the lease is held. Looking at the lock itself would mean taking it for a moment, and
//! somebody who tries without waiting would be told "busy" for no reason.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::gate::{Gate, GateLook};
use super::hint::Hint;
use super::record::{RECORD_BYTES, Record, RecordTemplate};
use super::{LeaseMode, clock};
use crate::error::{Error, Result};
use crate::sys::{self, Identity, ProcessFile};

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
    /// None where it cannot be used: that costs order and what others can see, never exclusion.
    gate: Option<Gate>,
    identity: Identity,
    /// Another process was given the descriptions: an unlock would end its lease too.
    lent: bool,
}

impl Files {
    pub(super) fn open(spot: &Spot) -> Result<Self> {
        // The lease file first: the kernel closes a dead process's files from the highest number down (measured), so
        // the state byte is free before the lease is, and the next holder finds it so.
        let lock = ProcessFile::open(|| open_lock(spot)).map_err(|error| unusable(&spot.lock, &error))?;
        if let Some(name) = sys::network_file_system(&lock) {
            let reason =
                format!("it lies on {name}, where locks can hang; set `OCGPU_DIR` to a local directory");
            return Err(Error::LeaseUnavailable { path: spot.lock.clone(), reason });
        }
        let identity = Identity::of(&lock).map_err(|error| unusable(&spot.lock, &error))?;
        Ok(Self { lock, gate: Gate::open(spot), identity, lent: false })
    }

    /// Take the lease now, or see that another has it or waits for it. The files come back either way.
    pub(super) fn try_claim(kept: Option<Self>, spot: &Spot, mode: LeaseMode) -> Result<(bool, Self)> {
        let mut kept = kept;
        for _ in 0..REPLACED_MAX {
            let files = match kept.take() {
                Some(files) => files,
                None => Self::open(spot)?,
            };
            let first = !files.gate.as_ref().is_some_and(Gate::has_waiters);
            let got = first
                && sys::lock_file(&files.lock, mode.into(), false)
                    .map_err(|error| unusable(&spot.lock, &error))?;
            if files.is_current(spot)? {
                return Ok((got, files));
            }
            // Replaced or removed: dropping the files drops the lock on what is no longer the lease.
        }
        let reason = "it is replaced again and again while it is being locked; see who does that".to_owned();
        Err(Error::LeaseUnavailable { path: spot.lock.clone(), reason })
    }

    /// Queue for the lease, behind all who wait.
    pub(super) fn enqueue(&mut self, spot: &Spot, mode: LeaseMode, template: &RecordTemplate) {
        if !self.gate.as_ref().is_some_and(|gate| gate.is_current(spot)) {
            self.gate = Gate::open(spot);
        }
        if let Some(gate) = &mut self.gate {
            gate.enqueue();
            gate.announce_wait(mode, &template.author);
        }
    }

    /// Leave the queue: served, or tired of waiting.
    pub(super) fn dequeue(&mut self) {
        if let Some(gate) = &mut self.gate {
            gate.dequeue();
        }
    }

    /// Sleep until the lock is ours, at our place in the queue. `Ok(false)`: a signal ended the sleep, or the one before us
    /// is gone and there may be another.
    pub(super) fn claim_waiting(&self, spot: &Spot, mode: LeaseMode) -> Result<bool> {
        let first = self.gate.as_ref().map_or(Ok(true), Gate::advance);
        match first.and_then(|first| Ok(first && sys::lock_file(&self.lock, mode.into(), true)?)) {
            Ok(got) => Ok(got),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(false),
            Err(error) => Err(unusable(&spot.lock, &error)),
        }
    }

    /// The files to go on with after a lock that came: these, or those that the path names by now, which are not locked.
    pub(super) fn checked(
        self,
        spot: &Spot,
        template: &RecordTemplate,
        mode: LeaseMode,
    ) -> Result<(bool, Self)> {
        if self.is_current(spot)? {
            return Ok((true, self));
        }
        // Our place in the queue stays, where the queue is still the one that the path names.
        let kept = self.gate.filter(|gate| gate.is_current(spot));
        let mut files = Self::open(spot)?;
        match kept.and_then(Gate::reopened) {
            Some(gate) => files.gate = Some(gate),
            None => files.enqueue(spot, mode, template),
        }
        Ok((false, files))
    }

    /// Whether the path still names the file that we have open: only then does its lock mean anything.
    pub(super) fn is_current(&self, spot: &Spot) -> Result<bool> {
        let named = Identity::at(&spot.lock).map_err(|error| unusable(&spot.lock, &error))?;
        Ok(named.is_some_and(|identity| identity.same_file(self.identity)))
    }

    /// Tell others that the lease is held, how, and by whom. Failures cost hints only.
    pub(super) fn announce(&mut self, mode: LeaseMode, template: &RecordTemplate) {
        if let Some(gate) = &mut self.gate {
            gate.announce_held(mode, &template.author);
        }
        self.write_record(template);
    }

    /// Name another process as the holder.
    pub(super) fn announce_as(&mut self, mode: LeaseMode, template: &RecordTemplate) {
        if let Some(gate) = &mut self.gate {
            gate.rename(mode, &template.author);
        }
        self.write_record(template);
    }

    fn write_record(&self, template: &RecordTemplate) {
        let _ = self.lock.write_all_at(&template.stamp(clock::wall_us()), 0);
    }

    /// Give up a wait; the files can be used again.
    pub(super) fn withdraw(mut self) -> Self {
        if let Some(gate) = &mut self.gate {
            gate.dequeue();
            gate.withdraw_hint();
        }
        self
    }

    /// Give the lease back; `None` when the files had to be closed for that.
    pub(super) fn release(mut self) -> Option<Self> {
        if self.lent {
            return None;
        }
        if let Some(gate) = &mut self.gate {
            gate.announce_free();
        }
        sys::unlock_file(&self.lock).ok().map(|()| self)
    }

    /// Copies of both descriptors for a child process, which then holds the lease together with us.
    pub(super) fn lend(&mut self) -> io::Result<Vec<File>> {
        let mut copies = vec![self.lock.try_clone()?];
        if let Some(gate) = &self.gate {
            copies.push(gate.file().try_clone()?);
        }
        self.lent = true;
        Ok(copies)
    }

    /// How many queue behind us.
    pub(super) fn waiters(&self) -> usize {
        self.gate.as_ref().map_or(0, Gate::waiters)
    }
}

/// What the files say about a lease without touching its lock.
#[derive(Debug, Default)]
pub(super) struct Look {
    pub(super) identity: Option<Identity>,
    pub(super) state: Option<LeaseMode>,
    pub(super) record: Record,
    pub(super) hints: Vec<Hint>,
}

impl Look {
    pub(super) fn at(spot: &Spot) -> Result<Self> {
        let Some(lock) = sys::open_existing(&spot.lock).map_err(|error| unusable(&spot.lock, &error))? else {
            let there = sys::check_directory(&spot.lock).map_err(|error| unusable(&spot.lock, &error));
            return there.map(|()| Self::default());
        };
        let mut bytes = [0; RECORD_BYTES];
        let length = lock.read_at(&mut bytes, 0).unwrap_or(0);
        let GateLook { state, hints } = GateLook::at(spot);
        Ok(Self { identity: Identity::of(&lock).ok(), state, record: Record::parse(&bytes[..length]), hints })
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
            "another user keeps it to itself (`OCGPU_SHARE=user`): let this user read and write it, delete it while nobody \
             uses it, or set `OCGPU_DIR` to a directory of its own"
        }
        io::ErrorKind::ReadOnlyFilesystem => "set `OCGPU_DIR` to a directory that can be written",
        _ if sys::is_symbolic_link(error) => {
            "symbolic links are not followed: remove it or name another `path`"
        }
        _ => "remove what stands there or name another `path`",
    };
    Error::LeaseUnavailable { path: path.to_owned(), reason: format!("{error}; {remedy}") }
}
