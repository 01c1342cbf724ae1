"""Durations as Go writes them: `1m30s`, `500ms`, `1.5h`, `0`.

The settings of `ocgpu serve` and the command line share this spelling, so that the compose files of
gpulock, which is written in Go, keep working.
"""

import re
from typing import Final

__all__ = ["DURATION_FORM", "format_duration", "parse_duration"]

DURATION_FORM: Final = "a duration such as `1m30s`, `500ms` or `0`"
"""The legal form, for messages: what a person should write instead."""

_UNIT_S: Final = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,  # U+00B5, the micro sign
    "μs": 1e-6,  # U+03BC, the Greek letter: Go takes both
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
_PART: Final = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_MAX_S: Final = (2**63 - 1) / 1e9  # Go counts nanoseconds in an int64: 292 years


def parse_duration(text: str) -> float:
    """Read a Go duration, in seconds.

    Args:
        text: One or more numbers, each with its unit, or `0`. No sign: a wait is not negative.

    Raises:
        ValueError: Not of that form, or longer than 292 years, Go's own limit.
    """
    if text == "0":
        return 0.0
    seconds = 0.0
    end = 0
    while end < len(text):
        part = _PART.match(text, end)
        if part is None:
            raise ValueError(text)
        seconds += float(part[1]) * _UNIT_S[part[2]]
        end = part.end()
    if end == 0 or seconds > _MAX_S:
        raise ValueError(text)
    return seconds


def format_duration(seconds: float) -> str:
    """Write `seconds` as Go does, in the largest units that keep it readable: 90.0 is `1m30s`."""
    if seconds < 1.0:
        return _below_one_second(seconds)
    hours, rest = divmod(seconds, 3600.0)
    minutes, rest = divmod(rest, 60.0)
    parts = [f"{hours:.0f}h" if hours else "", f"{minutes:.0f}m" if minutes else ""]
    parts.append(f"{rest:.9f}".rstrip("0").rstrip(".") + "s" if rest else "")
    return "".join(parts)


def _below_one_second(seconds: float) -> str:
    if seconds == 0.0:
        return "0"
    for unit, scale in (("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.6g}{unit}"
    return f"{seconds * 1e9:.6g}ns"
