//! Who waits and who shares, for people: records in the gate file, each true as long as its author holds its byte.

use super::LeaseMode;

/// Where the hints begin in the gate file.
pub(super) const HINTS_AT: usize = 256;
/// How many fit into the file; who comes later is not named.
pub(super) const HINT_COUNT: usize = 60;
const NAME_BYTES: usize = 40;
const HELD: u32 = 1 << 8;

/// Who writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Author {
    pub(super) pid: u32,
    /// The last bits of the pid namespace's number: a pid means nothing outside of it.
    pub(super) namespace: u16,
    /// UTF-8, filled up with zeros.
    pub(super) name: [u8; NAME_BYTES],
}

impl Author {
    pub(super) fn new(pid: u32, pid_namespace: u64, name: &str) -> Self {
        let mut bytes = [0; NAME_BYTES];
        let mut length = name.len().min(NAME_BYTES);
        while !name.is_char_boundary(length) {
            length -= 1;
        }
        bytes[..length].copy_from_slice(&name.as_bytes()[..length]);
        Self { pid, namespace: short(pid_namespace), name: bytes }
    }

    /// The name; whatever bytes stand there.
    pub(super) fn name(&self) -> String {
        let end = self.name.iter().position(|byte| *byte == 0).unwrap_or(NAME_BYTES);
        String::from_utf8_lossy(&self.name[..end]).into_owned()
    }

    /// Whether its pid means something in this namespace.
    pub(super) fn is_of(&self, pid_namespace: u64) -> bool {
        self.namespace == short(pid_namespace)
    }
}

/// What its author does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claimed {
    Wanted(LeaseMode),
    Held(LeaseMode),
}

/// One record.
///
/// | offset | field |
/// |---|---|
/// | 0 | of a waiter the ticket, of a holder the pid that took the lock, u64 |
/// | 8 | since, microseconds of the wall clock, i64 |
/// | 16 | pid u32 |
/// | 20 | mode u32: 1 shared, 2 exclusive; + 256 held, not wanted; the upper half: of the pid namespace's number |
/// | 24 | name, 40 bytes |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hint {
    pub(super) ticket: u64,
    pub(super) since_us: i64,
    pub(super) claimed: Claimed,
    pub(super) author: Author,
}

impl Hint {
    pub(super) const BYTES: usize = 64;

    /// Where the hint of this number stands in the file.
    pub(super) fn offset(index: usize) -> u64 {
        (HINTS_AT + index * Self::BYTES) as u64
    }

    /// Whether its author waits.
    pub(super) fn waits(&self) -> bool {
        matches!(self.claimed, Claimed::Wanted(_))
    }

    pub(super) fn to_bytes(self) -> [u8; Self::BYTES] {
        let (mode, held) = match self.claimed {
            Claimed::Wanted(mode) => (mode, 0),
            Claimed::Held(mode) => (mode, HELD),
        };
        let mode = match mode {
            LeaseMode::Shared => 1,
            LeaseMode::Exclusive => 2,
        };
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.ticket.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.since_us.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.author.pid.to_le_bytes());
        let word = mode | held | u32::from(self.author.namespace) << 16;
        bytes[20..24].copy_from_slice(&word.to_le_bytes());
        bytes[24..].copy_from_slice(&self.author.name);
        bytes
    }

    /// Read any bytes: what is no hint gives none.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let word = u32::from_le_bytes(bytes.get(20..24)?.try_into().ok()?);
        let mode = match word & 0xff {
            1 => LeaseMode::Shared,
            2 => LeaseMode::Exclusive,
            _ => return None,
        };
        let pid = u32::from_le_bytes(bytes.get(16..20)?.try_into().ok()?);
        Some(Self {
            ticket: u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?),
            since_us: i64::from_le_bytes(bytes.get(8..16)?.try_into().ok()?),
            claimed: if word & HELD == 0 { Claimed::Wanted(mode) } else { Claimed::Held(mode) },
            author: Author {
                pid: if pid == 0 { return None } else { pid },
                namespace: short(u64::from(word >> 16)),
                name: bytes.get(24..Self::BYTES)?.try_into().ok()?,
            },
        })
    }
}

fn short(pid_namespace: u64) -> u16 {
    u16::try_from(pid_namespace & 0xffff).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_hint_reads_back_what_was_written(
            ticket in any::<u64>(), since_us in any::<i64>(), pid in 1_u32.., namespace in any::<u64>(),
            name in ".{0,60}", (shared, held) in any::<(bool, bool)>()
        ) {
            let mode = if shared { LeaseMode::Shared } else { LeaseMode::Exclusive };
            let claimed = if held { Claimed::Held(mode) } else { Claimed::Wanted(mode) };
            let hint = Hint { ticket, since_us, claimed, author: Author::new(pid, namespace, &name) };

            let read = Hint::parse(&hint.to_bytes());

            prop_assert_eq!(read, Some(hint));
            prop_assert!(hint.author.is_of(namespace));
            let until_zero = name.split('\0').next().unwrap_or_default();
            prop_assert!(until_zero.starts_with(&hint.author.name()));
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = Hint::parse(&bytes).map(|hint| hint.author.name());
        }
    }
}
