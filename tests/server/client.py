"""A blocking HTTP client that shows what came over the wire and can leave at any moment."""

import http.client
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

__all__ = ["Answer", "OpenCall", "background", "call"]

T = TypeVar("T")
TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True)
class Answer:
    """A whole answer.

    Attributes:
        status: Its status.
        headers: Its headers as they came.
        body: Its body as it came.
    """

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def json(self) -> Any:  # noqa: ANN401 - the body is whatever the server sent
        """The body, parsed."""
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        """The first value of a header."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


class OpenCall:
    """A request that has been sent; the answer is read piece by piece, or left."""

    def __init__(
        self,
        method: str,
        url: str,
        body: object = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        parts = urlsplit(url)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"} if raw is not None else {}
        self._connection = http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_SECONDS)
        self._connection.request(method, target, raw, {**kind, **(headers or {})})
        self._response: http.client.HTTPResponse | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

    def response(self) -> http.client.HTTPResponse:
        """Wait for the head of the answer."""
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response

    def line(self) -> bytes:
        """Wait for the next line of the body; empty at the end."""
        return self.response().readline()

    def answer(self) -> Answer:
        """Wait for the rest of the answer."""
        response = self.response()
        return Answer(response.status, response.getheaders(), response.read())

    def again(self, method: str, target: str) -> Answer:
        """Send one more request on the same connection; the answer before must have been read."""
        self._connection.request(method, target)
        self._response = None
        return self.answer()

    def leave(self) -> None:
        """Close the connection, whatever is under way."""
        if self._response is not None:
            self._response.close()
        self._connection.close()


def call(
    method: str, url: str, body: object = None, headers: dict[str, str] | None = None
) -> Answer:
    """Send one request on a connection of its own and read the whole answer."""
    with OpenCall(method, url, body, headers) as opened:
        return opened.answer()


def background(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a thread; what it raises is raised by `result()`."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
