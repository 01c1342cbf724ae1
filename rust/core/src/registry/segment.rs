//! Creating, validating and mapping a segment.
//!
//! Every step may be the last of a process that dies, and may be repeated by the next one: the init lock is the
//! kernel's, the constants are the same whoever writes them, and the magic is written last.

use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::error::{Error, Result};
use crate::key::GpuKey;
use crate::layout::{
    EXT_HEADER_SIZE, EXT_MAGIC, EXT_OFFSET, EXT_SLOT_STRIDE, EXT_VERSION, MAGIC, SEED_SIZE, SEGMENT_SIZE,
    SLOT_COUNT_STORED, Segment, VERSION,
};
use crate::place::Place;
use crate::registry::{LockKind, Locks, SegmentPath, extended};
use crate::sync::Ordering;
use crate::sys::{
    Identity, Mapping, ProcessFile, boot_hash, check_directory, is_symbolic_link, open_or_create, random_u64,
};

/// Restarts when the file behind the name is replaced while we open it.
const RESTARTS_MAX: u32 = 100;
const STUCK: &str = "another process holds the init lock for ever; end it, then try again";

/// A validated segment, mapped for as long as this lives.
#[derive(Debug)]
pub(crate) struct MappedSegment {
    file: ProcessFile,
    mapping: Mapping,
    identity: Identity,
    locks: Locks,
}

impl MappedSegment {
    /// Open the segment, or create it.
    pub(crate) fn open(place: &Place, path: &SegmentPath) -> Result<Self> {
        for _ in 0..RESTARTS_MAX {
            adopt_plain(path)?;
            let file = ProcessFile::open(|| open_or_create(path.main(), place.mode()))
                .map_err(|error| unavailable(path.main(), &error))?;
            let locks =
                Locks::probe(&file, path, place.mode()).map_err(|error| unavailable(path.main(), &error))?;
            locks
                .initialising(&file, || initialise(&file, path.main()))
                .map_err(|error| unavailable(path.main(), &error))?
                .ok_or_else(|| reason(path.main(), STUCK.into()))??;
            let identity = Identity::of(&file).map_err(|error| unavailable(path.main(), &error))?;
            let mapping =
                Mapping::new(&file, SEGMENT_SIZE).map_err(|error| unavailable(path.main(), &error))?;
            let segment = Self { file, mapping, identity, locks };
            if segment.still_named(path) {
                path.link_plain().map_err(|error| unavailable(path.main(), &error))?;
                return Ok(segment);
            }
        }
        Err(reason(path.main(), "the file behind the name is replaced again and again".into()))
    }

    /// Open the segment only if it is there: `None` when nobody ever joined.
    pub(crate) fn open_existing(place: &Place, path: &SegmentPath) -> Result<Option<Self>> {
        adopt_plain(path)?;
        match Identity::at(path.main()) {
            Ok(None) => {
                check_directory(path.main()).map(|()| None).map_err(|error| unavailable(path.main(), &error))
            }
            Ok(Some(_)) => Self::open(place, path).map(Some),
            Err(error) => Err(unavailable(path.main(), &error)),
        }
    }

    /// The bytes, as atomics.
    pub(crate) fn bytes(&self) -> &Segment {
        // SAFETY: the mapping is page-aligned, `SEGMENT_SIZE` long (asserted against `Segment`) and lives as long as
        // `self`; every field is an atomic, for which all bit patterns are legal.
        unsafe { self.mapping.start().cast::<Segment>().as_ref() }
    }

    /// The handle that locks are taken through.
    pub(crate) fn file(&self) -> &ProcessFile {
        &self.file
    }

    /// Its name, for messages.
    pub(crate) fn path(&self) -> &Path {
        self.locks.path()
    }

    /// The locks of its slots.
    pub(crate) fn locks(&self) -> &Locks {
        &self.locks
    }

    /// Whether our extension means here what this release thinks: else the seed's part alone is read and written.
    pub(crate) fn extended(&self) -> bool {
        extended(self.bytes())
    }

    /// Whether the file has all its bytes: where it was cut, the mapping may be this process's own zeros.
    pub(crate) fn whole(&self) -> bool {
        Identity::of(&self.file).is_ok_and(|now| now.size >= SEGMENT_SIZE as u64)
    }

    /// Write the constants of the header anew where somebody overwrote them: they were right when we came.
    pub(crate) fn restore_header(&self) {
        let header = &self.bytes().header;
        let first = u32::from_le_bytes([MAGIC[0], MAGIC[1], MAGIC[2], MAGIC[3]]);
        // What follows the fifth letter is not ours to know.
        let second = header.magic[1].load(Ordering::Relaxed) & !0xff | u32::from(MAGIC[4]);
        for (word, right) in [
            (&header.magic[0], first),
            (&header.magic[1], second),
            (&header.version, VERSION),
            (&header.slot_count, SLOT_COUNT_STORED),
        ] {
            if word.load(Ordering::Relaxed) != right {
                word.store(right, Ordering::Relaxed);
            }
        }
    }

