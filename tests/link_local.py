"""An address of this machine that is none without its zone."""

import ipaddress
from pathlib import Path

import pytest

__all__ = ["link_local"]


def link_local() -> str:
    """A link-local address with its zone, as `fe80::1%2`; skips the test where there is none."""
    rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    for text, zone, *_ in rows:
        if text.startswith("fe80"):
            return f"{ipaddress.IPv6Address(bytes.fromhex(text))}%{int(zone, 16)}"
    pytest.skip("no link-local address on this machine")
