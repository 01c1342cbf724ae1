//! The token: taking a turn, handing it over, and taking it from one who does not move.
//!
//! The token word names whose turn it is and counts the turns, so that a hand-over is one compare-and-swap, and
//! one that comes too late fails. Whoever waits sleeps on a word of its own slot and looks again every 20 ms, so that no
//! lost wake-up and no dead neighbour holds it longer.

use crate::layout::{ExtSlot, SLOT_COUNT, Segment, flag, turn_flag};
use crate::registry::{MappedSegment, owner_is_gone};
use crate::schedule::{Round, Want, believed_turn_limit_us};
use crate::sync::Ordering;
use crate::sys::wake_sleepers;

use super::company::{Company, latest_v_us, signs_of_life};
use super::desk::Desk;
use super::member::Member;

/// Longest sleep of a waiter between two looks.
pub(crate) const LOOK_AGAIN_US: u64 = 20_000;
/// A peer that was given the turn and has not taken it after this long, more than one look, is passed over.
const TAKE_US: u64 = 30_000;
/// A holder that goes on computing for this long after others were overdue does not play by the rules.
const HOARD_US: u64 = 2_000_000;
/// Tries at a token that changes under our hands, before waiting is the better idea.
const TRIES_MAX: u32 = 16;

/// The token's word, `generation << 16 | slot + 1`; 0 below: free.
mod word {
    use crate::layout::SLOT_COUNT;

    const GENERATION: u64 = 1 << 16;

    /// Whose turn it is.
    pub(super) fn holder(word: u64) -> Option<usize> {
        let slot = usize::try_from(word % GENERATION).unwrap_or(0).checked_sub(1)?;
        (slot < SLOT_COUNT).then_some(slot)
    }

    /// The word of the turn after `word`, for this slot or for nobody.
    pub(super) fn following(word: u64, slot: Option<usize>) -> u64 {
        let named = slot.map_or(0, |slot| slot as u64 + 1);
        (word & !(GENERATION - 1)).wrapping_add(GENERATION) | named
    }
}

/// Our place at the table: the segment, our slot, and who is there besides.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) segment: &'a MappedSegment,
    pub(crate) slot: usize,
    /// Our half of the extension; a spare one where the segment has another.
    pub(crate) ext: &'a ExtSlot,
    pub(crate) company: Company,
}

/// How a unit ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// By a call that said so: all of it was work.
    Told,
    /// By the begin of the next one: it may have been a pause as well.
    ByNext,
}

impl<'a> Place<'a> {
    pub(crate) fn bytes(&self) -> &'a Segment {
        self.segment.bytes()
    }

    fn token(&self) -> u64 {
        // SeqCst: a waiter looks at the token after it raised its flag; see `OwnTurn::raise`.
        self.bytes().token.load(Ordering::SeqCst)
    }

    /// End the turn of `word` in favour of `next`, and wake whom it concerns. False: the turn was over already.
    fn pass(&self, word: u64, next: Option<usize>) -> bool {
        let token = &self.bytes().token;
        let following = word::following(word, next);
        // SeqCst: whoever frees the token looks at the flags of the waiters afterwards; see `OwnTurn::raise`.
        if token.compare_exchange(word, following, Ordering::SeqCst, Ordering::Relaxed).is_err() {
            return false;
        }
        match next {
            Some(slot) if !self.ungated(slot) => self.wake_waiter(slot),
            // All, to see when the turn that they wait out began; or who of them takes the free token.
            _ => self.wake_waiters(),
        }
        true
    }

    /// Wake all who wait, to look again.
    pub(crate) fn wake_waiters(&self) {
        for slot in 0..SLOT_COUNT {
            self.wake_waiter(slot);
        }
    }

    fn ungated(&self, slot: usize) -> bool {
        self.bytes().ext_slots[slot].flags.load(Ordering::Relaxed) & flag::UNGATED != 0
    }

    fn wake_waiter(&self, slot: usize) {
        // SeqCst: pairs with `OwnTurn::raise`.
        let flags = self.bytes().ext_slots[slot].turn_flags.load(Ordering::SeqCst);
        if flags & turn_flag::QUEUED != 0 {
            wake(self.bytes(), slot);
        }
    }
}

