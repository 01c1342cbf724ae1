"""Clients that leave behind bytes which nobody has read: a pipelined request, a stray line end."""

import json
import socket
import struct
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from tests.fakes import Engines
from tests.server.jobs import CHAT, hold_an_image, post_image
from tests.server.served import Served
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "AF_NETLINK"), reason="no sock_diag: the kernel is not Linux"
)

Serve = Callable[..., Served]
BODY = json.dumps({**CHAT, "stream": False}).encode()
POST = (
    b"POST /api/chat HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)
GET = b"GET /api/version HTTP/1.1\r\nHost: a\r\n\r\n"


def dial(url: str, host: str | None = None) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((host or parts.hostname, parts.port), timeout=20)


def leave(client: socket.socket, *, reset: bool) -> None:
    if reset:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("behind", [POST, GET, b"\r\n"], ids=["post", "get", "line end"])
def test_a_waiter_that_left_behind_unread_bytes_loses_its_place(
    engines: Engines, served: Served, behind: bytes, reset: bool
) -> None:
    nodes = hold_an_image(engines, served)
    client = dial(served.ollama)
    client.sendall(POST)
    served.wait_waiting("llm", 1)
    client.sendall(behind)

    leave(client, reset=reset)

    wait_until(lambda: served.metrics()['gpulock_waiting{kind="llm"}'] == 0, 8, "the place free")
    nodes.open()
    served.wait_state("idle")
    assert not engines.record.calls("POST /api/chat")


def test_nothing_behind_a_request_is_served_when_its_client_is_gone(
    engines: Engines, served: Served
) -> None:
    nodes = hold_an_image(engines, served)
    with dial(served.ollama) as client:
        client.sendall(POST * 4)
        served.wait_waiting("llm", 1)
        # One that has half-closed counts as gone and can still read.
        client.shutdown(socket.SHUT_WR)
        said = client.makefile("rb").read()

    assert said.startswith(b"HTTP/1.1 400 ")
    assert said.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in said
    nodes.open()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_client_of_a_listener_on_all_interfaces_is_seen(
    engines: Engines, serve: Serve, host: str
) -> None:
    served = serve(LISTEN_OLLAMA="[::]:0")
    nodes = hold_an_image(engines, served)
    with dial(served.ollama, host) as stays:
        stays.sendall(POST + GET)
        client = dial(served.ollama, host)
        client.sendall(POST + b"\r\n")
        served.wait_waiting("llm", 2)

        leave(client, reset=False)

        served.wait_waiting("llm", 1)
        nodes.open()
        assert answers(stays, 2) == [b"200", b"200"]
    assert len(engines.record.calls("POST /api/chat")) == 1


def test_an_image_that_waits_behind_another_is_seen_too(engines: Engines, served: Served) -> None:
    nodes = hold_an_image(engines, served)
    body = b"{}"
    with dial(served.comfy) as client:
        client.sendall(b"POST /prompt HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n" + body)
        client.sendall(b"\r\n")
        served.wait_waiting("image", 1)
    served.wait_waiting("image", 0)
    nodes.open()
    served.wait_state("idle")

    assert len(engines.record.calls("POST /prompt")) == 1


def test_a_client_that_pipelines_and_stays_gets_both_answers(
    engines: Engines, served: Served
) -> None:
    nodes = hold_an_image(engines, served)
    with dial(served.ollama) as client:
        client.sendall(POST + POST)
        # Each is noticed by a look of its own, and each look sees the client too.
        for _ in range(3):
            with dial(served.ollama) as ghost:
                ghost.sendall(POST + GET)
                served.wait_waiting("llm", 2)
            served.wait_waiting("llm", 1)
        nodes.open()

        assert answers(client, 2) == [b"200", b"200"]
    assert len(engines.record.calls("POST /api/chat")) == 2
    assert post_image(served).status == 200


def answers(client: socket.socket, number: int) -> list[bytes]:
    """Read so many answers with a length or in chunks; their statuses."""
    reader = client.makefile("rb")
    statuses = []
    for _ in range(number):
        statuses.append(reader.readline().split()[1])
        fields = {}
        while (line := reader.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            fields[name.lower()] = value.strip()
        if b"content-length" in fields:
            reader.read(int(fields[b"content-length"]))
            continue
        while size := int(reader.readline(), 16):
            reader.read(size + 2)
        reader.readline()
    return statuses