    /// Whether the name still leads to this file and the file is still whole: else newcomers meet elsewhere.
    pub(crate) fn still_named(&self, path: &SegmentPath) -> bool {
        let named = matches!(Identity::at(path.main()), Ok(Some(named)) if named.same_file(self.identity));
        // Newcomers that know only the other name come to us as well; where it cannot be mended, ours still leads here.
        let _ = named.then(|| path.link_plain());
        named && self.whole() && self.locks.still_named()
    }
}

/// Which locks the segment of a GPU has; `None` when there is no segment.
///
/// # Errors
/// `RegistryUnavailable` when there is one and it cannot be used.
pub fn lock_kind(place: &Place, key: &GpuKey) -> Result<Option<LockKind>> {
    let segment = MappedSegment::open_existing(place, &SegmentPath::new(place, key))?;
    Ok(segment.map(|segment| segment.locks.kind()))
}

fn adopt_plain(path: &SegmentPath) -> Result<()> {
    path.adopt_plain().map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => reason(
            path.plain(),
            format!("{error}; another user made it and alone may write to it: have its owner `chmod 666` it, or set `OCGPU_DIR`"),
        ),
        _ => unavailable(path.main(), &error),
    })
}

fn initialise(file: &ProcessFile, path: &Path) -> Result<()> {
    let io = |error: io::Error| unavailable(path, &error);
    let size = Identity::of(file).map_err(io)?.size;
    if size > 0 && size < SEED_SIZE as u64 {
        return Err(reason(
            path,
            format!(
                "{size} bytes are too few for a segment; delete it and the `opencoti-gpu-…` beside it when nobody uses it"
            ),
        ));
    }
    if size < SEGMENT_SIZE as u64 {
        crate::sys::reserve(file, SEGMENT_SIZE as u64).map_err(io)?;
    }
    let mut header = [0_u8; 16];
    file.read_exact_at(&mut header, 0).map_err(io)?;
    if header[..5] == [0; 5] {
        file.write_all_at(&u32::to_le_bytes(SLOT_COUNT_STORED), 12).map_err(io)?;
        file.write_all_at(&VERSION.to_le_bytes(), 8).map_err(io)?;
        file.write_all_at(b"OCGPU\0\0\0", 0).map_err(io)?;
    } else {
        validate(&header).map_err(|what| reason(path, what))?;
    }
    initialise_extension(file).map_err(io)
}

fn validate(header: &[u8; 16]) -> std::result::Result<(), String> {
    let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    if header[..5] != MAGIC {
        return Err("the file is not a segment (wrong magic); delete it and the `opencoti-gpu-…` beside it when nobody uses it".into());
    }
    if word(8) != VERSION {
        return Err(format!(
            "segment version {}, this ocgpu knows {VERSION}; use one release everywhere",
            word(8)
        ));
    }
    // With more slots the seed's part would reach into ours; with fewer, peers of the seed would not see all of us.
    if word(12) != SLOT_COUNT_STORED {
        return Err(format!(
            "{} slots, this ocgpu knows {SLOT_COUNT_STORED}; use one release everywhere",
            word(12)
        ));
    }
    Ok(())
}

/// Write the extension's header where there is none. Another one than ours is a later release's, and left alone.
fn initialise_extension(file: &ProcessFile) -> io::Result<()> {
    let mut magic = [0_u8; 8];
    file.read_exact_at(&mut magic, EXT_OFFSET)?;
    if magic != [0; 8] {
        return Ok(());
    }
    let mut header = [0_u8; EXT_HEADER_SIZE as usize];
    header[8..12].copy_from_slice(&EXT_VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&EXT_HEADER_SIZE.to_le_bytes());
    header[16..20].copy_from_slice(&EXT_SLOT_STRIDE.to_le_bytes());
    header[20..24].copy_from_slice(&u32::to_le_bytes(SLOT_COUNT_STORED));
    header[32..40].copy_from_slice(&random_u64().to_le_bytes());
    header[40..48].copy_from_slice(&boot_hash().to_le_bytes());
    file.write_all_at(&header[8..], EXT_OFFSET + 8)?;
    file.write_all_at(&EXT_MAGIC.to_le_bytes(), EXT_OFFSET)
}

fn unavailable(path: &Path, error: &io::Error) -> Error {
    let remedy = match error.kind() {
        io::ErrorKind::NotFound => "; set `OCGPU_DIR` to a directory that exists and that all peers share",
        io::ErrorKind::PermissionDenied => {
            "; another user made it with `OCGPU_SHARE=user`, or the directory is not writable: set `OCGPU_DIR`"
        }
        io::ErrorKind::StorageFull => "; the file system is full: free 4 KiB or set `OCGPU_DIR`",
        _ if is_symbolic_link(error) => "; a symbolic link stands there: remove it",
        _ => "",
    };
    reason(path, format!("{error}{remedy}"))
}

fn reason(path: &Path, reason: String) -> Error {
    Error::RegistryUnavailable { path: path.to_owned(), reason }
}
