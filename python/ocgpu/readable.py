"""Waiting for a descriptor in an event loop."""

from typing import Protocol


class HasFileno(Protocol):
    """What owns a descriptor."""

    def fileno(self) -> int:
        """The descriptor; open as long as the object lives."""
        ...


async def readable(source: HasFileno, timeout: float | None = None) -> None:
    """Return when `source` can be read.

    Args:
        source: Polled by the running loop; not read.
        timeout: Seconds to wait; None waits for ever.

    Raises:
        TimeoutError: `timeout` seconds passed.
    """
    # Here: it would be most of the time of `import ocgpu`, and whoever awaits has it anyway.
    import asyncio

    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(source.fileno(), ready.set)
    try:
        async with asyncio.timeout(timeout):
            await ready.wait()
    finally:
        loop.remove_reader(source.fileno())
