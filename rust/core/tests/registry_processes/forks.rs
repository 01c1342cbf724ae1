//! Programs that fork while other threads of theirs join, leave and lease.

use std::io::Write;
use std::path::Path;

use ocgpu_core::{Lease, LeaseMode, LeaseOptions};

use crate::children::{Played, Scratch, join, say};

const FORKS: usize = 200;
/// Leases of one program, each with two files: more than one part of the table of watched files has room for.
const LEASES: usize = 300;
/// Every descriptor of the program lies below.
const DESCRIPTORS: usize = 2 * LEASES + 100;

/// Role: count the forked children that hold a file of ours.
pub(crate) fn fork_again_and_again(directory: &Path) {
    for _ in 0..2 {
        let directory = directory.to_owned();
        std::thread::spawn(move || {
            let options = LeaseOptions { mode: LeaseMode::Shared, reason: None, signals: true };
            loop {
                drop(join(&directory, "joins and leaves"));
                let lease = Lease::at_path(&directory.join("gpu.lease"), 0o600, options.clone());
                let lease = lease.expect("a legal lease");
                assert!(lease.try_acquire().expect("a usable lease"));
            }
        });
    }
    let leaks = (0..FORKS).filter(|_| fork_finds_a_file_of(directory)).count();
    say(&format!("leaks {leaks}"));
}

/// Role: more files than one part of the table has places for.
pub(crate) fn fork_with_many_files(directory: &Path) {
    let options = LeaseOptions { mode: LeaseMode::Shared, reason: None, signals: true };
    let leases: Vec<Lease> = (0..LEASES)
        .map(|_| {
            let lease = Lease::at_path(&directory.join("gpu.lease"), 0o600, options.clone());
            let lease = lease.expect("a legal lease");
            assert!(lease.try_acquire().expect("a usable lease"));
            lease
        })
        .collect();

    let found = fork_finds_a_file_of(directory);

    drop(leases);
    say(&format!("found {found}"));
}

fn fork_finds_a_file_of(directory: &Path) -> bool {
    let prefix = directory.as_os_str().as_encoded_bytes();
    // SAFETY: the child only calls readlink and _exit, which are safe there (signal-safety(7)).
    match unsafe { libc::fork() } {
        -1 => panic!("no fork: {}", std::io::Error::last_os_error()),
        0 => {
            let found = (3..DESCRIPTORS).any(|fd| opens_below(fd, prefix));
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(found)) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: `status` outlives the call, and the process is our child.
            assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
            assert!(libc::WIFEXITED(status), "a child died: {status}");
            libc::WEXITSTATUS(status) != 0
        }
    }
}

/// Without an allocation: the child of a program with threads must not ask for one.
fn opens_below(fd: usize, prefix: &[u8]) -> bool {
    let mut link = [0_u8; 64];
    write!(&mut link[..], "/proc/self/fd/{fd}\0").expect("room for a short path");
    let mut target = [0_u8; 512];
    // SAFETY: the link ends with NUL, and the target is as long as it says.
    let length = unsafe { libc::readlink(link.as_ptr().cast(), target.as_mut_ptr().cast(), target.len()) };
    usize::try_from(length).is_ok_and(|length| target[..length].starts_with(prefix))
}

#[test]
fn no_forked_child_comes_with_a_file_of_its_parents() {
    let scratch = Scratch::new("forks");

    let found = Played::start("fork again and again", &scratch.0).hear("leaks");

    assert_eq!(found, "0", "of {FORKS} children");
}

#[test]
fn a_forked_child_has_none_of_many_files_either() {
    let scratch = Scratch::new("many");

    let found = Played::start("fork with many files", &scratch.0).hear("found");

    assert_eq!(found, "false");
}
