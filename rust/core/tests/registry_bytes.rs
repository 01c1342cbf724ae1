//! Whatever bytes a segment holds, nobody panics, waits for long or computes a share that is none.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use ocgpu_core::{Error, GpuKey, Pacer, Place, Schedule, Settings, Share, Snapshot, peers};
use proptest::prelude::*;

const SIZE: usize = 4096;
const HEADER: &[u8; 16] = b"OCGPU\0\0\0\x01\0\0\0\x10\0\0\0";
const EXT_AT: usize = 1536;
const EXT_HEADER: &[u8; 32] = b"OCGPUEX1\x01\0\0\0\x40\0\0\0\x80\0\0\0\x10\0\0\0\0\0\0\0\0\0\0\0";
const EXT_SLOTS_AT: usize = 1600;
/// Longest turn: five quarters of a quantum, which is a period at most.
const TURN_US_MAX: u64 = 500_000;

/// What is put into random bytes, so that they mean something.
#[derive(Debug, Clone)]
struct Sense {
    header: bool,
    extension: bool,
    /// Bit per slot: nobody has it.
    free: u16,
    /// Bit per slot: a young heartbeat, and at work.
    alive: u16,
    /// Bit per slot: the extension names the owner.
    named: u16,
}

fn sense() -> impl Strategy<Value = Sense> {
    let likely = || prop_oneof![9 => Just(true), 1 => Just(false)];
    (likely(), likely(), any::<u16>(), any::<u16>(), any::<u16>())
        .prop_map(|(header, extension, free, alive, named)| Sense { header, extension, free, alive, named })
}

fn segment(mut bytes: Vec<u8>, sense: &Sense) -> Vec<u8> {
    if sense.header {
        bytes[..16].copy_from_slice(HEADER);
    }
    if sense.extension {
        bytes[EXT_AT..EXT_AT + 32].copy_from_slice(EXT_HEADER);
    }
    for index in 0..16 {
        let (slot, ext) = (16 + 88 * index, EXT_SLOTS_AT + 128 * index);
        let set = |bits: u16| bits >> index & 1 == 1;
        if set(sense.free) {
            bytes[slot..slot + 4].fill(0);
        }
        if set(sense.alive) {
            bytes[slot + 20..slot + 24].copy_from_slice(&1_u32.to_le_bytes());
            bytes[slot + 24..slot + 32].copy_from_slice(&ocgpu_core::wall_us().to_le_bytes());
        }
        if set(sense.named) {
            bytes.copy_within(slot..slot + 4, ext + 8);
            bytes.copy_within(slot + 8..slot + 16, ext + 16);
        }
    }
    bytes
}

struct Scratch(PathBuf);

impl Scratch {
    fn with(bytes: &[u8]) -> Self {
        let path = std::env::temp_dir().join(format!("ocgpu-bytes-{}", std::process::id()));
        fs::create_dir_all(&path).expect("a scratch directory");
        fs::write(path.join("opencoti-gpu-test"), bytes).expect("writable");
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn assert_sane(view: &Snapshot) {
    let everybody = || view.own.iter().chain(&view.peers);
    let shares: u64 = everybody().map(|peer| u64::from(peer.share_ppm)).sum();
    assert!(shares == 0 || shares.abs_diff(1_000_000) <= 16, "{shares}");
    assert!(everybody().all(|peer| (1..=1_000_000).contains(&peer.weight_milli)), "{view:?}");
    assert!(everybody().all(|peer| peer.busy_ppm <= 1_000_000), "{view:?}");
    serde_json::from_str::<serde_json::Value>(&view.to_json()).expect("a JSON document");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_bytes_are_refused_or_lived_with(
        bytes in proptest::collection::vec(any::<u8>(), SIZE),
        sense in sense(),
    ) {
        let scratch = Scratch::with(&segment(bytes, &sense));
        let place = Place::new(&scratch.0, Share::Machine);
        let key = GpuKey::new("test").expect("a legal key");

        let seen = peers(&place, &key);
        let joined = Pacer::join(Settings { key, place, weight: 1.0, name: "ours".into(), gated: true, schedule: Schedule::Turn });

        match (seen, joined) {
            (Ok(seen), Ok(pacer)) => {
                assert_sane(&seen);
                pacer.open_request();
                for _ in 0..3 {
                    let _ = pacer.arrive() || pacer.wait(Duration::from_millis(1)) || pacer.look();
                    prop_assert!(pacer.remaining_us().is_none_or(|us| us <= TURN_US_MAX));
                    pacer.done();
                    assert_sane(&pacer.snapshot());
                }
            }
            (Err(Error::RegistryUnavailable { .. }), Err(Error::RegistryUnavailable { .. })) => {
                prop_assert!(!sense.header);
            }
            (seen, joined) => panic!("{seen:?} {joined:?}"),
        }
    }
}
