"""Our own endpoints, as plain functions of what the server knows. No call to an upstream here."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import ocgpu
from ocgpu.errors import OcgpuError
from ocgpu.lease import LeaseStatus, lease_status
from ocgpu.server.admission import Admission
from ocgpu.server.documents import (
    EventDocument,
    HealthDocument,
    LeaseDocument,
    OutsideProcessDocument,
    OwnLeaseDocument,
    PeersDocument,
    RegistryDocument,
    ReleasedDocument,
    SwitchDocument,
    UnloadedDocument,
    UpstreamDocument,
)
from ocgpu.server.foreign_jobs import ForeignJobs
from ocgpu.server.gpu_processes import GpuProcesses
from ocgpu.server.metrics import Metrics, Sample, family
from ocgpu.server.probes import Probes
from ocgpu.server.registry_view import RegistryView, peer_series
from ocgpu.server.residency import Residency

__all__ = [
    "Knowledge",
    "events",
    "health",
    "index",
    "metrics_text",
    "peers",
    "release",
    "unload",
]


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What the endpoints are made of.

    Attributes:
        unload: Evicts everything from the card and says what.
    """

    admission: Admission
    metrics: Metrics
    registry: RegistryView
    residency: Residency
    probes: Probes
    processes: GpuProcesses
    foreign_jobs: ForeignJobs
    started: float
    unload: Callable[[], Awaitable[dict[str, Any]]]


def health(known: Knowledge) -> tuple[int, HealthDocument]:
    """Give status and document of `/healthz`: 503 while draining only."""
    counts = known.admission.counts
    memory = known.processes.engines()
    registry: SwitchDocument = {"enabled": known.registry.enabled}
    if known.registry.reason is not None:
        registry["reason"] = known.registry.reason
    document: HealthDocument = {
        "state": counts.state.value,
        "llm_inflight": counts.llm_inflight,
        "image_pending": counts.image_pending,
        "waiting": {
            "llm": counts.waiting_llm,
            "image": counts.waiting_image,
            "bytes": known.admission.waiting_bytes,
        },
        "draining": known.admission.closed,
        "evicting": counts.evicting,
        "lease": cast("OwnLeaseDocument", known.residency.document()),
        "registry": registry,
        "upstreams": {
            name: cast("UpstreamDocument", {**document, "memory_bytes": memory.get(name)})
            for name, document in known.probes.documents().items()
        },
        "outside": {
            "processes": cast("list[OutsideProcessDocument] | None", known.processes.outside()),
            "image_jobs": known.foreign_jobs.count,
        },
        "version": ocgpu.__version__,
        "uptime_seconds": round(time.monotonic() - known.started, 3),
    }
    return (503 if known.admission.closed else 200), document


async def metrics_text(known: Knowledge) -> str:
    """Give the exposition text of `/metrics`."""
    document = known.registry.snapshot()
    parts = [known.metrics.render(known.admission.counts), peer_series(document)]
    parts += [known.processes.series(), known.foreign_jobs.series()]
    lease = await _lease(document["gpu_key"])
    if lease is not None:
        parts.append(_lease_series(lease))
    return "".join(parts)


async def peers(known: Knowledge) -> PeersDocument:
    """Give the document of `/gpu/peers`: under `lease` stand holders that are no peers, too."""
    document = cast("RegistryDocument", known.registry.snapshot())
    lease = await _lease(document["gpu_key"])
    status = None if lease is None else cast("LeaseDocument", lease.to_dict())
    return {**document, "lease": status}


def events(known: Knowledge) -> list[EventDocument]:
    """Give the last transitions of the lock, oldest first; times are Unix seconds."""
    return [
        {"at": round(t.at, 6), "before": t.before.value, "after": t.after.value, "cause": t.cause}
        for t in known.admission.transitions
    ]


def release(known: Knowledge) -> ReleasedDocument:
    """Reset the lock by force, the machine's lease with it; say what that dropped."""
    dropped = known.admission.reset()
    # Before the waiters run that the reset let go: they take it anew.
    known.residency.give_up()
    return cast("ReleasedDocument", dropped)


async def unload(known: Knowledge) -> UnloadedDocument:
    """Evict everything from the card; say what."""
    return cast("UnloadedDocument", await known.unload())


def index() -> str:
    """Give the list of endpoints for a person who looks at `/`."""
    return (
        f"ocgpu {ocgpu.__version__}\n"
        "GET  /healthz\nGET  /metrics\nGET  /gpu/peers\nGET  /events\n"
        "POST /gpulock/release\nPOST /gpulock/unload\n"
        "GET  /ocgpu/schema/openapi.json\n"
    )


async def _lease(gpu_key: str | None) -> LeaseStatus | None:
    """Look at the machine's lease, in a thread: it may take 20 ms. None where it cannot be read."""
    if gpu_key is None:
        return None
    try:
        return await asyncio.to_thread(lease_status, gpu_key)
    except (OcgpuError, OSError):
        return None


def _lease_series(status: LeaseStatus) -> str:
    """Write the machine's lease as metrics."""
    held: list[Sample] = [("", {}, float(status.held))]
    waiters: list[Sample] = [("", {}, float(len(status.waiters)))]
    return family("gpulease_held", "gauge", "1 while the lease is held", held) + family(
        "gpulease_waiters", "gauge", "processes that wait for the lease", waiters
    )
