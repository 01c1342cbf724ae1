//! The queue in front of the lock: first come, first served, and nobody polls.
//!
//! flock(2) wakes its sleepers in order, but a process that releases and asks again at once gets the lock before any of
//! them has run, and a stream of readers keeps a writer out for ever. So whoever has to wait takes a ticket, which is a
//! locked byte of the gate file, and sleeps in the lock of the byte before it. Its owner frees that byte when it was
//! served, and the kernel does when the owner dies. Only the first of the queue sleeps in flock(2).
//!
//! The queue consists of the kernel's locks alone: the next ticket is the highest locked byte and one, so no bytes in the
//! file can lead it astray, and nothing is to be repaired after a death. The bytes carry hints, for people. Without a
//! gate, or with a broken one, the order is flock's; exclusion never depends on it.
//!
//! | byte | lock |
//! |---|---|
//! | 2^38 | state: write = held exclusively, read = shared |
//! | 2^39 | held for the microseconds of taking a ticket, so that an arrival and its number are one |
//! | 2^40 + t | ticket t, while its owner waits |
//! | 2^41 + i | hint i is true as long as its author holds this |

use std::io;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Duration;

use super::LeaseMode;
use super::files::Spot;
use super::hint::{Author, Claimed, HINT_COUNT, HINTS_AT, Hint};
use crate::clock;
use crate::sys::{self, Identity, LockMode, ProcessFile};

const MAGIC: [u8; 8] = *b"OCGPUQ1\0";
const VERSION: u32 = 1;
const FILE_BYTES: usize = 4096;
const STATE: i64 = 1 << 38;
const MUTEX: i64 = 1 << 39;
const TICKETS: i64 = 1 << 40;
const HINT_BYTES: i64 = 1 << 41;
const TICKETS_END: i64 = HINT_BYTES;
/// Whoever is stopped in the middle of taking a ticket costs those who arrive meanwhile this much, and their order.
const MUTEX_TRIES: u32 = 1000;
const MUTEX_PAUSE: Duration = Duration::from_micros(50);
/// Tickets that may be snatched from us while we hold no mutex, before we go without.
const TICKET_TRIES: u32 = 100;
/// The state byte can be kept for a moment by a holder that is dying.
const STATE_TRIES: u32 = 20;

/// The open gate file. Its locks belong to this handle.
#[derive(Debug)]
pub(super) struct Gate {
    file: ProcessFile,
    identity: Identity,
    ticket: Option<i64>,
    hint: Option<usize>,
}

impl Gate {
    /// Open or make the gate; `None` where it cannot be used, which costs order and what others can see.
    pub(super) fn open(spot: &Spot) -> Option<Self> {
        let file = ProcessFile::open(|| sys::open_or_create(&spot.gate, spot.permissions)).ok()?;
        let identity = Identity::of(&file).ok()?;
        let usable = sys::byte_locks_work(&file, MUTEX).unwrap_or(false) && prepared(&file);
        usable.then_some(Self { file, identity, ticket: None, hint: None })
    }

    /// The same handle under a higher number, with all of its locks. The kernel closes a dead process's files from the
    /// highest number down (measured), so the state byte is free before a lease file that was opened in between.
    pub(super) fn reopened(mut self) -> Option<Self> {
        let file = ProcessFile::open(|| self.file.try_clone()).ok()?;
        Some(Self { file, identity: self.identity, ticket: self.ticket.take(), hint: self.hint.take() })
    }

    /// Whether the path still names this file: only then does everybody queue here.
    pub(super) fn is_current(&self, spot: &Spot) -> bool {
        matches!(Identity::at(&spot.gate), Ok(Some(named)) if named.same_file(self.identity))
    }

    /// Whether somebody waits: nobody may pass then.
    pub(super) fn has_waiters(&self) -> bool {
        matches!(sys::byte_lock_in(&self.file, TICKETS, TICKETS_END - TICKETS), Ok(Some(_)))
    }

