//! Who has, and who waits for, the whole-file lock of a file: `/proc/locks` (`proc_locks(5)`).
//!
//! A hint: locks of processes in other pid namespaces do not show, nor does a process that tries again and again
//! instead of waiting, and the file may be unreadable altogether.

use std::fs;
use std::path::Path;

use super::file::Identity;
use super::lock::LockMode;

/// One line of `/proc/locks` about the file that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LockLine {
    /// Who asked for the lock; it may be dead, while a child that shares its handle still has the lock.
    pub(crate) pid: u32,
    pub(crate) mode: LockMode,
    /// Still asleep in the call.
    pub(crate) waiting: bool,
}

/// Every whole-file lock on `identity` that this process may see, of each process once; empty when the kernel does not tell.
///
/// The kernel writes the list page by page, and repeats lines where it changes meanwhile.
pub(crate) fn file_lock_lines(identity: Identity) -> Vec<LockLine> {
    let text = fs::read("/proc/locks").unwrap_or_default();
    once(String::from_utf8_lossy(&text).lines().filter_map(|line| parse(line, identity)))
}

fn once(lines: impl Iterator<Item = LockLine>) -> Vec<LockLine> {
    let mut found = Vec::new();
    for line in lines {
        if !found.contains(&line) {
            found.push(line);
        }
    }
    found
}

/// The command name of a process; `None` when it is gone or hidden.
pub(crate) fn command_name(pid: u32) -> Option<String> {
    let text = fs::read(format!("/proc/{pid}/comm")).ok()?;
    Some(String::from_utf8_lossy(&text).trim_end_matches('\n').to_owned())
}

/// Whether a process of that number lives in this pid namespace.
pub(crate) fn process_exists(pid: u32) -> bool {
    Path::new("/proc").join(pid.to_string()).exists()
}

/// `1: FLOCK  ADVISORY  WRITE 708 00:1a:5 0 EOF`; a waiter has `->` after the number.
fn parse(line: &str, identity: Identity) -> Option<LockLine> {
    let mut words = line.split_ascii_whitespace().skip(1).peekable();
    let waiting = words.next_if_eq(&"->").is_some();
    if words.next()? != "FLOCK" {
        return None;
    }
    let mode = match words.nth(1)? {
        "READ" => LockMode::Shared,
        "WRITE" => LockMode::Exclusive,
        _ => return None,
    };
    let pid = words.next()?.parse().ok()?;
    let mut file = words.next()?.split(':');
    let major = u32::from_str_radix(file.next()?, 16).ok()?;
    let minor = u32::from_str_radix(file.next()?, 16).ok()?;
    let inode: u64 = file.next()?.parse().ok()?;
    let same = inode == identity.inode && libc::makedev(major, minor) == identity.device;
    same.then_some(LockLine { pid, mode, waiting })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: Identity = Identity { device: 0x1a, inode: 77, size: 0 };

    #[test]
    fn holders_and_waiters_of_one_file_are_told_apart() {
        let held = "4: FLOCK  ADVISORY  WRITE 708 00:1a:77 0 EOF";
        let waits = "4:  -> FLOCK  ADVISORY  READ 709 00:1a:77 0 EOF";

        let pid_708 = LockLine { pid: 708, mode: LockMode::Exclusive, waiting: false };
        assert_eq!(parse(held, FILE), Some(pid_708));
        let pid_709 = LockLine { pid: 709, mode: LockMode::Shared, waiting: true };
        assert_eq!(parse(waits, FILE), Some(pid_709));
    }

    #[test]
    fn a_line_that_the_kernel_repeats_is_one() {
        let waits = "4:  -> FLOCK  ADVISORY  READ 709 00:1a:77 0 EOF";
        let again = "9:  -> FLOCK  ADVISORY  READ 709 00:1a:77 0 EOF";
        let holds = "5: FLOCK  ADVISORY  READ 709 00:1a:77 0 EOF";

        let lines = once([waits, again, holds].into_iter().filter_map(|line| parse(line, FILE)));

        assert_eq!(lines.iter().map(|line| line.waiting).collect::<Vec<_>>(), [true, false]);
    }

    #[test]
    fn other_files_other_kinds_and_broken_lines_are_passed_over() {
        for line in [
            "1: FLOCK  ADVISORY  WRITE 708 00:1a:78 0 EOF",
            "1: FLOCK  ADVISORY  WRITE 708 00:1b:77 0 EOF",
            "1: OFDLCK ADVISORY  WRITE -1 00:1a:77 0 EOF",
            "1: FLOCK  ADVISORY  WRITE -1 00:1a:77 0 EOF",
            "1: FLOCK",
            "",
        ] {
            assert_eq!(parse(line, FILE), None, "{line:?}");
        }
    }
}
