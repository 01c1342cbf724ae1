//! Linux: flock and OFD byte locks, regular files in tmpfs, `/proc`.

mod file;
mod fork;
mod lock;
mod mapping;
mod process;

pub(crate) use file::{Identity, OpenedFile, is_symbolic_link, open_or_create, reserve};
pub(crate) use fork::{ProcessFile, fork_generation};
pub(crate) use lock::{LockMode, byte_lock_held, lock_byte, lock_file, unlock_byte, unlock_file};
pub(crate) use mapping::Mapping;
pub(crate) use process::{ProcessIdentity, boot_hash, process_identity, random_u64};
