//! `kill -9` of a peer, with real processes: this test binary runs itself as the child.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ocgpu_core::{GpuKey, Pacer, Place, Schedule, Settings, Share};

const CHILD: &str = "OCGPU_TEST_CHILD_DIR";

fn join(directory: PathBuf, name: &str) -> Pacer {
    let key = GpuKey::new("test").expect("a legal key");
    let place = Place::new(directory, Share::Machine);
    Pacer::join(Settings {
        key,
        place,
        weight: 1.0,
        name: name.into(),
        gated: true,
        schedule: Schedule::Turn,
    })
    .expect("a place")
}

/// Not a test by itself: joins, works and waits to be killed when the variable is set.
#[test]
fn child_that_is_killed() {
    let Some(directory) = std::env::var_os(CHILD) else { return };
    let pacer = join(directory.into(), "child");
    pacer.open_request();
    // Through libtest's capture: the parent runs us with `--nocapture` and reads this line.
    eprintln_joined();
    loop {
        std::thread::park();
    }
}

#[expect(clippy::print_stderr, reason = "the parent waits for this line")]
fn eprintln_joined() {
    eprintln!("joined");
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start_child(directory: &PathBuf) -> Killed {
    let mut child = Command::new(std::env::current_exe().expect("this binary"))
        .args(["--exact", "child_that_is_killed", "--nocapture"])
        .env(CHILD, directory)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a child");
    let output = BufReader::new(child.stderr.take().expect("a pipe"));
    assert!(
        output.lines().map_while(Result::ok).any(|line| line.contains("joined")),
        "the child did not join"
    );
    Killed(child)
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a test's watchdog is not the core's clock")]
fn a_killed_peer_leaves_the_schedule_and_its_slot_within_3_seconds() {
    let directory = std::env::temp_dir().join(format!("ocgpu-crash-{}", std::process::id()));
    fs::create_dir_all(&directory).expect("a scratch directory");
    let survivor = join(directory.clone(), "survivor");
    survivor.open_request();
    let mut child = start_child(&directory);
    let both = survivor.snapshot();
    assert_eq!((both.peers.len(), both.peers[0].share_ppm), (1, 500_000));

    child.0.kill().expect("a killable child");
    child.0.wait().expect("a dead child");
    let killed = Instant::now();
    while !survivor.snapshot().peers.is_empty() && killed.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(5));
    }

    assert!(killed.elapsed() < Duration::from_secs(3), "{:?}", killed.elapsed());
    assert_eq!(survivor.snapshot().own.expect("a slot").share_ppm, 1_000_000);
    fs::remove_dir_all(&directory).expect("removable");
}
