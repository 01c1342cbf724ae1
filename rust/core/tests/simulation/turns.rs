//! The gate of turn mode: a token that is handed over, and what waiters do about a holder that does not move.

use ocgpu_core::SLOT_COUNT;
use ocgpu_core::schedule::{
    Round, TurnPeer, Want, believed_turn_limit_us, longest_step_us, smooth_step_us, turn_limit_us,
};

use super::peer::State;
use super::world::{Gate, World};
use super::{Kind, Ungated};

/// A waiter looks again after this long at the latest.
const LOOK_US: u64 = 20_000;
/// Who was given a turn and has not begun after this long does not come.
const BEGIN_WITHIN_US: u64 = 15_000;
/// The kernel drops a killed process's lock after about this long.
const DEATH_SHOWS_US: u64 = 2500;
/// A member whose heartbeat or progress does not change for so long is none.
const BEAT_WITHIN_US: u64 = 3_000_000;
const PROGRESS_WITHIN_US: u64 = 2_000_000;
/// A hand-over takes this long.
const HANDOVER_US: u64 = 30;

/// Whose turn it is, and which turn.
#[derive(Debug, Default)]
pub(crate) struct Token {
    pub(crate) generation: u64,
    pub(crate) holder: Option<usize>,
    pub(crate) since_us: u64,
}

impl World {
    /// A request begins: its credit and debt are bounded.
    pub(crate) fn turn_arrive(&mut self, slot: usize) {
        let latest = self.peers.iter().map(|peer| peer.words.v_us).max().unwrap_or(0);
        let newcomer = !std::mem::replace(&mut self.peers[slot].turn.entered, true);
        let (v_us, boosted) = self.round(slot).arrival(slot, latest, newcomer);
        self.peers[slot].words.v_us = v_us;
        self.peers[slot].turn.boosted = boosted;
    }

    pub(crate) fn turn_gate(&mut self, slot: usize, since_us: u64) -> Gate {
        if std::mem::take(&mut self.peers[slot].turn.ran_on_grid) {
            self.turn_arrive(slot);
        }
        if self.token.holder.is_none() {
            self.give_token(Some(slot));
        }
        let mut overdue_us = 0;
        if self.token.holder != Some(slot) {
            overdue_us = since_us + self.round(slot).overdue_after_us();
            self.want_turn(slot, overdue_us);
            if let Some(taken) = self.holder_to_relieve(slot) {
                self.steal(slot, taken);
            }
        }
        if self.token.holder == Some(slot) {
            self.turn_begin(slot);
            return Gate::Run;
        }
        Gate::Wait { until_us: self.next_look_us(slot, overdue_us) }
    }

    /// A step ended: charge it, and give the turn up if that is due.
    pub(crate) fn turn_done(&mut self, slot: usize) {
        let holds =
            self.token.holder == Some(slot) && self.token.generation == self.peers[slot].turn.generation;
        let peer = &mut self.peers[slot];
        let from_us = if holds { peer.turn.charged_until_us } else { peer.turn.begun_us };
        let mut spent_us = self.now_us - from_us;
        peer.turn.charged_until_us = self.now_us;
        if std::mem::take(&mut peer.turn.beside) {
            spent_us = spent_us.min(u64::from(peer.words.step_us));
        } else {
            let step_us = self.now_us - peer.turn.begun_us;
            peer.words.step_us = smooth_step_us(peer.words.step_us, step_us);
            peer.turn.longest_us = longest_step_us(peer.turn.longest_us, step_us);
        }
        peer.words.turn_limit_us = turn_limit_us(peer.words.step_us, peer.turn.longest_us);
        self.peers[slot].words.v_us = self.round(slot).charge(slot, spent_us);
        if !holds {
            return;
        }
        let round = self.round(slot);
        let used_us =
            if round.next_after(slot).is_none() { 0 } else { self.peers[slot].turn.used_us + spent_us };
        self.peers[slot].turn.used_us = used_us;
        if used_us > 0 && round.must_yield(slot, used_us) {
            self.pass_token(slot, slot);
        }
    }

    /// `viewer` passes the token of `holder` on; free when nobody waits.
    pub(crate) fn pass_token(&mut self, viewer: usize, holder: usize) {
        let next = self.round(viewer).next_after(holder);
        self.give_token(next);
        if let Some(next) = next.filter(|next| self.peers[*next].kind != Kind::Ungated) {
            self.wake(next);
        } else {
            // Whoever waits takes a free token, or starts to measure how long an ungated turn rests.
            for other in (0..self.peers.len()).filter(|other| *other != viewer) {
                self.wake(other);
            }
        }
    }

    pub(crate) fn free_token(&mut self) {
        self.give_token(None);
    }

    fn give_token(&mut self, to: Option<usize>) {
        self.token = Token { generation: self.token.generation + 1, holder: to, since_us: self.now_us };
    }