/// How long the owner of this slot may be silent in its turn.
fn published_limit_us(ext: &ExtSlot) -> u64 {
    u64::from(believed_turn_limit_us(ext.turn_limit_us.load(Ordering::Relaxed)))
}

/// Wake the threads that wait in `slot`.
pub(crate) fn wake(segment: &Segment, slot: usize) {
    let wake = &segment.ext_slots[slot].wake;
    wake.fetch_add(1, Ordering::Release); // Release: pairs with the Acquire of the sleeper's look.
    wake_sleepers(wake);
}

impl Member {
    /// Whether it is our turn, or can be made so: nobody has the token, or one who is not at work.
    pub(crate) fn take_turn(&self, place: &Place<'_>, desk: &mut Desk, now_us: u64) -> bool {
        for _ in 0..TRIES_MAX {
            let token = place.token();
            match word::holder(token) {
                Some(slot) if slot == place.slot => {
                    desk.turn.enter(place.ext, token, now_us);
                    return !desk.turn.ending;
                }
                // Asked anew: it may have come to work after the company was looked at.
                Some(slot) if self.at_work(place.bytes(), slot) => break,
                _ => {}
            }
            let next = self.heir(place, desk, now_us);
            let ours = word::following(token, Some(place.slot));
            if !place.pass(token, Some(next)) {
                continue;
            }
            if next == place.slot {
                desk.turn.enter(place.ext, ours, now_us);
                return true;
            }
            break;
        }
        desk.turn.forget();
        false
    }

    /// Whose turn it is where nobody has one: ours, unless one who waits goes before us.
    fn heir(&self, place: &Place<'_>, desk: &mut Desk, now_us: u64) -> usize {
        if place.company.is_empty() {
            return place.slot;
        }
        // After nobody's turn those who wait are all asked about; who comes only now is not among them.
        let last = if desk.turn.want() == Want::Nothing { place.slot } else { SLOT_COUNT };
        self.round(place, desk, now_us).next_after(last).unwrap_or(place.slot)
    }

    /// Whether the token is ours, in the turn that we entered.
    pub(crate) fn has_turn(place: &Place<'_>, desk: &Desk) -> bool {
        desk.turn.word != 0 && place.token() == desk.turn.word
    }

    /// Enter the round from idleness.
    pub(crate) fn enter_round(&self, place: &Place<'_>, desk: &mut Desk, now_us: u64) {
        let round = self.round(place, desk, now_us);
        let newcomer = !std::mem::replace(&mut desk.turn.entered, true);
        let (v_us, boost) = round.arrival(place.slot, latest_v_us(place.bytes()), newcomer);
        desk.turn.publish_v(place.ext, v_us);
        desk.turn.raise(place.ext, turn_flag::INREQ | if boost { turn_flag::BOOST } else { 0 });
    }

    /// A unit ended: charge it, and end the turn where that is due.
    pub(crate) fn charge(
        &self,
        place: &Place<'_>,
        desk: &mut Desk,
        (unit_us, ended): (u64, Ended),
        now_us: u64,
    ) {
        let ours = Self::has_turn(place, desk);
        let limit_us = published_limit_us(place.ext);
        let silent = unit_us == 0 || (ended == Ended::ByNext && !ours && unit_us > limit_us);
        let mut spent_us = match ours {
            _ if unit_us == 0 => 0,
            // Within a turn the time since the last charge: the card was ours between the units too.
            true => now_us.saturating_sub(desk.turn.charged_until_us),
            // It lost its turn by silence, and may have paused as well as computed: it had the card until then.
            false if silent => limit_us,
            false => unit_us,
        };
        if std::mem::take(&mut desk.turn.stolen) {
            // The step of the one whose turn we took was under way: most of that time was not ours.
            spent_us = spent_us.min(u64::from(desk.turn.step_us));
        } else if !silent {
            desk.turn.publish_step(place.ext, unit_us, ended);
        }
        desk.turn.charged_until_us = now_us;
        if place.company.is_empty() {
            let v_us = desk.turn.v_us.saturating_add(spent_us.cast_signed());
            desk.turn.publish_v(place.ext, v_us);
            desk.turn.alone();
            return;
        }
        let charged = self.round(place, desk, now_us).charge(place.slot, spent_us);
        desk.turn.publish_v(place.ext, charged);
        if !ours {
            return;
        }
        let round = self.round(place, desk, now_us);
        if round.next_after(place.slot).is_none() {
            desk.turn.used_us = 0;
            return;
        }
        desk.turn.used_us += spent_us;
        desk.turn.ending |= round.must_yield(place.slot, desk.turn.used_us);
        self.end_turn_if_due(place, desk, now_us);
    }

