//! The legal forms that both sides check: their rule and their wording stand in the core alone.

use ocgpu_core::{GpuKey, Place, Schedule, check_weight};
use pyo3::prelude::*;

use crate::error::to_python;

/// Whether a text may be a GPU key.
#[pyfunction]
pub(crate) fn is_gpu_key(text: &str) -> bool {
    GpuKey::new(text).is_ok()
}

/// Whether a number may be a weight.
#[pyfunction]
pub(crate) fn is_weight(value: f64) -> bool {
    check_weight(value).is_ok()
}

/// Whether a text names a schedule.
#[pyfunction]
pub(crate) fn is_schedule(text: &str) -> bool {
    Schedule::parse(text).is_ok()
}

/// Check the values of `OCGPU_DIR` and `OCGPU_SHARE`; raises `ConfigError` outside their legal forms.
#[pyfunction]
pub(crate) fn check_place(directory: Option<String>, share: Option<String>) -> PyResult<()> {
    Place::parse(directory.map(Into::into), share.map(Into::into)).map(|_| ()).map_err(to_python)
}
