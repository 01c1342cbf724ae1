"""`ocgpu demo`: the package's own simulators, the real proxy and real pacers; no GPU needed."""

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console

from ocgpu import demo_lock, demo_share
from ocgpu.device import resolve_key
from ocgpu.server.serve import new_event_loop

__all__ = ["run"]

GPU_KEY: Final = "demo"


def run(*, gpu: str | int | None = None) -> int:
    """Play the demo (about 20 s), in a registry of its own that is gone afterwards.

    Args:
        gpu: Name of the pretend GPU; None is `demo`.

    Returns:
        Exit status: 0, after Ctrl-C too.

    Raises:
        ConfigError: The name is not a legal key.
    """
    key = GPU_KEY if gpu is None else resolve_key(gpu)
    console = Console(highlight=False, soft_wrap=True)
    with _own_place(key), _quiet_log():
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(_play(console, key))
        except (KeyboardInterrupt, asyncio.CancelledError):
            console.print("\nended early")
    return 0


async def _play(console: Console, key: str) -> None:
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    console.print("[bold]ocgpu demo[/]  no GPU, no Ollama and no ComfyUI needed; about 20 s")
    await demo_share.play(console)
    await demo_lock.play(console, key)
    console.print(
        "\nnow for real:  [bold]ocgpu serve[/]  in front of your Ollama and ComfyUI,"
        "\n               [bold]with ocgpu.Pacer() as pacer: pacer.step()[/]  in your own loop,"
        "\n               [bold]ocgpu run -- CMD[/]  to have the card alone"
    )


@contextmanager
def _own_place(key: str) -> Iterator[None]:
    """A registry that no other process meets, gone with the block."""
    names = ("OCGPU_DIR", "OCGPU_GPU_KEY")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="ocgpu-demo-") as directory:
        os.environ.update({"OCGPU_DIR": directory, "OCGPU_GPU_KEY": key})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name)
                else:
                    os.environ[name] = value


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Show no log lines but those that the script prints itself."""
    logger = logging.getLogger("ocgpu")
    silent = logging.NullHandler()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(silent)
    try:
        yield
    finally:
        logger.removeHandler(silent)
        logger.propagate = propagate
