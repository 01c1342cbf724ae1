//! Child processes with a role, and what parent and child say to each other.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use ocgpu_core::{GpuKey, Pacer, Place, Schedule, Settings, Share};

const ROLE: &str = "OCGPU_TEST_CHILD_ROLE";
const DIRECTORY: &str = "OCGPU_TEST_CHILD_DIR";
const WATCHDOG: Duration = Duration::from_secs(30);

/// Not a test by itself: plays the role that its parent gave it.
#[test]
fn child() {
    let Some(role) = std::env::var_os(ROLE) else { return };
    let directory = PathBuf::from(std::env::var_os(DIRECTORY).expect("a directory"));
    match role.to_str().expect("a role in UTF-8") {
        "compute" => crate::cut::compute(&directory),
        "fault elsewhere" => crate::cut::fault_elsewhere(&directory),
        "fault with an earlier handler" => crate::cut::fault_with_an_earlier_handler(&directory),
        "fault with a later handler" => crate::cut::fault_with_a_later_handler(&directory),
        "await a signal" => crate::cut::await_a_signal(&directory),
        "fork again and again" => crate::forks::fork_again_and_again(&directory),
        "fork with many files" => crate::forks::fork_with_many_files(&directory),
        "try to join" => crate::foreign::try_to_join(&directory),
        "join filtered" => crate::locks::join_filtered(&directory),
        "join unfiltered" => crate::locks::join_unfiltered(&directory),
        "claim filtered" => crate::locks::claim_filtered(&directory),
        "claim unfiltered" => crate::locks::claim_unfiltered(&directory),
        "lease filtered" => crate::locks::lease_filtered(&directory),
        other => panic!("no such role: {other}"),
    }
}

/// A line for the parent, past libtest's capture.
#[expect(clippy::print_stderr, reason = "the parent reads it")]
pub(crate) fn say(line: &str) {
    eprintln!("say {line}");
}

/// Wait for a line from the parent; the end of its pipe, when it is gone, ends the child.
pub(crate) fn listen() -> String {
    let mut line = String::new();
    if std::io::stdin().read_line(&mut line).expect("a readable pipe") == 0 {
        std::process::exit(0);
    }
    line.trim_end().to_owned()
}

pub(crate) fn place(directory: &Path) -> Place {
    Place::new(directory, Share::Machine)
}

pub(crate) fn key() -> GpuKey {
    GpuKey::new("test").expect("a legal key")
}

pub(crate) fn join(directory: &Path, name: &str) -> Pacer {
    let place = place(directory);
    Pacer::join(Settings {
        key: key(),
        place,
        weight: 1.0,
        name: name.into(),
        gated: true,
        schedule: Schedule::Turn,
    })
    .expect("a place")
}

/// A child process, which ends with this value.
pub(crate) struct Played {
    process: Child,
    lines: Receiver<String>,
}

impl Played {
    pub(crate) fn start(role: &str, directory: &Path) -> Self {
        Self::start_by(&mut Command::new(std::env::current_exe().expect("this binary")), role, directory)
    }

    /// The same by a command that ends with this binary.
    pub(crate) fn start_by(command: &mut Command, role: &str, directory: &Path) -> Self {
        let mut process = command
            .args(["--exact", "children::child", "--nocapture"])
            .env(ROLE, role)
            .env(DIRECTORY, directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a child");
        let output = BufReader::new(process.stderr.take().expect("a pipe"));
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            // Ends with the pipe, or when nobody listens any more.
            let _ = output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line));
        });
        Self { process, lines }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// The rest of the next line that the child says and that begins with `word`.
    pub(crate) fn hear(&self, word: &str) -> String {
        loop {
            let line = self.lines.recv_timeout(WATCHDOG).unwrap_or_else(|_| panic!("never said: {word}"));
            if let Some(rest) = line.strip_prefix("say ").and_then(|said| said.strip_prefix(word)) {
                return rest.trim().to_owned();
            }
        }
    }

    pub(crate) fn lives(&mut self) -> bool {
        self.process.try_wait().expect("a child").is_none()
    }

    /// How it ended, by itself.
    pub(crate) fn end(&mut self) -> ExitStatus {
        wait_until("the child to end", || !self.lives());
        self.process.wait().expect("a child")
    }
}

impl Played {
    /// `kill -9`, and gone.
    pub(crate) fn kill(&mut self) {
        self.process.kill().expect("a killable child");
        self.process.wait().expect("a dead child");
    }
}

impl Drop for Played {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A directory that goes with the test.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ocgpu-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).expect("a scratch directory");
        Self(path)
    }

    pub(crate) fn segment(&self) -> PathBuf {
        self.0.join("opencoti-gpu-test")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[expect(clippy::disallowed_methods, reason = "a test's watchdog is not the core's clock")]
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + WATCHDOG;
    while !condition() {
        assert!(Instant::now() < deadline, "not within 30 s: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
