"""How a relayed websocket ends: codes, reasons, peers that vanish and peers that do not answer."""

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from ocgpu.server.relay import frames, websocket, websocket_upstream
from ocgpu.server.relay.address import Address
from ocgpu.server.relay.asgi import Message, Scope
from ocgpu.server.relay.websocket import WebsocketRelay
from tests.server.inloop import WATCHDOG, Connection, RawUpstream, proxy, read_head
from tests.server.websocket_peers import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    accept,
    client,
    close_frame,
    frame,
    raw_client,
    read_frame,
)

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")

MIB = 2**20
Handler = Callable[[Connection], Awaitable[None]]


def saying(*pieces: bytes) -> tuple[Handler, "asyncio.Queue[tuple[int, bytes]]"]:
    """An upstream that sends these, and the frames that it got until the end."""
    got: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()

    async def handler(connection: Connection) -> None:
        await accept(connection)
        for piece in pieces:
            await connection.write(piece)
        try:
            while True:
                got.put_nowait(await read_frame(connection))
                if got._queue[-1][0] == CLOSE:  # type: ignore[attr-defined]
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            got.put_nowait((-1, b""))

    return handler, got


async def end_of(handler: Handler) -> tuple[object, object]:
    """Code and reason of the close frame that a client of the proxy gets."""
    async with (
        RawUpstream(handler) as raw,
        proxy(comfy_url=raw.url) as bound,
        client(bound.comfy_url) as socket,
    ):
        message = await socket.receive(timeout=WATCHDOG)
    assert message.type is aiohttp.WSMsgType.CLOSE, message
    return message.data, message.extra


REASON = "é" * 61 + "x"
CODES = {
    "4001": (close_frame(4001, b"bye"), 4001, "bye"),
    "restart": (close_frame(1012), 1012, ""),
    "too big": (close_frame(1009, b"big"), 1009, "big"),
    "longest reason": (close_frame(1000, REASON.encode()), 1000, REASON),
    "no code": (frame(CLOSE), 1000, ""),
    "illegal 0": (close_frame(0), 1000, ""),
    "illegal 1005": (close_frame(1005), 1000, ""),
    "illegal 1006": (close_frame(1006, b"x"), 1000, "x"),
    "illegal 5000": (close_frame(5000), 1000, ""),
    "reason that is no text": (close_frame(3000, b"\xff" * 123), 3000, "�" * 41),
}


@pytest.mark.parametrize(("said", "code", "reason"), CODES.values(), ids=CODES.keys())
async def test_the_upstreams_close_reaches_the_client_as_far_as_it_is_legal(
    said: bytes, code: int, reason: str
) -> None:
    handler, got = saying(said)

    assert await end_of(handler) == (code, reason)
    kind, payload = await got.get()
    assert kind == CLOSE
    assert payload[:2] in (said[2:4], b"")


BROKEN = {
    "reserved bits": (b"\xf1\x01a", 1002),
    "unknown kind": (b"\x83\x01a", 1002),
    "masked": (frame(TEXT, b"a", masked=True), 1002),
    "long ping": (b"\x89\x7e\x00\x80" + bytes(128), 1002),
    "ping in parts": (frame(PING, b"a", final=False), 1002),
    "part of nothing": (frame(CONTINUATION, b"a"), 1002),
    "text inside a text": (frame(TEXT, b"a", final=False) + frame(TEXT, b"b"), 1002),
    "no utf-8": (frame(TEXT, b"\xff"), 1007),
}


@pytest.mark.parametrize(("said", "code"), BROKEN.values(), ids=BROKEN.keys())
async def test_an_upstream_that_breaks_the_protocol_is_told_and_the_client_sees_1011(
    said: bytes, code: int
) -> None:
    handler, got = saying(said)

    seen, reason = await end_of(handler)

    assert seen == 1011
    assert str(reason).startswith("the upstream sent ")
    assert await got.get() == (CLOSE, struct.pack("!H", code))


@pytest.mark.parametrize("reset", [True, False])
async def test_an_upstream_that_leaves_without_a_word_is_abnormal(reset: bool) -> None:
    async def handler(connection: Connection) -> None:
        await accept(connection)
        if reset:
            connection.writer.transport.abort()

    assert (await end_of(handler))[0] == 1011


