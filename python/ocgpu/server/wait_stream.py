"""Keep a stream alive that waits for the card: the head at once, then a sign of life now and then.

Front proxies and clients give up on a request that gives no byte for a minute. For a client that
asked for a stream, the head can go out before the engine is asked, and each stream form has bytes
that mean nothing: white space before a JSON document, a comment among server-sent events. A blank
line would be the obvious one for NDJSON, but Ollama's own clients parse every line and fail on it.

The price is that the status is said before it is known: what fails from then on is told in the
stream's own form, as Ollama's and OpenAI's clients read it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ocgpu.server.relay.asgi import Headers, Message, Send, header
from ocgpu.server.relay.control import json_object
from ocgpu.server.relay.http import StalledClientError

__all__ = ["Form", "WaitStream", "form_of"]

# An engine's error is a line; what comes beyond this of a page in its place helps nobody.
_ERROR_MAX: Final = 65_536
_SNIPPET: Final = 200


def _ndjson_error(error: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"error": error["message"]}) + b"\n"


def _sse_error(error: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n"


def _messages_error(error: dict[str, Any]) -> bytes:
    document = {"type": "error", "error": error}
    return b"event: error\ndata: " + msgspec.json.encode(document) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Form:
    """How a stream looks on the wire.

    Attributes:
        media: Its media type.
        sign: Bytes that mean nothing in it.
        error: Writes an error (`message`, `type`, `code`) as the last thing in it.
    """

    media: bytes
    sign: bytes
    error: Callable[[dict[str, Any]], bytes]


NDJSON: Final = Form(b"application/x-ndjson", b" ", _ndjson_error)
SSE: Final = Form(b"text/event-stream", b": waiting\n\n", _sse_error)
MESSAGES: Final = Form(b"text/event-stream", b": waiting\n\n", _messages_error)

# Path to the form of its stream, and whether it streams unless told not to.
_STREAMS: Final[Mapping[str, tuple[Form, bool]]] = {
    "/api/generate": (NDJSON, True),
    "/api/chat": (NDJSON, True),
    "/v1/chat/completions": (SSE, False),
    "/v1/completions": (SSE, False),
    "/v1/responses": (SSE, False),
    "/v1/messages": (MESSAGES, False),
}
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_UNSAID: Final = b"null"


def form_of(path: str, headers: Headers, body: bytes) -> Form | None:
    """Give the form of the stream that a request asks for; None where its head has to wait.

    The head of an answer to a page of another site is the engine's: its CORS headers decide
    whether the page may read it. A body that two readers could read differently waits, too.
    """
    form, streams = _STREAMS.get(path, (None, False))
    if form is None or header(headers, b"origin") is not None:
        return None
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    # Go reads keys whatever their letter case.
    said = [bytes(value) for key, value in fields.items() if key.casefold() == "stream"]
    if len(said) > 1:
        return None
    asked = said[0] if said and said[0] != _UNSAID else (b"true" if streams else b"false")
    return form if asked == b"true" else None


class WaitStream:
    """Stands between the relay and one client whose stream may begin before the engine is asked.

    A request that need not wait is left alone: everything passes through `send` as it is. Once the
    head went out, the engine's is taken back, and an answer that is no stream becomes an error
    within the stream. Signs of life go on until the answer comes: a model may have to load yet.

    Args:
        send: The connection's `send`.
        form: The stream's form.
        interval: Seconds between two signs of life.
        stall_timeout: Seconds that the client may take no byte once there is an answer; 0 is no
            limit.

    Attributes:
        begun: Whether the head went out.
    """

    def __init__(self, send: Send, form: Form, interval: float, stall_timeout: float) -> None:
        self._send = send
        self._form = form
        self._interval = interval
        self._stall_timeout = stall_timeout
        self._answered = asyncio.Event()
        self._signs: asyncio.Task[None] | None = None
        self._status = 200
        # The engine's answer where it is no stream; None while all is well.
        self._failure: bytearray | None = None
        self.begun = False

    def start(self) -> None:
        """Begin the stream with the loop's next turn, unless the wait is over by then."""
        self._signs = asyncio.ensure_future(self._show_signs())

    def granted(self) -> None:
        """The wait is over: a stream that has not begun is the engine's alone."""
        if not self.begun:
            self.stop()

    def stop(self) -> None:
        """End the signs of life, whatever they are doing; to be called in `finally`."""
        signs, self._signs = self._signs, None
        if signs is not None:
            signs.cancel()

    async def send(self, message: Message) -> None:
        """Send a message of the answer.

        Raises:
            StalledClientError: The client takes not even the signs of life.
        """
        await self._quiet()
        if not self.begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._judge(message)
        elif self._failure is None:
            await self._send(message)
        else:
            await self._fail(self._failure, message)

    async def _show_signs(self) -> None:
        self.begun = True
        head = [(b"content-type", self._form.media), (b"x-accel-buffering", b"no")]
        await self._send({"type": "http.response.start", "status": 200, "headers": head})
        # Granian holds the head back until the first body message.
        await self._send({"type": "http.response.body", "body": b"", "more_body": True})
        while not await _within(self._interval, self._answered.wait()):
            message = {"type": "http.response.body", "body": self._form.sign, "more_body": True}
            await self._send(message)

    async def _quiet(self) -> None:
        """End the signs of life between two of them: a piece on its way must not be torn."""
        signs, self._signs = self._signs, None
        if signs is None:
            return
        if not self.begun:
            signs.cancel()
            return
        self._answered.set()
        if not await _within(self._stall_timeout, signs):
            raise StalledClientError

    def _judge(self, head: Message) -> None:
        """See whether an answer's head is one that the head which went out stands for."""
        self._status = head["status"]
        headers = [(name.lower(), value) for name, value in head["headers"]]
        media = (header(headers, b"content-type") or b"").split(b";", 1)[0].strip().lower()
        coding = header(headers, b"content-encoding") or b"identity"
        # A JSON document alone is a line of NDJSON; among events it would be nothing.
        fits = self._form is NDJSON or media == self._form.media
        if not (200 <= self._status < 300 and fits and coding == b"identity"):
            self._failure = bytearray()

    async def _fail(self, failure: bytearray, message: Message) -> None:
        """Collect an answer that is no stream; at its end, tell it as an error."""
        room = _ERROR_MAX - len(failure)
        failure += message.get("body", b"")[:room]
        if not message.get("more_body", False):
            event = self._form.error(_error(self._status, bytes(failure)))
            await self._send({"type": "http.response.body", "body": event})


async def _within(timeout: float, awaitable: Awaitable[Any]) -> bool:
    """Await something for `timeout` seconds at most, 0 for ever; False when the time is over."""
    try:
        async with asyncio.timeout(timeout or None):
            await awaitable
    except TimeoutError:
        return False
    return True


def _error(status: int, body: bytes) -> dict[str, Any]:
    """Give the error that an answer tells: ours and Ollama's is a text, OpenAI's an object."""
    document = json_object(body) or {}
    error = document.get("error")
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return error
    if isinstance(error, str):
        return {"message": error, "type": document.get("reason", "api_error"), "code": status}
    text = body[:_SNIPPET].decode("utf-8", "replace").strip()
    message = f"the engine gave no stream but an answer {status}: {text}"
    return {"message": message, "type": "api_error", "code": status}
