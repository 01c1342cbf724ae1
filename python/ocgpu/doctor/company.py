"""Who is in the registry, who has the lease, and whether they stand in each other's way."""

from collections import Counter
from typing import TYPE_CHECKING, Final

import ocgpu
from ocgpu.doctor.finding import Finding, error, ok, split_message, warning
from ocgpu.doctor.processes import is_stopped
from ocgpu.errors import OcgpuError, RegistryUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ocgpu.lease import LeaseParty, LeaseStatus
    from ocgpu.snapshot import Peer

__all__ = ["SLOTS", "check_lease", "check_registry", "judge_lease", "judge_peers"]

_REGISTRY: Final = "registry"
_LEASE: Final = "lease"
_SERVES: Final = "serves"
_SERVE_NAME: Final = "ocgpu-serve"
SLOTS: Final = 16
"""Peers that have a place in the registry; others see all and have no share of their own."""


def check_registry(key: str) -> list[Finding]:
    """Look at the peers of a key."""
    try:
        return judge_peers(ocgpu.peers(key).peers)
    except RegistryUnavailableError as problem:
        return [error(_REGISTRY, *split_message(str(problem)))]


def judge_peers(peers: "Sequence[Peer]") -> list[Finding]:
    """Judge who is there: full, stopped, or two proxies."""
    serves = [peer.pid for peer in peers if peer.name == _SERVE_NAME and peer.alive]
    if len(serves) > 1:
        pids = ", ".join(str(pid) for pid in serves)
        found = f"{len(serves)} run on this GPU (pids {pids}), and know nothing of each other"
        both = [error(_SERVES, found, "run one `ocgpu serve` a GPU; one fronts both engines")]
    else:
        both = [ok(_SERVES, f"{len(serves)} on this GPU")]
    return [_crowd(peers), *both]


def _crowd(peers: "Sequence[Peer]") -> Finding:
    states = Counter(peer.state for peer in peers)
    listed = ", ".join(f"{peer.name} ({peer.pid}, {peer.state})" for peer in peers)
    found = f"{len(peers)} peers{f': {listed}' if listed else ''}"
    if len(peers) >= SLOTS:
        found = f"full, all {SLOTS} slots are taken: {listed}"
        return warning(_REGISTRY, found, "end some of these: a further peer gets no share")
    if states["stopped"]:
        pids = " ".join(str(peer.pid) for peer in peers if peer.state == "stopped")
        return warning(_REGISTRY, found, f"`kill -CONT {pids}`, or end what was stopped")
    return ok(_REGISTRY, found)


def check_lease(key: str) -> list[Finding]:
    """Look at the lease of a key."""
    try:
        return judge_lease(ocgpu.lease_status(key))
    except OcgpuError as problem:
        return [error(_LEASE, *split_message(str(problem)))]


def judge_lease(status: "LeaseStatus") -> list[Finding]:
    """Judge who holds the lease and who waits for it."""
    waiters = f"; waiting: {_named(status.waiters)}" if status.waiters else ""
    if not status.held:
        return [ok(_LEASE, f"free{waiters}")]
    found = f"held, {status.mode}, by {_named(status.holders) or 'a process not known'}{waiters}"
    stopped = [party.pid for party in status.holders if party.pid and is_stopped(party.pid)]
    if stopped:
        pids = " ".join(str(pid) for pid in stopped)
        remedy = f"`kill -CONT {pids}`, or end it: a stopped process keeps its lease"
        return [warning(_LEASE, f"{found}; pid {pids} is stopped", remedy)]
    return [ok(_LEASE, found)]


def _named(parties: "Sequence[LeaseParty]") -> str:
    return ", ".join(_party(party) for party in parties)


def _party(party: "LeaseParty") -> str:
    reason = f", {party.reason}" if party.reason else ""
    pid = "pid not known" if party.pid is None else f"pid {party.pid}"
    return f"{party.name or '?'} ({pid}{reason})"
