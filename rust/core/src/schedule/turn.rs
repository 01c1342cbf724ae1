//! Turns: who has the card next, and when the one who has it must give it up.
//!
//! Each peer carries a virtual time `v`: what it used, divided by its share. Peers that are behind the mean `V` are owed
//! time, and a turn ends about half a turn ahead of it, at the step's end that comes nearest. So the shares are exact
//! whatever the lengths of the steps, which windows of a clock are not: there a long step overshoots for nothing.
//!
//! All of this is a function of the registry's words, so that every peer names the same next one. The words may hold
//! anything: values are clamped where they enter, the worst that a hostile one does is a wrong share.

use crate::layout::SLOT_COUNT;
use crate::schedule::{PPM, Roster, period_of_window_us};

/// A peer's debt and the charge of one step are cut to this much virtual time: whoever computed for long by itself is
/// not shut out for as long.
pub const DEBT_MAX_US: i64 = 1_000_000;
/// Virtual times are kept within this distance of zero, so that no sum overflows.
const V_MAX_US: i64 = 1 << 60;
/// Who enters does so within this distance of zero, so that the times have room to grow even after somebody wrote the
/// largest.
const V_ENTER_MAX_US: i64 = V_MAX_US / 2;
/// Added per peer to the natural round: a hand-over and a look.
const HANDOVER_US: u64 = 1000;
/// A turn ends when it used this much of its quantum and somebody waits who used less, or whatever the virtual times say
/// when a waiter would be overdue.
const STRETCH_PERCENT: u64 = 125;
/// After this many percent of a natural round a waiter is overdue: it gets a step whatever it owes.
const OVERDUE_PERCENT: u64 = 125;
/// Longest step that is believed.
const STEP_MAX_US: u32 = 2_000_000;
/// Window that a peer gets at least when it asks for none.
pub const WINDOW_DEFAULT_US: u32 = 40_000;
const WINDOW_RANGE_US: (u32, u32) = (1000, 400_000);
/// An ungated peer computes in everybody's turns, and a GPU's driver gives it half of each. So turns of its own are due to it
/// only for what its share is above this.
const HALF_PPM: u32 = 500_000;
/// Shortest and longest silence after which a holder's turn may be taken.
const TURN_LIMIT_RANGE_US: (u32, u32) = (100_000, 2_000_000);
/// A turn's limit in steps of its holder.
const TURN_LIMIT_STEPS: u32 = 4;
/// The longest step of late is forgotten by this part with each step.
const LONGEST_STEPS: u32 = 256;

/// A member of the round, as the registry has it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TurnPeer {
    /// Weight in thousandths.
    pub weight_milli: u32,
    /// Virtual time used.
    pub v_us: i64,
    /// Length of its steps, smoothed.
    pub step_us: u32,
    /// Smallest window it wants; 0 = `WINDOW_DEFAULT_US`.
    pub min_window_us: u32,
    /// What it wants now.
    pub want: Want,
}

/// What a member wants now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Want {
    /// No turn: it has one, or is between two steps.
    #[default]
    Nothing,
    /// It waits for a turn.
    Turn,
    /// It waits, and woke up with no debt: it goes first.
    Boost,
    /// It has waited for more than a round: it goes next.
    Overdue,
    /// It cannot wait. It has half of everybody's turn by computing in it, and the others wait out what more its share is.
    Ungated,
}

/// The members of a round with what follows from their words.
#[derive(Debug, Clone, Copy)]
pub struct Round {
    peers: [Option<TurnPeer>; SLOT_COUNT],
    shares_ppm: [u32; SLOT_COUNT],
    /// Share of all ungated ones together; 0 when they take no turns.
    ungated_ppm: u32,
    period_us: u64,
    mean_v_us: i64,
}

