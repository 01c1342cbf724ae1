//! Members of a round to test with.

use ocgpu_core::SLOT_COUNT;
use ocgpu_core::schedule::{Roster, Round, TurnPeer, Want};
use proptest::prelude::*;

pub(crate) type Members = [Option<TurnPeer>; SLOT_COUNT];

pub(crate) fn want() -> impl Strategy<Value = Want> {
    prop_oneof![Just(Want::Nothing), Just(Want::Turn), Just(Want::Boost), Just(Want::Overdue)]
}

/// A peer as honest ones write themselves.
pub(crate) fn honest() -> impl Strategy<Value = TurnPeer> {
    (1_u32..=1_000_000, -2_000_000_i64..2_000_000, 1_u32..400_000, 0_u32..100_000, want()).prop_map(
        |(weight_milli, v_us, step_us, min_window_us, want)| TurnPeer {
            weight_milli,
            v_us,
            step_us,
            min_window_us,
            want,
        },
    )
}

/// A peer of any bits, the extremes often.
pub(crate) fn any_peer() -> impl Strategy<Value = TurnPeer> {
    let v_us = prop_oneof![any::<i64>(), Just(i64::MIN), Just(i64::MAX), -10_i64..10];
    let word = || prop_oneof![any::<u32>(), Just(0), Just(u32::MAX)];
    (word(), v_us, word(), word(), want()).prop_map(|(weight_milli, v_us, step_us, min_window_us, want)| {
        TurnPeer { weight_milli, v_us, step_us, min_window_us, want }
    })
}

/// Members, one slot of which is taken.
pub(crate) fn with_one(peer: impl Strategy<Value = TurnPeer>) -> impl Strategy<Value = (Members, usize)> {
    let peers = prop::collection::vec((peer, any::<bool>()), SLOT_COUNT);
    (peers, 0..SLOT_COUNT).prop_map(|(peers, slot)| {
        let kept =
            peers.into_iter().enumerate().map(|(at, (peer, there))| (there || at == slot).then_some(peer));
        (kept.collect::<Vec<_>>().try_into().expect("one per slot"), slot)
    })
}

pub(crate) fn waiting(members: &Members, holder: usize) -> Vec<(usize, TurnPeer)> {
    let peers = members.iter().enumerate().filter_map(|(slot, peer)| peer.map(|peer| (slot, peer)));
    peers.filter(|(slot, peer)| *slot != holder && peer.want != Want::Nothing).collect()
}

pub(crate) fn alone(own: TurnPeer, slot: usize) -> Round {
    let mut members = [None; SLOT_COUNT];
    members[slot] = Some(own);
    Round::new(&members)
}

pub(crate) fn two(own: TurnPeer, other: TurnPeer) -> Round {
    let mut members = [None; SLOT_COUNT];
    (members[0], members[1]) = (Some(own), Some(other));
    Round::new(&members)
}

pub(crate) fn share_ppm(members: &Members, slot: usize) -> u32 {
    let mut roster = Roster::default();
    for (slot, peer) in members.iter().enumerate() {
        if let Some(peer) = peer {
            roster.insert(slot, peer.weight_milli);
        }
    }
    roster.shares_ppm()[slot]
}

pub(crate) fn peer(v_us: i64, want: Want) -> TurnPeer {
    TurnPeer { weight_milli: 1000, v_us, step_us: 8000, min_window_us: 0, want }
}
