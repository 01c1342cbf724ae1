//! What the rules give a peer that cannot wait.

use ocgpu_core::SLOT_COUNT;
use ocgpu_core::schedule::{DEBT_MAX_US, Roster, Round, TurnPeer, Want};
use proptest::prelude::*;

use crate::members::{any_peer, peer, share_ppm, two, with_one};

proptest! {
    #[test]
    fn an_ungated_peer_with_half_of_the_card_or_less_takes_no_turns((members, own) in with_one(any_peer()), ungated in 0..SLOT_COUNT) {
        prop_assume!(own != ungated);
        let mut members = members;
        members[ungated] = Some(TurnPeer { want: Want::Ungated, ..members[ungated].unwrap_or_default() });
        prop_assume!(share_ppm(&members, ungated) <= 500_000);
        let with = Round::new(&members);
        members[ungated] = None;
        let without = Round::new(&members);

        prop_assert_eq!(with.next_after(own), without.next_after(own));
        prop_assert_eq!((with.len(), with.period_us()), (without.len(), without.period_us()));
        prop_assert_eq!(with.quantum_us(own), without.quantum_us(own));
        prop_assert_eq!((with.quantum_us(ungated), with.mean_v_us()), (0, without.mean_v_us()));
    }

    #[test]
    fn an_ungated_peer_whose_share_is_more_is_left_what_it_lacks(v_us in any::<i64>(), weight in 1001_u32..9000) {
        let ungated = TurnPeer { weight_milli: weight, v_us, ..peer(0, Want::Ungated) };
        let round = two(peer(0, Want::Nothing), ungated);
        let (own, rest) = (round.quantum_us(0), round.quantum_us(1));

        // Of the time that others compute in, it has half; with its rest that must make its share.
        let had = (rest + own / 2) * 1_000_000 / (rest + own);
        let mut roster = Roster::default();
        roster.insert(0, 1000);
        roster.insert(1, weight);
        prop_assert!(had.abs_diff(u64::from(roster.shares_ppm()[1])) <= 50, "{}", had);
        prop_assert_eq!(round.next_after(0), Some(1));
        prop_assert!(round.rested(1) >= -round.period_us().cast_signed());
        prop_assert!(round.rested(1) <= DEBT_MAX_US + round.period_us().cast_signed());
    }
}
