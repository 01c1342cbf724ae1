//! This process's part of a lease: free, waiting or held, and what turns one into another.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::LeaseOptions;
use super::files::{Files, Spot};
use super::record::{RecordFields, RecordTemplate};
use super::wait::{Outcome, Waiting};
use crate::error::{Error, Result};
use crate::sys;

/// This process's part of a lease.
#[derive(Debug)]
pub(super) struct Claim {
    state: Mutex<State>,
    pub(super) template: Arc<RecordTemplate>,
}

/// What a claim is doing.
#[derive(Debug)]
pub(super) enum State {
    /// Not held; the files stay open between two uses.
    Free(Option<Files>),
    /// A thread of ours sleeps in the lock.
    Waiting(Arc<Waiting>),
    /// Ours.
    Held(Files),
}

impl Claim {
    pub(super) fn new(options: &LeaseOptions) -> Arc<Self> {
        let pid = std::process::id();
        let name = sys::command_name(pid).unwrap_or_default();
        let template = Arc::new(template(options, pid, &name));
        Arc::new(Self { state: Mutex::new(State::Free(None)), template })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn release(&self) {
        let waiting = {
            let mut state = self.lock();
            match std::mem::replace(&mut *state, State::Free(None)) {
                State::Held(files) => {
                    *state = State::Free(files.release());
                    return;
                }
                State::Free(files) => {
                    *state = State::Free(files);
                    return;
                }
                State::Waiting(waiting) => {
                    *state = State::Waiting(Arc::clone(&waiting));
                    waiting
                }
            }
        };
        // Without the state's lock: the answer may take a millisecond, and `held` must not wait for it.
        waiting.cancel();
        let _ = self.collect(&waiting, false);
    }

    /// Turn the outcome of a wait into the state that follows. True: held now. Whoever comes second finds nothing.
    fn collect(&self, waiting: &Arc<Waiting>, keep: bool) -> Result<bool> {
        let mut state = self.lock();
        if !matches!(&*state, State::Waiting(current) if Arc::ptr_eq(current, waiting)) {
            return Ok(false);
        }
        let (next, result) = match waiting.take() {
            Some(Outcome::Granted(files)) if keep => (State::Held(files), Ok(true)),
            Some(Outcome::Granted(files)) => (State::Free(files.release()), Ok(false)),
            Some(Outcome::Cancelled(files)) => (State::Free(Some(files)), Ok(false)),
            Some(Outcome::Failed(error)) => (State::Free(None), Err(error)),
            // The thread could not be woken: it keeps its files and frees what it gets.
            None => (State::Free(None), Ok(false)),
        };
        *state = next;
        result
    }
}

/// A wait that goes on. Dropping it does not end it: `cancel`, `stop` or `Lease::release` do.
#[derive(Debug)]
pub struct LeaseWait {
    pub(super) claim: Arc<Claim>,
    pub(super) waiting: Arc<Waiting>,
    pub(super) path: PathBuf,
}

impl LeaseWait {
    /// What an event loop polls for reading: readable when `finish` will not say "not yet". Only with an event.
    #[must_use]
    pub fn event_fd(&self) -> Option<i32> {
        self.waiting.event_fd()
    }

    /// Collect a wait that is over.
    ///
    /// # Errors
    /// `LeaseInterrupted` when it was ended by a release or is not over, or what stopped the waiting thread.
    pub fn finish(&self) -> Result<()> {
        if self.claim.collect(&self.waiting, true)? {
            return Ok(());
        }
        Err(Error::LeaseInterrupted { path: self.path.clone() })
    }

    /// End the wait; true when the lease came before that and is held now.
    ///
    /// # Errors
    /// What stopped the waiting thread.
    pub fn stop(&self) -> Result<bool> {
        self.waiting.cancel();
        self.claim.collect(&self.waiting, true)
    }

    /// End the wait; the lease is not held afterwards, whatever came first.
    pub fn cancel(&self) {
        self.waiting.cancel();
        let _ = self.claim.collect(&self.waiting, false);
    }
}

/// The files of a free claim, to be put back by the caller.
pub(super) fn take_files(state: &mut State, spot: &Spot) -> Result<Option<Files>> {
    match state {
        State::Free(files) => Ok(files.take()),
        State::Held(_) => Err(Error::LeaseMisuse {
            path: spot.lock.clone(),
            reason: "this object already holds the lease; release it first or make another `Lease`",
        }),
        State::Waiting(_) => Err(Error::LeaseMisuse {
            path: spot.lock.clone(),
            reason: "this object already waits for the lease; make another `Lease` for a second waiter",
        }),
    }
}

pub(super) fn template(options: &LeaseOptions, pid: u32, name: &str) -> RecordTemplate {
    let identity = sys::process_identity();
    RecordTemplate::new(&RecordFields {
        token: sys::random_u64(),
        pid,
        lock_pid: identity.pid,
        pid_namespace: identity.pid_namespace,
        uid: identity.uid,
        name,
        mode: options.mode,
        reason: options.reason.as_deref(),
    })
}
