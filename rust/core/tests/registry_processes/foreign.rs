//! Segments of other releases, and places without room for one.

use std::fs;
use std::path::Path;
use std::process::Command;

use ocgpu_core::{Error, Pacer, Schedule, Settings};

use crate::children::{Played, Scratch, join, key, place, say};

const VERSION_AT: usize = 8;
const SLOT_COUNT_AT: usize = 12;
const EXT_AT: usize = 1536;

/// Role: join, or say why not.
pub(crate) fn try_to_join(directory: &Path) {
    match attempt(directory) {
        Ok(_) => say("joined"),
        Err(error) => say(&format!("refused {error}")),
    }
}

fn attempt(directory: &Path) -> Result<Pacer, Error> {
    Pacer::join(Settings {
        key: key(),
        place: place(directory),
        weight: 1.0,
        name: "ours".into(),
        gated: true,
        schedule: Schedule::Turn,
    })
}

/// A segment as this release makes it, empty, with another word at `at`.
fn segment_with(at: usize, word: u32) -> Vec<u8> {
    let scratch = Scratch::new(&format!("made-{at}"));
    drop(join(&scratch.0, "makes it"));
    let mut bytes = fs::read(scratch.segment()).expect("readable");
    bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
    bytes
}

#[test]
fn a_segment_of_another_version_or_size_is_refused_and_not_written_to() {
    for at in [VERSION_AT, SLOT_COUNT_AT] {
        let scratch = Scratch::new("version");
        let bytes = segment_with(at, 2);
        fs::write(scratch.segment(), &bytes).expect("writable");

        let refused = attempt(&scratch.0);

        assert!(matches!(refused, Err(Error::RegistryUnavailable { .. })), "{refused:?}");
        assert!(fs::read(scratch.segment()).expect("readable") == bytes, "written to");
    }
}

#[test]
fn a_later_version_of_the_extension_is_used() {
    let scratch = Scratch::new("later");
    fs::write(scratch.segment(), segment_with(EXT_AT + 8, 2)).expect("writable");

    let pacer = join(&scratch.0, "ours");

    assert_eq!(pacer.slot(), Some(0));
    let owner_token = &fs::read(scratch.segment()).expect("readable")[1600..1608];
    assert_ne!(owner_token, [0; 8]);
}

#[test]
fn an_extension_that_means_something_else_is_neither_read_nor_written() {
    // Its magic, a feature, its own sizes.
    for (at, word) in [(EXT_AT, 0x5a5a_5a5a), (EXT_AT + 28, 1), (EXT_AT + 16, 256)] {
        let scratch = Scratch::new("unknown");
        let bytes = segment_with(at, word);
        fs::write(scratch.segment(), &bytes).expect("writable");

        let pacer = join(&scratch.0, "ours");
        let slot = pacer.slot();
        pacer.leave();

        assert_eq!(slot, Some(0));
        assert!(fs::read(scratch.segment()).expect("readable")[1424..] == bytes[1424..], "written to");
    }
}

#[test]
#[expect(clippy::print_stderr, reason = "a skip says why")]
fn a_full_file_system_is_an_error_and_no_signal() {
    let scratch = Scratch::new("full-disk");
    let mount = "mount -t tmpfs -o size=4k tmpfs \"$OCGPU_TEST_CHILD_DIR\" && head -c 4096 /dev/zero \
                 > \"$OCGPU_TEST_CHILD_DIR/fill\"";
    let mut unshare = Command::new("unshare");
    let unshared = unshare.args(["-Urm", "sh", "-c", mount]).env("OCGPU_TEST_CHILD_DIR", &scratch.0).output();
    if !unshared.as_ref().is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: no file system can be mounted here: {unshared:?}");
        return;
    }
    let script = format!("{mount}; exec \"$0\" \"$@\"");
    let binary = std::env::current_exe().expect("this binary");
    let mut command = Command::new("unshare");
    command.args(["-Urm", "sh", "-c", script.as_str()]).arg(binary);

    let refused = Played::start_by(&mut command, "try to join", &scratch.0).hear("refused");

    assert!(refused.contains("the file system is full"), "{refused}");
}
