"""What a run of the load gives, and what follows from several: plain functions, no measuring."""

import statistics
from collections.abc import Callable

__all__ = [
    "Measure",
    "Sample",
    "Samples",
    "chunk_cpu",
    "cpu_us",
    "differences",
    "gone_ms",
    "p50_us",
]
__all__ += ["p99_us", "rate", "ratios", "spread"]

Sample = dict[str, int]
"""One run of the load, as it printed it."""
Samples = dict[str, list[Sample]]
"""By target, a run each round."""
Measure = Callable[[Sample], float]


def rate(sample: Sample) -> float:
    """Answers a second."""
    return sample["count"] / sample["span_ns"] * 1e9


def cpu_us(sample: Sample) -> float:
    """Microseconds of the proxy's CPU for each answer."""
    return sample["cpu_ns"] / sample["count"] / 1e3


def chunk_cpu(sample: Sample) -> float:
    """Seconds of the proxy's CPU for 10,000 chunks."""
    return sample["cpu_ns"] / sample["count"] / 1e5


def p50_us(sample: Sample) -> float:
    """The median, in microseconds."""
    return sample["p50_ns"] / 1e3


def p99_us(sample: Sample) -> float:
    """The 99th percentile, in microseconds."""
    return sample["p99_ns"] / 1e3


def gone_ms(sample: Sample) -> float:
    """Milliseconds until the last one was gone."""
    return sample["gone_ns"] / 1e6


def ratios(samples: Samples, measure: Measure, name: str, other: str) -> list[float]:
    """`name` over `other`, round by round."""
    pairs = zip(samples.get(name, []), samples.get(other, []), strict=False)
    return [measure(one) / measure(two) for one, two in pairs]


def differences(samples: Samples, measure: Measure, name: str, other: str) -> list[float]:
    """`name` less `other`, round by round."""
    pairs = zip(samples.get(name, []), samples.get(other, []), strict=False)
    return [measure(one) - measure(two) for one, two in pairs]


def spread(values: list[float], digits: int) -> str:
    """The median and, of several, the smallest and the largest."""
    middle = f"{statistics.median(values):,.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"
