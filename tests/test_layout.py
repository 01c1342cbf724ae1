"""The segment's bytes are a contract with other programs and other releases."""

import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from ocgpu import Pacer
from tests.seed_peer import SeedPrograms, seed_peer
from tests.waiting import wait_until

GOLDEN = Path(__file__).parent / "data" / "registry" / "segment.txt"
ROW = 16
FIRST_EXT_SLOT, EXT_SLOT_SIZE, SLOT_LOCK = 1600, 128, 1 << 30
# What differs from run to run, as (offset, size): pid, boot_us and heartbeat_us of both slots;
# nonce, boot_hash and change_seq of the extension's header; of each extension slot all but
# `vram_bytes`.
VOLATILE = [
    *((16 + 88 * slot + at, size) for slot in (0, 1) for at, size in ((0, 4), (8, 8), (24, 8))),
    (1568, 24),
    *((FIRST_EXT_SLOT + EXT_SLOT_SIZE * slot, 56) for slot in (0, 1)),
    # The second half of an extension slot belongs to the schedule in force.
    *((FIRST_EXT_SLOT + EXT_SLOT_SIZE * slot + 64, 64) for slot in (0, 1)),
]


@pytest.fixture
def segment(gpu_dir: Path, gpu_key: str) -> Iterator[Path]:
    """A segment with two peers of known values."""
    with Pacer(2.5, "golden é"), Pacer(0.125, "second"):
        yield gpu_dir / f"opencoti-gpu-{gpu_key}"


def dump(content: bytes) -> str:
    """The rows that are not all zero, volatile bytes as `..`."""
    masked = {at for start, size in VOLATILE for at in range(start, start + size)}
    rows = []
    for start in range(0, len(content), ROW):
        row = range(start, start + ROW)
        if any(content[at] or at in masked for at in row):
            shown = (".." if at in masked else f"{content[at]:02x}" for at in row)
            rows.append(f"{start:04} {' '.join(shown)}\n")
    return "".join(rows)


def field(content: bytes, at: int, kind: str) -> int:
    value: int = struct.unpack_from(f"<{kind}", content, at)[0]
    return value


def test_a_segment_has_the_golden_bytes(segment: Path) -> None:
    content = segment.read_bytes()

    assert len(content) == 4096
    assert dump(content) == GOLDEN.read_text()


def test_the_seeds_fields_stand_where_a_c_compiler_puts_them(
    seed_programs: SeedPrograms, segment: Path
) -> None:
    layout = seed_programs.layout()
    content = segment.read_bytes()
    (first, stride), (end, _) = layout["slots"], layout["end"]

    def stored(slot: int, name: str, kind: str) -> object:
        at, size = layout[name]
        assert struct.calcsize(kind) == size
        return struct.unpack_from(f"<{kind}", content, first + stride * slot + at)[0]

    assert (end, stride, first) == (1424, 88, 16)
    assert content[:6] == b"OCGPU\0"
    assert [field(content, layout[name][0], "I") for name in ("version", "slot_count")] == [1, 16]
    assert [stored(slot, "pid", "I") for slot in (0, 1, 2)] == [os.getpid(), os.getpid(), 0]
    assert [stored(slot, "weight", "f") for slot in (0, 1)] == [2.5, 0.125]
    assert [stored(slot, "active", "I") for slot in (0, 1)] == [0, 0]
    assert [stored(slot, "busy_ppm", "I") for slot in (0, 1)] == [0, 0]
    assert [stored(slot, "name", "48s") for slot in (0, 1)] == [
        name.encode().ljust(48, b"\0") for name in ("golden é", "second")
    ]


def test_a_peer_of_the_seed_reads_what_we_wrote(seed_programs: SeedPrograms, segment: Path) -> None:
    with seed_peer(seed_programs, segment) as theirs:
        read = theirs.snapshot()["peers"]

    assert [(peer["slot"], peer["pid"], peer["name"], peer["weight"]) for peer in read] == [
        (0, os.getpid(), "golden é", 2.5),
        (1, os.getpid(), "second", 0.125),
    ]
    assert all(peer["alive"] and not peer["active"] for peer in read)
    assert all(0 <= peer["heartbeat_age_ms"] < 3000 for peer in read)


def test_the_extension_names_the_owner_of_the_seeds_slot(segment: Path) -> None:
    content = segment.read_bytes()
    process = Path("/proc/self/stat").read_text().rpartition(")")[2].split()

    for slot in (0, 1):
        base, ext = 16 + 88 * slot, FIRST_EXT_SLOT + EXT_SLOT_SIZE * slot
        assert field(content, ext, "Q") != 0
        assert field(content, ext + 8, "I") == field(content, base, "I")
        assert field(content, ext + 12, "I") & 1 == 1
        assert field(content, ext + 16, "q") == field(content, base + 8, "q")
        assert field(content, ext + 32, "Q") == Path("/proc/self/ns/pid").stat().st_ino
        assert field(content, ext + 40, "Q") == int(process[19])
        assert field(content, ext + 48, "I") == os.getuid()
    assert field(content, FIRST_EXT_SLOT, "Q") != field(
        content, FIRST_EXT_SLOT + EXT_SLOT_SIZE, "Q"
    )


def test_the_owner_of_a_slot_holds_its_lock_byte(segment: Path) -> None:
    with segment.open("r+b") as file:

        def held(offset: int) -> bool:
            query = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
            answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, query)
            return bool(struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK)

        assert [slot for slot in range(65) if held(SLOT_LOCK + slot)] == [0, 1]


def test_the_heartbeat_moves_and_nothing_else_of_an_idle_slot_does(segment: Path) -> None:
    before = segment.read_bytes()

    wait_until(lambda: segment.read_bytes()[40:48] != before[40:48], 10, "a beat")

    assert field(segment.read_bytes(), 40, "q") > field(before, 40, "q")
    assert dump(segment.read_bytes()) == dump(before)


@pytest.mark.usefixtures("gpu_dir")
def test_the_hashed_name_is_cosmopolitans(gpu_dir: Path) -> None:
    # BLAKE2b-256 of `/opencoti-gpu-metal-0`, as libc/calls/shm_path_np.c names it.
    hashed = "cb197ce2155862306e88937979e9708a186916bc14243a9c60cb9e266efa04fc.sem"

    with Pacer(gpu="metal-0"):
        files = {path.name: path.stat().st_ino for path in gpu_dir.iterdir()}

    assert files.keys() == {hashed, "opencoti-gpu-metal-0"}
    assert len(set(files.values())) == 1
