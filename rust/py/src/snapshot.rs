//! `Snapshot` and `Peer`: what stands in the registry at one moment.

use ocgpu_core::{GpuKey, Place};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::to_python;
use crate::pacer::Pacer;

/// One process in the registry at one moment.
#[pyclass(frozen, module = "ocgpu")]
#[derive(Clone)]
pub(crate) struct Peer(ocgpu_core::Peer);

#[pymethods]
impl Peer {
    /// Process id, in the peer's own pid namespace.
    #[getter]
    fn pid(&self) -> u32 {
        self.0.pid
    }

    /// What the peer calls itself; written by that process, control characters removed.
    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    /// Relative claim on the compute.
    #[getter]
    fn weight(&self) -> f64 {
        f64::from(self.0.weight_milli) / 1000.0
    }

    /// Share of the compute, 0 to 1; 0 while idle.
    #[getter]
    fn share(&self) -> f64 {
        f64::from(self.0.share_ppm) / 1e6
    }

    /// Measured fraction of time at work, 0 to 1.
    #[getter]
    fn busy(&self) -> f64 {
        f64::from(self.0.busy_ppm) / 1e6
    }

    /// Whether it worked within the activity window of 2 s, or has a request open.
    #[getter]
    fn active(&self) -> bool {
        self.0.active
    }

    /// Whether it is in the schedule.
    #[getter]
    fn alive(&self) -> bool {
        self.0.alive
    }

    /// One of `idle`, `running`, `waiting`, `stopped`, `ungated`, `dead`.
    #[getter]
    fn state(&self) -> &'static str {
        self.0.state.as_str()
    }

    /// Milliseconds since its last heartbeat, by the wall clock.
    #[getter]
    fn heartbeat_age_ms(&self) -> u64 {
        self.0.heartbeat_age_ms
    }

    /// Its slot in the registry, 0 to 15.
    #[getter]
    fn slot(&self) -> usize {
        self.0.slot
    }

    /// Units of work since it joined; 0 for a peer that does not count them.
    #[getter]
    fn steps(&self) -> u64 {
        self.0.steps
    }

    /// How it holds the lease of the GPU, `"exclusive"` or `"shared"`; None when it does not.
    #[getter]
    fn lease(&self) -> Option<&'static str> {
        self.0.lease.map(ocgpu_core::LeaseMode::as_str)
    }

    fn __repr__(&self) -> String {
        let peer = &self.0;
        format!(
            "<Peer {} {:?} slot={} weight={} share={:.3} {}>",
            peer.pid,
            peer.name,
            peer.slot,
            f64::from(peer.weight_milli) / 1000.0,
            f64::from(peer.share_ppm) / 1e6,
            peer.state.as_str()
        )
    }
}

/// All processes of one GPU at one moment; see `ocgpu.Snapshot`, which adds `self`.
#[pyclass(subclass, frozen, module = "ocgpu._ocgpu")]
pub(crate) struct Snapshot(ocgpu_core::Snapshot);

/// Whose view to take.
#[derive(FromPyObject)]
enum Source<'py> {
    /// A joined peer's.
    Pacer(Bound<'py, Pacer>),
    /// That of somebody who looks at the segment of this key without joining.
    GpuKey(String),
}

#[pymethods]
impl Snapshot {
    /// Look now: as the peer `source`, or from outside at the GPU of the key `source`.
    ///
    /// Raises `RegistryUnavailableError` when there is a segment and it cannot be read, `ConfigError` for an illegal
    /// key.
    #[new]
    fn new(source: Source<'_>) -> PyResult<Self> {
        let look = || match source {
            Source::Pacer(pacer) => Ok(pacer.get().look_around()),
            Source::GpuKey(key) => ocgpu_core::peers(&Place::from_env()?, &GpuKey::new(&key)?),
        };
        look().map(Self).map_err(to_python)
    }

    /// Which GPU.
    #[getter]
    fn gpu_key(&self) -> &str {
        &self.0.gpu_key
    }

    /// Which schedule is in force: `turn`, or `grid` while a peer that knows no other is at work.
    #[getter]
    fn schedule(&self) -> &'static str {
        self.0.schedule.as_str()
    }

    #[getter]
    fn _own(&self) -> Option<Peer> {
        self.0.own.clone().map(Peer)
    }

    /// The others, in slot order.
    #[getter]
    fn peers(&self) -> Vec<Peer> {
        self.0.peers.iter().cloned().map(Peer).collect()
    }

    /// The seed's `/gpu/peers` document (`gpu_key`, `self`, `peers`) with our keys behind the seed's, as JSON text.
    fn to_json(&self) -> String {
        self.0.to_json()
    }

    /// What `to_json` says, as a dict.
    #[pyo3(signature = () -> "dict[str, object]")]
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let loads = py.import("json")?.getattr("loads")?;
        Ok(loads.call1((self.0.to_json(),))?.cast_into::<PyDict>()?)
    }

    fn __repr__(&self) -> String {
        format!("<Snapshot {:?} {} peers>", self.0.gpu_key, self.0.peers.len())
    }
}
