//! The one map from the core's errors to Python's exceptions, which are classes in `ocgpu.errors`.

use ocgpu_core::Error;
use pyo3::exceptions::PyOSError;
use pyo3::{PyErr, import_exception};

import_exception!(ocgpu.errors, ConfigError);
import_exception!(ocgpu.errors, LeaseBusyError);
import_exception!(ocgpu.errors, LeaseError);
import_exception!(ocgpu.errors, LeaseTimeoutError);
import_exception!(ocgpu.errors, RegistryUnavailableError);

/// The Python exception that says what `error` says.
pub(crate) fn to_python(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::InvalidArgument { .. } => ConfigError::new_err(message),
        Error::RegistryUnavailable { .. } => RegistryUnavailableError::new_err(message),
        Error::LeaseBusy { holder, .. } => {
            LeaseBusyError::new_err((message, holder.and_then(|holder| holder.pid)))
        }
        Error::LeaseTimeout { holder, .. } => {
            LeaseTimeoutError::new_err((message, holder.and_then(|holder| holder.pid)))
        }
        Error::LeaseInterrupted { .. } | Error::LeaseMisuse { .. } | Error::LeaseUnavailable { .. } => {
            LeaseError::new_err(message)
        }
        _ => PyOSError::new_err(message),
    }
}
