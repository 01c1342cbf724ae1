//! Promises of the registry, through the public API, each in a directory of its own.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ocgpu_core::{Error, GpuKey, Pacer, PeerState, Place, SLOT_COUNT, Schedule, Settings, Share, peers};

/// A directory that goes with the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ocgpu-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).expect("a scratch directory");
        Self(path)
    }

    fn place(&self) -> Place {
        Place::new(&self.0, Share::Machine)
    }

    fn segment(&self) -> PathBuf {
        self.0.join("opencoti-gpu-test")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn key() -> GpuKey {
    GpuKey::new("test").expect("a legal key")
}

fn join(scratch: &Scratch, name: &str, weight: f64) -> Pacer {
    let settings = Settings {
        key: key(),
        place: scratch.place(),
        weight,
        name: name.into(),
        gated: true,
        schedule: Schedule::Turn,
    };
    Pacer::join(settings).expect("a place among the peers")
}

#[expect(clippy::disallowed_methods, reason = "a test's watchdog is not the core's clock")]
fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "not within 10 s: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn bytes_at(file: &Path, at: usize, length: usize) -> Vec<u8> {
    fs::read(file).expect("a readable segment")[at..at + length].to_vec()
}

#[test]
fn both_names_lead_to_one_segment_of_4096_bytes() {
    let scratch = Scratch::new("names");
    let _pacer = join(&scratch, "a", 1.0);

    let files: Vec<_> =
        fs::read_dir(&scratch.0).expect("readable").map(|entry| entry.expect("entry").path()).collect();
    let inodes: Vec<u64> = files.iter().map(|file| file.metadata().expect("metadata").ino()).collect();

    assert_eq!(files.len(), 2);
    assert_eq!(inodes[0], inodes[1]);
    assert_eq!(scratch.segment().metadata().expect("metadata").len(), 4096);
}

#[test]
fn the_seeds_fields_lie_where_the_seed_reads_them() {
    let scratch = Scratch::new("layout");
    let _pacer = join(&scratch, "chat", 1.5);

    let file = scratch.segment();

    assert_eq!(bytes_at(&file, 0, 16), b"OCGPU\0\0\0\x01\0\0\0\x10\0\0\0");
    assert_eq!(bytes_at(&file, 16, 4), std::process::id().to_le_bytes());
    assert_eq!(bytes_at(&file, 16 + 16, 4), 1.5_f32.to_le_bytes());
    assert_eq!(bytes_at(&file, 16 + 36, 5), b"chat\0");
    assert_eq!(bytes_at(&file, 1536, 8), b"OCGPUEX1");
}

/// A segment as a peer of the seed leaves it: one slot a pid, with this heartbeat.
fn seed_segment(pids: &[u32], heartbeat_us: i64) -> Vec<u8> {
    let mut bytes = vec![0_u8; 4096];
    bytes[..16].copy_from_slice(b"OCGPU\0\0\0\x01\0\0\0\x10\0\0\0");
    for (index, pid) in pids.iter().enumerate() {
        let slot = &mut bytes[16 + 88 * index..][..88];
        slot[..4].copy_from_slice(&pid.to_le_bytes());
        slot[8..16].copy_from_slice(&heartbeat_us.to_le_bytes());
        slot[16..20].copy_from_slice(&2.0_f32.to_le_bytes());
        slot[20..24].copy_from_slice(&1_u32.to_le_bytes());
        slot[24..32].copy_from_slice(&heartbeat_us.to_le_bytes());
        slot[36..40].copy_from_slice(b"seed");
    }
    bytes
}

#[test]
fn a_segment_that_a_peer_of_the_seed_made_is_joined_under_both_names() {
    let scratch = Scratch::new("seed");
    fs::write(scratch.segment(), seed_segment(&[4242], ocgpu_core::wall_us())).expect("a writable directory");

    let pacer = join(&scratch, "ours", 1.0);
    let view = pacer.snapshot();

    assert_eq!(pacer.slot(), Some(1));
    assert_eq!((view.peers[0].name.as_str(), view.peers[0].pid, view.peers[0].alive), ("seed", 4242, true));
    assert_eq!(view.peers[0].share_ppm, 1_000_000);
}