    fn turn_begin(&mut self, slot: usize) {
        let turn = &mut self.peers[slot].turn;
        turn.boosted = false;
        if turn.generation != self.token.generation {
            turn.generation = self.token.generation;
            turn.used_us = 0;
            turn.charged_until_us = self.now_us;
            // A step whose turn I took may still run: what I wait for it at the card is its owner's, charged there.
            turn.beside = turn.stole;
            turn.stole = false;
        }
        self.peers[slot].words.want = Want::Nothing;
    }

    fn want_turn(&mut self, slot: usize, overdue_us: u64) {
        let overdue = self.now_us >= overdue_us;
        let peer = &mut self.peers[slot];
        peer.words.want = match (overdue, peer.turn.boosted) {
            (true, _) => Want::Overdue,
            (false, true) => Want::Boost,
            (false, false) => Want::Turn,
        };
    }

    /// The holder, if it must be relieved of its turn.
    fn holder_to_relieve(&mut self, slot: usize) -> Option<usize> {
        let holder = self.token.holder?;
        let what = (self.token.generation, self.peers[holder].words.progress);
        if self.peers[slot].turn.seen.what != what {
            self.peers[slot].turn.seen = super::peer::Seen { what, since_us: self.now_us };
        }
        (self.now_us >= self.relief_us(slot, holder)).then_some(holder)
    }

    /// When `slot` may take the turn of `holder`, as far as it knows now.
    fn relief_us(&self, slot: usize, holder: usize) -> u64 {
        let peer = &self.peers[holder];
        let seen_us = self.peers[slot].turn.seen.since_us;
        if peer.kind == Kind::Ungated {
            return self.token.since_us + self.round(slot).quantum_us(holder);
        }
        if peer.state == State::Dead {
            return peer.turn.died_us + DEATH_SHOWS_US;
        }
        if peer.words.want != Want::Nothing {
            return seen_us + BEGIN_WITHIN_US;
        }
        seen_us + u64::from(believed_turn_limit_us(peer.words.turn_limit_us))
    }

    fn steal(&mut self, slot: usize, from: usize) {
        if self.peers[from].kind == Kind::Ungated {
            // Its turn has rested; the one whose exchange of the token succeeds charges it.
            self.peers[from].words.v_us = self.round(slot).rested(from);
        } else {
            let words = &self.peers[from].words;
            self.peers[slot].turn.suspects[from] = Some((words.beats, words.progress));
            self.peers[from].turn.stolen = true;
            self.steals += 1;
            // Whoever finds out takes it: it is alive, and knows beside whom it begins.
            self.peers[slot].turn.stole = true;
            return self.give_token(Some(slot));
        }
        self.pass_token(slot, from);
    }

    fn next_look_us(&self, slot: usize, overdue_us: u64) -> u64 {
        let mut until_us = self.now_us + LOOK_US;
        if self.peers[slot].words.want != Want::Overdue {
            until_us = until_us.min(overdue_us);
        }
        if let Some(holder) = self.token.holder {
            until_us = until_us.min(self.relief_us(slot, holder));
        }
        until_us.max(self.now_us + 100)
    }

    fn wake(&mut self, slot: usize) {
        if self.peers[slot].waits() {
            let delay_us = self.random.around(HANDOVER_US, 30);
            self.look_again(slot, self.now_us + delay_us);
        }
    }

    /// In a request, alive, no suspect, and either waiting or making progress.
    fn is_member(&self, viewer: usize, slot: usize) -> bool {
        let peer = &self.peers[slot];
        let moves =
            peer.words.want != Want::Nothing || self.now_us - peer.turn.progress_at_us <= PROGRESS_WITHIN_US;
        let counts = peer.kind != Kind::Ungated || self.ungated != Ungated::Ignored;
        peer.words.in_request
            && counts
            && moves
            && self.now_us - peer.turn.beat_at_us <= BEAT_WITHIN_US
            && !self.suspects(viewer, slot)
    }

    /// Whether `viewer` gave `slot` up, and none of its words has moved since.
    fn suspects(&self, viewer: usize, slot: usize) -> bool {
        let words = &self.peers[slot].words;
        self.peers[viewer].turn.suspects[slot] == Some((words.beats, words.progress))
    }

    /// The round as `viewer` sees it, itself included.
    pub(crate) fn round(&self, viewer: usize) -> Round {
        let mut members = [None; SLOT_COUNT];
        for (slot, peer) in self.peers.iter().enumerate() {
            let counts = if slot == viewer { peer.words.in_request } else { self.is_member(viewer, slot) };
            if !counts {
                continue;
            }
            let want = if peer.kind == Kind::Ungated { Want::Ungated } else { peer.words.want };
            members[slot] = Some(TurnPeer {
                weight_milli: peer.words.weight_milli,
                v_us: peer.words.v_us,
                step_us: peer.words.step_us,
                min_window_us: 0,
                want,
            });
        }
        Round::new(&members)
    }
}
