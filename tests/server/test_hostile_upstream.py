"""Upstreams that answer what no engine answers."""

import pytest

from ocgpu.server.engines.ollama import Ollama
from ocgpu.server.relay.control import Control, Reply, json_object
from ocgpu.server.relay.headers import legal
from ocgpu.server.relay.upstream import UpstreamError
from tests.fakes import Engines
from tests.fakes.faults import answer
from tests.server.client import call
from tests.server.served import Served

DEEP = b"[" * 100_000


@pytest.mark.parametrize("body", [b"", b"x", b"[1]", b"\xff", DEEP, b'{"a":' + DEEP])
def test_a_body_that_is_no_json_object_is_none(body: bytes) -> None:
    assert json_object(body) is None


class Scripted(Control):
    """Answers every call with one body."""

    def __init__(self, body: bytes) -> None:
        self.upstream = type("Upstream", (), {"url": "http://u", "authority": b"u"})()
        self._body = body

    async def get(self, path: str, *, timeout: float) -> Reply:
        del path, timeout
        return Reply(200, [], self._body)


@pytest.mark.parametrize("models", [b"7", b'"x"', b'{"a":1}'])
async def test_a_model_list_that_is_none_is_an_error_of_the_upstream(models: bytes) -> None:
    with pytest.raises(UpstreamError, match="no model list from http://u"):
        await Ollama(Scripted(b'{"models":%s}' % models)).loaded(timeout=1)


async def test_odd_entries_of_a_model_list_are_left_out() -> None:
    body = b'{"models":["x",7,{},{"model":5},{"name":"m"}]}'

    assert await Ollama(Scripted(body)).loaded(timeout=1) == ["m"]


@pytest.mark.parametrize("byte", [0, 1, 8, 10, 13, 0x1B, 0x7F])
def test_a_control_in_a_header_is_illegal(byte: int) -> None:
    assert not legal([(b"x-a", b"a%cb" % byte)])


@pytest.mark.parametrize("name", [b"", b"a b", b"a:b", b"\xff", b"n" * 70_000])
def test_a_header_name_that_is_no_token_is_illegal(name: bytes) -> None:
    assert not legal([(name, b"a")])


def test_tabs_and_letters_beyond_ascii_are_legal_in_a_value() -> None:
    assert legal([(b"X-Custom_1", b"a\tb\xff\xe9")])


@pytest.mark.parametrize("models", [b'{"models":7}', b'{"models":["x"]}', b'{"models":' + DEEP])
def test_an_image_is_rendered_whatever_ollama_says(
    engines: Engines, served: Served, models: bytes
) -> None:
    engines.ollama.fail("GET /api/ps", answer(200, models), times=1)

    reply = call("POST", f"{served.comfy}/prompt", {"prompt": GRAPH})

    assert reply.status == 200
    served.wait_state("idle")


GRAPH = {
    "1": {
        "class_type": "EmptyImage",
        "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 0},
    },
    "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
}
