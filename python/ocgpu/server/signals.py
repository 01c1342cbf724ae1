"""Signals of `ocgpu serve`: the first SIGTERM or SIGINT drains, a second one ends at once."""

import asyncio
import logging
import os
import signal
from typing import Final, NoReturn

__all__ = ["install"]

logger: Final = logging.getLogger("ocgpu.server")

# `timeout(1)` signals its child and then the child's group: one wish, told twice.
_SAME_SIGNAL_SECONDS: Final = 0.2


def install(stop: asyncio.Event) -> None:
    """Have SIGTERM and SIGINT set `stop`, and SIGHUP do nothing but say so.

    A second SIGTERM or SIGINT ends the process with status 1.
    """
    loop = asyncio.get_running_loop()
    first: float | None = None

    def told() -> None:
        nonlocal first
        now = loop.time()
        first = now if first is None else first
        if not stop.is_set():
            stop.set()
        elif now - first >= _SAME_SIGNAL_SECONDS:
            _end()

    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, told)
        except NotImplementedError:
            signal.signal(number, lambda *_args: loop.call_soon_threadsafe(told))
    if hasattr(signal, "SIGHUP"):
        loop.add_signal_handler(signal.SIGHUP, _ignored)


def _ignored() -> None:
    logger.warning("SIGHUP ignored: settings are read at the start; restart to change them")


def _end() -> NoReturn:
    logger.warning("second signal: ending at once")
    logging.shutdown()
    os._exit(1)
