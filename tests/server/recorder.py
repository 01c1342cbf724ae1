"""An upstream in a thread that keeps every byte which came, connection by connection."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tests.server.wire import Asked, read_requests

__all__ = ["OK", "Recorder"]

_ARRIVAL_SECONDS = 1.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Recorder:
    """Answers every whole request.

    Args:
        answer: Gives the bytes of an answer.
        keep: Keep the connection for the next request.

    Attributes:
        url: Where it is.
    """

    def __init__(
        self, answer: Callable[[Asked], bytes] = lambda _asked: OK, *, keep: bool = True
    ) -> None:
        self._answer = answer or (lambda _asked: OK)
        self._keep = keep
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._bytes: list[bytearray] = []
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for opened in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
            opened.close()

    def environ(self) -> dict[str, str]:
        """The settings of a serve that has this for both of its engines."""
        return {
            "LISTEN_OLLAMA": "127.0.0.1:0",
            "LISTEN_COMFY": "127.0.0.1:0",
            "LISTEN_ADMIN": "127.0.0.1:0",
            "OLLAMA_URL": self.url,
            "COMFY_URL": self.url,
            "LOG_FORMAT": "json",
            "UNLOAD_TIMEOUT": "50ms",
        }

    def requests(self) -> list[Asked]:
        """All requests so far but serve's own, strictly read.

        Raises:
            AssertionError: Something came that a strict server refuses.
        """
        deadline = time.monotonic() + _ARRIVAL_SECONDS
        while True:
            try:
                parts = [read_requests(bytes(taken)) for taken in list(self._bytes)]
                break
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                # Perhaps the rest of a head is on its way.
                time.sleep(0.01)
        found = [asked for part in parts for asked in part]
        return [asked for asked in found if (b"user-agent", b"ocgpu") not in asked.headers]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._sockets.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        taken = bytearray()
        self._bytes.append(taken)
        answered = 0
        with contextlib.suppress(OSError):
            while piece := connection.recv(65_536):
                taken += piece
                whole = _whole(bytes(taken))
                for asked in whole[answered:]:
                    connection.sendall(self._answer(asked))
                    if not self._keep:
                        connection.shutdown(socket.SHUT_RDWR)
                answered = len(whole)


def _whole(data: bytes) -> list[Asked]:
    with contextlib.suppress(AssertionError):
        return [asked for asked in read_requests(data) if asked.whole]
    return []
