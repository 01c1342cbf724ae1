"""Let the processes of one machine share one GPU.

Three primitives over one `gpu_key`: `Pacer` shares the compute between resident processes,
`Lease` says who may be resident on the card, and `ocgpu serve` arbitrates engines that know
nothing of either.
"""

from ocgpu._ocgpu import __version__
from ocgpu.device import Gpu, gpu_key, gpus
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
from ocgpu.pacer import Pacer, add_arguments, peers
from ocgpu.snapshot import Peer, Snapshot

__all__ = [
    "ConfigError",
    "Gpu",
    "Lease",
    "LeaseBusyError",
    "LeaseError",
    "LeaseParty",
    "LeaseStatus",
    "LeaseTimeoutError",
    "NoGpuError",
    "OcgpuError",
    "Pacer",
    "Peer",
    "RegistryUnavailableError",
    "Snapshot",
    "__version__",
    "add_arguments",
    "gpu_key",
    "gpus",
    "lease_status",
    "peers",
]
