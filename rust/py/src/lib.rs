//! The Python border of `ocgpu-core`: converts, detaches where a call can block, converts back.

mod error;
mod forms;
mod lease;
mod pacer;
mod snapshot;
mod tenure;

use pyo3::prelude::*;

/// The compiled half of ocgpu; its public names are re-exported by `ocgpu`.
#[pymodule]
mod _ocgpu {
    #[pymodule_export]
    use crate::pacer::{Pacer, TurnWait};
    #[pymodule_export]
    use crate::snapshot::{Peer, Snapshot};

    #[pymodule_export]
    use crate::forms::{check_place, is_gpu_key, is_schedule, is_weight};

    /// What a GPU key must look like, for messages.
    #[pymodule_export]
    const GPU_KEY_FORM: &str = ocgpu_core::GPU_KEY_FORM;

    /// What a weight must be, for messages.
    #[pymodule_export]
    const WEIGHT_FORM: &str = ocgpu_core::WEIGHT_FORM;

    /// What a schedule must be, for messages.
    #[pymodule_export]
    const SCHEDULE_FORM: &str = ocgpu_core::SCHEDULE_FORM;

    /// Version of the package, from Cargo.toml.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name that Python knows")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_export]
    use crate::lease::{Lease, LeaseParty, LeaseStatus, LeaseWait, adopt_orphans, lease_status};
}
