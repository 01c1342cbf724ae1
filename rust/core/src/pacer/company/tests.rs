//! With a peer of the seed at work, our decision is the seed's: a reference written from its description alone.

use proptest::prelude::*;

use super::*;
use crate::key::GpuKey;
use crate::place::{Place, Share};
use crate::registry::{Owner, SegmentPath};
use crate::schedule::Grid;
use crate::sys::process_identity;

/// One slot as a peer of the seed writes it.
#[derive(Debug, Clone, Copy)]
struct SeedSlot {
    pid: u32,
    weight: f32,
    active: bool,
    age_us: i64,
}

fn seed_slot() -> impl Strategy<Value = SeedSlot> {
    let age_us = prop_oneof![-2_900_000..2_900_000_i64, 3_100_000..9_000_000_i64];
    (0_u32..4, 0.001_f32..1000.0, any::<bool>(), age_us).prop_map(|(pid, weight, active, age_us)| SeedSlot {
        pid,
        weight,
        active,
        age_us,
    })
}

/// Microseconds until the window of `own` opens: active peers with a heartbeat not older than 3 s, shares of at least
/// 10 % before renormalising, a period that gives the smallest 40 ms within 80 to 400 ms, windows in slot order.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "weights are from 0.001 to 1000")]
fn seeds_wait_us(slots: &[SeedSlot], own: usize, wall_us: i64) -> u64 {
    let alive = |slot: &SeedSlot| slot.pid != 0 && slot.active && slot.age_us.abs() <= 3_000_000;
    let members: Vec<usize> =
        (0..slots.len()).filter(|index| *index == own || alive(&slots[*index])).collect();
    if members.len() < 2 {
        return 0;
    }
    let milli = |index: &usize| (slots[*index].weight * 1000.0).round() as u64;
    let total: u64 = members.iter().map(milli).sum();
    // In tenths of the total: a share is at least one of ten.
    let floored: Vec<u64> = members.iter().map(|index| (milli(index) * 10).max(total)).collect();
    let whole: u64 = floored.iter().sum();
    let smallest = floored.iter().min().expect("members");
    let period = (40_000 * whole / smallest).clamp(80_000, 400_000);
    let place = members.iter().position(|index| *index == own).expect("among them");
    let edge = |count: usize| period * floored[..count].iter().sum::<u64>() / whole;
    let at = wall_us.rem_euclid(period.cast_signed()).cast_unsigned();
    if (edge(place)..edge(place + 1)).contains(&at) { 0 } else { (edge(place) + period - at) % period }
}

fn publish(segment: &Segment, slot: usize, seed: SeedSlot, now_us: i64) {
    let base = &segment.slots[slot];
    base.weight.store(seed.weight.to_bits(), Ordering::Relaxed);
    base.active.store(u32::from(seed.active), Ordering::Relaxed);
    base.heartbeat_us.store(now_us - seed.age_us, Ordering::Relaxed);
    base.pid.store(seed.pid, Ordering::Relaxed);
}

#[test]
fn beside_peers_of_the_seed_we_wait_as_the_seed_does() {
    let directory = std::env::temp_dir().join(format!("ocgpu-seed-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a scratch directory");
    let (place, key) = (Place::new(&directory, Share::Machine), GpuKey::new("test").expect("a legal key"));
    let owner = Owner { identity: process_identity(), name: "ours".into(), weight: 1.0, flags: 0 };
    let path = SegmentPath::new(&place, &key);
    let member = Member::join(key, place, path, owner).expect("a place among the peers");
    let segment = member.seat().segment.expect("a segment");

    let others = proptest::collection::vec(seed_slot(), 15);
    let checked = proptest::test_runner::TestRunner::default().run(
        &(others, 0.001_f32..1000.0, any::<i64>()),
        |(others, weight, wall_us)| {
            let own = SeedSlot { pid: 1, weight, active: true, age_us: 0 };
            let slots: Vec<SeedSlot> = std::iter::once(own).chain(others).collect();
            member.set_weight(weight);
            for (slot, seed) in slots.iter().enumerate().skip(1) {
                publish(segment.bytes(), slot, *seed, clock::wall_us());
            }

            let company = member.company(segment.bytes(), Some(0));
            let roster = member.roster(segment.bytes(), 0, company);
            let wait_us = if company.is_empty() { 0 } else { Grid::new(&roster).wait_us(0, wall_us) };

            prop_assert!(company.is_empty() || company.schedule == Schedule::Grid);
            prop_assert_eq!(wait_us, seeds_wait_us(&slots, 0, wall_us));
            Ok(())
        },
    );

    std::fs::remove_dir_all(&directory).expect("removable");
    checked.expect("the seed's decision");
}
