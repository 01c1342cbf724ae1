//! The legal forms that both sides check: their rule and their wording stand in the core alone.

use ocgpu_core::{GpuKey, check_weight};
use pyo3::prelude::*;

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
