//! Locks that the kernel drops at the death of their owner: flock(2) on a file, OFD locks on bytes (fcntl(2)).
//!
//! Both belong to the open file description, not to the process: another handle of the same process conflicts, and
//! closing an unrelated handle drops nothing. POSIX `F_SETLK` locks do the opposite and are not used anywhere.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// How a lock is held: several may share, one excludes all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LockMode {
    Shared,
    Exclusive,
}

/// Take the whole-file lock. `Ok(false)`: somebody else has it and `wait` is false.
///
/// # Errors
/// `Interrupted` when a signal ended the wait: whoever kicked it decides what follows.
pub(crate) fn lock_file(file: &File, mode: LockMode, wait: bool) -> io::Result<bool> {
    let operation = match mode {
        LockMode::Shared => libc::LOCK_SH,
        LockMode::Exclusive => libc::LOCK_EX,
    };
    let flags = if wait { operation } else { operation | libc::LOCK_NB };
    // SAFETY: a plain system call on a descriptor that `file` keeps open.
    busy_is_false(unsafe { libc::flock(file.as_raw_fd(), flags) })
}

/// Drop the whole-file lock of this handle; harmless when there is none.
pub(crate) fn unlock_file(file: &File) -> io::Result<()> {
    // SAFETY: a plain system call on a descriptor that `file` keeps open.
    busy_is_false(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_UN) }).map(|_| ())
}

/// Lock the byte at `offset`, which may lie past the end. `Ok(false)`: taken by another handle and `wait` is false.
///
/// # Errors
/// `Interrupted` when a signal ended the wait.
pub(crate) fn lock_byte(file: &File, offset: i64, mode: LockMode, wait: bool) -> io::Result<bool> {
    let kind = match mode {
        LockMode::Shared => libc::F_RDLCK,
        LockMode::Exclusive => libc::F_WRLCK,
    };
    let mut lock = byte_lock(kind, offset);
    let command = if wait { libc::F_OFD_SETLKW } else { libc::F_OFD_SETLK };
    // SAFETY: `lock` outlives the call, and `file` keeps the descriptor open.
    busy_is_false(unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) })
}

/// Unlock the byte at `offset` of this handle; harmless when there is no lock.
pub(crate) fn unlock_byte(file: &File, offset: i64) -> io::Result<()> {
    let mut lock = byte_lock(libc::F_UNLCK, offset);
    // SAFETY: `lock` outlives the call, and `file` keeps the descriptor open.
    busy_is_false(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) }).map(|_| ())
}

/// How another handle holds the byte at `offset`; `None` when nobody else does. Takes nothing itself.
pub(crate) fn byte_lock_held(file: &File, offset: i64) -> io::Result<Option<LockMode>> {
    Ok(match i32::from(conflicting(file, offset, 1)?.l_type) {
        libc::F_RDLCK => Some(LockMode::Shared),
        libc::F_WRLCK => Some(LockMode::Exclusive),
        _ => None,
    })
}

/// A lock that another handle has somewhere in the `length` bytes from `start`, as its own start and length (0: to the
/// end of all files); `None` when there is none. Which one of several is the kernel's choice.
pub(crate) fn byte_lock_in(file: &File, start: i64, length: i64) -> io::Result<Option<(i64, i64)>> {
    let lock = conflicting(file, start, length)?;
    Ok((i32::from(lock.l_type) != libc::F_UNLCK).then_some((lock.l_start, lock.l_len)))
}

/// Whether the kernel knows OFD locks at all: some sandboxes refuse them. `offset` is any byte.
pub(crate) fn byte_locks_work(file: &File, offset: i64) -> io::Result<bool> {
    match byte_lock_held(file, offset) {
        Ok(_) => Ok(true),
        Err(error) => match error.raw_os_error() {
            Some(libc::EINVAL | libc::ENOSYS | libc::EPERM | libc::EOPNOTSUPP) => Ok(false),
            _ => Err(error),
        },
    }
}

/// One of the locks of other handles that a write lock of these bytes would meet; of the type `F_UNLCK` when there is none.
fn conflicting(file: &File, start: i64, length: i64) -> io::Result<libc::flock> {
    let mut lock = libc::flock { l_len: length, ..byte_lock(libc::F_WRLCK, start) };
    // SAFETY: `lock` outlives the call, and `file` keeps the descriptor open.
    busy_is_false(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) })?;
    Ok(lock)
}

fn byte_lock(kind: i32, offset: i64) -> libc::flock {
    libc::flock {
        l_type: i16::try_from(kind).unwrap_or(i16::MAX),
        l_whence: i16::try_from(libc::SEEK_SET).unwrap_or(i16::MAX),
        l_start: offset,
        l_len: 1,
        l_pid: 0, // OFD locks demand 0 here (fcntl(2)).
    }
}

fn busy_is_false(result: libc::c_int) -> io::Result<bool> {
    if result != -1 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(error),
    }
}
