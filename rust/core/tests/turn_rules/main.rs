//! What the rules of turns promise for any words that the registry may hold.

mod examples;
mod members;
mod ungated;

use ocgpu_core::SLOT_COUNT;
use ocgpu_core::schedule::{
    DEBT_MAX_US, PPM, Round, TurnPeer, Want, believed_turn_limit_us, longest_step_us, smooth_step_us,
    turn_limit_us,
};
use proptest::prelude::*;

use members::{alone, any_peer, honest, share_ppm, waiting, with_one};

/// No step is believed to be longer.
const STEP_MAX_US: u64 = 2_000_000;

proptest! {
    #[test]
    fn everybody_names_the_same_next_one_however_often_and_in_whatever_order_it_asks(
        (members, last) in with_one(any_peer()), used in any::<u64>()
    ) {
        let first = Round::new(&members);
        let answer = (first.next_after(last), first.must_yield(last, used), first.mean_v_us());

        let second = Round::new(&members);
        let reversed = (second.mean_v_us(), second.must_yield(last, used), second.next_after(last));

        prop_assert_eq!(answer, (reversed.2, reversed.1, reversed.0));
        prop_assert_eq!(first.next_after(last), answer.0);
    }

    #[test]
    fn the_next_one_waits_and_is_not_the_last_one((members, last) in with_one(any_peer())) {
        let next = Round::new(&members).next_after(last);

        let waiting = waiting(&members, last);
        prop_assert_eq!(next.is_none(), waiting.is_empty());
        prop_assert!(next.is_none_or(|next| waiting.iter().any(|(slot, _)| *slot == next)));
    }

    #[test]
    fn overdue_goes_before_boosted_before_owed_before_the_rest((members, last) in with_one(any_peer())) {
        let round = Round::new(&members);
        let Some(next) = round.next_after(last) else { return Ok(()) };

        let waiting = waiting(&members, last);
        let rank = |peer: &TurnPeer| match peer.want {
            Want::Overdue => 0,
            Want::Boost => 1,
            _ if peer.v_us.clamp(-(1 << 60), 1 << 60) <= round.mean_v_us() => 2,
            _ => 3,
        };
        let best = waiting.iter().map(|(_, peer)| rank(peer)).min();
        prop_assert_eq!(members[next].as_ref().map(rank), best);
    }

    #[test]
    fn among_those_owed_the_slots_take_turns((members, last) in with_one(honest())) {
        let mut members = members;
        for peer in members.iter_mut().flatten() {
            *peer = TurnPeer { want: Want::Turn, v_us: 0, ..*peer };
        }

        let next = Round::new(&members).next_after(last);

        let mut after_last = (1..SLOT_COUNT).map(|step| (last + step) % SLOT_COUNT);
        prop_assert_eq!(next, after_last.find(|slot| members[*slot].is_some()));
    }

    #[test]
    fn where_all_have_used_more_than_the_mean_the_least_user_goes(
        (members, last) in with_one(honest()), least in 0..SLOT_COUNT
    ) {
        prop_assume!(least != last);
        let mut members = members;
        members[least].get_or_insert(TurnPeer { weight_milli: 1000, ..TurnPeer::default() });
        for (slot, peer) in members.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            let v_us = if slot == last { -9_000_000_000 } else { 1000 + i64::from(slot != least) };
            *peer = TurnPeer { want: Want::Turn, v_us, ..*peer };
        }

        prop_assert_eq!(Round::new(&members).next_after(last), Some(least));
    }

    #[test]
    fn who_arrives_has_half_a_turn_of_credit_and_a_bounded_debt_at_most(
        (members, slot) in with_one(honest()), latest in any::<i64>()
    ) {
        let round = Round::new(&members);
        let mut others = members;
        others[slot] = None;
        let others = Round::new(&others);
        prop_assume!(!others.is_empty());

        let (v_us, first) = round.arrival(slot, latest, false);

        let half = (round.period_us() - round.quantum_us(slot)).cast_signed() / 2;
        let before = members[slot].expect("a member").v_us;
        prop_assert!(v_us >= others.mean_v_us() - half);
        prop_assert!(v_us <= others.mean_v_us() + DEBT_MAX_US);
        prop_assert!(v_us == before.clamp(others.mean_v_us() - half, others.mean_v_us() + DEBT_MAX_US));
        prop_assert_eq!(first, before <= others.mean_v_us());
    }

    #[test]
    fn a_newcomer_is_owed_nothing_owes_nothing_and_waits_like_all(
        (members, slot) in with_one(honest()), latest in any::<i64>()
    ) {
        let mut others = members;
        others[slot] = None;
        let others = Round::new(&others);
        prop_assume!(!others.is_empty());

        let arrived = Round::new(&members).arrival(slot, latest, true);

        prop_assert_eq!(arrived, (others.mean_v_us(), false));
    }

    #[test]
    fn who_arrives_alone_owes_nothing_and_is_owed_nothing(own in honest(), slot in 0..SLOT_COUNT, latest in 0_i64..1 << 50) {
        prop_assert_eq!(alone(own, slot).arrival(slot, latest, false), (own.v_us.max(latest), false));
        prop_assert_eq!(alone(own, slot).arrival(slot, latest, true), (own.v_us.max(latest), false));
    }

    #[test]
    fn alone_there_is_nobody_to_yield_to(own in any_peer(), slot in 0..SLOT_COUNT, used in any::<u64>()) {
        prop_assert!(!alone(own, slot).must_yield(slot, used));
        prop_assert_eq!(alone(own, slot).next_after(slot), None);
    }

    #[test]
    fn a_turn_is_given_up_at_once_for_one_that_is_overdue(
        (members, holder) in with_one(any_peer()), other in 0..SLOT_COUNT, peer in any_peer()
    ) {
        prop_assume!(other != holder);
        let mut members = members;
        members[other] = Some(TurnPeer { want: Want::Overdue, ..peer });

        prop_assert!(Round::new(&members).must_yield(holder, 0));
    }

    #[test]
    fn a_turn_is_given_up_only_when_somebody_waits((members, holder) in with_one(any_peer()), used in any::<u64>()) {
        let must = Round::new(&members).must_yield(holder, used);

        prop_assert!(!must || !waiting(&members, holder).is_empty());
    }

    #[test]
    fn no_virtual_time_keeps_a_turn_for_ever((members, holder) in with_one(any_peer())) {
        let round = Round::new(&members);
        prop_assume!(!waiting(&members, holder).is_empty());

        prop_assert!(round.must_yield(holder, round.overdue_after_us()));
        prop_assert!(round.must_yield(holder, u64::MAX));
    }

    #[test]
    fn a_charge_grows_with_the_time_and_never_beyond_the_bounded_debt(
        (members, slot) in with_one(any_peer()), spent in any::<u64>(), more in 0_u64..10_000_000
    ) {
        let round = Round::new(&members);
        let (less, more) = (round.charge(slot, spent), round.charge(slot, spent.saturating_add(more)));

        let mut uncut = members;
        let own = uncut[slot].as_mut().expect("a member");
        own.v_us = i64::MAX;
        prop_assert!(less <= more);
        prop_assert!(more <= Round::new(&uncut).mean_v_us().saturating_add(DEBT_MAX_US));
    }

    #[test]
    fn a_charge_is_the_time_over_the_share_until_the_debt_is_cut(
        (members, slot) in with_one(honest()), spent in 0_u64..3_000_000
    ) {
        let round = Round::new(&members);
        let share = u64::from(share_ppm(&members, slot));
        let uncut = members[slot].expect("a member").v_us
            + (spent.min(DEBT_MAX_US.cast_unsigned()) * PPM / share).cast_signed();
        let mut charged = members;
        charged[slot].as_mut().expect("a member").v_us = uncut;
        let most = Round::new(&charged).mean_v_us() + DEBT_MAX_US;

        prop_assert_eq!(round.charge(slot, spent), uncut.min(most));
    }

    #[test]
    fn any_words_give_finite_answers((members, slot) in with_one(any_peer()), used in any::<u64>(), latest in any::<i64>()) {
        let round = Round::new(&members);
        let sum: u64 = (0..SLOT_COUNT).map(|slot| u64::from(share_ppm(&members, slot))).sum();

        prop_assert!(sum <= PPM && sum + SLOT_COUNT as u64 > PPM, "{}", sum);
        prop_assert!((80_000..=400_000).contains(&round.period_us()));
        prop_assert!(round.quantum_us(slot) > 0 && round.quantum_us(slot) <= round.period_us());
        prop_assert!(round.round_us() <= SLOT_COUNT as u64 * (STEP_MAX_US + 1000));
        prop_assert!(round.remaining_us(slot, used) <= round.quantum_us(slot) * 5 / 4);
        prop_assert!(round.len() == members.iter().flatten().count());
        let (v_us, _) = round.arrival(slot, latest, false);
        prop_assert!(v_us.unsigned_abs() <= 1 << 60);
        prop_assert!(round.charge(slot, used).unsigned_abs() <= 1 << 61);
    }

    #[test]
    fn who_enters_beside_any_words_has_room_to_be_charged((members, slot) in with_one(any_peer()), latest in any::<i64>(), newcomer: bool) {
        let (v_us, _) = Round::new(&members).arrival(slot, latest, newcomer);

        let mut entered = [None; SLOT_COUNT];
        entered[slot] = members[slot].map(|own| TurnPeer { v_us, ..own });
        prop_assert_eq!(Round::new(&entered).charge(slot, 1000), v_us + 1000);
    }

    #[test]
    fn a_slot_that_is_no_member_has_no_part((members, slot) in with_one(any_peer()), used in any::<u64>()) {
        let mut members = members;
        members[slot] = None;
        let round = Round::new(&members);

        prop_assert_eq!((round.quantum_us(slot), round.remaining_us(slot, used), round.charge(slot, used)), (0, 0, 0));
        prop_assert!(round.must_yield(slot, 0));
        prop_assert_eq!(round.must_yield(SLOT_COUNT, used), true);
        prop_assert_eq!(round.arrival(slot, 5, false), (0, false));
    }

    #[test]
    fn a_smoothed_step_lies_between_what_it_was_and_what_came(before in 1_u32..2_000_000, step in 1_u64..2_000_000) {
        let after = u64::from(smooth_step_us(before, step));

        let (low, high) = (u64::from(before).min(step), u64::from(before).max(step));
        // Two divisions round down, each by less than one.
        prop_assert!(after >= low.saturating_sub(1).max(1) && after <= high + 1, "{}", after);
        prop_assert_eq!(u64::from(smooth_step_us(0, step)), step);
    }

    #[test]
    fn any_step_is_smoothed_without_overflow(before in any::<u32>(), step in any::<u64>()) {
        let after = smooth_step_us(before, step);

        prop_assert!(after >= 1);
        prop_assert!(u64::from(after) <= u64::from(before).max(STEP_MAX_US) + 1);
    }

    #[test]
    fn the_longest_step_is_kept_over_a_request_and_forgotten_over_many(longest in 100_000_u64..2_000_000) {
        let after = |steps| (0..steps).fold(longest_step_us(0, longest), |longest, _| longest_step_us(longest, 8000));

        prop_assert_eq!(u64::from(after(0)), longest);
        prop_assert!(u64::from(after(60)) * 5 > longest * 3);
        prop_assert!(after(2000) <= 8000 + 256);
    }

    #[test]
    fn a_turn_limit_is_four_steps_or_half_as_long_again_as_the_longest_within_a_tenth_of_a_second_and_two(
        step in prop_oneof![0_u32..1_000_000, any::<u32>()], longest in prop_oneof![0_u32..1_500_000, any::<u32>()],
        published in prop_oneof![0_u32..3_000_000, any::<u32>()]
    ) {
        let limit = u64::from(turn_limit_us(step, longest));

        let wanted = (u64::from(step) * 4).max(u64::from(longest) * 3 / 2);
        prop_assert_eq!(limit, wanted.clamp(100_000, 2_000_000));
        prop_assert_eq!(believed_turn_limit_us(published), published.clamp(100_000, 2_000_000));
    }
}
