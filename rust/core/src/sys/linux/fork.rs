//! What a forked child must not keep.
//!
//! flock and OFD locks belong to the open file description, which a child shares: it would keep a dead parent's locks
//! alive, and an unlock in the child would free the parent's. So the child closes its copies at once, in a
//! `pthread_atfork` handler, and unlocks nothing. The handler only reads atomics and calls close(2), both of which are
//! allowed there (signal-safety(7)). A fork waits for the microseconds between an open and its entry in the table, and
//! between the end of an entry and the close, so that no child comes with a file that the table does not name.
#![expect(clippy::disallowed_types, reason = "a signal-safe table is not something that loom could model")]

use std::cell::UnsafeCell;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Once, OnceLock};

use super::fault;
use super::table::{Entry, Table};

/// Descriptors to close in a child, each raised by one: 0 marks a free place.
static WATCHED: Table = Table::new();
static GENERATION: AtomicU32 = AtomicU32::new(0);
static FORK_LOCK: ForkLock = ForkLock(UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER));

/// Held by whoever forks, and by whoever must not be forked for a moment.
///
/// A plain pthread mutex, because the handlers around fork(2) lock and unlock it in different functions.
struct ForkLock(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: the mutex is only ever given to the pthread functions, which are made for that.
unsafe impl Sync for ForkLock {}

impl ForkLock {
    fn lock(&self) {
        // SAFETY: statically initialised, never moved, never destroyed.
        unsafe { libc::pthread_mutex_lock(self.0.get()) };
    }

    fn unlock(&self) {
        // SAFETY: locked by this thread, or in a child by the thread that it continues.
        unsafe { libc::pthread_mutex_unlock(self.0.get()) };
    }
}

/// Run `critical` alone, and without a fork of this process in the middle of it. It must be short, must not fork, and
/// must not come here again.
pub(super) fn exclusively<T>(critical: impl FnOnce() -> T) -> T {
    struct Unlock;
    impl Drop for Unlock {
        fn drop(&mut self) {
            FORK_LOCK.unlock();
        }
    }
    watch_forks();
    FORK_LOCK.lock();
    let _unlock = Unlock;
    critical()
}

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
    entry: Entry,
}

impl ProcessFile {
    /// Open a file by `open`, between which and the watch for forks there is no fork.
    pub(crate) fn open(mut open: impl FnMut() -> io::Result<File>) -> io::Result<Self> {
        loop {
            let opened: io::Result<_> = exclusively(|| {
                let file = open()?;
                Ok(watch(&file).map(|entry| (file, entry)))
            });
            match opened? {
                Some((file, entry)) => {
                    return Ok(Self { file: ManuallyDrop::new(file), generation: fork_generation(), entry });
                }
                // Outside of the lock: an allocator may have a lock of its own around a fork.
                None => WATCHED.grow(),
            }
        }
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
        exclusively(|| {
            self.entry.clear();
            // SAFETY: dropped here and nowhere else; `self` is not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.file) };
        });
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

fn watch(file: &File) -> Option<Entry> {
    WATCHED.enter(usize::try_from(file.as_raw_fd()).ok()? + 1)
}

fn watch_forks() {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        // SAFETY: the handlers only use atomics, the mutex and close(2), and stay valid as long as this library is
        // loaded.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    });
}

extern "C" fn before_fork() {
    FORK_LOCK.lock();
}

extern "C" fn in_parent() {
    FORK_LOCK.unlock();
}

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    fault::forget_pages();
    for word in WATCHED.drain() {
        // SAFETY: the number was entered by its owner, which will not touch it again in this process.
        let _ = i32::try_from(word - 1).map(|fd| unsafe { libc::close(fd) });
    }
    FORK_LOCK.unlock();
}
