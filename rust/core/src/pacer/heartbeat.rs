//! The thread that shows the others that we live, and watches them.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::registry::Sweep;

use super::member::{BusyWindow, Member};

/// The seed's cadence.
const PERIOD: Duration = Duration::from_millis(500);

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

    /// Sleep until the next beat; `false` when there is none.
    fn next(&self) -> bool {
        let stopped = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(stopped, PERIOD, |stopped| !*stopped);
        !*waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Start the thread; it ends with `Beat::stop`.
pub(crate) fn start(member: Arc<Member>, beat: Arc<Beat>) -> Result<JoinHandle<()>> {
    let run = move || {
        let (mut sweep, mut busy) = (Sweep::default(), BusyWindow::default());
        while beat.next() {
            member.beat(&mut sweep, &mut busy);
        }
    };
    std::thread::Builder::new().name("ocgpu-heartbeat".into()).spawn(run).map_err(|source| Error::Io {
        doing: "start the heartbeat thread of",
        path: "ocgpu".into(),
        source,
    })
}
