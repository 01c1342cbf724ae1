//! What a forked child must not keep.
//!
//! flock and OFD locks belong to the open file description, which a child shares: it would keep a dead parent's locks
//! alive, and an unlock in the child would free the parent's. So the child closes its copies at once, in a
//! `pthread_atfork` handler, and unlocks nothing. The handler only reads atomics and calls close(2), both of which are
//! allowed there (signal-safety(7)).
#![expect(clippy::disallowed_types, reason = "a signal-safe table is not something that loom could model")]

use std::fs::File;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::{Once, OnceLock};

/// Handles beyond this many stay open in a forked child until it executes another program.
const WATCHED_MAX: usize = 1024;
const NONE: i32 = -1;

static WATCHED: [AtomicI32; WATCHED_MAX] = [const { AtomicI32::new(NONE) }; WATCHED_MAX];
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// How many forks lie between the process that loaded this library and this one.
pub(crate) fn fork_generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// A file of this process alone: a forked child has it closed before its first own instruction.
///
/// Dropping it in a child does nothing, because the number may belong to another file by then.
#[derive(Debug)]
pub(crate) struct ProcessFile {
    file: ManuallyDrop<File>,
    generation: u32,
    watched: Option<usize>,
}

impl ProcessFile {
    pub(crate) fn new(file: File) -> Self {
        watch_forks();
        let watched = WATCHED.iter().position(|entry| {
            entry.compare_exchange(NONE, file.as_raw_fd(), Ordering::Relaxed, Ordering::Relaxed).is_ok()
        });
        Self { file: ManuallyDrop::new(file), generation: fork_generation(), watched }
    }

    /// Whether this is a forked child's copy, whose file is closed.
    pub(crate) fn forked(&self) -> bool {
        self.generation != fork_generation()
    }
}

impl Deref for ProcessFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl Drop for ProcessFile {
    fn drop(&mut self) {
        if self.forked() {
            return;
        }
        if let Some(index) = self.watched {
            WATCHED[index].store(NONE, Ordering::Relaxed);
        }
        // SAFETY: dropped here and nowhere else; `self` is not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.file) };
    }
}

/// A value of this process alone: a forked child makes its own at first use.
///
/// The parent's cannot serve there: a lock inside may be taken by a thread that does not exist in the child. It is
/// kept untouched beside the child's own, and never dropped there: its threads do not exist in the child.
#[derive(Debug)]
pub(crate) struct PerProcess<T> {
    generation: u32,
    value: ManuallyDrop<T>,
    next: OnceLock<Box<PerProcess<T>>>,
}

impl<T> PerProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        watch_forks();
        Self { generation: fork_generation(), value: ManuallyDrop::new(value), next: OnceLock::new() }
    }

    /// This process's value, made by `make` when it has none yet.
    pub(crate) fn get_or_make(&self, make: impl Fn() -> T) -> &T {
        let generation = fork_generation();
        let mut node = self;
        while node.generation != generation {
            node = node.next.get_or_init(|| Box::new(Self::new(make())));
        }
        &node.value
    }

    /// This process's value; `None` in a forked child that has made none.
    pub(crate) fn get(&self) -> Option<&T> {
        let generation = fork_generation();
        let mut node = self;
        while node.generation != generation {
            node = node.next.get()?;
        }
        Some(&node.value)
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        if self.generation == fork_generation() {
            // SAFETY: dropped here and nowhere else; `self` is not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

fn watch_forks() {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        // SAFETY: `in_child` only uses atomics and close(2), and stays valid as long as this library is loaded.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    for entry in &WATCHED {
        let fd = entry.swap(NONE, Ordering::Relaxed);
        if fd != NONE {
            // SAFETY: the number was registered by its owner, which will not touch it again in this process.
            unsafe { libc::close(fd) };
        }
    }
}
