"""Thousands of connections that say nothing, and everybody else is served as ever."""

import contextlib
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.server.client import call
from tests.server.jobs import chat
from tests.server.served import Served
from tests.waiting import wait_until

IDLE = 2000
SPARE = 200


@pytest.fixture
def descriptors() -> Iterator[None]:
    """As many descriptors as this process may have; a skip where they are too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = IDLE + SPARE
    if hard < wanted:
        pytest.skip(f"needs {wanted} descriptors, the hard limit is {hard}: raise `ulimit -Hn`")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("descriptors")
def test_thousands_of_idle_connections_starve_nobody(served: Served) -> None:
    host, port = served.ollama.removeprefix("http://").split(":")
    process = psutil.Process(served.process.pid)
    with contextlib.ExitStack() as idle:
        for _ in range(IDLE):
            idle.enter_context(socket.create_connection((host, int(port)), timeout=10))
        wait_until(lambda: process.num_fds() >= IDLE, what="all connections accepted")

        assert call("GET", f"{served.ollama}/healthz").status == 200
        assert chat(served).status == 200
        assert call("GET", f"{served.ollama}/api/tags").status == 200

    wait_until(lambda: process.num_fds() < SPARE, what="all connections closed")
    assert served.stop() == 0


def test_it_takes_all_the_descriptors_that_it_may_have() -> None:
    # Granian raises the limit too, by being imported; nothing promises that.
    program = """
import logging, resource
logging.basicConfig(level="DEBUG", format="%(levelname)s %(before)s %(limit)s")
from ocgpu.server.descriptors import raise_limit
raise_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    command = ("sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh", sys.executable, "-c", program)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    done = subprocess.run(command, capture_output=True, text=True, timeout=25, check=True)

    assert done.stdout == f"{hard} {hard}\n"
    assert done.stderr == f"DEBUG 256 {hard}\n"
