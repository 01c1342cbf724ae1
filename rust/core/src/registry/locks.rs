//! The locks of a segment: one a slot, held for as long as its owner lives, and one for whoever creates it.
//!
//! Where the kernel has OFD locks they are locks on bytes of the segment itself. Where it has none (some sandboxes) they
//! are flocks on files beside it, and the owner says so by `flag::SLOT_FILE`. Both kinds may meet in one segment: a peer
//! with OFD locks takes the slot's file too wherever there is one, so that both exclude each other and both see a death.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::clock;
use crate::layout::{INIT_LOCK, SLOT_COUNT, SLOT_LOCK, flag};
use crate::registry::SegmentPath;
use crate::sys::{
    Identity, LockMode, ProcessFile, byte_lock_held, byte_locks_work, lock_byte, lock_file, open_existing,
    open_or_create, unlock_byte, unlock_file,
};

/// Initialising takes about a millisecond; whoever holds its lock for this long will not let go.
const INIT_TRIES: u32 = 2000;

/// What shows that the owner of a slot lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockKind {
    /// OFD locks on bytes of the segment (fcntl(2)).
    Ofd,
    /// flock(2) on one file a slot, where the kernel refuses OFD locks.
    Flock,
}

impl LockKind {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ofd => "ofd",
            Self::Flock => "flock",
        }
    }
}

/// What the lock of a slot says of its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Liveness {
    /// Somebody holds it.
    Held,
    /// Nobody does: the owner is dead.
    Free,
    /// The owner has none, or one that cannot be asked from here.
    Unknown,
}

/// The locks of one open segment.
#[derive(Debug)]
pub(crate) struct Locks {
    kind: LockKind,
    path: SegmentPath,
    /// Permission bits of lock files created here.
    mode: u32,
    /// The lock files that we hold, by slot.
    held: Mutex<[Option<ProcessFile>; SLOT_COUNT]>,
}

impl Locks {
    /// Find out which kind the kernel has for `segment`.
    pub(crate) fn probe(segment: &File, path: &SegmentPath, mode: u32) -> io::Result<Self> {
        let kind = if byte_locks_work(segment, INIT_LOCK)? { LockKind::Ofd } else { LockKind::Flock };
        Ok(Self { kind, path: path.clone(), mode, held: Mutex::default() })
    }

    /// The segment's name.
    pub(crate) fn path(&self) -> &Path {
        self.path.main()
    }

    pub(crate) fn kind(&self) -> LockKind {
        self.kind
    }

    /// Take the lock of `slot`; `Ok(false)` when somebody has it.
    pub(crate) fn lock_slot(&self, segment: &File, slot: usize) -> io::Result<bool> {
        if self.kind == LockKind::Ofd && !lock_byte(segment, offset(slot), LockMode::Exclusive, false)? {
            return Ok(false);
        }
        let locked = self.lock_slot_file(slot);
        if !matches!(locked, Ok(true)) && self.kind == LockKind::Ofd {
            unlock_byte(segment, offset(slot))?;
        }
        locked
    }

    /// Give the lock of `slot` back. An error leaves it to the kernel, which drops it with the handle.
    pub(crate) fn unlock_slot(&self, segment: &File, slot: usize) {
        self.held()[slot] = None;
        if self.kind == LockKind::Ofd {
            let _ = unlock_byte(segment, offset(slot));
        }
    }

    /// The bits of `layout::flag` that say which lock of `slot` we hold.
    pub(crate) fn flags(&self, slot: usize) -> u32 {
        let file = if self.held()[slot].is_some() { flag::SLOT_FILE } else { 0 };
        flag::HAS_LOCK | file
    }

    /// Whether the lock of `slot` that we hold is the one that its owner, which says `flags` of itself, had.
    pub(crate) fn prove_death(&self, slot: usize, flags: u32) -> bool {
        let same_kind = match flags & flag::SLOT_FILE {
            0 => self.kind == LockKind::Ofd,
            _ => self.held()[slot].is_some(),
        };
        flags & flag::HAS_LOCK != 0 && same_kind
    }

