//! What the threads of this process share at the gate.

use crate::layout::{ExtSlot, turn_flag};
use crate::registry::Claim;
use crate::schedule::{WINDOW_DEFAULT_US, Want, longest_step_us, smooth_step_us, turn_limit_us};
use crate::sync::Ordering;

use super::meter::Meter;
use super::turn::Ended;
use super::watch::Watch;

/// Behind one mutex, which is held for the time of a few loads and stores.
#[derive(Debug, Default)]
pub(crate) struct Desk {
    pub(crate) meter: Meter,
    pub(crate) turn: OwnTurn,
    pub(crate) watch: Watch,
    /// Which claim `turn` belongs to: one in another slot or segment starts anew.
    claim: Option<Claim>,
    /// A peer without a slot does not begin before this.
    pub(crate) observer_until_us: u64,
}

impl Desk {
    /// Note which claim is in force; what was known of a former one is dropped.
    pub(crate) fn sit(&mut self, claim: Claim) {
        if self.claim != Some(claim) {
            self.claim = Some(claim);
            self.turn = OwnTurn {
                step_us: self.turn.step_us,
                longest_us: self.turn.longest_us,
                ..OwnTurn::default()
            };
            self.watch = Watch::default();
        }
    }
}

/// This process's own part of turn mode; published to its slot, whose only writer it is.
#[expect(clippy::struct_excessive_bools, reason = "facts that do not depend on each other")]
#[derive(Debug, Default)]
pub(crate) struct OwnTurn {
    /// Bits of `layout::turn_flag`, as published.
    flags: u32,
    /// Virtual time used.
    pub(crate) v_us: i64,
    /// Length of our steps, smoothed.
    pub(crate) step_us: u32,
    /// Length of our longest step of late.
    longest_us: u32,
    /// The token's word of the turn that we entered; 0 when we have none.
    pub(crate) word: u64,
    /// Until when the turn is charged.
    pub(crate) charged_until_us: u64,
    /// What the turn has used so far.
    pub(crate) used_us: u64,
    /// The turn ends with the unit that another thread still has open.
    pub(crate) ending: bool,
    /// We took it from a holder whose step may still be under way.
    pub(crate) stolen: bool,
    /// When we began to wait.
    pub(crate) waiting_since_us: Option<u64>,
    /// After how long the turn that we wait for may be over.
    pub(crate) look_again_us: u64,
    /// It was in a round before.
    pub(crate) entered: bool,
    /// The last look found the grid in force.
    pub(crate) in_grid: bool,
}

impl OwnTurn {
    /// Whether we are in a request.
    pub(crate) fn in_request(&self) -> bool {
        self.flags & turn_flag::INREQ != 0
    }

    /// Add flags.
    pub(crate) fn raise(&mut self, ext: &ExtSlot, flags: u32) {
        if self.flags & flags != flags {
            self.flags |= flags;
            // SeqCst: a waiter raises its flag and then looks at the token; whoever frees the token looks at the flags
            // afterwards. One of the two sees the other.
            ext.turn_flags.store(self.flags, Ordering::SeqCst);
        }
    }

    /// Remove flags.
    pub(crate) fn lower(&mut self, ext: &ExtSlot, flags: u32) {
        if self.flags & flags != 0 {
            self.flags &= !flags;
            ext.turn_flags.store(self.flags, Ordering::SeqCst); // SeqCst: as in `raise`.
        }
    }

    /// Set and publish the virtual time.
    pub(crate) fn publish_v(&mut self, ext: &ExtSlot, v_us: i64) {
        self.v_us = v_us;
        ext.v_us.store(v_us, Ordering::Relaxed);
    }

    /// Take one more step into the smoothed length, and publish what follows from it.
    pub(crate) fn publish_step(&mut self, ext: &ExtSlot, step_us: u64, ended: Ended) {
        self.step_us = smooth_step_us(self.step_us, step_us);
        ext.step_us.store(self.step_us, Ordering::Relaxed);
        // A pause that looks like a step must not make the others wait as long for the next one.
        let sure_us = if ended == Ended::Told { step_us } else { 0 };
        self.longest_us = longest_step_us(self.longest_us, sure_us);
        ext.turn_limit_us.store(turn_limit_us(self.step_us, self.longest_us), Ordering::Relaxed);
        ext.min_window_us.store(WINDOW_DEFAULT_US, Ordering::Relaxed);
    }

    /// The token's `word` names us: the turn starts, unless it is the one that we are in.
    pub(crate) fn enter(&mut self, ext: &ExtSlot, word: u64, now_us: u64) {
        if self.word != word {
            self.word = word;
            self.charged_until_us = now_us;
            self.used_us = 0;
            self.ending = false;
            self.stolen = false;
            self.stop_waiting(ext);
            move_on(ext);
        }
    }

    /// Nobody is there to yield to.
    pub(crate) fn alone(&mut self) {
        self.used_us = 0;
        self.ending = false;
    }

    /// What we want, as the others read it.
    pub(crate) fn want(&self) -> Want {
        want(self.flags)
    }

    /// The turn is somebody else's.
    pub(crate) fn forget(&mut self) {
        self.word = 0;
        self.ending = false;
    }

    /// Come back from a wait within `span_us`.
    pub(crate) fn look_again_within(&mut self, span_us: u64) {
        self.look_again_us = self.look_again_us.min(span_us);
    }

    /// No longer queued, by whatever way the wait ended.
    pub(crate) fn stop_waiting(&mut self, ext: &ExtSlot) {
        self.lower(ext, turn_flag::QUEUED | turn_flag::BOOST | turn_flag::OVERDUE);
        self.waiting_since_us = None;
    }
}

/// What the flags of a gated peer in a request say.
pub(crate) fn want(flags: u32) -> Want {
    match flags {
        _ if flags & turn_flag::QUEUED == 0 => Want::Nothing,
        _ if flags & turn_flag::OVERDUE != 0 => Want::Overdue,
        _ if flags & turn_flag::BOOST != 0 => Want::Boost,
        _ => Want::Turn,
    }
}

/// Show those who watch us that we move.
pub(crate) fn move_on(ext: &ExtSlot) {
    // Only this process writes it, under the desk's mutex: no read-modify-write is needed.
    let progress = ext.progress.load(Ordering::Relaxed).wrapping_add(1);
    ext.progress.store(progress, Ordering::Relaxed);
}