async def test_frames_before_the_close_arrive_first() -> None:
    handler, _ = saying(frame(TEXT, b"1") + frame(BINARY, b"2" * 70_000) + close_frame(4000))
    async with (
        RawUpstream(handler) as raw,
        proxy(comfy_url=raw.url) as bound,
        client(bound.comfy_url) as socket,
    ):
        assert await socket.receive_str() == "1"
        assert await socket.receive_bytes() == b"2" * 70_000
        assert (await socket.receive()).data == 4000


async def test_fragments_and_what_stands_between_them_pass() -> None:
    handler, got = saying(
        frame(TEXT, b"gr\xc3", final=False),
        frame(PING, b"there?"),
        frame(CONTINUATION, b"", final=False),
        frame(PONG, b"unasked"),
        frame(CONTINUATION, b"\xbc\xc3\x9fe"),
        frame(BINARY),
        frame(TEXT),
    )
    async with (
        RawUpstream(handler) as raw,
        proxy(comfy_url=raw.url) as bound,
        client(bound.comfy_url) as socket,
    ):
        assert await socket.receive_str() == "grüße"
        assert await socket.receive_bytes() == b""
        assert await socket.receive_str() == ""
        assert await got.get() == (PONG, b"there?")


async def test_a_clients_fragments_pings_and_empty_frames_pass() -> None:
    handler, got = saying()
    async with RawUpstream(handler) as raw, proxy(comfy_url=raw.url) as bound:
        sender = await raw_client(bound.comfy_url)
        await read_head(sender.reader)
        await sender.write(frame(BINARY, b"ab", final=False, masked=True))
        await sender.write(frame(PING, b"there?", masked=True))
        await sender.write(frame(CONTINUATION, b"cd", masked=True))
        await sender.write(frame(TEXT, b"", masked=True))

        assert await read_frame(sender) == (PONG, b"there?")
        assert await got.get() == (BINARY, b"abcd")
        assert await got.get() == (TEXT, b"")
        await sender.close()


@pytest.mark.parametrize(
    ("said", "told"),
    [(struct.pack("!H", 4002), struct.pack("!H", 4002)), (b"", b"")],
    ids=["4002", "no code"],
)
async def test_the_clients_close_reaches_the_upstream_and_is_answered(
    said: bytes, told: bytes
) -> None:
    handler, got = saying()
    async with RawUpstream(handler) as raw, proxy(comfy_url=raw.url) as bound:
        sender = await raw_client(bound.comfy_url)
        await read_head(sender.reader)
        await sender.write(frame(CLOSE, said, masked=True))

        assert await got.get() == (CLOSE, told)
        assert await read_frame(sender) == (CLOSE, said)
        assert await sender.rest() == b""
        await sender.close()


@pytest.mark.parametrize("reset", [True, False])
async def test_a_client_that_leaves_without_a_word_ends_the_upstreams_socket(reset: bool) -> None:
    handler, got = saying()
    async with RawUpstream(handler) as raw, proxy(comfy_url=raw.url) as bound:
        sender = await raw_client(bound.comfy_url)
        await read_head(sender.reader)
        if reset:
            sender.writer.transport.abort()
        await sender.close()

        # Granian does not tell this from a close without a code.
        assert await asyncio.wait_for(got.get(), WATCHDOG) == (CLOSE, b"")


@pytest.mark.parametrize("talks", [True, False])
async def test_an_upstream_that_answers_no_close_is_cut_in_time(
    monkeypatch: pytest.MonkeyPatch,
    talks: bool,
) -> None:
    monkeypatch.setattr(websocket, "_CLOSE_SECONDS", 0.3)
    cut = asyncio.Event()

    async def handler(connection: Connection) -> None:
        await accept(connection)
        try:
            while talks:
                await connection.write(frame(TEXT, b"busy"))
                await asyncio.sleep(0.01)
            while await connection.reader.read(1000):
                pass
        except ConnectionError:
            pass
        cut.set()

    async with RawUpstream(handler) as raw, proxy(comfy_url=raw.url) as bound:
        async with client(bound.comfy_url) as socket:
            await socket.close(code=4002)
        await asyncio.wait_for(cut.wait(), WATCHDOG)


