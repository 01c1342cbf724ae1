//! Who moves and who does not, as one waiter sees it: by change of words, on its own monotonic clock.
//!
//! No time is taken from another process: a step of its clock, a suspended machine and a time namespace change nothing.

use crate::layout::SLOT_COUNT;

use super::meter::ACTIVITY_WINDOW_US;

/// Time between two looks that counts: what kept us from looking for longer may have kept the holder from moving too.
const GLANCE_MAX_US: u64 = 25_000;

/// What was last seen of one peer.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    progress: u32,
    moved_us: Option<u64>,
    /// Its heartbeat and progress when its turn was taken; it is passed over until one of them changes.
    suspect: Option<(i64, u32)>,
}

/// One waiter's memory of the others.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    seen: [Seen; SLOT_COUNT],
    stare: Stare,
}

/// The holder that is being waited for.
#[derive(Debug, Default)]
struct Stare {
    word: u64,
    progress: u32,
    looked_us: u64,
    still_us: u64,
    held_us: u64,
}

impl Watch {
    /// Take note of a peer's words; whether it takes part: no suspect, and queued or seen to move lately.
    pub(crate) fn takes_part(&mut self, slot: usize, words: (i64, u32), queued: bool, now_us: u64) -> bool {
        let seen = &mut self.seen[slot];
        if seen.suspect.is_some_and(|suspect| suspect != words) {
            seen.suspect = None;
        }
        if seen.progress != words.1 || seen.moved_us.is_none() {
            seen.progress = words.1;
            seen.moved_us = Some(now_us);
        }
        let moved = seen.moved_us.is_some_and(|moved| now_us.saturating_sub(moved) <= ACTIVITY_WINDOW_US);
        seen.suspect.is_none() && (queued || moved)
    }

    /// A peer is at work no more: the next look at it is a first one.
    pub(crate) fn forget(&mut self, slot: usize) {
        self.seen[slot].moved_us = None;
    }

    /// Pass this peer over until it moves.
    pub(crate) fn suspect(&mut self, slot: usize, words: (i64, u32)) {
        self.seen[slot].suspect = Some(words);
    }

    /// For how long the token has stood at `word` without progress of its holder, as far as we were awake to see it.
    pub(crate) fn still_us(&mut self, word: u64, progress: u32, now_us: u64) -> u64 {
        let stare = &mut self.stare;
        if stare.word != word {
            *stare = Stare { word, progress, looked_us: now_us, still_us: 0, held_us: 0 };
        }
        let seen_us = now_us.saturating_sub(stare.looked_us).min(GLANCE_MAX_US);
        stare.looked_us = now_us;
        stare.held_us += seen_us;
        stare.still_us = if stare.progress == progress { stare.still_us + seen_us } else { 0 };
        stare.progress = progress;
        stare.still_us
    }

    /// For how long the token has stood where it stood at the last look, whatever its holder does.
    pub(crate) fn held_us(&self) -> u64 {
        self.stare.held_us
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suspect_is_passed_over_until_its_heartbeat_or_its_progress_moves() {
        let mut watch = Watch::default();
        assert!(watch.takes_part(3, (100, 7), true, 0));

        watch.suspect(3, (100, 7));

        assert!(!watch.takes_part(3, (100, 7), true, 10));
        assert!(watch.takes_part(3, (101, 7), true, 20));
        watch.suspect(3, (101, 7));
        assert!(watch.takes_part(3, (101, 8), true, 30));
    }

    #[test]
    fn a_peer_that_neither_waits_nor_moves_is_out_after_the_activity_window() {
        let mut watch = Watch::default();
        watch.takes_part(3, (100, 7), false, 0);

        assert!(watch.takes_part(3, (900, 7), false, ACTIVITY_WINDOW_US));
        assert!(!watch.takes_part(3, (900, 7), false, ACTIVITY_WINDOW_US + 1));
        assert!(watch.takes_part(3, (900, 7), true, ACTIVITY_WINDOW_US + 1));
    }

    #[test]
    fn stillness_is_counted_from_the_last_change_of_token_or_progress() {
        let mut watch = Watch::default();
        assert_eq!(watch.still_us(5, 1, 1_000), 0);

        assert_eq!(watch.still_us(5, 1, 21_000), 20_000);
        assert_eq!(watch.still_us(5, 2, 22_000), 0);
        assert_eq!(watch.held_us(), 21_000);
        assert_eq!(watch.still_us(6, 2, 23_000), 0);
    }

    #[test]
    fn a_waiter_that_was_stopped_itself_does_not_hold_that_against_the_holder() {
        let mut watch = Watch::default();
        watch.still_us(5, 1, 0);

        assert_eq!(watch.still_us(5, 1, 9_000_000), GLANCE_MAX_US);
    }
}
