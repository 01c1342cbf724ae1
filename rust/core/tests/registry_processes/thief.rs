//! A peer of the seed that takes the slot of one that was stopped for too long.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use crate::children::{Scratch, join, wait_until};

const SLOT: usize = 16;

#[test]
fn who_lost_its_slot_takes_another_at_its_next_beat_and_leaves_the_thief_alone() {
    for pid in [99_999, std::process::id()] {
        let scratch = Scratch::new("thief");
        let pacer = join(&scratch.0, "robbed");
        assert_eq!(pacer.slot(), Some(0));
        let mut thief = [0_u8; 88];
        let now_us = ocgpu_core::wall_us();
        thief[..4].copy_from_slice(&pid.to_le_bytes());
        thief[8..16].copy_from_slice(&now_us.to_le_bytes());
        thief[16..20].copy_from_slice(&3.0_f32.to_le_bytes());
        // Ahead of our clock, so that it stays alive for the whole test without a beat.
        thief[24..32].copy_from_slice(&(now_us + 400_000).to_le_bytes());
        thief[36..41].copy_from_slice(b"thief");
        let file = File::options().write(true).open(scratch.segment()).expect("a segment");

        file.write_all_at(&thief, SLOT as u64).expect("a theft");

        wait_until("another slot", || pacer.slot() == Some(1));
        let peers = pacer.snapshot().peers;
        assert_eq!((peers.len(), peers[0].name.as_str(), peers[0].pid), (1, "thief", pid));
        assert_eq!(fs::read(scratch.segment()).expect("readable")[SLOT..SLOT + 88], thief);
    }
}