#[test]
fn slots_of_silent_peers_of_the_seed_are_reclaimed() {
    let scratch = Scratch::new("silent");
    let pids: Vec<u32> = (1..=16).collect();
    let long_ago_us = ocgpu_core::wall_us() - 60_000_000;
    fs::write(scratch.segment(), seed_segment(&pids, long_ago_us)).expect("a writable directory");

    let pacer = join(&scratch, "ours", 1.0);
    assert_eq!(pacer.slot(), None);

    wait_until("a slot among the silent", || pacer.slot().is_some());
    wait_until("the other slots to be freed", || pacer.snapshot().peers.is_empty());
}

#[test]
fn a_peer_of_the_seed_that_beats_keeps_its_slot() {
    let scratch = Scratch::new("beating");
    // An hour ahead: its age alone would condemn it, its beat does not.
    let mut heartbeat_us = ocgpu_core::wall_us() + 3_600_000_000;
    fs::write(scratch.segment(), seed_segment(&[4242], heartbeat_us)).expect("a writable directory");
    let pacer = join(&scratch, "ours", 1.0);
    let file = fs::File::options().write(true).open(scratch.segment()).expect("a writable segment");
    let mut beats = 0;

    wait_until("five seconds of beats", || {
        heartbeat_us += 1;
        file.write_all_at(&heartbeat_us.to_le_bytes(), 16 + 24).expect("a beat");
        beats += 1;
        assert_eq!(pacer.snapshot().peers.len(), 1);
        beats > 1000
    });
}

#[test]
fn sixteen_fit_and_the_seventeenth_waits_for_a_slot() {
    let scratch = Scratch::new("full");
    let mut joined: Vec<Pacer> = (0..SLOT_COUNT).map(|_| join(&scratch, "one of many", 1.0)).collect();
    let late = join(&scratch, "late", 1.0);
    assert_eq!(late.slot(), None);
    assert!(late.arrive());

    drop(joined.remove(5));

    wait_until("a slot for the late one", || late.slot() == Some(5));
}

#[test]
fn a_private_place_is_readable_by_its_user_alone() {
    let scratch = Scratch::new("private");
    let place = Place::new(&scratch.0, Share::User);

    let _pacer = Pacer::join(Settings {
        key: key(),
        place,
        weight: 1.0,
        name: String::new(),
        gated: true,
        schedule: Schedule::Turn,
    })
    .expect("a place");

    assert_eq!(scratch.segment().metadata().expect("metadata").mode() & 0o777, 0o600);
}

#[test]
fn an_outsiders_look_changes_nothing() {
    let scratch = Scratch::new("look");
    let pacer = join(&scratch, "a", 1.0);
    pacer.open_request();

    let seen = peers(&scratch.place(), &key()).expect("a readable segment");

    assert_eq!(seen.own, None);
    assert_eq!((seen.peers.len(), seen.peers[0].state), (1, PeerState::Running));
    assert_eq!(pacer.slot(), Some(0));
}

#[test]
fn any_bytes_of_any_length_are_an_error_or_a_segment() {
    let scratch = Scratch::new("hostile");
    for (index, length) in [0, 1, 15, 1423, 1424, 4095, 4096, 16_384].into_iter().enumerate() {
        for fill in [0_u8, 0x41, 0xff] {
            fs::remove_dir_all(&scratch.0).expect("removable");
            fs::create_dir_all(&scratch.0).expect("creatable");
            let mut bytes = vec![fill; length];
            if index % 2 == 0 && length >= 16 {
                bytes[..16].copy_from_slice(b"OCGPU\0\0\0\x01\0\0\0\x10\0\0\0");
            }
            fs::write(scratch.segment(), &bytes).expect("writable");

            match Pacer::join(Settings {
                key: key(),
                place: scratch.place(),
                weight: 1.0,
                name: "ours".into(),
                gated: true,
                schedule: Schedule::Turn,
            }) {
                Ok(pacer) => {
                    pacer.open_request();
                    let _ = (pacer.arrive(), pacer.remaining_us(), pacer.snapshot().to_json());
                }
                Err(Error::RegistryUnavailable { .. }) => {}
                Err(other) => panic!("{length} bytes of {fill:#x}: {other}"),
            }
        }
    }
}
