"""Sockets that we bind: taken ones, foreign ones, privileged ones, and what they are set to."""

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ocgpu.forms import Listen
from ocgpu.server.sockets import ListenError, address_of, bind, open_sockets, url_of
from ocgpu.server.systemd import Inherited
from ocgpu.settings import Settings
from tests.users import BECOME, root_only

HERE = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A socket that listens, as systemd would have bound it."""
    with socket.create_server((HERE, 0)) as listener:
        yield listener


def settings(**changes: object) -> Settings:
    any_port = Listen(host=HERE, port=0)
    defaults = {"listen_ollama": any_port, "listen_comfy": any_port, "listen_admin": any_port}
    return Settings(**{**defaults, **changes})


def test_a_bound_socket_is_shared_with_nobody_and_notices_vanished_clients() -> None:
    with bind(HERE, 0) as listener, socket.create_connection(listener.getsockname()) as client:
        listener.settimeout(5)
        accepted, _ = listener.accept()
        with accepted:
            assert not listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT)
            assert not listener.get_inheritable()
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert client.recv(1) == b""


def test_a_port_that_others_would_share_is_taken_all_the_same() -> None:
    with socket.socket() as sharing:
        sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sharing.bind((HERE, 0))
        sharing.listen()
        listen = address_of(sharing)

        with pytest.raises(ListenError, match="address already in use"):
            open_sockets(settings(listen_comfy=listen))


@pytest.mark.parametrize("variable", ["LISTEN_OLLAMA", "LISTEN_COMFY", "LISTEN_ADMIN"])
def test_a_taken_port_is_named_with_its_setting_and_a_remedy(
    taken: socket.socket, variable: str
) -> None:
    listen = address_of(taken)

    with pytest.raises(ListenError) as refused:
        open_sockets(settings(**{variable.lower(): listen}))

    assert str(refused.value) == (
        f"cannot listen on {listen}: address already in use;"
        f" stop what listens there or set `{variable}`"
    )


def test_all_interfaces_are_taken_where_one_is(taken: socket.socket) -> None:
    with pytest.raises(ListenError, match=f"cannot listen on :{address_of(taken).port}: "):
        open_sockets(settings(listen_comfy=Listen(host="::", port=address_of(taken).port)))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ListenError) as refused:
        open_sockets(settings(listen_ollama=Listen(host="203.0.113.7", port=7)))

    assert "203.0.113.7:7: cannot assign requested address; set `LISTEN_OLLAMA` to an address" in (
        str(refused.value)
    )


@root_only
def test_a_privileged_port_is_refused_with_two_ways_out() -> None:
    program = f"""
import os
from ocgpu.server.sockets import ListenError, open_sockets
from ocgpu.forms import Listen
from ocgpu.settings import Settings
{BECOME}
try:
    open_sockets(Settings(listen_ollama=Listen(host="{HERE}", port=81)))
except ListenError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=25, check=True
    )

    assert done.stdout == (
        f"cannot listen on {HERE}:81: permission denied; let systemd bind it (`ListenStream=`),"
        " or set `LISTEN_OLLAMA` to a port from 1024 on\n"
    )


def test_a_start_that_fails_leaves_nothing_bound(taken: socket.socket) -> None:
    with socket.create_server((HERE, 0)) as other:
        free = address_of(other)
    given = socket.create_server((HERE, 0))

    with pytest.raises(ListenError):
        open_sockets(
            settings(listen_comfy=free, listen_admin=address_of(taken)),
            [Inherited("ollama", given)],
        )

    assert given.fileno() == -1
    socket.create_server((HERE, free.port)).close()


def test_listeners_that_are_off_are_not_bound() -> None:
    opened = open_sockets(settings(ollama_url="", listen_admin=None))

    assert [name for name, _ in opened] == ["comfy"]
    opened[0][1].close()


def test_an_address_for_all_interfaces_is_reached_on_this_machine() -> None:
    for host in ("::", "0.0.0.0"):  # noqa: S104 - that is the case here
        with bind(host, 0) as listener:
            assert url_of(listener).startswith("http://127.0.0.1:")
            socket.create_connection((HERE, address_of(listener).port)).close()


def test_inherited_sockets_are_placed_by_name_and_then_by_port() -> None:
    given = [socket.create_server((HERE, 0)) for _ in range(4)]
    inherited = [
        Inherited("admin", given[0]),
        Inherited("ocgpu.socket", given[1]),
        Inherited("ollama", given[2]),
        Inherited("ollama", given[3]),
    ]

    opened = open_sockets(settings(listen_comfy=address_of(given[1])), inherited)

    assert opened == [
        ("ollama", given[2]),
        ("ollama", given[3]),
        ("comfy", given[1]),
        ("admin", given[0]),
    ]
    for listener in given:
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert listener.gettimeout() == 0
        listener.close()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ocgpu.socket", {}),
        ("comfy", {"comfy_url": ""}),
        ("admin", {"listen_admin": None}),
        ("other", {"comfy_url": ""}),
    ],
)
def test_an_inherited_socket_without_a_listener_is_refused(
    taken: socket.socket, name: str, changes: dict
) -> None:
    port = address_of(taken).port

    with pytest.raises(ListenError) as refused:
        open_sockets(settings(**changes), [Inherited(name, taken)])

    assert f"no listener for the inherited socket `{name}` (port {port} on {HERE}); name it" in (
        str(refused.value)
    )
    assert taken.fileno() == -1


def test_a_name_of_ours_counts_for_more_than_a_port_of_ours(taken: socket.socket) -> None:
    with pytest.raises(ListenError, match="no listener for the inherited socket `comfy`"):
        open_sockets(
            settings(comfy_url="", listen_ollama=address_of(taken)), [Inherited("comfy", taken)]
        )


def test_an_inherited_admin_socket_off_loopback_needs_a_token_too() -> None:
    everywhere = socket.create_server(("0.0.0.0", 0))  # noqa: S104 - that is the case here

    with pytest.raises(ListenError, match="not on loopback; set `ADMIN_TOKEN`"):
        open_sockets(settings(), [Inherited("admin", everywhere)])

    everywhere = socket.create_server(("0.0.0.0", 0))  # noqa: S104 - that is the case here
    opened = open_sockets(settings(admin_token="t"), [Inherited("admin", everywhere)])  # noqa: S106
    for _, listener in opened:
        listener.close()


def test_an_inherited_socket_that_an_upstream_points_at_is_refused(taken: socket.socket) -> None:
    url = f"http://u:s3cret@localhost:{address_of(taken).port}"

    with pytest.raises(ListenError, match="`COMFY_URL` points there") as refused:
        open_sockets(settings(comfy_url=url), [Inherited("ollama", taken)])

    assert "s3cret" not in str(refused.value)
