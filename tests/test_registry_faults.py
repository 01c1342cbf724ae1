"""What others do to the segment and to its peers harms nobody."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ocgpu import Pacer, RegistryUnavailableError, peers
from tests.remote import remote, remotes, wait_for_names
from tests.sharers import Sharer, sharers
from tests.waiting import wait_until

STEP_BYTES = str(64 * 1024)


def names(gpu_dir: Path) -> tuple[Path, Path]:
    """The hashed and the plain name of the one segment in the directory."""
    plain = next(gpu_dir.glob("opencoti-gpu-*"))
    return next(gpu_dir.glob("*.sem")), plain


def both_names_lead_to_one_whole_file(gpu_dir: Path) -> bool:
    try:
        hashed, plain = (path.stat() for path in names(gpu_dir))
    except (FileNotFoundError, StopIteration):
        return False
    return hashed.st_ino == plain.st_ino and hashed.st_size == 4096


@pytest.mark.usefixtures("gpu_dir", "gpu_key")
@pytest.mark.timeout(60)
def test_a_peer_stopped_for_5_seconds_keeps_its_slot_beside_17_joiners() -> None:
    with remotes("sleeper") as (sleeper,):
        with sleeper.stopped():
            joiners = [Pacer(name=f"joiner {number}") for number in range(17)]
            deadline = time.monotonic() + 5.0
            wait_until(lambda: time.monotonic() > deadline, 10)

            assert [pacer.slot for pacer in joiners] == [*range(1, 16), None, None]
            states = {peer.slot: peer.state for peer in joiners[0].snapshot().peers}
            assert states[0] == "stopped"

        wait_for_names(sleeper, {f"joiner {number}" for number in range(15)})
        assert sleeper.ask("pacer.slot") == 0
        wait_until(lambda: joiners[0].snapshot().peers[0].alive, 10)
        assert joiners[0].snapshot().peers[0].name == "sleeper"
        for pacer in joiners:
            pacer.leave()


@pytest.mark.usefixtures("gpu_dir", "gpu_key")
@pytest.mark.timeout(60)
def test_the_last_four_of_twenty_joiners_get_the_slots_of_four_that_are_killed() -> None:
    first = [Pacer() for _ in range(12)]
    with remotes("v0", "v1", "v2", "v3") as victims:
        late = [Pacer() for _ in range(4)]
        assert [pacer.slot for pacer in first] == list(range(12))
        assert [victim.ask("pacer.slot") for victim in victims] == [12, 13, 14, 15]
        assert [pacer.slot for pacer in late] == [None] * 4
        assert all("16 slots" in str(pacer.reason) for pacer in late)
        late[0].step()

        for victim in victims:
            victim.kill()
        wait_until(lambda: {pacer.slot for pacer in late} == {12, 13, 14, 15}, 10)

        assert all(pacer.enabled and pacer.reason is None for pacer in late)
    for pacer in (*first, *late):
        pacer.leave()


def ended(*workers: Sharer) -> list[int]:
    """Exit statuses of those that ended."""
    return [status for worker in workers if (status := worker.process.poll()) is not None]


def unlink_hashed(gpu_dir: Path) -> None:
    names(gpu_dir)[0].unlink()


def unlink_plain(gpu_dir: Path) -> None:
    names(gpu_dir)[1].unlink()


def unlink_both(gpu_dir: Path) -> None:
    for path in names(gpu_dir):
        path.unlink()


def truncate(gpu_dir: Path) -> None:
    os.truncate(names(gpu_dir)[0], 0)


@pytest.mark.usefixtures("gpu_key")
@pytest.mark.parametrize(
    "damage",
    [unlink_both, unlink_hashed, unlink_plain, truncate],
)
def test_three_idle_peers_meet_again_in_one_file_after_its(
    gpu_dir: Path, damage: Callable[[Path], None]
) -> None:
    with remotes("a", "b") as (a, b), Pacer(name="c") as c:
        damage(gpu_dir)

        wait_until(lambda: both_names_lead_to_one_whole_file(gpu_dir), 10)
        wait_for_names(a, {"b", "c"})
        wait_for_names(b, {"a", "c"})
        wait_until(lambda: {peer.name for peer in c.snapshot().peers} == {"a", "b"}, 10)
        assert {peer.name for peer in peers().peers} == {"a", "b", "c"}
        assert len({a.ask("pacer.slot"), b.ask("pacer.slot"), c.slot} - {None}) == 3


@pytest.mark.usefixtures("gpu_key")
@pytest.mark.parametrize("damage", [unlink_both, truncate])
def test_computing_peers_go_on_and_meet_again_after_its(
    gpu_dir: Path, damage: Callable[[Path], None]
) -> None:
    lines = [["--name", name, "--step-bytes", STEP_BYTES] for name in ("a", "b")]

    with sharers(*lines) as (a, b):
        for sharer in (a, b):
            sharer.tell("work")
        wait_until(lambda: min(a.steps(), b.steps()) > 0, 10)

        damage(gpu_dir)

        wait_until(lambda: ended(a, b) or both_names_lead_to_one_whole_file(gpu_dir), 10)
        assert not ended(a, b)
        wait_until(lambda: a.snapshot()["self"] and a.snapshot()["self"]["share_pct"] == 50.0, 10)
        wait_until(lambda: b.snapshot()["self"] and b.snapshot()["self"]["share_pct"] == 50.0, 10)
        before = (a.steps(), b.steps())
        wait_until(lambda: a.steps() > before[0] and b.steps() > before[1], 10)
        assert not ended(a, b)


def test_a_python_reader_whose_exit_unlinks_the_plain_name_does_not_split_the_peers(
    gpu_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `shared_memory` opens names in this directory alone.
    directory = Path("/dev/shm")  # noqa: S108
    if not os.access(directory, os.W_OK):
        pytest.skip("no /dev/shm to write to")
    monkeypatch.setenv("OCGPU_DIR", str(directory))
    plain = directory / f"opencoti-gpu-{gpu_key}"
    before = set(directory.glob("*.sem"))
    program = (
        "from multiprocessing.shared_memory import SharedMemory\n"
        f"attached = SharedMemory({plain.name!r})\n"
        "print(bytes(attached.buf[:5]).decode())\n"
    )
    try:
        with Pacer(name="a") as a, Pacer(name="b") as b:
            ours = next(iter(set(directory.glob("*.sem")) - before))
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", program],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                timeout=20,
            )
            assert done.stdout == "OCGPU\n"

            wait_until(lambda: plain.exists() and plain.stat().st_ino == ours.stat().st_ino, 5)
            assert [peer.name for peer in a.snapshot().peers] == ["b"]
            assert [peer.name for peer in b.snapshot().peers] == ["a"]
    finally:
        for path in (plain, *(set(directory.glob("*.sem")) - before)):
            path.unlink(missing_ok=True)


def plant_dangling_symlink(path: Path) -> None:
    path.symlink_to(path.parent.parent / "elsewhere")


def plant_symlink(path: Path) -> None:
    target = path.parent.parent / "precious"
    target.write_bytes(bytes(4096))
    path.symlink_to(target)


def plant_fifo(path: Path) -> None:
    os.mkfifo(path)


def plant_directory(path: Path) -> None:
    path.mkdir()


PLANTS = [plant_dangling_symlink, plant_symlink, plant_fifo, plant_directory]


def nothing_happened_elsewhere(gpu_dir: Path) -> bool:
    precious = gpu_dir.parent / "precious"
    untouched = not precious.exists() or precious.read_bytes() == bytes(4096)
    return untouched and not (gpu_dir.parent / "elsewhere").exists()


def names_of_metal(gpu_dir: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The hashed and the plain name of a segment that is not there yet."""
    monkeypatch.setenv("OCGPU_GPU_KEY", "metal-0")
    hashed = "cb197ce2155862306e88937979e9708a186916bc14243a9c60cb9e266efa04fc.sem"
    return gpu_dir / hashed, gpu_dir / "opencoti-gpu-metal-0"


