"""Servers that do one thing with every connection, whatever they are asked."""

import contextlib
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Talk", "document", "server"]

Talk = Callable[[socket.socket], None]


@contextmanager
def server(talk: Talk, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Do `talk` with each connection behind its first bytes; gives the port on 127.0.0.1."""

    class _Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError), self._talking() as connection:
                connection.recv(4096)
                talk(connection)

        def _talking(self) -> socket.socket:
            plain: socket.socket = self.request
            return tls.wrap_socket(plain, server_side=True) if tls else plain

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Handler) as serving:
        serving.daemon_threads = True
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield serving.server_address[1]
        finally:
            serving.shutdown()
            thread.join()


def document(body: str, status: str = "200 OK") -> Talk:
    """Answer with a status and a body."""
    text = f"HTTP/1.1 {status}\r\nContent-Length: {len(body.encode())}\r\n\r\n{body}"
    return lambda connection: connection.sendall(text.encode())
