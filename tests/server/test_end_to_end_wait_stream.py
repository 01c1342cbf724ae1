"""Signs of life to a stream that waits, as Ollama's and OpenAI's own clients take them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ollama
import openai
import pytest

from tests.fakes import Engines
from tests.fakes.faults import answer
from tests.server.client import background
from tests.server.jobs import MESSAGES, MODEL, hold_an_image, open_chat
from tests.server.served import Served

Serve = Callable[..., Served]
WORDS = ["the", " card", " is", " free"]
KEEPALIVE = "20ms"


def ollama_chat(served: Served) -> list[str | None]:
    with ollama.Client(host=served.ollama) as client:
        parts = list(client.chat(MODEL, MESSAGES, stream=True))
    return [part.message.content for part in parts if not part.done]


def ollama_generate(served: Served) -> list[str | None]:
    with ollama.Client(host=served.ollama) as client:
        parts = list(client.generate(MODEL, "hello", stream=True))
    return [part.response for part in parts if not part.done]


def openai_chat(served: Served) -> list[str | None]:
    with openai.OpenAI(base_url=f"{served.ollama}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        words = [part.choices[0].delta.content for part in stream]
    return [word for word in words if word]


def openai_text(served: Served) -> list[str | None]:
    with openai.OpenAI(base_url=f"{served.ollama}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model=MODEL, prompt="hello", stream=True)
        words = [part.choices[0].text for part in stream]
    return [word for word in words if word]


CLIENTS = (ollama_chat, ollama_generate, openai_chat, openai_text)
ERRORS = (ollama.ResponseError, openai.APIError)


@contextmanager
def signs_seen(served: Served) -> Iterator[None]:
    """Wait until one who came later than all others has had signs of life."""
    with open_chat(served) as observer:
        assert observer.response().read(3) == b"   "
        yield


@pytest.mark.parametrize("talk", CLIENTS)
def test_a_client_that_was_kept_alive_has_its_whole_answer(
    engines: Engines, serve: Serve, talk: Callable[[Served], list[str | None]]
) -> None:
    served = serve(WAIT_KEEPALIVE=KEEPALIVE)
    image = hold_an_image(engines, served)
    words = background(lambda: talk(served))
    served.wait_waiting("llm", 1)

    with signs_seen(served):
        assert engines.record.calls("POST /api/chat") == []
        image.open()

        assert words.result() == WORDS


@pytest.mark.parametrize("talk", [ollama_chat, openai_chat])
def test_a_client_that_was_kept_alive_and_is_refused_raises_its_own_error(
    engines: Engines, serve: Serve, talk: Callable[[Served], list[str | None]]
) -> None:
    served = serve(WAIT_KEEPALIVE=KEEPALIVE, LLM_WAIT_TIMEOUT="300ms")
    image = hold_an_image(engines, served)

    with pytest.raises(ERRORS, match=r"the gpu was not free within 0\.3s"):
        talk(served)

    image.open()


@pytest.mark.parametrize(
    ("talk", "body"),
    [
        (ollama_chat, b'{"error":"the model is gone"}'),
        (openai_chat, b'{"error":{"message":"the model is gone"}}'),
    ],
)
def test_an_engines_error_after_the_head_raises_the_clients_own_error(
    engines: Engines, serve: Serve, talk: Callable[[Served], list[str | None]], body: bytes
) -> None:
    served = serve(WAIT_KEEPALIVE=KEEPALIVE)
    engines.ollama.fail("POST", answer(404, body))
    image = hold_an_image(engines, served)
    talking = background(lambda: talk(served))
    served.wait_waiting("llm", 1)

    with signs_seen(served):
        image.open()

        with pytest.raises(ERRORS, match="the model is gone"):
            talking.result()
