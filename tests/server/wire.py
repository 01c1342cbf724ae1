"""What a client made of raw bytes sees: a strict reader that takes nothing for granted."""

import re
from typing import NamedTuple

__all__ = ["Asked", "Wire", "read_answers", "read_requests"]

_REQUEST = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ((?:/|\*$)[\x21-\x7e]*) HTTP/1\.1")
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9]) [\t\x20-\x7e\x80-\xff]*")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ?([\t\x20-\x7e\x80-\xff]*)")
_SIZE = re.compile(rb"[0-9]{1,18}")
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,16})\r\n")


class Wire(NamedTuple):
    """One answer.

    Attributes:
        status: Its status.
        headers: Its headers, names in lower case.
        body: What came of the body.
        whole: Whether the body came to its end.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    whole: bool

    def values(self, name: bytes) -> list[bytes]:
        """All values of a header."""
        return [value for key, value in self.headers if key == name]


def read_answers(data: bytes, methods: tuple[str, ...] = ("GET",)) -> list[Wire]:
    """Read all that a server sent on one connection, up to its end.

    Args:
        data: The bytes.
        methods: Of the requests, in order.

    Raises:
        AssertionError: A byte that a strict client refuses, or more answers than requests.
    """
    answers: list[Wire] = []
    while data:
        assert len(answers) < len(methods), f"bytes after the last answer: {data[:80]!r}"
        line, headers, data = _head(data)
        status = _STATUS.fullmatch(line)
        assert status, f"no status line: {line[:80]!r}"
        bare = Wire(int(status[1]), headers, b"", whole=True)
        body, whole, data = _body(bare, methods[len(answers)], data)
        answers.append(bare._replace(body=body, whole=whole))
    return answers


class Asked(NamedTuple):
    """One request, as an upstream saw it.

    Attributes:
        line: Its request line.
        headers: Its headers, names in lower case.
        body: What came of the body.
        whole: Whether the body came to its end.
    """

    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    whole: bool


def read_requests(data: bytes) -> list[Asked]:
    """Read all that a client sent on one connection; only the last request may lack its end.

    Raises:
        AssertionError: A byte that two servers could understand differently.
    """
    found: list[Asked] = []
    while data:
        line, headers, data = _head(data)
        assert _REQUEST.fullmatch(line), f"no request line: {line[:200]!r}"
        named = [key for key, _ in headers]
        assert named.count(b"host") == 1, headers
        assert named.count(b"content-length") + named.count(b"transfer-encoding") <= 1, headers
        bare = Wire(200, headers, b"", whole=True)
        body, whole, data = _body(bare, "POST", data) if _framed(bare) else (b"", True, data)
        assert whole or not data, data[:80]
        found.append(Asked(line, headers, body, whole))
    return found


def _framed(message: Wire) -> bool:
    return bool(message.values(b"content-length") or message.values(b"transfer-encoding"))


def _head(data: bytes) -> tuple[bytes, list[tuple[bytes, bytes]], bytes]:
    """Give the first line, the headers and what follows them."""
    head, blank, data = data.partition(b"\r\n\r\n")
    assert blank, f"half a head: {head[:80]!r}"
    lines = head.split(b"\r\n")
    fields = [_FIELD.fullmatch(line) for line in lines[1:]]
    assert all(fields), f"no headers: {head[:200]!r}"
    return lines[0], [(field[1].lower(), field[2].strip()) for field in fields if field], data


def _body(answer: Wire, method: str, data: bytes) -> tuple[bytes, bool, bytes]:
    """Give the body, whether it is whole, and what follows it."""
    lengths = answer.values(b"content-length")
    codings = answer.values(b"transfer-encoding")
    assert len(lengths) + len(codings) <= 1, f"two framings: {answer.headers}"
    if method == "HEAD" or answer.status in {204, 304}:
        return b"", True, data
    if codings:
        assert codings == [b"chunked"], codings
        return _chunks(data)
    if lengths:
        assert _SIZE.fullmatch(lengths[0]), lengths
        size = int(lengths[0])
        return data[:size], len(data) >= size, data[size:]
    return data, True, b""


def _chunks(data: bytes) -> tuple[bytes, bool, bytes]:
    parts: list[bytes] = []
    while chunk := _CHUNK.match(data):
        size = int(chunk[1], 16)
        data = data[chunk.end() :]
        if len(data) < size + 2:
            return b"".join([*parts, data[:size]]), False, b""
        assert data[size : size + 2] == b"\r\n", data[:80]
        parts.append(data[:size])
        data = data[size + 2 :]
        if size == 0:
            return b"".join(parts), True, data
    assert not data, f"no chunk: {data[:80]!r}"
    return b"".join(parts), False, b""
