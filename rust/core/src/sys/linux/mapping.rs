//! A shared mapping of a file's first bytes.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use super::fault::Guard;
use super::fork::fork_generation;

/// `length` bytes of a file, mapped shared, readable and writable, until dropped.
///
/// Where the file is cut, the bytes turn to zeros that no other process sees. A forked child does not have it: a copy would
/// keep the file's description open, and with it the parent's locks, for as long as the child lives.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    length: usize,
    /// `None` once the mapping ends.
    guard: Option<Guard>,
    generation: u32,
}

// SAFETY: the bytes are shared with other processes anyway; whoever reads them does so through atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above; `Mapping` hands out an address only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Map the first `length` bytes, at most a page, which is 4,096 bytes or more.
    pub(crate) fn new(file: &File, length: usize) -> io::Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases no Rust object.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(address.cast()).ok_or_else(io::Error::last_os_error)?;
        let mapping =
            Self { start, length, guard: Some(Guard::new(address as usize)), generation: fork_generation() };
        // SAFETY: the range is the one mapped above.
        match unsafe { libc::madvise(address, length, libc::MADV_DONTFORK) } {
            0 => Ok(mapping),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// First byte of the mapping; page-aligned, valid for as long as `self` lives.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.generation != fork_generation() {
            // Not mapped here; the address may be another mapping's.
            std::mem::forget(self.guard.take());
            return;
        }
        // First: the address may be another mapping's as soon as ours has ended.
        self.guard = None;
        // SAFETY: the range is the one that `mmap` returned, and nothing can refer to it after `self`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}
