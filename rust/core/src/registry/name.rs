//! Names in slots: 48 bytes of atomics, for display only.

use crate::layout::NAME_SIZE;
use crate::sync::{AtomicU32, Ordering};

/// Store a name, cut on a character's boundary to 47 bytes and ended by NUL.
pub(crate) fn store(words: &[AtomicU32; NAME_SIZE / 4], name: &str) {
    let mut end = name.len().min(NAME_SIZE - 1);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    let mut bytes = [0_u8; NAME_SIZE];
    bytes[..end].copy_from_slice(&name.as_bytes()[..end]);
    for (word, chunk) in words.iter().zip(bytes.as_chunks::<4>().0) {
        word.store(u32::from_le_bytes(*chunk), Ordering::Relaxed);
    }
}

/// Read a name that any process may have written: what is not UTF-8 is replaced, control characters are dropped.
pub(crate) fn load(words: &[AtomicU32; NAME_SIZE / 4]) -> String {
    let mut bytes = [0_u8; NAME_SIZE];
    for (word, chunk) in words.iter().zip(bytes.as_chunks_mut::<4>().0) {
        *chunk = word.load(Ordering::Relaxed).to_le_bytes();
    }
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(NAME_SIZE);
    String::from_utf8_lossy(&bytes[..end]).chars().filter(|char| !char.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words() -> [AtomicU32; 12] {
        [const { AtomicU32::new(0) }; 12]
    }

    #[test]
    fn a_long_name_is_cut_between_characters() {
        let words = words();

        store(&words, &"é".repeat(30));

        assert_eq!(load(&words), "é".repeat(23));
    }

    #[test]
    fn hostile_bytes_become_harmless_text() {
        let words = words();
        words[0].store(u32::from_le_bytes([0xff, 0x1b, b'[', b'm']), Ordering::Relaxed);

        assert_eq!(load(&words), "\u{fffd}[m");
    }
}
