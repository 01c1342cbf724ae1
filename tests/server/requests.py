"""Small requests of the tests, their answers, and an engine whose chat the test lets go."""

import asyncio
import json

from tests.server.inloop import Connection, exchange

__all__ = ["CHAT", "Engine", "get", "json_of", "post", "status_of", "waiting"]

CHAT = b"POST /api/chat HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def post(path: str, *headers: str) -> bytes:
    return get(path, "Content-Length: 0", *headers, method="POST")


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def json_of(answer: bytes) -> dict:
    return json.loads(answer.partition(b"\r\n\r\n")[2])


class Engine:
    """Answers everything, and a chat only when it is let go."""

    def __init__(self, props: bytes = b"") -> None:
        self.go_on = asyncio.Event()
        self.chats = 0
        self.props = props

    async def __call__(self, connection: Connection) -> None:
        head = await connection.head()
        if b"/api/chat" in head[0]:
            await connection.read(2)
            self.chats += 1
            await self.go_on.wait()
            await connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nchat")
        elif b"/props" in head[0] and self.props:
            await connection.write(self.props)
        else:
            await connection.write(
                b"HTTP/1.1 404 No\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
            )


async def waiting(url: str, **values: object) -> None:
    """Wait until `/healthz` says so."""
    async with asyncio.timeout(10):
        while True:
            document = json_of(await exchange(url, get("/healthz")))
            if values.items() <= document.items():
                return
            await asyncio.sleep(0.005)
