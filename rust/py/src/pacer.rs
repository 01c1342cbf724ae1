//! `Pacer`: the compiled base of `ocgpu.Pacer`, which adds what Python does better.

use std::sync::Arc;
use std::time::Duration;

use ocgpu_core::{GpuKey, Place, Schedule, Settings};
use pyo3::prelude::*;

use crate::error::to_python;
use crate::tenure;

/// Longest wait without a look at Python's signals, so that Ctrl-C works.
const SLICE: Duration = Duration::from_millis(20);

/// A process's place among the peers of one GPU; see `ocgpu.Pacer`.
#[pyclass(subclass, frozen, module = "ocgpu._ocgpu")]
pub(crate) struct Pacer {
    joined: Option<Arc<ocgpu_core::Pacer>>,
    /// Why nothing was joined.
    reason: Option<String>,
    weight: f64,
}

#[pymethods]
impl Pacer {
    /// Join the peers of `gpu_key`; with None, register nothing and say `reason`.
    #[new]
    #[pyo3(signature = (gpu_key, reason, weight, name, gated, schedule))]
    fn new(
        py: Python<'_>,
        gpu_key: Option<&str>,
        reason: Option<String>,
        weight: f64,
        name: String,
        gated: bool,
        schedule: &str,
    ) -> PyResult<Self> {
        ocgpu_core::check_weight(weight).map_err(to_python)?;
        let Some(gpu_key) = gpu_key else { return Ok(Self { joined: None, reason, weight }) };
        let key = GpuKey::new(gpu_key).map_err(to_python)?;
        let place = Place::from_env().map_err(to_python)?;
        let schedule = Schedule::parse(schedule).map_err(to_python)?;
        let settings = Settings { key: key.clone(), place, weight, name, gated, schedule };
        let joined = Arc::new(py.detach(|| ocgpu_core::Pacer::join(settings)).map_err(to_python)?);
        tenure::joined(&key, &joined);
        Ok(Self { joined: Some(joined), reason: None, weight })
    }

    /// Gate before a unit of GPU work, and end of the unit before it.
    ///
    /// Call it at the head of the loop, after the device was synchronised. Returns the seconds slept: 0.0 when alone.
    fn step(&self, py: Python<'_>) -> PyResult<f64> {
        match &self.joined {
            Some(pacer) if !pacer.arrive() => wait_for_turn(py, pacer),
            _ => Ok(0.0),
        }
    }

    /// End the unit before, and begin the next one if it need not wait: False = wait, with `_wait` and `_look`.
    fn _arrive(&self) -> bool {
        self.joined.as_deref().is_none_or(ocgpu_core::Pacer::arrive)
    }

    /// Whether the unit that had to wait has begun now.
    fn _look(&self) -> bool {
        self.joined.as_deref().is_none_or(ocgpu_core::Pacer::look)
    }

    /// Wait for a turn in a thread of its own; None where there is nothing to wait for.
    fn _start_wait(&self) -> PyResult<Option<TurnWait>> {
        let wait =
            self.joined.as_deref().map(ocgpu_core::Pacer::start_wait).transpose().map_err(to_python)?;
        Ok(wait.flatten().map(TurnWait))
    }

    /// Do not wait any longer.
    fn _abandon(&self) {
        if let Some(pacer) = &self.joined {
            pacer.abandon();
        }
    }

    /// A wait took `slept` seconds.
    fn _add_slept(&self, slept: f64) {
        if let Some(pacer) = &self.joined {
            pacer.add_slept(Duration::try_from_secs_f64(slept).unwrap_or_default());
        }
    }

    /// The unit ended: the device is synchronised, and what follows (sampling, streaming) is not GPU work.
    fn done(&self) {
        if let Some(pacer) = &self.joined {
            pacer.done();
        }
    }

    fn _open_request(&self) {
        if let Some(pacer) = &self.joined {
            pacer.open_request();
        }
    }

    fn _close_request(&self) {
        if let Some(pacer) = &self.joined {
            pacer.close_request();
        }
    }

    /// For a process that cannot be paused: it works from True to False.
    fn _mark(&self, active: bool) {
        if let Some(pacer) = &self.joined {
            pacer.mark(active);
        }
    }

    /// Idle at once, for all threads of this process: the others get its share now, not after 2 s of silence.
    fn idle(&self) {
        if let Some(pacer) = &self.joined {
            pacer.idle();
        }
    }

    /// Seconds left of this peer's turn, 0.0 before it, `inf` when it need not share: size a prefill chunk by it.
    fn remaining(&self) -> f64 {
        self.joined.as_deref().and_then(ocgpu_core::Pacer::remaining_us).map_or(f64::INFINITY, seconds)
    }

    /// Relative claim on the compute.
    #[getter]
    fn weight(&self) -> f64 {
        self.joined.as_deref().map_or(self.weight, ocgpu_core::Pacer::weight)
    }

    fn _set_weight(&self, weight: f64) -> PyResult<()> {
        match &self.joined {
            Some(pacer) => pacer.set_weight(weight).map_err(to_python),
            None => ocgpu_core::check_weight(weight).map_err(to_python),
        }
    }

    /// Whether this process is registered and paced at present.
    #[getter]
    fn enabled(&self) -> bool {
        self.joined.as_deref().is_some_and(|pacer| pacer.reason().is_none())
    }

    /// Why `enabled` is False; None when it is True.
    #[getter]
    fn reason(&self) -> Option<String> {
        self.joined.as_deref().map_or_else(|| self.reason.clone(), ocgpu_core::Pacer::reason)
    }

    /// Its slot in the registry, 0 to 15; None when it has none.
    #[getter]
    fn slot(&self) -> Option<usize> {
        self.joined.as_deref().and_then(ocgpu_core::Pacer::slot)
    }

    /// Leave the peers. Harmless when repeated; the pacer stays usable as one that never sleeps.
    fn leave(&self, py: Python<'_>) {
        if let Some(pacer) = &self.joined {
            py.detach(|| pacer.leave());
        }
    }
}

/// A wait for a turn, for an event loop: readable when it is worth to look. Dropping it ends the wait.
#[pyclass(frozen, module = "ocgpu")]
pub(crate) struct TurnWait(ocgpu_core::TurnWait);

#[pymethods]
impl TurnWait {
    /// The descriptor to watch for reading; it stays open as long as this object lives.
    fn fileno(&self) -> i32 {
        self.0.event_fd()
    }
}

impl Pacer {
    /// Everybody of this GPU as this peer sees them; nobody while it is not joined.
    pub(crate) fn look_around(&self) -> ocgpu_core::Snapshot {
        self.joined.as_deref().map(ocgpu_core::Pacer::snapshot).unwrap_or_default()
    }
}

fn seconds(us: u64) -> f64 {
    Duration::from_micros(us).as_secs_f64()
}

/// Sleep until the unit has begun; the seconds slept.
fn wait_for_turn(py: Python<'_>, pacer: &ocgpu_core::Pacer) -> PyResult<f64> {
    let started_us = ocgpu_core::monotonic_us();
    while !py.detach(|| pacer.wait(SLICE)) {
        if let Err(interrupted) = py.check_signals() {
            pacer.abandon();
            return Err(interrupted);
        }
    }
    let slept = Duration::from_micros(ocgpu_core::monotonic_us().saturating_sub(started_us));
    pacer.add_slept(slept);
    Ok(slept.as_secs_f64())
}
