"""Which hosts and addresses are this machine's."""

import ipaddress

import pytest

from ocgpu.addresses import is_local, is_own, resolve
from tests.link_local import link_local


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
    here = link_local()
    address = here.partition("%")[0]

    assert is_local(here)
    assert [is_own(one) for one in resolve(here)] == [True]
    assert not is_own(ipaddress.IPv6Address(address))
    assert not is_own(ipaddress.IPv6Address(f"{address}%{2**31 - 1}"))
