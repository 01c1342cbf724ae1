//! The Python border of `ocgpu-core`: converts, detaches where a call can block, converts back.

mod error;
mod lease;

use pyo3::prelude::*;

/// The compiled half of ocgpu; its public names are re-exported by `ocgpu`.
#[pymodule]
mod _ocgpu {
    /// Version of the package, from Cargo.toml.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name that Python knows")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_export]
    use crate::lease::{Lease, LeaseParty, LeaseStatus, LeaseWait, lease_status};
}