@pytest.mark.parametrize("plant", PLANTS)
def test_what_is_planted_at_the_hashed_name_disables_with_a_reason(
    gpu_dir: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Path], None]
) -> None:
    hashed, _ = names_of_metal(gpu_dir, monkeypatch)
    plant(hashed)

    started = time.monotonic()
    pacer = Pacer()

    assert time.monotonic() - started < 2.0
    assert not pacer.enabled
    assert str(hashed) in str(pacer.reason)
    assert pacer.step() == 0.0
    assert nothing_happened_elsewhere(gpu_dir)
    assert set(gpu_dir.iterdir()) == {hashed}


@pytest.mark.parametrize("plant", PLANTS)
def test_what_is_planted_at_the_plain_name_is_not_followed(
    gpu_dir: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Path], None]
) -> None:
    hashed, plain = names_of_metal(gpu_dir, monkeypatch)
    plant(plain)

    started = time.monotonic()
    pacer = Pacer()

    assert time.monotonic() - started < 2.0
    # Programs that know only the plain name cannot join there either: going on under the other
    # name splits nobody off.
    assert pacer.enabled == (hashed.is_file() and not hashed.is_symlink())
    assert pacer.enabled or pacer.reason
    assert pacer.step() == 0.0
    assert nothing_happened_elsewhere(gpu_dir)
    assert set(gpu_dir.iterdir()) <= {hashed, plain}
    pacer.leave()


HEADERS = {
    "a newer version": (b"OCGPU\0\0\0" + bytes([2, 0, 0, 0, 16, 0, 0, 0]), "version 2"),
    "another magic": (b"OTHER\0\0\0" + bytes([1, 0, 0, 0, 16, 0, 0, 0]), "wrong magic"),
    "more slots": (b"OCGPU\0\0\0" + bytes([1, 0, 0, 0, 32, 0, 0, 0]), "32 slots"),
}


