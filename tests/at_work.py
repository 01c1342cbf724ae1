"""Peers of a test that are at work, and what they are at."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ocgpu import Pacer
from tests.waiting import wait_until


def state_of(pacer: Pacer) -> str:
    own = pacer.snapshot().self
    assert own is not None
    return own.state


@contextmanager
def at_work(pacer: Pacer, seconds: float = 0.004) -> Iterator[None]:
    """A thread that computes in units of `seconds` for as long as the block runs."""
    ended = threading.Event()

    def loop() -> None:
        while not ended.is_set():
            with pacer.unit():
                ended.wait(seconds)
        pacer.idle()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        wait_until(lambda: state_of(pacer) != "idle")
        yield
    finally:
        ended.set()
        thread.join(20)