    /// How many wait, this handle not counted.
    pub(super) fn waiters(&self) -> usize {
        self.tickets_below(TICKETS_END).count()
    }

    /// Queue behind all who wait. Without a ticket afterwards the order is flock's.
    pub(super) fn enqueue(&mut self) {
        let ordered = self.lock_mutex();
        for _ in 0..TICKET_TRIES {
            let ticket = self.tickets_below(TICKETS_END).last().map_or(TICKETS, |last| last + 1);
            if ticket >= TICKETS_END {
                break;
            }
            if sys::lock_byte(&self.file, ticket, LockMode::Exclusive, false).unwrap_or(false) {
                self.ticket = Some(ticket);
                break;
            }
        }
        if ordered {
            let _ = sys::unlock_byte(&self.file, MUTEX);
        }
    }

    /// Sleep until the one before us was served or is gone. True: nobody is before us.
    ///
    /// # Errors
    /// `Interrupted` when a signal ended the sleep.
    pub(super) fn advance(&self) -> io::Result<bool> {
        let Some(ticket) = self.ticket else { return Ok(true) };
        let Some(before) = self.tickets_below(ticket).last() else { return Ok(true) };
        match sys::lock_byte(&self.file, before, LockMode::Shared, true) {
            Ok(_) => {
                let _ = sys::unlock_byte(&self.file, before);
                Ok(false)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Err(error),
            // A kernel that refuses to wait here leaves us flock's order.
            Err(_) => Ok(true),
        }
    }

    /// Served, or tired of waiting: the next one may come.
    pub(super) fn dequeue(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            let _ = sys::unlock_byte(&self.file, ticket);
        }
    }

    /// Show that we wait.
    pub(super) fn announce_wait(&mut self, mode: LeaseMode, author: &Author) {
        let ticket = self.ticket.map_or(0, |ticket| (ticket - TICKETS).cast_unsigned());
        self.write_hint(ticket, Claimed::Wanted(mode), author);
    }

    /// Show that the lease is held: the state byte, and a hint where the record has no room for all holders.
    pub(super) fn announce_held(&mut self, mode: LeaseMode, author: &Author) {
        for _ in 0..STATE_TRIES {
            if sys::lock_byte(&self.file, STATE, mode.into(), false).unwrap_or(true) {
                break;
            }
            thread::yield_now();
        }
        match mode {
            LeaseMode::Shared => self.write_hint(locker(), Claimed::Held(mode), author),
            LeaseMode::Exclusive => self.withdraw_hint(),
        }
    }

    /// Show that it is not held by us.
    pub(super) fn announce_free(&mut self) {
        let _ = sys::unlock_byte(&self.file, STATE);
        self.withdraw_hint();
    }

    /// Name another process in our hint.
    pub(super) fn rename(&mut self, mode: LeaseMode, author: &Author) {
        if self.hint.is_some() {
            self.write_hint(locker(), Claimed::Held(mode), author);
        }
    }

    pub(super) fn withdraw_hint(&mut self) {
        if let Some(index) = self.hint.take() {
            let _ = sys::unlock_byte(&self.file, hint_byte(index));
        }
    }

    /// The handle, to be shared with a child process.
    pub(super) fn file(&self) -> &ProcessFile {
        &self.file
    }

