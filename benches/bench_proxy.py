"""A request at one connection, through the proxy and beside it; `make bench-proxy` has the rest."""

import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benches.proxy.targets import DIRECT, FRESH, GO, NGINX, OCGPU, POOLED, Bench, open_bench

GET = "GET /api/version, 1 connection"
POST = "locked POST of 2 KB, 1 connection"
ROUNDS = 1500
GENERATE = json.dumps({"model": "bench", "prompt": "x" * 1900, "stream": False}).encode()
TARGETS = pytest.mark.parametrize("name", [DIRECT, NGINX, GO, OCGPU])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with open_bench(tmp_path_factory.mktemp("proxy")) as opened:
        yield opened


@TARGETS
def test_get(benchmark: BenchmarkFixture, bench: Bench, name: str) -> None:
    benchmark.group = GET
    measure(benchmark, port_of(bench, name, POOLED), "GET", "/api/version", None)


@TARGETS
def test_post(benchmark: BenchmarkFixture, bench: Bench, name: str) -> None:
    benchmark.group = POST
    measure(benchmark, port_of(bench, name, FRESH), "POST", "/api/generate", GENERATE)


def port_of(bench: Bench, name: str, listener: str) -> int:
    """The port of a target; skips where it is not at hand."""
    if all(target.name != name for target in bench.targets):
        pytest.skip("; ".join(bench.absent))
    return bench.target(name).ports[listener]


def measure(
    benchmark: BenchmarkFixture, port: int, method: str, path: str, body: bytes | None
) -> None:
    """Time one request after the other on one connection."""
    connection = HTTPConnection("127.0.0.1", port)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def request() -> None:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        reply.read()
        assert reply.status == 200

    benchmark.pedantic(request, rounds=ROUNDS, iterations=1, warmup_rounds=100)
    connection.close()
