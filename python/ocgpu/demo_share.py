"""First half of `ocgpu demo`: two real processes share a pretend GPU, weights 2 to 1."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console

from ocgpu.simulators.gpu_worker import step_bytes

__all__ = ["play"]

WEIGHTS: Final = {"train": 1, "chat": 2}
COLOURS: Final = {"train": "yellow", "chat": "cyan"}
STEP_S: Final = 0.009
SOLO_S: Final = 1.5
SHARED_S: Final = 5
BAR: Final = 24
STARTED_WITHIN_S: Final = 30.0


async def play(console: Console) -> None:
    """Run the two processes and print how the core was split.

    Raises:
        RuntimeError: A process could not be started.
    """
    console.print("\n[bold]share[/]  two processes, one pretend GPU, `pacer.step()` in their loops")
    if not hasattr(os, "sched_setaffinity"):
        console.print("  this platform cannot pin a process to one core: the split is not shown")
        return
    core = max(os.sched_getaffinity(0))
    console.print(
        f"  the GPU is core {core}, a step is a sha256 of {STEP_S * 1000:.0f} ms; "
        "weights chat 2, train 1\n"
    )
    size = await asyncio.to_thread(step_bytes, STEP_S)
    async with _worker("train", core, size) as train, _worker("chat", core, size) as chat:
        await _split(console, train, chat)


@dataclass
class _Worker:
    name: str
    process: Process
    reports: list[dict[str, Any]] = field(default_factory=list)

    def tell(self, line: str) -> None:
        if self.process.stdin is not None:
            self.process.stdin.write(f"{line}\n".encode())

    def steps(self) -> int:
        return int(self.reports[-1]["steps"])

    async def read(self) -> None:
        if self.process.stdout is not None:
            async for line in self.process.stdout:
                self.reports.append(json.loads(line))

    async def started(self) -> None:
        async with asyncio.timeout(STARTED_WITHIN_S):
            while not self.reports:
                if self.process.returncode is not None:
                    raise RuntimeError(f"`{self.name}` ended with {self.process.returncode}")
                await asyncio.sleep(0.02)


@asynccontextmanager
async def _worker(name: str, core: int, size: int) -> AsyncIterator[_Worker]:
    command = [sys.executable, "-m", "ocgpu.simulators.gpu_worker", "--name", name]
    command += ["--weight", str(WEIGHTS[name]), "--core", str(core), "--step-bytes", str(size)]
    # A group of its own: Ctrl-C ends the demo, which then ends its children.
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, start_new_session=True
    )
    worker = _Worker(name, process)
    reader = asyncio.create_task(worker.read())
    try:
        await worker.started()
        yield worker
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        reader.cancel()


async def _split(console: Console, train: _Worker, chat: _Worker) -> None:
    train.tell("work")
    alone = await _rate(train, SOLO_S)
    console.print(f"  {_label('train')} alone: {alone:5.1f} steps/s, and `step()` never sleeps")
    chat.tell("work")
    console.print(f"  {_label('chat')} begins")
    await asyncio.sleep(0.5)
    first = {worker.name: worker.steps() for worker in (train, chat)}
    before = dict(first)
    for _ in range(SHARED_S):
        await asyncio.sleep(1.0)
        now = {worker.name: worker.steps() for worker in (train, chat)}
        _print_split(console, {name: now[name] - before[name] for name in now})
        before = now
    done = {name: before[name] - first[name] for name in before}
    total = max(1, sum(done.values()))
    console.print(
        f"  [bold]measured {done['chat'] / total:.1%} : {done['train'] / total:.1%}, "
        "wanted 66.7% : 33.3%[/]"
    )
    chat.tell("idle")
    console.print(f"  {_label('chat')} idles")
    again = await _rate(train, SOLO_S)
    console.print(f"  {_label('train')} alone: {again:5.1f} steps/s again")


async def _rate(worker: _Worker, seconds: float) -> float:
    before = worker.steps()
    await asyncio.sleep(seconds)
    return (worker.steps() - before) / seconds


def _print_split(console: Console, steps: dict[str, int]) -> None:
    total = max(1, sum(steps.values()))
    parts = []
    for name in ("chat", "train"):
        share = steps[name] / total
        bar = "█" * round(BAR * share)
        parts.append(f"{_label(name)} [{COLOURS[name]}]{bar:<{BAR}}[/] {share:4.0%}")
    console.print("  " + "   ".join(parts))


def _label(name: str) -> str:
    return f"[{COLOURS[name]}]{name:>5}[/]"