    fn tickets_below(&self, end: i64) -> Tickets<'_> {
        Tickets { file: &self.file, from: TICKETS, end }
    }

    fn write_hint(&mut self, ticket: u64, claimed: Claimed, author: &Author) {
        let hint = Hint { ticket, since_us: clock::wall_us(), claimed, author: *author };
        let Some(index) = self.hint.or_else(|| self.free_hint(author)) else { return };
        self.hint = Some(index);
        let _ = self.file.write_all_at(&hint.to_bytes(), Hint::offset(index));
    }

    fn free_hint(&self, author: &Author) -> Option<usize> {
        let first = author.pid as usize % HINT_COUNT;
        let indices = (0..HINT_COUNT).map(|step| (first + step) % HINT_COUNT);
        indices.into_iter().find(|index| {
            sys::lock_byte(&self.file, hint_byte(*index), LockMode::Exclusive, false).unwrap_or(false)
        })
    }

    fn lock_mutex(&self) -> bool {
        for _ in 0..MUTEX_TRIES {
            match sys::lock_byte(&self.file, MUTEX, LockMode::Exclusive, false) {
                Ok(false) => clock::sleep(MUTEX_PAUSE),
                Ok(true) => return true,
                Err(_) => return false,
            }
        }
        false
    }
}

/// What a gate file says without being touched.
#[derive(Debug, Default)]
pub(super) struct GateLook {
    pub(super) state: Option<LeaseMode>,
    /// Those that are true, the waiters among them in the order of their tickets.
    pub(super) hints: Vec<Hint>,
}

impl GateLook {
    pub(super) fn at(spot: &Spot) -> Self {
        let Ok(Some(file)) = sys::open_existing(&spot.gate) else { return Self::default() };
        let state = sys::byte_lock_held(&file, STATE).ok().flatten().map(LeaseMode::from);
        let mut bytes = [0; FILE_BYTES];
        let length = file.read_at(&mut bytes, 0).unwrap_or(0);
        if !bytes.starts_with(&MAGIC) {
            return Self { state, hints: Vec::new() };
        }
        let written = (0..HINT_COUNT).filter_map(|index| {
            let bytes = bytes[..length].get(HINTS_AT + index * Hint::BYTES..)?;
            Hint::parse(bytes.get(..Hint::BYTES)?).map(|hint| (index, hint))
        });
        let held = |index| matches!(sys::byte_lock_held(&file, hint_byte(index)), Ok(Some(_)));
        let mut hints: Vec<Hint> = written.filter(|(index, _)| held(*index)).map(|(_, hint)| hint).collect();
        hints.sort_by_key(|hint| hint.ticket);
        Self { state, hints }
    }
}

/// The locked tickets from `from` up to `end`, ascending as far as the kernel lists them so; the last one is the highest.
struct Tickets<'a> {
    file: &'a ProcessFile,
    from: i64,
    end: i64,
}

impl Iterator for Tickets<'_> {
    type Item = i64;

    fn next(&mut self) -> Option<i64> {
        if self.from >= self.end {
            return None;
        }
        let (start, length) = sys::byte_lock_in(self.file, self.from, self.end - self.from).ok().flatten()?;
        let behind = if length == 0 { self.end } else { start.saturating_add(length).min(self.end) };
        // Always ahead, whatever range a stranger locked.
        self.from = behind.max(self.from + 1);
        Some(self.from - 1)
    }
}

/// What a holder's hint has in place of a ticket: the process that the system names as the one that locks.
fn locker() -> u64 {
    u64::from(std::process::id())
}

fn hint_byte(index: usize) -> i64 {
    HINT_BYTES + i64::try_from(index).unwrap_or(0)
}

/// Whether the file is a gate of ours, which an empty one is made.
fn prepared(file: &ProcessFile) -> bool {
    let mut head = [0; 12];
    let length = file.read_at(&mut head, 0).unwrap_or(0);
    if head[..8] == MAGIC {
        return head[8..] == VERSION.to_le_bytes();
    }
    // Every maker writes the same bytes, so that they need no lock among them. The magic goes last.
    // Another maker may be between the two.
    let begun = head[8..] == VERSION.to_le_bytes() && head[..8].iter().all(|byte| *byte == 0);
    (begun || head[..length].iter().all(|byte| *byte == 0))
        && sys::reserve(file, FILE_BYTES as u64).is_ok()
        && file.write_all_at(&VERSION.to_le_bytes(), 8).is_ok()
        && file.write_all_at(&MAGIC, 0).is_ok()
}
