//! What a process has both of: its pacers show the leases that it holds to the other peers.
//!
//! Everything here happens with the GIL held, so that nobody ever waits for the mutex; in a child that was forked
//! without the GIL it may stay locked, and then nothing is shown.

use std::sync::{Arc, Mutex, Weak};

use ocgpu_core::{GpuKey, LeaseMode};

static TENURE: Mutex<Tenure> = Mutex::new(Tenure { pid: 0, pacers: Vec::new(), held: Vec::new() });

struct Tenure {
    /// Whose leases these are: a forked child holds none.
    pid: u32,
    pacers: Vec<(GpuKey, Weak<ocgpu_core::Pacer>)>,
    held: Vec<(GpuKey, LeaseMode)>,
}

impl Tenure {
    fn show(&self, key: &GpuKey, pacer: &ocgpu_core::Pacer) {
        let holds = |mode| self.held.iter().any(|held| (&held.0, held.1) == (key, mode));
        pacer.note_lease(holds(LeaseMode::Exclusive), holds(LeaseMode::Shared));
    }
}

/// A pacer was made.
pub(crate) fn joined(key: &GpuKey, pacer: &Arc<ocgpu_core::Pacer>) {
    with(|tenure| {
        tenure.pacers.push((key.clone(), Arc::downgrade(pacer)));
        tenure.show(key, pacer);
    });
}

/// A lease was taken or given back.
pub(crate) fn changed(key: &GpuKey, mode: LeaseMode, held: bool) {
    with(|tenure| {
        if held {
            tenure.held.push((key.clone(), mode));
        } else if let Some(index) = tenure.held.iter().position(|held| (&held.0, held.1) == (key, mode)) {
            tenure.held.swap_remove(index);
        }
        for (_, pacer) in tenure.pacers.iter().filter(|entry| entry.0 == *key) {
            if let Some(pacer) = pacer.upgrade() {
                tenure.show(key, &pacer);
            }
        }
    });
}

fn with(run: impl FnOnce(&mut Tenure)) {
    let Ok(mut tenure) = TENURE.try_lock() else { return };
    let pid = std::process::id();
    if tenure.pid != pid {
        tenure.pid = pid;
        tenure.held.clear();
    }
    tenure.pacers.retain(|(_, pacer)| pacer.strong_count() > 0);
    run(&mut tenure);
}
