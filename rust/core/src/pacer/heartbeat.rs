//! The thread that shows the others that we live, and watches them.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::clock;
use crate::error::{Error, Result};
use crate::registry::{ClockWatch, Sweep};
use crate::sys::keep_guarding;

use super::member::{BusyWindow, Member};

/// The seed's cadence.
const PERIOD_US: u64 = 500_000;
/// While we work we look at the others more often: a death is then known after a tenth of a second.
const SWEEP_PERIOD: Duration = Duration::from_millis(100);
/// How often the handler that survives a cut file is put back over another program's: by a thread that touches neither the
/// file nor a lock of ours, because those that do may be the ones that fault again and again meanwhile.
const GUARD_PERIOD: Duration = Duration::from_millis(250);
/// It makes one system call, nothing deep.
const GUARD_STACK_BYTES: usize = 64 * 1024;

/// Stops the thread at once instead of at its next beat.
#[derive(Debug, Default)]
pub(crate) struct Beat {
    stopped: Mutex<bool>,
    changed: Condvar,
}

impl Beat {
    pub(crate) fn stop(&self) {
        *self.stopped.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Sleep for `span`; `false` when there is no next beat.
    fn sleep(&self, span: Duration) -> bool {
        let stopped = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(stopped, span, |stopped| !*stopped);
        !*waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Start the thread; it ends with `Beat::stop`.
pub(crate) fn start(member: Arc<Member>, beat: Arc<Beat>) -> Result<JoinHandle<()>> {
    let run = move || {
        std::thread::scope(|scope| {
            let guard = std::thread::Builder::new().name("ocgpu-guard".into()).stack_size(GUARD_STACK_BYTES);
            // Without it a cut under another program's handler is fatal, as it is without us.
            let _ = guard.spawn_scoped(scope, || {
                while beat.sleep(GUARD_PERIOD) {
                    keep_guarding();
                }
            });
            beat_until_stopped(&member, &beat);
        });
    };
    std::thread::Builder::new().name("ocgpu-heartbeat".into()).spawn(run).map_err(|source| Error::Io {
        doing: "start the heartbeat thread of",
        path: "ocgpu".into(),
        source,
    })
}

fn beat_until_stopped(member: &Member, beat: &Beat) {
    let (mut sweep, mut busy) = (Sweep::default(), BusyWindow::default());
    let mut watch = ClockWatch::default();
    let mut next_us = clock::monotonic_us() + PERIOD_US;
    loop {
        let left = Duration::from_micros(next_us.saturating_sub(clock::monotonic_us()));
        let span = if member.at_work_itself() { left.min(SWEEP_PERIOD) } else { left };
        if !beat.sleep(span) {
            return;
        }
        let stepped = watch.stepped(clock::monotonic_us(), clock::wall_us());
        if stepped || clock::monotonic_us() >= next_us {
            member.beat(&mut busy);
            next_us = clock::monotonic_us() + PERIOD_US;
        }
        member.sweep(&mut sweep);
    }
}