impl Round {
    /// The round of these members, by slot.
    #[must_use]
    pub fn new(members: &[Option<TurnPeer>; SLOT_COUNT]) -> Self {
        let mut peers = members.map(|peer| peer.map(believed));
        let mut shares_ppm = shares_ppm(&peers);
        let mut ungated_ppm = ungated_ppm(&peers, &shares_ppm);
        if ungated_ppm <= HALF_PPM {
            peers = peers.map(|peer| peer.filter(|peer| peer.want != Want::Ungated));
            shares_ppm = self::shares_ppm(&peers);
            ungated_ppm = 0;
        }
        let smallest = shares_ppm.into_iter().filter(|share| *share > 0).min().unwrap_or(0);
        let window_us = peers.iter().flatten().map(|peer| peer.min_window_us).max().unwrap_or(0);
        let period_us = period_of_window_us(window_us, smallest);
        keep_ungated_near(&mut peers, &shares_ppm, period_us.cast_signed());
        let mean_v_us = mean_v_us(&peers, &shares_ppm);
        Self { peers, shares_ppm, ungated_ppm, period_us, mean_v_us }
    }

    /// How many members there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.peers.iter().flatten().count()
    }

    /// Whether there is nobody.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.peers.iter().all(Option::is_none)
    }

    /// Length of a period.
    #[must_use]
    pub fn period_us(&self) -> u64 {
        self.period_us
    }

    /// `V`: the mean of the members' virtual times, by share.
    #[must_use]
    pub fn mean_v_us(&self) -> i64 {
        self.mean_v_us
    }

    /// What `slot` gets of a period; 0 for one who is no member.
    ///
    /// For an ungated one that is what it needs beside the half that it has of every other turn.
    #[must_use]
    pub fn quantum_us(&self, slot: usize) -> u64 {
        let quantum_us = self.period_us * u64::from(self.share_ppm(slot)) / PPM;
        match self.peer(slot) {
            Some(peer) if peer.want == Want::Ungated => {
                let all_ppm = u64::from(self.ungated_ppm);
                quantum_us * all_ppm.saturating_sub(u64::from(HALF_PPM)) / all_ppm.max(1)
            }
            _ => quantum_us,
        }
    }

    /// The natural round: every member's quantum or step, whichever is longer, and the hand-overs.
    #[must_use]
    pub fn round_us(&self) -> u64 {
        let members = self.peers.iter().enumerate().filter_map(|(slot, peer)| peer.map(|peer| (slot, peer)));
        members.map(|(slot, peer)| self.quantum_us(slot).max(u64::from(peer.step_us)) + HANDOVER_US).sum()
    }

    /// After how long a waiter is overdue.
    #[must_use]
    pub fn overdue_after_us(&self) -> u64 {
        self.round_us() * OVERDUE_PERCENT / 100
    }

    /// What `slot` has used after `spent_us` more: its new virtual time, its debt bounded.
    #[must_use]
    pub fn charge(&self, slot: usize, spent_us: u64) -> i64 {
        let Some(peer) = self.peer(slot) else { return 0 };
        let spent = i64::try_from(spent_us).unwrap_or(i64::MAX).min(DEBT_MAX_US);
        let more = spent * PPM.cast_signed() / i64::from(self.share_ppm(slot).max(1));
        let charged = TurnPeer { v_us: peer.v_us.saturating_add(more).min(V_MAX_US), ..peer };
        let mut peers = self.peers;
        peers[slot] = Some(charged);
        charged.v_us.min(mean_v_us(&peers, &self.shares_ppm).saturating_add(DEBT_MAX_US))
    }

    /// The virtual time of an ungated `slot` after its turn was waited out: it paid its quantum, which by its share is a
    /// period.
    #[must_use]
    pub fn rested(&self, slot: usize) -> i64 {
        self.peer(slot).map_or(0, |peer| peer.v_us.saturating_add(self.period_us.cast_signed()))
    }

    /// The virtual time with which `slot`, a member here, enters from idleness, and whether it goes first.
    ///
    /// It has at most half a turn of credit and at most `DEBT_MAX_US` of debt; a newcomer, of whom nothing is known, has
    /// neither, or a process that leaves after each step and comes again would always go first. `latest_us` is the latest
    /// virtual time of all slots: where nobody else is at work, nobody is owed anything.
    #[must_use]
    pub fn arrival(&self, slot: usize, latest_us: i64, newcomer: bool) -> (i64, bool) {
        let Some(own) = self.peer(slot) else { return (0, false) };
        let mut others = self.peers;
        others[slot] = None;
        let others = Self::new(&others);
        if others.is_empty() {
            let latest = latest_us.max(own.v_us);
            return (latest.clamp(-V_ENTER_MAX_US, V_ENTER_MAX_US), false);
        }
        let mean = others.mean_v_us.clamp(-V_ENTER_MAX_US, V_ENTER_MAX_US);
        if newcomer {
            return (mean, false);
        }
        let entered = own.v_us.max(mean.saturating_sub(self.half_turn_us(slot)));
        (entered.min(mean.saturating_add(DEBT_MAX_US)), own.v_us <= mean)
    }

    /// Whether `holder`, at the end of a step and `used_us` into its turn, must give it up.
    #[must_use]
    pub fn must_yield(&self, holder: usize, used_us: u64) -> bool {
        let Some(own) = self.peer(holder) else { return true };
        let waiting = || self.others(holder).filter(|(_, peer)| peer.want != Want::Nothing);
        let late = used_us >= self.overdue_after_us() && waiting().next().is_some();
        if late || waiting().any(|(_, peer)| peer.want == Want::Overdue) {
            return true;
        }
        if waiting().all(|(_, peer)| peer.v_us >= own.v_us) {
            return false;
        }
        waiting().any(|(_, peer)| peer.want == Want::Boost)
            || self.left_us(holder, used_us) < i64::from(own.step_us) / 2
    }

    /// How much more `holder` may use of its turn at best, when others wait; never negative.
    #[must_use]
    pub fn remaining_us(&self, holder: usize, used_us: u64) -> u64 {
        u64::try_from(self.left_us(holder, used_us)).unwrap_or(0)
    }

    /// Whose turn is next, after the turn of `holder`, which does not get it again: an overdue one, a boosted one, the next
    /// in slot order that is owed time, or else the one that used least. `None` when nobody waits.
    #[must_use]
    pub fn next_after(&self, holder: usize) -> Option<usize> {
        let cyclic = |slot: usize| (slot + SLOT_COUNT - 1 - holder % SLOT_COUNT) % SLOT_COUNT;
        let waiting = || self.others(holder).filter(|(_, peer)| peer.want != Want::Nothing);
        let overdue =
            waiting().filter(|(_, peer)| peer.want == Want::Overdue).min_by_key(|(slot, _)| cyclic(*slot));
        let boosted = || {
            waiting()
                .filter(|(_, peer)| peer.want == Want::Boost)
                .min_by_key(|(slot, peer)| (peer.v_us, *slot))
        };
        let owed = || {
            waiting().filter(|(_, peer)| peer.v_us <= self.mean_v_us).min_by_key(|(slot, _)| cyclic(*slot))
        };
        let least = || waiting().min_by_key(|(slot, peer)| (peer.v_us, *slot));
        overdue.or_else(boosted).or_else(owed).or_else(least).map(|(slot, _)| slot)
    }

    /// Time until the turn of `slot` is half a turn ahead of the mean, or stretched to its limit; negative beyond.
    fn left_us(&self, slot: usize, used_us: u64) -> i64 {
        let Some(own) = self.peer(slot) else { return 0 };
        let share = i128::from(self.share_ppm(slot).max(1));
        let others = (i128::from(PPM) - share).max(1);
        // One microsecond of work moves `v` ahead of the mean by (1 - share) / share.
        let room = i128::from(self.half_turn_us(slot)) - (i128::from(own.v_us) - i128::from(self.mean_v_us));
        let by_lead =
            i64::try_from(room * share / others).unwrap_or(if room < 0 { i64::MIN } else { i64::MAX });
        let stretched = self.quantum_us(slot) * STRETCH_PERCENT / 100;
        let by_use = stretched.cast_signed().saturating_sub(i64::try_from(used_us).unwrap_or(i64::MAX));
        by_lead.min(by_use)
    }

    /// Half of what the others get in a period: how far a turn leads at its end, and lags at its start.
    fn half_turn_us(&self, slot: usize) -> i64 {
        (self.period_us - self.quantum_us(slot).min(self.period_us)).cast_signed() / 2
    }

    fn others(&self, slot: usize) -> impl Iterator<Item = (usize, TurnPeer)> {
        let all = self.peers.iter().enumerate().filter_map(|(index, peer)| peer.map(|peer| (index, peer)));
        all.filter(move |(index, _)| *index != slot)
    }

    fn peer(&self, slot: usize) -> Option<TurnPeer> {
        self.peers.get(slot).copied().flatten()
    }

    fn share_ppm(&self, slot: usize) -> u32 {
        self.shares_ppm.get(slot).copied().unwrap_or(0)
    }
}

