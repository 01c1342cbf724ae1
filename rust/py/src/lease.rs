//! The lease at the border: arguments in, waits detached, exceptions out.
#![expect(clippy::doc_markdown, reason = "these are Python's docstrings")]

use std::ops::ControlFlow;
use std::os::fd::IntoRawFd;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use ocgpu_core::{Error, GpuKey, LeaseMode, LeaseOptions, Place};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::to_python;
use crate::tenure;

/// A machine-wide claim on one GPU; `ocgpu.Lease` adds the `with` forms.
#[pyclass(frozen, subclass, module = "ocgpu")]
#[derive(Debug)]
pub(crate) struct Lease {
    core: ocgpu_core::Lease,
    /// Whose pacers are to show it; None for a lease at a path.
    key: Option<GpuKey>,
    shown: Mutex<bool>,
}

#[pymethods]
impl Lease {
    #[new]
    #[pyo3(signature = (key, mode, *, reason=None, path=None))]
    fn new(key: Option<&str>, mode: &str, reason: Option<String>, path: Option<PathBuf>) -> PyResult<Self> {
        let signals = std::env::var_os("OCGPU_NO_SIGNAL").is_none_or(|value| value != "1");
        let options = LeaseOptions { mode: parse_mode(mode).map_err(to_python)?, reason, signals };
        target(key, path)
            .and_then(|target| match target {
                Target::Path(path, permissions) => {
                    ocgpu_core::Lease::at_path(&path, permissions, options).map(|core| (core, None))
                }
                Target::Gpu(place, key) => {
                    ocgpu_core::Lease::new(&place, &key, options).map(|core| (core, Some(key)))
                }
            })
            .map(|(core, key)| Self { core, key, shown: Mutex::new(false) })
            .map_err(to_python)
    }

    /// Whether this process holds the lease through this object.
    #[getter]
    fn held(&self) -> bool {
        self.core.held()
    }

    /// `"exclusive"` or `"shared"`: how this lease is held when it is.
    #[getter]
    fn mode(&self) -> &'static str {
        self.core.mode().as_str()
    }

    /// The lease file.
    #[getter]
    fn path(&self) -> PathBuf {
        self.core.path().to_owned()
    }

    /// Take the lease if that needs no waiting; False when somebody else has it.
    ///
    /// Raises:
    ///     LeaseError: This object holds it or waits for it already, or the file cannot be used.
    fn try_acquire(&self) -> PyResult<bool> {
        let got = self.core.try_acquire();
        self.show();
        got.map_err(to_python)
    }

    /// Give the lease back, or end a wait for it.
    ///
    /// Harmless when it is not held, from any thread, and in a forked child, where it frees nothing.
    fn release(&self, py: Python<'_>) {
        py.detach(|| self.core.release());
        self.show();
    }

    /// How many waiters queue behind this lease; 0 when it is not held. Cheap enough for every step.
    ///
    /// Counted are ocgpu's waiters. Other programs asleep in flock(2) on the file are shown by
    /// `lease_status` alone.
    fn wanted(&self) -> usize {
        self.core.wanted()
    }

    fn _acquire(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let timeout = parse_timeout(timeout).map_err(to_python)?;
        let mut signal = None;
        let result = py.detach(|| {
            #[expect(
                clippy::redundant_closure_for_method_calls,
                reason = "the method fits no single lifetime"
            )]
            self.core.acquire(timeout, || match Python::attach(|py| py.check_signals()) {
                Ok(()) => ControlFlow::Continue(()),
                Err(raised) => {
                    signal = Some(raised);
                    ControlFlow::Break(())
                }
            })
        });
        self.show();
        signal.map_or_else(|| result.map_err(to_python), Err)
    }

    /// Check a time-out that is used later.
    #[staticmethod]
    fn _check_timeout(timeout: Option<f64>) -> PyResult<()> {
        parse_timeout(timeout).map(|_| ()).map_err(to_python)
    }

    fn _start(&self, timeout: Option<f64>) -> PyResult<Option<LeaseWait>> {
        if parse_timeout(timeout).map_err(to_python)? == Some(Duration::ZERO) {
            return if self.try_acquire()? { Ok(None) } else { Err(to_python(self.core.busy())) };
        }
        let wait = self.core.start(true);
        self.show();
        Ok(wait.map_err(to_python)?.map(LeaseWait))
    }

    fn _stop(&self, py: Python<'_>, wait: &LeaseWait, timeout: f64) -> PyResult<()> {
        let timeout = parse_timeout(Some(timeout)).map_err(to_python)?.unwrap_or_default();
        let got = py.detach(|| wait.0.stop());
        self.show();
        if got.map_err(to_python)? {
            return Ok(());
        }
        Err(to_python(self.core.timed_out(timeout)))
    }

    /// Collect a wait that is over: the lease is held, or an exception says why not.
    fn _finish(&self, wait: &LeaseWait) -> PyResult<()> {
        let finished = wait.0.finish();
        self.show();
        finished.map_err(to_python)
    }

    fn _lend(&self) -> PyResult<Vec<i32>> {
        let copies = self.core.lend().map_err(to_python)?.unwrap_or_default();
        Ok(copies.into_iter().map(IntoRawFd::into_raw_fd).collect())
    }

    fn _record_as(&self, pid: u32, name: &str) {
        self.core.record_as(pid, name);
    }
}

