//! Linux: flock and OFD byte locks, regular files in tmpfs, `/proc`.

mod clock;
mod fault;
mod file;
mod fork;
mod futex;
mod holders;
mod lock;
mod mapping;
mod process;
mod signal;
mod table;

pub(crate) use clock::monotonic_us;
pub(crate) use fault::keep_guarding;
pub(crate) use file::{
    Identity, check_directory, is_symbolic_link, network_file_system, open_existing, open_or_create, reserve,
};
pub(crate) use fork::{PerProcess, ProcessFile};
pub(crate) use futex::{sleep_on, wake_sleepers};
pub(crate) use holders::{LockLine, command_name, file_lock_lines, process_exists};
pub(crate) use lock::{
    LockMode, byte_lock_held, byte_lock_in, byte_locks_work, lock_byte, lock_file, unlock_byte, unlock_file,
};
pub(crate) use mapping::Mapping;
pub(crate) use process::{ProcessIdentity, adopt_orphans, boot_hash, process_identity, random_u64};
pub(crate) use signal::{Event, ThreadHandle};