/// A step's smoothed length after one more step.
#[must_use]
pub fn smooth_step_us(before_us: u32, step_us: u64) -> u32 {
    let step = u32::try_from(step_us.clamp(1, u64::from(STEP_MAX_US))).unwrap_or(STEP_MAX_US);
    if before_us == 0 { step } else { before_us - before_us / 5 + step / 5 }
}

/// The longest step of late, after one more step: a long one is forgotten over some hundreds of shorter ones.
#[must_use]
pub fn longest_step_us(before_us: u32, step_us: u64) -> u32 {
    let step = u32::try_from(step_us).unwrap_or(STEP_MAX_US);
    (before_us - before_us / LONGEST_STEPS).max(step).min(STEP_MAX_US)
}

/// How long a holder may be silent before its turn is taken: four of its steps, or half as long again as its longest of
/// late. So the prefills of a chat server, once seen, are not taken for hanging.
#[must_use]
pub fn turn_limit_us(step_us: u32, longest_us: u32) -> u32 {
    let longest = longest_us.saturating_add(longest_us / 2);
    believed_turn_limit_us(step_us.saturating_mul(TURN_LIMIT_STEPS).max(longest))
}

/// A turn limit that somebody published, kept within what is sensible.
#[must_use]
pub fn believed_turn_limit_us(published_us: u32) -> u32 {
    published_us.clamp(TURN_LIMIT_RANGE_US.0, TURN_LIMIT_RANGE_US.1)
}