@pytest.mark.parametrize("name", [0, 1], ids=["hashed", "plain"])
@pytest.mark.parametrize("header", HEADERS)
def test_a_foreign_segment_disables_with_a_reason_and_keeps_its_bytes(
    gpu_dir: Path, monkeypatch: pytest.MonkeyPatch, header: str, name: int
) -> None:
    path = names_of_metal(gpu_dir, monkeypatch)[name]
    start, reason = HEADERS[header]
    content = start.ljust(4096, b"\xa5")
    path.write_bytes(content)

    pacer = Pacer()

    assert not pacer.enabled
    assert reason in str(pacer.reason)
    assert pacer.step() == 0.0
    with pytest.raises(RegistryUnavailableError, match=reason):
        Pacer(strict=True)
    assert path.read_bytes() == content


@pytest.mark.usefixtures("gpu_key")
@pytest.mark.parametrize("size", [1, 1423])
def test_a_file_too_short_for_a_segment_disables_and_keeps_its_bytes(
    gpu_dir: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    hashed, _ = names_of_metal(gpu_dir, monkeypatch)
    hashed.write_bytes(b"x" * size)

    pacer = Pacer()

    assert not pacer.enabled
    assert f"{size} bytes" in str(pacer.reason)
    assert hashed.read_bytes() == b"x" * size


@pytest.mark.parametrize("name", [0, 1], ids=["hashed", "plain"])
@pytest.mark.parametrize("size", [0, 1424, 4095, 4096, 16384])
def test_a_file_whose_creator_died_before_it_wrote_anything_becomes_a_segment(
    gpu_dir: Path, monkeypatch: pytest.MonkeyPatch, size: int, name: int
) -> None:
    both = names_of_metal(gpu_dir, monkeypatch)
    both[name].write_bytes(bytes(size))

    with Pacer(name="ours") as pacer:
        assert (pacer.slot, [peer.name for peer in peers().peers]) == (0, ["ours"])
        assert len({path.stat().st_ino for path in both}) == 1
        assert both[0].stat().st_size == max(size, 4096)


@pytest.mark.usefixtures("gpu_dir", "gpu_key")
@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_behind_the_header_harm_nobody(gpu_dir: Path, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  (not a secret)
    with Pacer(name="ours") as pacer:
        content = bytearray(names(gpu_dir)[0].read_bytes())
        # Every slot but ours, its extension, and what lies between and behind.
        for start, end in ((104, 1536), (1568, 1600), (1728, 4096)):
            content[start:end] = chance.randbytes(end - start)
        with names(gpu_dir)[0].open("r+b") as file:
            file.write(content)

        slept = [pacer.step() for _ in range(3)]
        documents: list[dict[str, Any]] = [pacer.snapshot().to_dict(), peers().to_dict()]

    assert max(slept) < 2.0
    for seen in documents:
        shares = [peer["share_pct"] for peer in [seen["self"], *seen["peers"]] if peer]
        assert all(0.0 <= share <= 100.0 for share in shares)
        assert sum(shares) == pytest.approx(100.0, abs=0.01)


@pytest.mark.usefixtures("gpu_dir", "gpu_key")
def test_a_killed_process_does_not_need_to_be_reaped_by_its_parent() -> None:
    with remote() as process, Pacer(name="ours") as ours:
        process.ask("pacer = Pacer(name='zombie')")
        wait_until(lambda: [peer.name for peer in ours.snapshot().peers] == ["zombie"], 10)

        # Not waited for: it stays a zombie, whose pid still exists.
        os.kill(process.pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: ours.snapshot().peers == [], 30)

        assert time.monotonic() - killed < 3.0
        assert Path(f"/proc/{process.pid}").exists()


@pytest.mark.usefixtures("gpu_key")
def test_a_file_cut_behind_the_seeds_part_leaves_no_ghost_of_its_peers(gpu_dir: Path) -> None:
    with Pacer(name="a"), Pacer(name="b") as b:
        os.truncate(names(gpu_dir)[1], 1424)
        # Both must take another slot: what names them in the rest of the file is lost.
        wait_until(lambda: b.slot not in {1, None} and b.enabled)

        wait_until(lambda: sorted(peer.name for peer in peers().peers) == ["a", "b"], 2)
        assert all(peer.alive for peer in peers().peers)


@pytest.mark.usefixtures("gpu_key")
@pytest.mark.parametrize("offset", [0, 4, 8, 12])
def test_a_header_that_is_overwritten_is_put_right_by_those_who_know_it(
    gpu_dir: Path, offset: int
) -> None:
    with Pacer(name="a"):
        with names(gpu_dir)[1].open("rb+") as file:
            file.seek(offset)
            file.write(b"\xee")

        wait_until(lambda: Pacer(name="b").enabled)


def test_a_later_handler_for_sigbus_does_not_make_a_cut_a_hang(gpu_dir: Path, gpu_key: str) -> None:
    code = (
        "import os, signal, sys\n"
        "from ocgpu import Pacer\n"
        "pacer = Pacer(); pacer.step()\n"
        "signal.signal(signal.SIGBUS, lambda *_: None)\n"
        "os.truncate(sys.argv[1], 0)\n"
        "for _ in range(100): pacer.step()\n"
        "print('lives')\n"
    )
    path = gpu_dir / f"opencoti-gpu-{gpu_key}"

    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, timeout=20
    )

    assert done.stdout == "lives\n", done.stderr
