//! Waiting for a turn on behalf of an event loop.
//!
//! A loop can wait for a descriptor but not for a word of memory, so a thread of ours sleeps there and makes the
//! descriptor readable. It takes the turn, so that nobody passes us over while the loop is busy elsewhere; the unit
//! begins when the loop comes to it.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::sync::{AtomicU32, Ordering};
use crate::sys::Event;

use super::member::Member;
use super::turn::LOOK_AGAIN_US;

/// How often the thread looks whether the wait was ended.
const LOOK_AGAIN: Duration = Duration::from_micros(LOOK_AGAIN_US);
/// The thread makes a few calls, nothing deep.
const STACK_BYTES: usize = 128 * 1024;

/// A wait for a turn; readable when it is worth to look. Dropping it ends the wait.
#[derive(Debug)]
pub struct TurnWait(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    event: Event,
    ended: AtomicU32,
}

impl TurnWait {
    pub(super) fn start(member: Arc<Member>) -> Result<Self> {
        let start = || {
            let shared = Arc::new(Shared { event: Event::new()?, ended: AtomicU32::new(0) });
            let inside = Arc::clone(&shared);
            let run = move || {
                while inside.ended.load(Ordering::Relaxed) == 0 && !member.wait_ready(LOOK_AGAIN) {}
                inside.event.set();
            };
            let thread = thread::Builder::new().name("ocgpu-turn".into()).stack_size(STACK_BYTES);
            thread.spawn(run).map(|_| Self(shared))
        };
        start().map_err(|source| Error::Io {
            doing: "start a thread that waits for a turn of",
            path: "ocgpu".into(),
            source,
        })
    }

    /// The number to poll; open as long as `self` lives.
    #[must_use]
    pub fn event_fd(&self) -> i32 {
        self.0.event.fd()
    }
}

impl Drop for TurnWait {
    fn drop(&mut self) {
        self.0.ended.store(1, Ordering::Relaxed);
    }
}
