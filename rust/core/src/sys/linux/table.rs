//! A table of words that a signal handler and a forked child may walk: it never moves, never shrinks, takes no lock.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// Words in one part of a table; a full part gets another behind it.
const PART: usize = 256;
/// What no entry can be.
const FREE: usize = 0;

/// Words other than 0, in no order. The parts live as long as the process.
pub(super) struct Table {
    words: [AtomicUsize; PART],
    next: AtomicPtr<Table>,
}

impl Table {
    pub(super) const fn new() -> Self {
        Self { words: [const { AtomicUsize::new(FREE) }; PART], next: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Enter `word`, which is not 0, where there is room; `None` when every part is full.
    pub(super) fn enter(&'static self, word: usize) -> Option<Entry> {
        self.words().find_map(|entry| {
            // Release: pairs with the Acquire of whoever walks the table.
            let taken = entry.compare_exchange(FREE, word, Ordering::Release, Ordering::Relaxed);
            taken.is_ok().then_some(Entry(entry))
        })
    }

    /// Put another part behind the last one. Allocates, which `enter` never does.
    pub(super) fn grow(&'static self) {
        let part = Box::into_raw(Box::new(Self::new()));
        let mut last = self;
        // Release: pairs with the Acquire in `next`, so that a walk finds the new part complete.
        while last.next.compare_exchange(ptr::null_mut(), part, Ordering::Release, Ordering::Relaxed).is_err()
        {
            let Some(next) = last.next() else { continue };
            last = next;
        }
    }

    /// All words, `FREE` ones too.
    fn words(&'static self) -> impl Iterator<Item = &'static AtomicUsize> {
        std::iter::successors(Some(self), |part| part.next()).flat_map(|part| part.words.iter())
    }

    fn next(&self) -> Option<&'static Self> {
        // SAFETY: null, or a part that `grow` leaked, which nobody frees. Acquire: pairs with the Release there.
        unsafe { self.next.load(Ordering::Acquire).as_ref() }
    }

    /// Whether `word` is in the table.
    pub(super) fn contains(&'static self, word: usize) -> bool {
        // Acquire: pairs with the Release in `enter`.
        self.words().any(|entry| entry.load(Ordering::Acquire) == word)
    }

    /// Take every word out, one after the other.
    pub(super) fn drain(&'static self) -> impl Iterator<Item = usize> {
        // Acquire: pairs with the Release in `enter`.
        self.words().map(|entry| entry.swap(FREE, Ordering::Acquire)).filter(|word| *word != FREE)
    }
}

/// One word's place in a table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry(&'static AtomicUsize);

impl Entry {
    /// Free the place.
    pub(super) fn clear(self) {
        // Release: what the owner did with the word comes first; pairs with the next `enter` of this place.
        self.0.store(FREE, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_grows_past_its_first_part_and_gives_every_word_back() {
        static TABLE: Table = Table::new();
        let entries: Vec<Entry> = (1..=3 * PART)
            .map(|word| {
                TABLE.enter(word).unwrap_or_else(|| {
                    TABLE.grow();
                    TABLE.enter(word).expect("room in a new part")
                })
            })
            .collect();

        entries[0].clear();

        assert!(!TABLE.contains(1) && TABLE.contains(2) && TABLE.contains(3 * PART));
        assert_eq!(TABLE.drain().count(), 3 * PART - 1);
        assert_eq!(TABLE.drain().count(), 0);
    }
}
