"""Blocking websocket ends around a real `ocgpu serve`, which take and give when told to."""

import base64
import hashlib
import queue
import socket
import threading
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

__all__ = ["SlowUpstream", "fill", "shake_hands", "take"]

MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
WATCHDOG = 20.0
# Nothing moved for so long: both kernels' buffers and all of serve's are full.
FULL_SECONDS = 1.0


class SlowUpstream:
    """A server that accepts websockets and leaves them to the test; anything else gets a 404.

    Attributes:
        url: Where it is.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._accepted: queue.Queue[socket.socket] = queue.Queue()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(WATCHDOG)
        self._listener.close()
        while not self._accepted.empty():
            self._accepted.get().close()

    def accepted(self) -> socket.socket:
        """The next websocket, its handshake done."""
        return self._accepted.get(timeout=WATCHDOG)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(WATCHDOG)
            head = _head(connection)
            keys = [line[19:] for line in head if line.lower().startswith(b"sec-websocket-key: ")]
            if not keys:
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                connection.close()
                continue
            digest = hashlib.sha1(keys[0] + MAGIC, usedforsecurity=False).digest()
            connection.sendall(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Accept: " + base64.b64encode(digest) + b"\r\n\r\n"
            )
            self._accepted.put(connection)


def shake_hands(url: str) -> socket.socket:
    """Open a websocket through a listener; nothing behind the head is read."""
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=WATCHDOG)
    connection.sendall(
        b"GET /ws HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    head = _head(connection)
    assert head[0].startswith(b"HTTP/1.1 101 "), head
    return connection


def fill(connection: socket.socket, frame: bytes) -> int:
    """Send frames until none goes out any more; the bytes that went out.

    The last frame may be there in part: send its rest before anything else.
    """
    connection.settimeout(FULL_SECONDS)
    sent = 0
    while True:
        try:
            sent += connection.send(frame[sent % len(frame) :])
        except TimeoutError:
            connection.settimeout(WATCHDOG)
            return sent


def take(connection: socket.socket, size: int) -> int:
    """Read until `size` bytes have come; how many did."""
    got = 0
    while got < size:
        data = connection.recv(2**20)
        if not data:
            return got
        got += len(data)
    return got


def _head(connection: socket.socket) -> list[bytes]:
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        if not byte:
            return data.split(b"\r\n")
        data += byte
    return data[:-4].split(b"\r\n")