async def test_a_drain_closes_both_sides_as_going_away() -> None:
    handler, got = saying(frame(TEXT, b"up"))
    async with RawUpstream(handler) as raw:
        async with proxy(comfy_url=raw.url) as bound:
            session = aiohttp.ClientSession()
            socket = await session.ws_connect(f"{bound.comfy_url}/ws")
            assert await socket.receive_str() == "up"
        message = await socket.receive()
        await session.close()

    assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1001)
    assert await got.get() == (CLOSE, struct.pack("!H", 1001))


async def until_full(connection: Connection) -> None:
    """Accept and send until nothing goes out any more."""
    await accept(connection)
    data = frame(BINARY, bytes(65_536))
    with contextlib.suppress(TimeoutError):
        while True:
            connection.writer.write(data)
            await asyncio.wait_for(connection.writer.drain(), 0.5)


async def test_a_drain_is_not_held_by_a_client_that_takes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(websocket, "_CLOSE_SECONDS", 0.2)
    full = asyncio.Event()

    async def handler(connection: Connection) -> None:
        await until_full(connection)
        full.set()
        await connection.rest()

    async with RawUpstream(handler) as raw:
        async with proxy(comfy_url=raw.url, drain_timeout=60.0) as bound:
            stalled = await raw_client(bound.comfy_url)
            stalled.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.wait_for(full.wait(), WATCHDOG)
        # The end of `proxy` is the assertion: serve has left long before the drain's own end.
        await stalled.close()


async def test_an_upstream_held_back_is_read_to_its_answer_when_the_client_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(websocket, "_CLOSE_SECONDS", 60.0)
    full, ended = asyncio.Event(), asyncio.Event()

    async def handler(connection: Connection) -> None:
        await until_full(connection)
        full.set()
        assert (await read_frame(connection))[0] == CLOSE
        await connection.write(close_frame(1000))
        await connection.rest()
        ended.set()

    async with RawUpstream(handler) as raw, proxy(comfy_url=raw.url) as bound:
        stalled = await raw_client(bound.comfy_url)
        stalled.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.wait_for(full.wait(), WATCHDOG)
        stalled.writer.transport.abort()
        await asyncio.wait_for(ended.wait(), WATCHDOG)
        await stalled.close()


async def test_a_drain_during_the_accept_waits_for_it_and_then_closes() -> None:
    handler, _ = saying()
    accepting, accepted = asyncio.Event(), asyncio.Event()
    sent: list[Message] = []
    scope: Scope = {"type": "websocket", "raw_path": b"/ws", "query_string": b""}

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        if message["type"] == "websocket.accept":
            accepting.set()
            await accepted.wait()
        sent.append(message)

    async with RawUpstream(handler) as raw:
        relay = WebsocketRelay(Address.parse(raw.url), 5.0)
        task = asyncio.ensure_future(relay.relay(scope, receive, send, [(b"host", b"a")]))
        await accepting.wait()
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert sent == []
        accepted.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert [message["type"] for message in sent] == ["websocket.accept", "websocket.close"]
    assert sent[1]["code"] == 1001


async def test_what_came_of_an_unfinished_message_goes_with_its_websocket() -> None:
    decoders: list[frames.Decoder] = []

    class Noted(frames.Decoder):
        def __init__(self) -> None:
            super().__init__()
            decoders.append(self)

    async def half_a_preview(connection: Connection) -> None:
        await accept(connection)
        await connection.write(b"\x82\x7f" + (2 * MIB).to_bytes(8, "big") + bytes(MIB))
        await connection.rest()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(websocket_upstream, "Decoder", Noted)
        async with RawUpstream(half_a_preview) as raw, proxy(comfy_url=raw.url) as bound:
            client = await raw_client(bound.comfy_url)
            await client.head()
            async with asyncio.timeout(10):
                while not decoders or len(decoders[0]._buffer) < MIB:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            await client.close()

    assert [len(decoder._buffer) for decoder in decoders] == [0]
