"""Websocket frames as a client sends and reads them (RFC 6455 section 5); no I/O.

Own code and no library's: on a relay each coroutine and each copy per frame shows, and the ones
there are cannot send the `Host` that they are told to, or hide whether a close frame came.
"""

import random
import struct
from typing import Final, NamedTuple

__all__ = [
    "BINARY",
    "CLOSE",
    "MESSAGE_MAX",
    "PING",
    "PONG",
    "TEXT",
    "Decoder",
    "FrameError",
    "Message",
    "close_payload",
    "encode",
]

_CONTINUATION: Final = 0x0
TEXT: Final = 0x1
BINARY: Final = 0x2
CLOSE: Final = 0x8
PING: Final = 0x9
PONG: Final = 0xA
_KINDS: Final = frozenset((_CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG))
_FINAL: Final = 0x80
_RESERVED: Final = 0x70
_MASKED: Final = 0x80
# What a control frame may carry.
_CONTROL_MAX: Final = 125
_REASON_MAX: Final = _CONTROL_MAX - 2
# Numbers of this size stay in the processor's cache; a multiple of the key's length.
_CHUNK: Final = 4096
_PROTOCOL_ERROR: Final = 1002
_NOT_UTF8: Final = 1007
_TOO_BIG: Final = 1009
# Bytes. A message is in memory while it is put together: a batch of large images in one has less.
MESSAGE_MAX: Final = 256 * 2**20


class FrameError(Exception):
    """What came is no websocket frame.

    Attributes:
        code: The close code that says so.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Message(NamedTuple):
    """A whole message, or a control frame.

    Attributes:
        kind: `TEXT`, `BINARY`, `CLOSE`, `PING` or `PONG`.
        data: What it carries.
        text: The same as text; None where it is none.
    """

    kind: int
    data: bytes
    text: str | None = None


def encode(kind: int, payload: bytes) -> bytes:
    """Give one final frame, masked as a client's must be (section 5.3).

    Who writes a payload must not foresee its key; it is no secret, and never seen by that party.
    """
    size = len(payload)
    if size <= _CONTROL_MAX:
        head = struct.pack("!BB", _FINAL | kind, _MASKED | size)
    elif size < 2**16:
        head = struct.pack("!BBH", _FINAL | kind, _MASKED | 126, size)
    else:
        head = struct.pack("!BBQ", _FINAL | kind, _MASKED | 127, size)
    key = random.getrandbits(32).to_bytes(4, "little")
    return head + key + _masked(payload, key)


def close_payload(code: int | None, reason: str = "") -> bytes:
    """Give what a close frame carries: nothing without a code, the reason cut to what fits."""
    if code is None:
        return b""
    short = reason.encode()[:_REASON_MAX].decode(errors="ignore")
    return struct.pack("!H", code) + short.encode()


class Decoder:
    """Reads a server's frames.

    A message is given whole, because the listener's side takes no parts. What came of one that is
    not yet whole is kept, up to a size that no preview has.
    """

    __slots__ = ("_buffer", "_kept", "_kind", "_parts")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._kind = _CONTINUATION
        self._parts: list[bytes] = []
        self._kept = 0

    def clear(self) -> None:
        """Forget what came of a message that will never be whole."""
        self._buffer.clear()
        self._parts.clear()

    def feed(self, data: bytes) -> list[Message]:
        """Take bytes, give the messages that they complete.

        Raises:
            FrameError: They are no frames of a server; the connection is of no more use.
        """
        buffer = self._buffer
        buffer += data
        messages: list[Message] = []
        start = 0
        while True:
            head = _head(buffer, start)
            if head is not None and head[2] + self._kept > MESSAGE_MAX:
                raise FrameError(_TOO_BIG, f"a message of more than {MESSAGE_MAX >> 20} MiB")
            if head is None or len(buffer) < head[1] + head[2]:
                break
            first, offset, size = head
            end = offset + size
            message = self._frame(first, bytes(memoryview(buffer)[offset:end]))
            if message is not None:
                messages.append(message)
            start = end
        del buffer[:start]
        return messages

    def _frame(self, first: int, payload: bytes) -> Message | None:
        kind = first & 0xF
        if kind & 0x8:
            return Message(kind, payload)
        if (kind == _CONTINUATION) != bool(self._kind):
            raise FrameError(_PROTOCOL_ERROR, "a fragment out of its order")
        if not first & _FINAL:
            self._kind = self._kind or kind
            self._parts.append(payload)
            self._kept += len(payload)
            return None
        if self._kind:
            kind, self._kind = self._kind, _CONTINUATION
            self._parts.append(payload)
            payload = b"".join(self._parts)
            self._parts.clear()
            self._kept = 0
        if kind == BINARY:
            return Message(kind, payload)
        try:
            return Message(kind, payload, payload.decode())
        except UnicodeDecodeError:
            raise FrameError(_NOT_UTF8, "a text that is not UTF-8") from None


def _head(buffer: bytearray, start: int) -> tuple[int, int, int] | None:
    """Give a frame's first byte, where its payload begins and its length; None for not yet."""
    have = len(buffer) - start
    if have < 2:
        return None
    first, size = buffer[start], buffer[start + 1]
    kind = first & 0xF
    if first & _RESERVED or kind not in _KINDS or size & _MASKED:
        raise FrameError(_PROTOCOL_ERROR, "no frame of a server")
    if kind & 0x8 and (size > _CONTROL_MAX or not first & _FINAL):
        raise FrameError(_PROTOCOL_ERROR, "a control frame too long or in parts")
    if size <= _CONTROL_MAX:
        return first, start + 2, size
    width = 2 if size == 126 else 8
    if have < 2 + width:
        return None
    offset = start + 2 + width
    length = int.from_bytes(buffer[start + 2 : offset], "big")
    if length >> 63:
        raise FrameError(_PROTOCOL_ERROR, "a length that no frame may have")
    return first, offset, length


def _masked(payload: bytes, key: bytes) -> bytes:
    """XOR with the key repeated, one large number at a time: as near to C as Python comes."""
    size = len(payload)
    if size <= _CHUNK:
        return _xor(payload, int.from_bytes((key * (size // 4 + 1))[:size], "little"))
    mask = int.from_bytes(key * (_CHUNK // 4), "little")
    view = memoryview(payload)
    full = size - size % _CHUNK
    parts = [_xor(view[start : start + _CHUNK], mask) for start in range(0, full, _CHUNK)]
    return b"".join([*parts, _masked(payload[full:], key)])


def _xor(data: bytes | memoryview, mask: int) -> bytes:
    return (int.from_bytes(data, "little") ^ mask).to_bytes(len(data), "little")
