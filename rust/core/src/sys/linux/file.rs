//! Opening files in directories where others may write.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Which file this is, and how long: two handles with equal `device` and `inode` share their locks and bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) size: u64,
}

impl Identity {
    /// The file behind an open handle.
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        file.metadata().map(|meta| Self::from_metadata(&meta))
    }

    /// The file that a path names now, without following a symbolic link; `None` when there is none.
    pub(crate) fn at(path: &Path) -> io::Result<Option<Self>> {
        match path.symlink_metadata() {
            Ok(meta) => Ok(Some(Self::from_metadata(&meta))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether both are one file, whatever its size was when each was looked at.
    pub(crate) fn same_file(self, other: Self) -> bool {
        self.device == other.device && self.inode == other.inode
    }

    fn from_metadata(meta: &std::fs::Metadata) -> Self {
        Self { device: meta.dev(), inode: meta.ino(), size: meta.size() }
    }
}

/// Open `path` for reading and writing, or create it with exactly `mode`, whatever the umask.
///
/// The order is: open without creating, and only then create exclusively. With `fs.protected_regular` a plain
/// `O_CREAT` on another user's file in a sticky directory is refused even to root (proc(5)). A symbolic link is
/// refused, a FIFO does not block, and what is not a regular file is an error.
pub(crate) fn open_or_create(path: &Path, mode: u32) -> io::Result<File> {
    // A file can vanish between the two opens, and appear between them: both are tried again.
    for _ in 0..100 {
        match options().open(path) {
            Ok(file) => return regular(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        match options().create_new(true).mode(mode).open(path) {
            Ok(file) => {
                file.set_permissions(Permissions::from_mode(mode))?;
                return Ok(file);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("the file appears and vanishes while it is being opened"))
}

/// Open `path` for reading, never creating it; `None` when there is none. Refuses what `open_or_create` refuses.
pub(crate) fn open_existing(path: &Path) -> io::Result<Option<File>> {
    match options().write(false).open(path) {
        Ok(file) => regular(file).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether an open failed because a symbolic link stands there, which `O_NOFOLLOW` refuses.
pub(crate) fn is_symbolic_link(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ELOOP)
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC);
    options
}

/// An error unless the directory of `path` is there: a look at a file that does not exist yet says "nobody" only then.
pub(crate) fn check_directory(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |directory| directory.metadata().map(|_| ()))
}

/// The name of the network file system that a file lies on; `None` for all others. Locks there can hang, or be unknown to
/// the other machines.
pub(crate) fn network_file_system(file: &File) -> Option<&'static str> {
    let mut found = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the kernel fills `found` when it returns 0, and `file` keeps the descriptor open.
    if unsafe { libc::fstatfs(file.as_raw_fd(), found.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: filled by the call above.
    network_name(unsafe { found.assume_init() }.f_type)
}

/// Names by their magic numbers (statfs(2)), of which some are negative in 32 bits.
fn network_name(magic: i64) -> Option<&'static str> {
    match magic & 0xffff_ffff {
        0x6969 => Some("nfs"),
        0xff53_4d42 => Some("cifs"),
        0xfe53_4d42 => Some("smb2"),
        0x517b => Some("smb"),
        _ => None,
    }
}

fn regular(file: File) -> io::Result<File> {
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"))
    }
}

/// Give the file at least `length` bytes that are really there: on a full tmpfs this fails with `ENOSPC`, where
/// `ftruncate` would succeed and the first store raise `SIGBUS` (`posix_fallocate(3)`).
pub(crate) fn reserve(file: &File, length: u64) -> io::Result<()> {
    let wanted = libc::off_t::try_from(length).map_err(io::Error::other)?;
    // SAFETY: a plain system call on a descriptor that `file` keeps open.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, wanted) } {
        0 => Ok(()),
        libc::EOPNOTSUPP | libc::EINVAL => file.set_len(length),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_file_systems_are_told_from_local_ones() {
        assert_eq!(network_name(0x6969), Some("nfs"));
        assert_eq!(network_name(i64::from(0xff53_4d42_u32.cast_signed())), Some("cifs"));
        assert_eq!(network_name(0xef53), None);
        assert_eq!(network_name(0x0102_1994), None);
        let here = File::open("/proc/self/status").expect("a file");
        assert_eq!(network_file_system(&here), None);
    }
}
