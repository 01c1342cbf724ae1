"""Waiting for a condition, under a watchdog."""

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["wait_until"]

T = TypeVar("T")
LOOK_EVERY_SECONDS = 0.005


def wait_until(condition: Callable[[], T], watchdog: float = 10.0, what: str = "") -> T:
    """Look at `condition` until it is true; returns what it answered.

    Args:
        condition: Asked again and again, in this thread.
        watchdog: Seconds after which the wait has failed.
        what: What is waited for, for the message.

    Raises:
        AssertionError: `watchdog` seconds passed.
    """
    deadline = time.monotonic() + watchdog
    while not (answer := condition()):
        if time.monotonic() > deadline:
            message = f"not within {watchdog} s: {what or condition}"
            raise AssertionError(message)
        time.sleep(LOOK_EVERY_SECONDS)
    return answer
