//! Who is at work beside us, and by which schedule we share with them.

use crate::clock;
use crate::error::{Error, Result};
use crate::layout::{ExtSlot, SLOT_COUNT, Segment, flag, turn_flag};
use crate::registry::DEAD_AFTER_US;
use crate::schedule::{Roster, TurnPeer, WINDOW_DEFAULT_US, Want, weight_milli};
use crate::sync::Ordering;

use super::desk::{Desk, want};
use super::member::Member;

/// What a schedule must be, for messages.
pub const SCHEDULE_FORM: &str = "`turn` or `grid`";

/// By what the peers share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Schedule {
    /// Windows of the wall clock, as the seed has them.
    Grid,
    /// Turns, handed over.
    Turn,
}

impl Schedule {
    /// The schedule of this name.
    ///
    /// # Errors
    /// `InvalidArgument` for any other text.
    pub fn parse(text: &str) -> Result<Self> {
        let named = [Self::Grid, Self::Turn].into_iter().find(|schedule| schedule.as_str() == text);
        named.ok_or_else(|| Error::InvalidArgument {
            name: "schedule",
            value: text.into(),
            legal: SCHEDULE_FORM,
        })
    }

    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Grid => "grid",
            Self::Turn => "turn",
        }
    }
}

/// The others that are at work now, by one look.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Company {
    /// Bit per slot.
    others: u32,
    pub(crate) schedule: Schedule,
}

impl Company {
    pub(crate) fn is_empty(self) -> bool {
        self.others == 0
    }

    pub(crate) fn has(self, slot: usize) -> bool {
        self.others & 1 << slot != 0
    }

    fn slots(self) -> impl Iterator<Item = usize> {
        (0..SLOT_COUNT).filter(move |slot| self.has(*slot))
    }
}

impl Member {
    /// Look who is at work beside the slot `own`, if that is one: their activity words, and what the last sweep said.
    pub(crate) fn company(&self, segment: &Segment, own: Option<usize>) -> Company {
        let mut company = Company { others: 0, schedule: self.schedule };
        // Alone, which is most of the time, this is all that a step looks at.
        let active = (0..SLOT_COUNT).fold(0, |bits, slot| {
            bits | u32::from(segment.slots[slot].active.load(Ordering::Relaxed) != 0) << slot
        });
        let others = active & !own.map_or(0, |own| 1 << own);
        if others == 0 {
            return company;
        }
        let present = (0..SLOT_COUNT).filter(|slot| others & 1 << slot != 0 && self.at_work(segment, *slot));
        for slot in present {
            company.others |= 1 << slot;
            if !takes_turns(segment, slot) {
                company.schedule = Schedule::Grid;
            }
        }
        company
    }

    /// Whether the owner of `slot` is alive and at work.
    pub(crate) fn at_work(&self, segment: &Segment, slot: usize) -> bool {
        let base = &segment.slots[slot];
        base.active.load(Ordering::Relaxed) != 0
            && base.pid.load(Ordering::Relaxed) != 0
            && self.barred.load(Ordering::Relaxed) & 1 << slot == 0
            && self.believed(segment, slot)
    }

    /// Whether a sweep found the peer alive, or it is younger than that and has a young heartbeat.
    fn believed(&self, segment: &Segment, slot: usize) -> bool {
        if self.known.load(Ordering::Relaxed) & 1 << slot != 0 {
            return true;
        }
        // Acquire: pairs with the Release of the beat.
        let heartbeat_us = segment.slots[slot].heartbeat_us.load(Ordering::Acquire);
        clock::wall_us().saturating_sub(heartbeat_us).unsigned_abs() <= DEAD_AFTER_US
    }

    /// The company with ourselves in slot `own`, for the grid.
    pub(crate) fn roster(&self, segment: &Segment, own: usize, company: Company) -> Roster {
        let mut roster = Roster::default();
        roster.insert(own, weight_milli(self.weight()));
        for slot in company.slots() {
            roster.insert(slot, published_weight(segment, slot));
        }
        roster
    }

    /// The members of the round: ourselves, and those of the company who are in a request and seem to move.
    pub(crate) fn members(
        &self,
        segment: &Segment,
        own: usize,
        company: Company,
        desk: &mut Desk,
        now_us: u64,
    ) -> [Option<TurnPeer>; SLOT_COUNT] {
        let mut members = [None; SLOT_COUNT];
        members[own] = Some(TurnPeer {
            weight_milli: weight_milli(self.weight()),
            v_us: desk.turn.v_us,
            step_us: desk.turn.step_us,
            min_window_us: WINDOW_DEFAULT_US,
            want: desk.turn.want(),
        });
        for slot in (0..SLOT_COUNT).filter(|slot| *slot != own) {
            if !company.has(slot) {
                desk.watch.forget(slot);
                continue;
            }
            let ext = &segment.ext_slots[slot];
            let want = published_want(ext);
            let queued = !matches!(want, Some(Want::Nothing) | None);
            let words = signs_of_life(segment, slot);
            if desk.watch.takes_part(slot, words, queued, now_us) {
                members[slot] = want.map(|want| TurnPeer {
                    weight_milli: published_weight(segment, slot),
                    v_us: ext.v_us.load(Ordering::Relaxed),
                    step_us: ext.step_us.load(Ordering::Relaxed),
                    min_window_us: ext.min_window_us.load(Ordering::Relaxed),
                    want,
                });
            }
        }
        members
    }
}

/// The latest virtual time of all slots that were ever in a round.
pub(crate) fn latest_v_us(segment: &Segment) -> i64 {
    let owned = |slot: &usize| segment.slots[*slot].pid.load(Ordering::Relaxed) != 0;
    let times =
        (0..SLOT_COUNT).filter(owned).map(|slot| segment.ext_slots[slot].v_us.load(Ordering::Relaxed));
    times.max().unwrap_or(0)
}

/// The words that change while a peer lives: heartbeat and progress.
pub(crate) fn signs_of_life(segment: &Segment, slot: usize) -> (i64, u32) {
    // Acquire: pairs with the Release of the beat.
    let heartbeat_us = segment.slots[slot].heartbeat_us.load(Ordering::Acquire);
    (heartbeat_us, segment.ext_slots[slot].progress.load(Ordering::Relaxed))
}

/// Whether the owner of `slot` knows turns and wants them: its extension half is its own, and it does not ask for the
/// grid.
fn takes_turns(segment: &Segment, slot: usize) -> bool {
    let (base, ext) = (&segment.slots[slot], &segment.ext_slots[slot]);
    // Acquire: pairs with the Release of the token, which is stored after the rest of this half.
    ext.owner_token.load(Ordering::Acquire) != 0
        && ext.owner_pid.load(Ordering::Relaxed) == base.pid.load(Ordering::Relaxed)
        && ext.owner_boot_us.load(Ordering::Relaxed) == base.boot_us.load(Ordering::Relaxed)
        && ext.flags.load(Ordering::Relaxed) & flag::GRID == 0
}

/// What a peer of turn mode wants; `None` outside a request.
fn published_want(ext: &ExtSlot) -> Option<Want> {
    // SeqCst: pairs with `OwnTurn::raise`.
    let flags = ext.turn_flags.load(Ordering::SeqCst);
    let ungated = ext.flags.load(Ordering::Relaxed) & flag::UNGATED != 0;
    (flags & turn_flag::INREQ != 0).then(|| if ungated { Want::Ungated } else { want(flags) })
}

fn published_weight(segment: &Segment, slot: usize) -> u32 {
    weight_milli(f32::from_bits(segment.slots[slot].weight.load(Ordering::Relaxed)))
}

#[cfg(test)]
mod tests;