/// A member with its words clamped.
fn believed(peer: TurnPeer) -> TurnPeer {
    TurnPeer {
        v_us: peer.v_us.clamp(-V_MAX_US, V_MAX_US),
        step_us: peer.step_us.min(STEP_MAX_US),
        min_window_us: believed_window_us(peer.min_window_us),
        ..peer
    }
}

fn shares_ppm(peers: &[Option<TurnPeer>; SLOT_COUNT]) -> [u32; SLOT_COUNT] {
    let mut roster = Roster::default();
    for (slot, peer) in peers.iter().enumerate() {
        if let Some(peer) = peer {
            roster.insert(slot, peer.weight_milli);
        }
    }
    roster.shares_ppm()
}

fn ungated_ppm(peers: &[Option<TurnPeer>; SLOT_COUNT], shares_ppm: &[u32; SLOT_COUNT]) -> u32 {
    let ungated = |peer: &Option<TurnPeer>| peer.is_some_and(|peer| peer.want == Want::Ungated);
    peers.iter().zip(shares_ppm).filter(|(peer, _)| ungated(peer)).map(|(_, share)| share).sum()
}

/// Nobody charges an ungated peer for what it computes, so it is held within a period behind the others.
fn keep_ungated_near(
    peers: &mut [Option<TurnPeer>; SLOT_COUNT],
    shares_ppm: &[u32; SLOT_COUNT],
    period_us: i64,
) {
    let gated = peers.map(|peer| peer.filter(|peer| peer.want != Want::Ungated));
    if gated.iter().all(Option::is_none) {
        return;
    }
    let mean_us = mean_v_us(&gated, shares_ppm);
    for peer in peers.iter_mut().flatten().filter(|peer| peer.want == Want::Ungated) {
        peer.v_us = peer.v_us.clamp(mean_us - period_us, mean_us + DEBT_MAX_US);
    }
}

fn believed_window_us(published_us: u32) -> u32 {
    if published_us == 0 {
        WINDOW_DEFAULT_US
    } else {
        published_us.clamp(WINDOW_RANGE_US.0, WINDOW_RANGE_US.1)
    }
}

fn mean_v_us(peers: &[Option<TurnPeer>; SLOT_COUNT], shares_ppm: &[u32; SLOT_COUNT]) -> i64 {
    let members =
        peers.iter().zip(shares_ppm).filter_map(|(peer, share)| peer.map(|peer| (peer.v_us, *share)));
    let (sum, weight) = members.fold((0_i128, 0_i128), |(sum, weight), (v_us, share)| {
        (sum + i128::from(v_us) * i128::from(share), weight + i128::from(share))
    });
    // Within the range of the virtual times themselves, hence of an i64.
    sum.checked_div(weight).map_or(0, |mean| i64::try_from(mean).unwrap_or(0))
}
