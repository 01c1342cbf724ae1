"""Every exception of ocgpu.

OcgpuError
├── NoGpuError                 no GPU on this machine and no name given for one
├── RegistryUnavailableError   the shared segment cannot be used
├── LeaseError
│   ├── LeaseBusyError         another process holds the lease, and `timeout` is 0
│   └── LeaseTimeoutError      `timeout` seconds passed (also a TimeoutError)
└── ConfigError                a setting or an argument outside its legal form (also a ValueError)
"""

__all__ = [
    "ConfigError",
    "LeaseBusyError",
    "LeaseError",
    "LeaseTimeoutError",
    "NoGpuError",
    "OcgpuError",
    "RegistryUnavailableError",
]


class OcgpuError(Exception):
    """Base of all errors that ocgpu raises."""


class NoGpuError(OcgpuError):
    """No GPU was found and no name was given for one; the message names the remedy."""


class RegistryUnavailableError(OcgpuError):
    """The shared-memory segment cannot be used; the message names the path and the remedy."""


class LeaseError(OcgpuError):
    """Base of the lease's errors; raised itself when the lease is used against its rules."""


class LeaseBusyError(LeaseError):
    """Another process holds the lease and the caller did not want to wait.

    Attributes:
        holder: Pid of a holder, or None when it is not known.
    """

    def __init__(self, message: str, holder: int | None = None) -> None:
        super().__init__(message)
        self.holder = holder


class LeaseTimeoutError(LeaseError, TimeoutError):
    """The lease was not granted within `timeout` seconds.

    Attributes:
        holder: Pid of a holder, or None when it is not known.
    """

    def __init__(self, message: str, holder: int | None = None) -> None:
        super().__init__(message)
        self.holder = holder


class ConfigError(OcgpuError, ValueError):
    """A setting, an argument or a key outside its legal form.

    The message names it, its value and the legal form.
    """
