"""Numbers for Prometheus, written as text by ourselves.

Litestar's Prometheus plug-in costs a third of the request rate and labels by raw path, which has
no bound; a dozen series need neither. Format: prometheus.io/docs/instrumenting/exposition_formats.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Final

from ocgpu.server.arbiter import Counts, Kind, State

__all__ = ["REFUSALS", "Histogram", "Metrics", "Sample", "family"]

# Seconds. A wait is anything from nothing to LLM_WAIT_TIMEOUT; the steps are a third of a decade.
_WAIT_BOUNDS: Final = (0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_UNLOAD_BOUNDS: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0)
_SETTLE_BOUNDS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0)

# Why a request that needs the card is answered without it.
REFUSALS: Final = (
    "timeout",
    "queue_full",
    "shutdown",
    "body_memory",
    "body_too_large",
    "body_timeout",
    "lease",
)
_REQUESTS: Final = (Kind.LLM, Kind.IMAGE)
ENGINES: Final = ("ollama", "comfyui")
FAILURES: Final = ("refused", "broken")
JOB_RESULTS: Final = ("done", "error", "interrupted", "lost", "timeout")

Sample = tuple[str, Mapping[str, str], float]


class Histogram:
    """Counts of observations in seconds, by upper bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Add one observation."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def samples(self, labels: Mapping[str, str]) -> Iterable[Sample]:
        """Yield the cumulative buckets, the sum and the count."""
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            text = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield "_bucket", {**labels, "le": text}, total
        yield "_sum", labels, self._sum
        yield "_count", labels, total


class Metrics:
    """What serve counts about itself; the lock's present state is read when it is asked for."""

    def __init__(self) -> None:
        # Only waits that ended in a grant: a refusal, at once or after LLM_WAIT_TIMEOUT, would bend
        # the quantiles either way. Those are counted apart.
        self.lock_wait = {kind: Histogram(_WAIT_BOUNDS) for kind in _REQUESTS}
        self.refused = {(kind, reason): 0 for kind in _REQUESTS for reason in REFUSALS}
        self.left = dict.fromkeys(_REQUESTS, 0)
        self.unload = Histogram(_UNLOAD_BOUNDS)
        self.unload_timeouts = 0
        self.settle = Histogram(_SETTLE_BOUNDS)
        # Ends of requests that the engine gave no answer to, or half of one.
        self.engine_failures = dict.fromkeys(itertools.product(ENGINES, FAILURES), 0)
        self.image_jobs = dict.fromkeys(JOB_RESULTS, 0)

    def observe_wait(self, kind: Kind, seconds: float) -> None:
        """Add a wait that ended in a grant."""
        if kind in self.lock_wait:
            self.lock_wait[kind].observe(seconds)

    def count_refused(self, kind: Kind, reason: str) -> None:
        """Count a request that was refused the lock; `reason` is one of `REFUSALS`."""
        if kind in self.left:
            self.refused[kind, reason] += 1

    def count_left(self, kind: Kind) -> None:
        """Count a client that left while it waited."""
        if kind in self.left:
            self.left[kind] += 1

    def render(self, counts: Counts) -> str:
        """Write all series of the lock as exposition text."""
        return self._lock_series(counts) + self._request_series() + self._engine_series()

    def _lock_series(self, counts: Counts) -> str:
        states = [("", {"state": s.value}, float(s is counts.state)) for s in State]
        waiting = [
            ("", {"kind": Kind.LLM.value}, float(counts.waiting_llm)),
            ("", {"kind": Kind.IMAGE.value}, float(counts.waiting_image)),
        ]
        inflight: list[Sample] = [("", {}, counts.llm_inflight)]
        return (
            family("gpulock_state", "gauge", "1 for the state of the lock", states)
            + family("gpulock_llm_inflight", "gauge", "LLM requests that hold it", inflight)
            + family("gpulock_waiting", "gauge", "requests that wait for it", waiting)
        )

    def _request_series(self) -> str:
        waits = [
            s for kind in _REQUESTS for s in self.lock_wait[kind].samples({"kind": kind.value})
        ]
        refused = [
            ("", {"kind": kind.value, "reason": reason}, float(n))
            for (kind, reason), n in self.refused.items()
        ]
        left = [("", {"kind": kind.value}, float(n)) for kind, n in self.left.items()]
        failures = [
            ("", {"engine": engine, "ending": ending}, float(n))
            for (engine, ending), n in self.engine_failures.items()
        ]
        failed = "requests that got a 502 or half an answer"
        return (
            family("gpulock_lock_wait_seconds", "histogram", "wait for the lock", waits)
            + family("gpulock_refused_total", "counter", "requests refused the lock", refused)
            + family("gpulock_left_total", "counter", "clients that left waiting for it", left)
            + family("gpulock_engine_failures_total", "counter", failed, failures)
        )

    def _engine_series(self) -> str:
        jobs = [("", {"result": name}, float(n)) for name, n in self.image_jobs.items()]
        timeouts: list[Sample] = [("", {}, self.unload_timeouts)]
        unload, settle = self.unload.samples({}), self.settle.samples({})
        late = "image jobs that began with an LLM model still loaded"
        settled = "time until the memory of an engine was seen to be free"
        return (
            family("gpulock_image_jobs_total", "counter", "image jobs that ended", jobs)
            + family("gpulock_unload_seconds", "histogram", "time to unload all LLM models", unload)
            + family("gpulock_unload_timeouts_total", "counter", late, timeouts)
            + family("gpulock_settle_seconds", "histogram", settled, settle)
        )


def family(name: str, kind: str, meaning: str, samples: Iterable[Sample]) -> str:
    """Write one metric family: its help, its type and its samples."""
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{suffix}{_labels(labels)} {value:.10g}" for suffix, labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
