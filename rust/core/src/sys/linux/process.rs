//! Who this process is, in words that hold across pid namespaces and pid reuse (proc(5)).

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

/// What tells this process from any other of the machine, past and present.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProcessIdentity {
    pub(crate) pid: u32,
    /// Inode of the pid namespace; 0 when it cannot be read.
    pub(crate) pid_namespace: u64,
    /// Start time in clock ticks since boot; 0 when it cannot be read.
    pub(crate) start_ticks: u64,
    pub(crate) uid: u32,
}

/// Read from `/proc` where it is mounted; what cannot be read is 0.
pub(crate) fn process_identity() -> ProcessIdentity {
    ProcessIdentity {
        pid: std::process::id(),
        pid_namespace: fs::metadata("/proc/self/ns/pid").map_or(0, |meta| meta.ino()),
        start_ticks: fs::read_to_string("/proc/self/stat")
            .ok()
            .and_then(|stat| start_ticks(&stat))
            .unwrap_or(0),
        // SAFETY: getuid has no arguments and cannot fail.
        uid: unsafe { libc::getuid() },
    }
}

/// Become the parent of all descendants whose own parent ends (`PR_SET_CHILD_SUBREAPER`, prctl(2)).
pub(crate) fn adopt_orphans() -> io::Result<()> {
    // SAFETY: a plain system call without pointers.
    match unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// FNV-1a of the kernel's boot id: differs after a reboot. 0 when it cannot be read.
pub(crate) fn boot_hash() -> u64 {
    fs::read("/proc/sys/kernel/random/boot_id").map_or(0, |id| {
        id.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        })
    })
}

/// A random number other than 0, from the kernel (getrandom(2)).
pub(crate) fn random_u64() -> u64 {
    let mut bytes = [0_u8; 8];
    loop {
        // SAFETY: the buffer is 8 bytes long and outlives the call.
        let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        let value = u64::from_ne_bytes(bytes);
        if got == 8 && value != 0 {
            return value;
        }
    }
}

/// Field 22 of `/proc/<pid>/stat`; the command in field 2 may hold spaces and parentheses.
fn start_ticks(stat: &str) -> Option<u64> {
    let after_command = &stat[stat.rfind(')')? + 1..];
    after_command.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_ticks_survive_a_command_with_spaces_and_parentheses() {
        let stat = "7 (a) b (c)) S 1 7 7 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 4242 1 1";

        assert_eq!(start_ticks(stat), Some(4242));
    }
}
