"""Which hosts and addresses are this machine's."""

import ipaddress
from pathlib import Path

import pytest

from ocgpu.addresses import is_local, is_own, resolve


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("192.0.2.1", False),
        ("2001:db8::1", False),
        ("no-such-name.invalid", False),
    ],
)
def test_a_host_is_local_on_loopback_and_on_an_address_of_ours(host: str, *, local: bool) -> None:
    assert is_local(host) is local


def test_a_link_local_address_is_ours_with_its_zone_alone() -> None:
    rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    found = [(bytes.fromhex(text), int(zone, 16)) for text, zone, *_ in rows if text[:4] == "fe80"]
    if not found:
        pytest.skip("no link-local address on this machine")
    packed, zone = found[0]
    address = ipaddress.IPv6Address(packed)

    assert is_local(f"{address}%{zone}")
    assert [is_own(one) for one in resolve(f"{address}%{zone}")] == [True]
    assert not is_own(address)
    assert not is_own(ipaddress.IPv6Address(f"{address}%{2**31 - 1}"))