    /// Hand the token over when the turn is to end and no thread of ours is in the middle of a unit.
    pub(crate) fn end_turn_if_due(&self, place: &Place<'_>, desk: &mut Desk, now_us: u64) {
        let limit_us = published_limit_us(place.ext);
        if desk.turn.ending && !desk.meter.in_unit(now_us, limit_us) {
            self.end_turn(place, desk, now_us);
        }
    }

    /// Hand the token over, if it is ours.
    pub(crate) fn end_turn(&self, place: &Place<'_>, desk: &mut Desk, now_us: u64) {
        let token = place.token();
        if word::holder(token) == Some(place.slot) {
            let next = self.round(place, desk, now_us).next_after(place.slot);
            // Not passed: somebody took it, which ends the turn as well.
            place.pass(token, next);
        }
        desk.turn.forget();
    }

    /// Wait in the queue; whoever does comes back at least every `LOOK_AGAIN`.
    pub(crate) fn queue(&self, place: &Place<'_>, desk: &mut Desk, now_us: u64) -> bool {
        desk.turn.look_again_us = LOOK_AGAIN_US;
        self.end_turn_if_due(place, desk, now_us);
        if word::holder(place.token()) == Some(place.slot) {
            // Ours still, because another thread is in the middle of a unit: no time to ask for the next one.
            return self.take_turn(place, desk, now_us);
        }
        let since_us = *desk.turn.waiting_since_us.get_or_insert(now_us);
        desk.turn.raise(place.ext, turn_flag::QUEUED);
        let waited_us = now_us.saturating_sub(since_us);
        let overdue_us = self.round(place, desk, now_us).overdue_after_us().saturating_sub(waited_us);
        if overdue_us == 0 {
            desk.turn.raise(place.ext, turn_flag::OVERDUE);
        } else {
            desk.turn.look_again_within(overdue_us);
        }
        self.take_from_the_still(place, desk, now_us);
        self.take_turn(place, desk, now_us)
    }

    /// End the turn of a holder that died, does not move, did not take its turn, or cannot wait and had its time.
    fn take_from_the_still(&self, place: &Place<'_>, desk: &mut Desk, now_us: u64) {
        let token = place.token();
        let Some(holder) = word::holder(token).filter(|slot| *slot != place.slot) else { return };
        let ext = &place.bytes().ext_slots[holder];
        let words = signs_of_life(place.bytes(), holder);
        let still_us = desk.watch.still_us(token, words.1, now_us);
        let round = self.round(place, desk, now_us);
        let ungated = place.ungated(holder);
        // SeqCst: pairs with `OwnTurn::raise`.
        let untaken = ext.turn_flags.load(Ordering::SeqCst) & turn_flag::QUEUED != 0;
        let limit_us = match (ungated, untaken) {
            (true, _) => round.quantum_us(holder),
            (false, true) => TAKE_US,
            (false, false) => published_limit_us(ext),
        };
        let hoarded = desk.watch.held_us() >= round.overdue_after_us() + HOARD_US;
        if still_us < limit_us && !hoarded && !(still_us > 0 && owner_is_gone(place.segment, holder)) {
            desk.turn.look_again_within(limit_us.saturating_sub(still_us));
            return;
        }
        if ungated {
            if place.pass(token, round.next_after(holder)) {
                ext.v_us.store(round.rested(holder), Ordering::Relaxed);
            }
            return;
        }
        // Ours and not the next one's: only we know that what comes now began in another's turn.
        let ours = word::following(token, Some(place.slot));
        if place.pass(token, Some(place.slot)) {
            desk.watch.suspect(holder, words);
            desk.turn.enter(place.ext, ours, now_us);
            desk.turn.stolen = !untaken;
        }
    }

    /// The round as it stands now.
    pub(crate) fn round(&self, place: &Place<'_>, desk: &mut Desk, now_us: u64) -> Round {
        Round::new(&self.members(place.bytes(), place.slot, place.company, desk, now_us))
    }
}
