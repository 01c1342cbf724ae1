"""Who is a trusted proxy."""

import pytest

from ocgpu.networks import PRIVATE, networks
from ocgpu.server.trusted import TrustedProxies


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.9.9.9",
        "10.255.0.1",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "169.254.1.1",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fd12::9",
        "::ffff:10.0.0.1",
        "::FFFF:7f00:1",
    ],
)
def test_private_is_this_machine_and_its_networks(address: str) -> None:
    assert address in TrustedProxies(PRIVATE)


@pytest.mark.parametrize(
    "address",
    [
        "172.32.0.1",
        "172.15.255.255",
        "11.0.0.1",
        "192.169.0.1",
        "8.8.8.8",
        "100.64.0.1",
        "2001:db8::1",
        "::ffff:8.8.8.8",
        "::127.0.0.1",
        "64:ff9b::10.0.0.1",
        "10.0.0.1.evil",
        "localhost",
        "unix:",
        "",
    ],
)
def test_nobody_else_is_private(address: str) -> None:
    assert address not in TrustedProxies(PRIVATE)


def test_none_is_nobody_and_all_is_everybody() -> None:
    peers = ("127.0.0.1", "::1", "8.8.8.8", "2001:db8::1", "::ffff:8.8.8.8")

    assert [peer in TrustedProxies(networks("none")) for peer in peers] == [False] * 5
    assert [peer in TrustedProxies(networks("all")) for peer in peers] == [True] * 5


def test_named_peers_and_no_others() -> None:
    trusted = TrustedProxies(networks("10.0.0.5,2001:db8::/32"))

    assert [peer in trusted for peer in ("10.0.0.5", "::ffff:10.0.0.5", "2001:db8:9::1")] == (
        [True] * 3
    )
    assert [peer in trusted for peer in ("10.0.0.6", "127.0.0.1", "2001:db9::1")] == [False] * 3


def test_what_is_no_text_is_no_peer() -> None:
    assert None not in TrustedProxies(networks("all"))


def test_a_crowd_of_peers_does_not_grow_it() -> None:
    trusted = TrustedProxies(PRIVATE)

    for number in range(3000):
        assert f"10.0.{number // 250}.{number % 250}" in trusted

    assert trusted._look.cache_info().currsize <= 1024