    /// Whether the owner of `slot`, which says `flags` of itself, still holds its lock. Takes nothing, but a lock file
    /// is held shared for a moment: somebody who tries to claim that slot just then takes another.
    pub(crate) fn liveness(&self, segment: &File, slot: usize, flags: u32) -> Liveness {
        if flags & flag::HAS_LOCK == 0 {
            return Liveness::Unknown;
        }
        let held = match (flags & flag::SLOT_FILE != 0, self.kind) {
            (true, _) => match self.open_slot_file(slot) {
                Ok(Some(file)) => lock_file(&file, LockMode::Shared, false).map(|free| !free),
                // Somebody deleted it: whether its owner lives shows in the heartbeat alone.
                Ok(None) => return Liveness::Unknown,
                Err(error) => Err(error),
            },
            (false, LockKind::Ofd) => byte_lock_held(segment, offset(slot)).map(|held| held.is_some()),
            (false, LockKind::Flock) => return Liveness::Unknown,
        };
        // Death needs proof, which an error is not.
        if matches!(held, Ok(false)) { Liveness::Free } else { Liveness::Held }
    }

    /// Whether the lock files that we hold still have their names: else newcomers lock others.
    pub(crate) fn still_named(&self) -> bool {
        let held = self.held();
        let mut files =
            held.iter().enumerate().filter_map(|(slot, file)| file.as_ref().map(|file| (slot, file)));
        files.all(|(slot, file)| is_named(file, &self.path, slot).unwrap_or(true))
    }

    /// Run `initialise` alone among those who have the same kind of lock; `None` when somebody else never lets go.
    pub(crate) fn initialising<T>(
        &self,
        segment: &File,
        initialise: impl FnOnce() -> T,
    ) -> io::Result<Option<T>> {
        let file = match self.kind {
            LockKind::Ofd => None,
            LockKind::Flock => Some(ProcessFile::open(|| open_or_create(&self.path.init_file(), self.mode))?),
        };
        for _ in 0..INIT_TRIES {
            let locked = match &file {
                None => lock_byte(segment, INIT_LOCK, LockMode::Exclusive, false)?,
                Some(file) => lock_file(file, LockMode::Exclusive, false)?,
            };
            if !locked {
                clock::sleep(Duration::from_millis(1));
                continue;
            }
            self.make_slot_files()?;
            let result = initialise();
            match &file {
                None => unlock_byte(segment, INIT_LOCK)?,
                Some(file) => unlock_file(file)?,
            }
            return Ok(Some(result));
        }
        Ok(None)
    }

    /// See to it that every slot has its file where there are no OFD locks: peers that have them take both from then on,
    /// and peers without them can see whether they live.
    fn make_slot_files(&self) -> io::Result<()> {
        let slots = if self.kind == LockKind::Flock { SLOT_COUNT } else { 0 };
        (0..slots).try_for_each(|slot| open_or_create(&self.path.slot_file(slot), self.mode).map(drop))
    }

    /// Hold the lock file of `slot`: always where there are no OFD locks, else where there is one.
    fn lock_slot_file(&self, slot: usize) -> io::Result<bool> {
        let path = self.path.slot_file(slot);
        let file = match self.kind {
            LockKind::Flock => ProcessFile::open(|| open_or_create(&path, self.mode))?,
            LockKind::Ofd => match self.open_slot_file(slot)? {
                Some(file) => file,
                None => return Ok(true),
            },
        };
        // A file that lost its name in between excludes nobody.
        if !lock_file(&file, LockMode::Exclusive, false)? || !is_named(&file, &self.path, slot)? {
            return Ok(false);
        }
        self.held()[slot] = Some(file);
        Ok(true)
    }

    fn open_slot_file(&self, slot: usize) -> io::Result<Option<ProcessFile>> {
        let path = self.path.slot_file(slot);
        match ProcessFile::open(|| open_existing(&path)?.ok_or(io::ErrorKind::NotFound.into())) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some),
        }
    }

    fn held(&self) -> MutexGuard<'_, [Option<ProcessFile>; SLOT_COUNT]> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where the lock byte of `slot` lies.
fn offset(slot: usize) -> i64 {
    SLOT_LOCK + i64::try_from(slot).unwrap_or(0)
}

fn is_named(file: &File, path: &SegmentPath, slot: usize) -> io::Result<bool> {
    let held = Identity::of(file)?;
    Ok(Identity::at(&path.slot_file(slot))?.is_some_and(|named| named.same_file(held)))
}
