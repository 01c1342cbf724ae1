//! What differs between operating systems, one file a platform; nothing here decides, retries or times out.
//!
//! Each platform supplies:
//!
//! | name | what it does |
//! |---|---|
//! | `open_or_create` | open a file that others may have planted, or create it with an exact mode |
//! | `open_existing` | open a file for reading, if there is one |
//! | `network_file_system` | whether a file lies on another machine |
//! | `check_directory` | tell "nobody yet" from "no such place" |
//! | `reserve` | give a file its size and its memory, so that a later store cannot fault |
//! | `Identity` | which file a handle or a path is |
//! | `Mapping` | a shared mapping of the first bytes of a file, whose loss the process survives |
//! | `keep_guarding` | see to that again, in case that another part of the program took it over |
//! | `ProcessFile` | a file that a forked child neither keeps open nor unlocks |
//! | `lock_file`, `unlock_file` | the whole-file lock that dies with its last handle |
//! | `lock_byte`, `unlock_byte`, `byte_lock_held`, `byte_lock_in` | locks on single bytes, past the end of the file too |
//! | `byte_locks_work` | whether the system has them |
//! | `PerProcess` | a value that a forked child makes anew |
//! | `file_lock_lines`, `process_exists`, `command_name` | who has and who waits for a whole-file lock, as far as the system tells |
//! | `monotonic_us` | the clock that judges |
//! | `sleep_on`, `wake_sleepers` | wait for a change of a word that processes share |
//! | `ThreadHandle` | end the blocking call of one thread |
//! | `Event` | a handle that an event loop can wait for |
//! | `adopt_orphans` | become the parent of descendants that lose theirs |
//! | `process_identity`, `boot_hash` | who this process is, which boot this is |
//! | `random_u64` | a number that nobody else drew |

#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
pub(crate) use linux::*;

#[cfg(not(target_os = "linux"))]
compile_error!("ocgpu runs on Linux only so far: `rust/core/src/sys` has no file for this platform");
#[cfg(not(target_pointer_width = "64"))]
compile_error!(
    "ocgpu needs a 64-bit platform: the segment's layout assumes 8-byte alignment of 64-bit fields"
);
#[cfg(not(target_endian = "little"))]
compile_error!("ocgpu needs a little-endian platform: the segment's layout is little-endian");
