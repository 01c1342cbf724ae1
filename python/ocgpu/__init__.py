"""Let the processes of one machine share one GPU.

Three primitives over one `gpu_key`: `Pacer` shares the compute between resident processes,
`Lease` says who may be resident on the card, and `ocgpu serve` arbitrates engines that know
nothing of either.
"""

from ocgpu._ocgpu import __version__
from ocgpu.errors import (
    ConfigError,
    LeaseBusyError,
    LeaseError,
    LeaseTimeoutError,
    NoGpuError,
    OcgpuError,
    RegistryUnavailableError,
)
from ocgpu.lease import Lease, LeaseParty, LeaseStatus, lease_status

__all__ = [
    "ConfigError",
    "Lease",
    "LeaseBusyError",
    "LeaseError",
    "LeaseParty",
    "LeaseStatus",
    "LeaseTimeoutError",
    "NoGpuError",
    "OcgpuError",
    "RegistryUnavailableError",
    "__version__",
    "lease_status",
]