impl Lease {
    /// Let the pacers of this process show whether it is held.
    fn show(&self) {
        let Some(key) = &self.key else { return };
        // Taken with the GIL held alone; a child that was forked without it may find it locked.
        let Ok(mut shown) = self.shown.try_lock() else { return };
        let held = self.core.held();
        if *shown != held {
            *shown = held;
            tenure::changed(key, self.core.mode(), held);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.core.release();
        self.show();
    }
}

/// A wait for a lease, for an event loop: readable when it is over.
#[pyclass(frozen, module = "ocgpu")]
#[derive(Debug)]
pub(crate) struct LeaseWait(ocgpu_core::LeaseWait);

#[pymethods]
impl LeaseWait {
    /// The descriptor to watch for reading; it stays open as long as this object lives.
    fn fileno(&self) -> i32 {
        self.0.event_fd().unwrap_or(-1)
    }

    /// End the wait; the lease is not held afterwards.
    fn cancel(&self, py: Python<'_>) {
        py.detach(|| self.0.cancel());
    }
}

/// A process that holds a lease or waits for it; what is not known is None.
#[pyclass(frozen, eq, module = "ocgpu")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LeaseParty(ocgpu_core::LeaseParty);

#[pymethods]
impl LeaseParty {
    /// Process id, in this pid namespace.
    #[getter]
    fn pid(&self) -> Option<u32> {
        self.0.pid
    }

    /// Command name. Other processes wrote it: escape it before showing it.
    #[getter]
    fn name(&self) -> Option<&str> {
        self.0.name.as_deref()
    }

    /// Why it wanted the lease, in its own words: escape them before showing them. Known of an
    /// exclusive holder and of the latest of several shared ones; None of all others.
    #[getter]
    fn reason(&self) -> Option<&str> {
        self.0.reason.as_deref()
    }

    /// `"exclusive"` or `"shared"`: how it holds or wants the lease.
    #[getter]
    fn mode(&self) -> Option<&'static str> {
        self.0.mode.map(LeaseMode::as_str)
    }

    /// When it got the lease or began to wait, in seconds since the epoch.
    #[getter]
    fn since(&self) -> Option<f64> {
        self.0.since_us.map(seconds)
    }

    /// All of it as plain values; `since_us` is in microseconds since the epoch.
    #[pyo3(signature = () -> "dict[str, object]")]
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("pid", self.0.pid)?;
        dict.set_item("name", self.name())?;
        dict.set_item("reason", self.reason())?;
        dict.set_item("mode", self.mode())?;
        dict.set_item("since_us", self.0.since_us)?;
        Ok(dict)
    }

    fn __repr__(&self) -> String {
        format!("<LeaseParty {}>", self.0)
    }
}

/// One look at a lease: `held` and `mode` are facts of the kernel, everything else is a hint.
#[pyclass(frozen, eq, module = "ocgpu")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LeaseStatus(ocgpu_core::LeaseStatus);

