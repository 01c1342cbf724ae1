"""Serve's place in the registry, and what it sees there.

Serve is an ungated peer: pacers of other processes leave it its share although it cannot be paused
itself. Without a GPU or without a usable segment serve runs on and says why: the proxy may well run
on another host than the card.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from ocgpu.pacer import Pacer
from ocgpu.server.arbiter import State
from ocgpu.server.metrics import Sample, family

__all__ = ["RegistryView", "peer_series"]

_NAME: Final = "ocgpu-serve"


class RegistryView:
    """Joins the registry, follows the lock's state, and shows the peers.

    Args:
        weight: Our weight among the peers.
        gpu_key: Name of the GPU; "" asks the driver.

    Raises:
        ConfigError: A variable of the library is outside its legal form.
    """

    def __init__(self, weight: float, gpu_key: str) -> None:
        self._pacer = Pacer(weight=weight, name=_NAME, gpu=gpu_key or None, _gated=False)
        self._away: str | None = None
        # Gives the GPU memory of processes; None where it is not known.
        self.memory_of: Callable[[Collection[int]], Mapping[int, int | None]] = dict.fromkeys

    @property
    def enabled(self) -> bool:
        """Whether we are a peer."""
        return self._away is None and self._pacer.enabled

    @property
    def reason(self) -> str | None:
        """Why we are not a peer; None when we are."""
        return self._away or self._pacer.reason

    def leave(self, reason: str) -> None:
        """Be no peer any more, because nothing of ours is on this GPU."""
        self._away = reason
        self._pacer.leave()

    def follow(self, state: State) -> None:
        """Be active while the lock is not idle."""
        if self.enabled:
            self._pacer._mark(state is not State.IDLE)

    @property
    def gpu_key(self) -> str | None:
        """The GPU whose peer we are; None when we are no peer."""
        return self._pacer.snapshot().gpu_key if self.enabled else None

    def pids(self) -> list[int]:
        """Give the live peers, us among them; any thread may ask."""
        if not self.enabled:
            return []
        snapshot = self._pacer.snapshot()
        own = snapshot.self
        alive = [peer.pid for peer in snapshot.peers if peer.alive]
        return alive if own is None else [own.pid, *alive]

    def snapshot(self) -> dict[str, Any]:
        """Give the seed's `/gpu/peers` document with our keys."""
        if self.enabled:
            document = self._pacer.snapshot().to_dict()
            _add_memory(document, self.memory_of)
            return {**document, "enabled": True}
        empty: dict[str, Any] = {"gpu_key": None, "self": None, "peers": []}
        return {**empty, "enabled": False, "reason": self.reason}

    def gpu_share(self) -> dict[str, Any]:
        """Give the `opencoti.gpu_share` block of `/props`."""
        document = self.snapshot()
        return {key: document.get(key) for key in ("enabled", "gpu_key", "self", "peers")}

    def close(self) -> None:
        """Leave the registry."""
        self._pacer.leave()


def peer_series(document: Mapping[str, Any]) -> str:
    """Write the peers of a snapshot as metrics: ratios 0 to 1, ages in seconds."""
    own = [document["self"]] if document.get("self") else []
    peers = [*own, *document.get("peers", ())]
    return "".join(
        (
            family("gpushare_peers", "gauge", "live peers on the GPU", [("", {}, len(peers))]),
            _per_peer("weight", "weight of a peer", peers, "weight", 1.0),
            _per_peer("share_ratio", "resolved share of a peer", peers, "share_pct", 0.01),
            _per_peer("busy_ratio", "time at work of a peer", peers, "busy_pct", 0.01),
            _per_peer("active", "1 while a peer works", peers, "active", 1.0),
            _per_peer("memory_bytes", "GPU memory of a peer", peers, "memory_bytes", 1.0),
            _per_peer(
                "heartbeat_age_seconds", "age of a heartbeat", peers, "heartbeat_age_ms", 0.001
            ),
        )
    )


def _add_memory(
    document: dict[str, Any], memory_of: Callable[[Collection[int]], Mapping[int, int | None]]
) -> None:
    peers = [*filter(None, [document["self"]]), *document["peers"]]
    memory = memory_of([peer["pid"] for peer in peers])
    for peer in peers:
        peer["memory_bytes"] = memory[peer["pid"]]


def _per_peer(name: str, meaning: str, peers: list[dict[str, Any]], key: str, scale: float) -> str:
    samples: list[Sample] = [
        ("", {"pid": str(peer["pid"]), "name": str(peer["name"])}, float(peer[key]) * scale)
        for peer in peers
        if peer.get(key) is not None
    ]
    return family(f"gpushare_peer_{name}", "gauge", meaning, samples)
