"""A peer written from the seed's description alone: `peer.c`, compiled and driven by a test."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.sharers import Sharer

__all__ = ["SeedPrograms", "compile_seed", "seed_peer"]

SOURCE = Path(__file__).with_name("peer.c")
FLAGS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread")


@dataclass(frozen=True)
class SeedPrograms:
    """What the compiler made of the seed's peer.

    Attributes:
        program: Joins and paces; speaks as `ocgpu.simulators.gpu_worker` does.
        library: The claim rule alone.
    """

    program: Path
    library: Path

    def layout(self) -> dict[str, tuple[int, int]]:
        """Offset and size of every field of the C struct, within its slot or the header."""
        done = subprocess.run(
            [self.program, "--layout"], capture_output=True, text=True, check=True, timeout=10
        )
        return {name: (at, size) for name, (at, size) in json.loads(done.stdout).items()}


def compile_seed(directory: Path) -> SeedPrograms:
    """Compile `peer.c`; skips the test where there is no C compiler."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: `cc` is not installed")
    program, library = directory / "seed_peer", directory / "seed_peer.so"
    subprocess.run(["cc", *FLAGS, SOURCE, "-o", program], check=True, timeout=60)
    shared = ("-shared", "-fPIC", "-DSEED_LIBRARY")
    subprocess.run(["cc", *FLAGS, *shared, SOURCE, "-o", library], check=True, timeout=60)
    return SeedPrograms(program, library)


@contextmanager
def seed_peer(programs: SeedPrograms, segment: Path, *arguments: str) -> Iterator[Sharer]:
    """Start the seed's peer on the segment file `segment`; it ends with the block."""
    command = (str(programs.program), "--segment", str(segment))
    started = Sharer(*arguments, program=command)
    try:
        yield started
    finally:
        started.end()


def seen(snapshot: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Weight and share in percent of every live peer in a snapshot, own one included, by name."""
    everybody = [*filter(None, [snapshot["self"]]), *snapshot["peers"]]
    return {
        peer["name"]: (peer["weight"], round(peer["share_pct"], 2))
        for peer in everybody
        if peer["alive"]
    }