#[pymethods]
impl LeaseStatus {
    /// Whether anybody holds the lease.
    #[getter]
    fn held(&self) -> bool {
        self.0.held
    }

    /// `"exclusive"`, `"shared"`, or None when it is free.
    #[getter]
    fn mode(&self) -> Option<&'static str> {
        self.0.mode.map(LeaseMode::as_str)
    }

    /// Those who hold it, as far as they can be known: may be empty while `held`.
    #[getter]
    fn holders(&self) -> Vec<LeaseParty> {
        self.0.holders.iter().cloned().map(LeaseParty).collect()
    }

    /// Those who wait for it, in the order in which they will be served; then other programs asleep in
    /// flock(2) on the file, as far as `/proc/locks` shows them.
    #[getter]
    fn waiters(&self) -> Vec<LeaseParty> {
        self.0.waiters.iter().cloned().map(LeaseParty).collect()
    }

    /// All of it as plain values.
    #[pyo3(signature = () -> "dict[str, object]")]
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let list = |parties: Vec<LeaseParty>| -> PyResult<Vec<Bound<'py, PyDict>>> {
            parties.iter().map(|party| party.to_dict(py)).collect()
        };
        let dict = PyDict::new(py);
        dict.set_item("held", self.0.held)?;
        dict.set_item("mode", self.mode())?;
        dict.set_item("holders", list(self.holders())?)?;
        dict.set_item("waiters", list(self.waiters())?)?;
        Ok(dict)
    }

    /// `to_dict` as one JSON object.
    fn to_json(&self) -> String {
        self.0.to_json()
    }

    fn __repr__(&self) -> String {
        let mode = self.mode().map_or_else(|| "free".to_owned(), |mode| format!("held {mode}"));
        format!("<LeaseStatus {mode}, {} known waiters>", self.0.waiters.len())
    }
}

/// Look at a lease without touching it; `ocgpu.lease_status` finds the key.
#[pyfunction]
#[pyo3(signature = (key, path=None))]
pub(crate) fn lease_status(
    py: Python<'_>,
    key: Option<&str>,
    path: Option<PathBuf>,
) -> PyResult<LeaseStatus> {
    let target = target(key, path).map_err(to_python)?;
    let look = || match target {
        Target::Path(path, _) => ocgpu_core::lease_status_at(&path),
        Target::Gpu(place, key) => ocgpu_core::lease_status(&place, &key),
    };
    py.detach(look).map(LeaseStatus).map_err(to_python)
}

/// Become the parent of all descendants whose own parent ends; for the supervisor of `ocgpu run`.
#[pyfunction]
pub(crate) fn adopt_orphans() -> PyResult<()> {
    ocgpu_core::adopt_orphans().map_err(to_python)
}

/// What a caller named: a file with the permissions to create it with, or a GPU.
enum Target {
    Path(PathBuf, u32),
    Gpu(Place, GpuKey),
}

fn target(key: Option<&str>, path: Option<PathBuf>) -> Result<Target, Error> {
    let place = Place::from_env()?;
    match (key, path) {
        (_, Some(path)) => Ok(Target::Path(path, place.mode())),
        (key, None) => Ok(Target::Gpu(place, GpuKey::new(key.unwrap_or_default())?)),
    }
}

fn parse_mode(mode: &str) -> Result<LeaseMode, Error> {
    LeaseMode::from_name(mode).ok_or_else(|| Error::InvalidArgument {
        name: "mode",
        value: format!("{mode:?}"),
        legal: "`exclusive` or `shared`",
    })
}

fn parse_timeout(timeout: Option<f64>) -> Result<Option<Duration>, Error> {
    let legal = "a finite number of seconds from 0 on, or None to wait for ever";
    timeout
        .map(|seconds| {
            Duration::try_from_secs_f64(seconds).map_err(|_| Error::InvalidArgument {
                name: "timeout",
                value: format!("{seconds:?}"),
                legal,
            })
        })
        .transpose()
}

#[expect(clippy::cast_precision_loss, reason = "microseconds of this century fit 53 bits")]
fn seconds(us: i64) -> f64 {
    us as f64 / 1e6
}
