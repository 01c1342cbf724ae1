"""Frames of the upstream's side of a websocket, beside another implementation's."""

import contextlib
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.protocol import SERVER, Protocol

from ocgpu.server.relay.frames import (
    BINARY,
    MESSAGE_MAX,
    TEXT,
    Decoder,
    FrameError,
    close_payload,
    encode,
)

SIZES = st.sampled_from([0, 1, 125, 126, 127, 4095, 4096, 4097, 65_535, 65_536, 70_001])


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    """The data in parts."""
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {len(data)})
    for start, end in zip([0, *ends], ends, strict=False):
        yield data[start:end]


@settings(deadline=None)
@given(kind=st.sampled_from([TEXT, BINARY]), size=SIZES, seed=st.integers(0, 255))
def test_what_we_encode_another_library_reads(kind: int, size: int, seed: int) -> None:
    payload = bytes((seed + at) % 128 for at in range(size))
    server = Protocol(SERVER, max_size=None)

    server.receive_data(encode(kind, payload))

    (frame,) = server.events_received()
    assert isinstance(frame, Frame)
    assert (frame.opcode, frame.data, frame.fin) == (kind, payload, True)


@settings(deadline=None)
@given(
    messages=st.lists(
        st.tuples(st.sampled_from([TEXT, BINARY]), st.lists(SIZES, min_size=1, max_size=3)),
        max_size=4,
    ),
    cuts=st.lists(st.integers(0, 300_000), max_size=6),
)
def test_what_another_library_encodes_we_read_however_it_is_cut(
    messages: list[tuple[int, list[int]]], cuts: list[int]
) -> None:
    wire, expected = b"", []
    for kind, sizes in messages:
        for at, size in enumerate(sizes):
            opcode = Opcode(kind) if at == 0 else Opcode.CONT
            frame = Frame(opcode, b"x" * size, fin=at == len(sizes) - 1)
            wire += frame.serialize(mask=False)
        expected.append((kind, b"x" * sum(sizes)))
    decoder = Decoder()

    got = [message for piece in pieces(wire, cuts) for message in decoder.feed(piece)]

    assert [(message.kind, message.data) for message in got] == expected
    assert all((message.text is not None) == (message.kind == TEXT) for message in got)


@settings(deadline=None)
@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=4))
def test_no_bytes_do_more_than_be_refused(data: bytes, cuts: list[int]) -> None:
    decoder = Decoder()

    with contextlib.suppress(FrameError):
        for piece in pieces(data, cuts):
            decoder.feed(piece)


@pytest.mark.parametrize("reason", ["", "x" * 123, "é" * 100, "x" + "é" * 100])
def test_a_close_frame_fits_whatever_the_reason(reason: str) -> None:
    payload = close_payload(4000, reason)

    assert len(payload) <= 125
    assert reason.startswith(payload[2:].decode())
    assert close_payload(None, reason) == b""


@pytest.mark.parametrize(
    ("length", "code"), [(2**63, 1002), (2**64 - 1, 1002), (2**62, 1009), (MESSAGE_MAX + 1, 1009)]
)
def test_a_length_that_no_message_has_is_refused_at_its_head(length: int, code: int) -> None:
    with pytest.raises(FrameError) as refusal:
        Decoder().feed(b"\x82\x7f" + length.to_bytes(8, "big"))

    assert refusal.value.code == code


def test_fragments_are_bounded_together() -> None:
    decoder = Decoder()
    part = MESSAGE_MAX // 4
    fragment = b"\x7f" + part.to_bytes(8, "big") + bytes(part)
    decoder.feed(b"\x02" + fragment)
    for _ in range(2):
        decoder.feed(b"\x00" + fragment)

    with pytest.raises(FrameError) as refusal:
        decoder.feed(b"\x00\x7f" + (part + 1).to_bytes(8, "big"))

    assert refusal.value.code == 1009
