"""The websockets of the simulated ComfyUI: who gets which message."""

import asyncio
import contextlib
import json
import struct
import uuid
from typing import Any

from aiohttp import WSMsgType, web

__all__ = ["Sockets"]

PREVIEW_IMAGE = 1
JPEG = 1
FEATURES = {
    "supports_preview_metadata": True,
    "max_upload_size": 104857600,
    "node_replacements": True,
    "assets": False,
}


class Sockets:
    """Open sockets by client id; of two with one id only the newest gets messages.

    Sending never waits for a slow reader: each socket has a queue of its own.
    """

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[str | bytes]] = {}

    def send(self, event: str, data: dict[str, Any], client_id: str | None = None) -> None:
        """Send to the socket of `client_id`, or to all where it is None."""
        text = json.dumps({"type": event, "data": data})
        for key, queue in self._queues.items():
            if client_id is None or key == client_id:
                queue.put_nowait(text)

    def preview(self, image: bytes, client_id: str) -> None:
        """Send an image as ComfyUI does: its event and its format in front, all in one frame."""
        self._queues[client_id].put_nowait(struct.pack("!II", PREVIEW_IMAGE, JPEG) + image)

    async def serve(
        self, request: web.Request, queue_remaining: int, running: tuple[str, str] | None
    ) -> web.WebSocketResponse:
        """Talk to one client until it leaves.

        Args:
            request: The upgrade request.
            queue_remaining: What the first message says.
            running: Client id and node of the job that runs now.
        """
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        client_id = request.query.get("clientId") or uuid.uuid4().hex
        queue: asyncio.Queue[str | bytes] = asyncio.Queue()
        self._queues[client_id] = queue
        status = {"status": {"exec_info": {"queue_remaining": queue_remaining}}, "sid": client_id}
        self.send("status", status, client_id)
        if running is not None and running[0] == client_id:
            self.send("executing", {"node": running[1]}, client_id)
        writer = asyncio.create_task(_write(socket, queue))
        try:
            await self._read(socket, client_id)
        finally:
            writer.cancel()
            # The newer socket of the same id falls silent too, as it does in ComfyUI.
            self._queues.pop(client_id, None)
        return socket

    async def _read(self, socket: web.WebSocketResponse, client_id: str) -> None:
        first = True
        async for message in socket:
            if message.type is WSMsgType.TEXT and first and "feature_flags" in message.data:
                self.send("feature_flags", FEATURES, client_id)
            first = False


async def _write(socket: web.WebSocketResponse, queue: asyncio.Queue[str | bytes]) -> None:
    with contextlib.suppress(ConnectionResetError):
        while True:
            message = await queue.get()
            if isinstance(message, str):
                await socket.send_str(message)
            else:
                await socket.send_bytes(message)
