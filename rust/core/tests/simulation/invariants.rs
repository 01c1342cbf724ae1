//! What must hold at every moment of every run.

use super::Kind;
use super::peer::{Position, State};
use super::world::World;

/// A waiter looks again after this long at the latest.
const LOOK_US: u64 = 20_000;
/// Sleepers oversleep by no more than this.
const OVERSLEEP_US: u64 = 2000;
/// Longest silence of a holder of whom nothing else is known; see `turn_limit_us`.
const SHORTEST_LIMIT_US: u64 = 100_000;

impl World {
    /// Between begin and end of a step there is one peer, except beside one whose turn was taken, or whose gate was the
    /// grid's.
    pub(crate) fn check_exclusion(&self, slot: usize) {
        if !self.peers[slot].takes_turns() || self.peers[slot].turn.ran_on_grid {
            return;
        }
        for (other, peer) in self.peers.iter().enumerate().filter(|(other, _)| *other != slot) {
            let excused = peer.turn.stolen || peer.turn.ran_on_grid || !peer.takes_turns();
            let inside = peer.position == Position::Step && peer.state != State::Dead && !excused;
            assert!(!inside, "{slot} begins at {} while {other} is in its turn", self.now_us);
        }
    }

    /// Who is alone does not wait. A dead or stopped process is company until that is found out.
    pub(crate) fn check_not_alone(&self, slot: usize) {
        let company = self.peers.iter().enumerate().any(|(other, peer)| {
            other != slot && (peer.words.in_request || peer.words.active || peer.state != State::Running)
        });
        assert!(company, "{slot} waits at {} although it is alone", self.now_us);
    }

    /// While a live peer waits, the token is neither free for longer than a look takes, nor with a peer that has been
    /// silent for longer than its limit.
    pub(crate) fn check_token(&mut self) {
        let waits = self.peers.iter().any(|peer| {
            peer.waits() && peer.state == State::Running && peer.takes_turns() && !peer.turn.ran_on_grid
        });
        if !waits || self.on_grid() {
            self.free_since_us = None;
            return;
        }
        let Some(holder) = self.token.holder else {
            let since_us = *self.free_since_us.get_or_insert(self.now_us);
            assert!(self.now_us - since_us <= LOOK_US + OVERSLEEP_US, "free since {since_us}, wanted");
            return;
        };
        self.free_since_us = None;
        let peer = &self.peers[holder];
        if peer.kind == Kind::Ungated {
            return;
        }
        let first_wait_us = self.peers.iter().filter_map(|peer| match peer.position {
            Position::Gate { since_us, waits: true } if peer.state == State::Running => Some(since_us),
            _ => None,
        });
        let since_us =
            self.token.since_us.max(peer.turn.progress_at_us).max(first_wait_us.min().unwrap_or(0));
        let steps_us = (u64::from(peer.words.step_us) * 4).max(u64::from(peer.turn.longest_us) * 3 / 2);
        let limit_us = SHORTEST_LIMIT_US.max(steps_us).min(2_000_000);
        // The waiter may look just before the last sign of life.
        let bound_us = limit_us + 2 * (LOOK_US + OVERSLEEP_US);
        assert!(self.now_us - since_us <= bound_us, "{holder} keeps the turn in silence since {since_us}");
    }
}
