"""The JSON documents of our own endpoints, as types: what the OpenAPI schema is made of.

Plain dicts at run time. A reader must bear keys that are not named here: they come with releases.
"""

from typing import Literal, NotRequired, TypedDict

__all__ = [
    "EventDocument",
    "HealthDocument",
    "LeaseDocument",
    "LeasePartyDocument",
    "OutsideDocument",
    "OutsideProcessDocument",
    "PeerDocument",
    "PeersDocument",
    "RefusalDocument",
    "RegistryDocument",
    "ReleasedDocument",
    "SwitchDocument",
    "UnloadedDocument",
    "UpstreamDocument",
    "WaitingDocument",
]

StateName = Literal["idle", "llm", "image"]


class WaitingDocument(TypedDict):
    """Requests that wait for the lock, and the bytes of their bodies."""

    llm: int
    image: int
    bytes: int


class SwitchDocument(TypedDict):
    """Whether serve takes part in something, and if not, why."""

    enabled: bool
    reason: NotRequired[str]


class OwnLeaseDocument(TypedDict):
    """Serve's part in the machine's lease.

    Without it there is a reason. With it: how it is held (None when it is not) and for how long,
    whether requests of ours wait for somebody else's, and whether somebody waits for ours.
    """

    enabled: bool
    reason: NotRequired[str]
    mode: NotRequired[Literal["shared", "exclusive"] | None]
    held_seconds: NotRequired[float | None]
    waiting: NotRequired[bool]
    wanted: NotRequired[bool]


class UpstreamDocument(TypedDict):
    """What the last probe of an engine found; None before the first one ended."""

    url: str
    reachable: bool | None
    version: str | None
    checked_ago_seconds: float | None
    error: NotRequired[str]
    memory_bytes: int | None


class OutsideProcessDocument(TypedDict):
    """A process that computes on the GPU and is no peer, no holder of the lease and no engine."""

    pid: int
    name: str
    memory_bytes: int | None


class OutsideDocument(TypedDict):
    """What uses the GPU past serve; None where that is not known, as without NVML."""

    processes: list[OutsideProcessDocument] | None
    image_jobs: int | None


class HealthDocument(TypedDict):
    """`/healthz`: the lock's state, and what serve knows of its surroundings."""

    state: StateName
    llm_inflight: int
    image_pending: bool
    waiting: WaitingDocument
    draining: bool
    evicting: bool
    lease: OwnLeaseDocument
    registry: SwitchDocument
    upstreams: dict[str, UpstreamDocument]
    outside: OutsideDocument
    version: str
    uptime_seconds: float


class PeerDocument(TypedDict):
    """A process in the registry."""

    pid: int
    name: str
    weight: float
    share_pct: float
    busy_pct: float
    active: bool
    heartbeat_age_ms: int
    alive: bool
    state: str
    slot: int
    steps: int
    slept_ms: int
    lease: str | None
    memory_bytes: int | None


class LeasePartyDocument(TypedDict):
    """A holder or a waiter of the machine's lease, as far as it is known."""

    pid: int | None
    name: str | None
    reason: str | None
    mode: str | None
    since_us: int | None


class LeaseDocument(TypedDict):
    """The machine's lease."""

    held: bool
    mode: str | None
    holders: list[LeasePartyDocument]
    waiters: list[LeasePartyDocument]


class RegistryDocument(TypedDict):
    """The registry as serve sees it; without a GPU, why it sees none."""

    gpu_key: str | None
    self: PeerDocument | None
    peers: list[PeerDocument]
    schedule: NotRequired[str]
    enabled: bool
    reason: NotRequired[str | None]


class PeersDocument(RegistryDocument):
    """`/gpu/peers`: the peers of the GPU; under `lease` stand holders that are no peers, too."""

    lease: LeaseDocument | None


class EventDocument(TypedDict):
    """One change of the lock's state; `at` is in Unix seconds."""

    at: float
    before: StateName
    after: StateName
    cause: str


class ReleasedDocument(TypedDict):
    """What a forced reset dropped."""

    state: StateName
    released: int


class UnloadedDocument(TypedDict):
    """Models that left the card; `comfyui_freed` is None without a ComfyUI."""

    unloaded: list[str]
    comfyui_freed: bool | None


class RefusalDocument(TypedDict):
    """An answer that says no: a sentence for a person, a word for a program."""

    error: str
    reason: str
