"""What the end-to-end tests send and look for."""

from typing import Any

from tests.fakes import Engines, Gate
from tests.recordings import blur_workflow
from tests.server.client import Answer, OpenCall, call
from tests.server.served import Served

__all__ = [
    "CHAT",
    "MESSAGES",
    "MODEL",
    "assert_in_order",
    "chat",
    "hold_an_image",
    "open_chat",
    "post_image",
]

MODEL = "llama3.2"
MESSAGES = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES}


def chat(served: Served, **changes: object) -> Answer:
    """Chat through the Ollama listener to the end."""
    return call("POST", f"{served.ollama}/api/chat", {**CHAT, **changes})


def open_chat(served: Served, **changes: object) -> OpenCall:
    """Send a chat through the Ollama listener and do not wait for it."""
    return OpenCall("POST", f"{served.ollama}/api/chat", {**CHAT, **changes})


def post_image(served: Served, **changes: object) -> Answer:
    """Post the recorded workflow through the ComfyUI listener; `changes` are inputs of node 1."""
    return call("POST", f"{served.comfy}/prompt", blur_workflow(**changes))


def assert_in_order(engines: Engines, *expected: str) -> None:
    """Fail unless the fakes got calls of these names in this order, others between them or not."""
    names = engines.record.names()
    place = 0
    for name in expected:
        assert name in names[place:], f"{name} is missing after {names[:place]}: {names[place:]}"
        place = names.index(name, place) + 1


def hold_an_image(engines: Engines, served: Served) -> Gate:
    """Have an image job computing; the gate lets it end."""
    nodes = engines.comfy.hold_jobs()
    assert post_image(served).status == 200
    nodes.wait_reached()
    served.wait_state("image")
    return nodes
