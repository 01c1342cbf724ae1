//! Waiting for the lease without polling: one thread per waiting acquisition sleeps in the queue, then in flock(2).
//!
//! A blocking flock hands over in 20 µs where a poll needs tens of milliseconds, but it knows no time-out, and a
//! caller who waits in it can neither see Ctrl-C nor go on with its event loop. So a thread of our own sleeps there,
//! and the caller waits for the thread: on a condition variable, or on an event that its loop can poll. To end the
//! wait, the thread is told so and then signalled, again each millisecond until it answers, because a signal that comes
//! just before the system call is lost. Rejected: `alarm`-like timers (main thread only, and the host program's own),
//! non-blocking tries in a loop (135 times the hand-over time, no order among waiters).

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::LeaseMode;
use super::files::{Files, Spot};
use super::record::RecordTemplate;
use crate::error::{Error, Result};
use crate::sys::{Event, ThreadHandle};

/// The thread calls flock, lstat and pwrite, nothing deep.
const STACK_BYTES: usize = 128 * 1024;
/// Between two signals to a thread that has not answered: long beside a system call, short for a person.
const WAKE_INTERVAL: Duration = Duration::from_millis(1);
/// After this many signals the thread is left alone; it frees the lease as soon as it comes.
const WAKES_MAX: u32 = 1000;

/// How a wait ended. Taken out once, by whoever comes first: the acquisition, or a release that ended it.
#[derive(Debug)]
pub(super) enum Outcome {
    /// Locked and announced.
    Granted(Files),
    /// Not locked; the files can be used again.
    Cancelled(Files),
    Failed(Error),
}

/// What the sleeping thread needs.
#[derive(Debug)]
pub(super) struct Errand {
    pub(super) files: Files,
    pub(super) spot: Spot,
    pub(super) mode: LeaseMode,
    pub(super) template: Arc<RecordTemplate>,
}

/// One wait, shared by the thread that sleeps and those who want to know.
#[derive(Debug)]
pub(super) struct Waiting {
    progress: Mutex<Progress>,
    changed: Condvar,
    event: Option<Event>,
    signals: bool,
}

#[derive(Debug, Default)]
struct Progress {
    thread: Option<ThreadHandle>,
    cancelled: bool,
    /// The thread has ended its errand, or will do so unseen.
    over: bool,
    outcome: Option<Outcome>,
}

impl Waiting {
    /// Send a thread to wait. `signals` false: a cancelled thread sleeps on and hands the lease straight back.
    pub(super) fn start(errand: Errand, with_event: bool, signals: bool) -> Result<Arc<Self>> {
        let path = errand.spot.lock.clone();
        let start = || {
            let event = with_event.then(Event::new).transpose()?;
            let waiting =
                Arc::new(Self { progress: Mutex::default(), changed: Condvar::new(), event, signals });
            let inside = Arc::clone(&waiting);
            let thread = thread::Builder::new().name("ocgpu-lease".to_owned()).stack_size(STACK_BYTES);
            thread.spawn(move || inside.run(errand)).map(|_| waiting)
        };
        start().map_err(|source| Error::Io { doing: "start a thread that waits for", path, source })
    }

    /// The number that becomes readable when the wait is over.
    pub(super) fn event_fd(&self) -> Option<i32> {
        self.event.as_ref().map(Event::fd)
    }

    /// Wait at most `span`; true when the wait for the lease is over.
    pub(super) fn wait(&self, span: Duration) -> bool {
        let progress = self.lock();
        let waited = self.changed.wait_timeout_while(progress, span, |progress| !progress.over);
        waited.unwrap_or_else(PoisonError::into_inner).0.over
    }

    /// End the wait. Afterwards `take` gives the outcome; `None` there means that the thread could not be woken, and
    /// will free the lease when it comes.
    pub(super) fn cancel(&self) {
        let mut progress = self.lock();
        progress.cancelled = true;
        for _ in 0..WAKES_MAX {
            if progress.over {
                return;
            }
            // The thread lives: it needs this mutex to say that it is over.
            if !self.signals || progress.thread.is_some_and(|thread| !thread.wake()) {
                break;
            }
            let waited = self.changed.wait_timeout(progress, WAKE_INTERVAL);
            progress = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        self.end(progress);
    }

    /// The outcome, once.
    pub(super) fn take(&self) -> Option<Outcome> {
        self.lock().outcome.take()
    }

    fn run(&self, errand: Errand) {
        self.lock().thread = Some(ThreadHandle::of_waiter(self.signals));
        let outcome = self.sleep(errand);
        let mut progress = self.lock();
        progress.outcome = match outcome {
            Outcome::Granted(files) if progress.cancelled => files.release().map(Outcome::Cancelled),
            other => Some(other),
        };
        self.end(progress);
    }

    /// Tell everybody who waits for the end of the wait.
    fn end(&self, mut progress: MutexGuard<'_, Progress>) {
        progress.over = true;
        drop(progress);
        self.changed.notify_all();
        if let Some(event) = &self.event {
            event.set();
        }
    }

    fn sleep(&self, errand: Errand) -> Outcome {
        let Errand { mut files, spot, mode, template } = errand;
        loop {
            if self.lock().cancelled {
                return Outcome::Cancelled(files.withdraw());
            }
            match files.claim_waiting(&spot, mode) {
                Ok(false) => continue,
                Ok(true) => {}
                Err(error) => return Outcome::Failed(error),
            }
            let held;
            (held, files) = match files.checked(&spot, &template, mode) {
                Ok(checked) => checked,
                Err(error) => return Outcome::Failed(error),
            };
            if held {
                files.dequeue();
                files.announce(mode, &template);
                return Outcome::Granted(files);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
