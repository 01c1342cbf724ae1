"""`Pacer`: a process's share of one GPU, and `peers`, a look at everybody's."""

import atexit
import logging
import math
import os
import sys
import time
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar, cast

from ocgpu import _ocgpu, arguments
from ocgpu.device import resolve_key
from ocgpu.errors import ConfigError, NoGpuError, RegistryUnavailableError
from ocgpu.readable import readable
from ocgpu.snapshot import Snapshot

if TYPE_CHECKING:
    import argparse

T = TypeVar("T")

SCHEDULE_DEFAULT = "turn"
"""What a peer wants when nobody says otherwise."""

_log = logging.getLogger("ocgpu")
_joined: "weakref.WeakSet[Pacer]" = weakref.WeakSet()


class Pacer(_ocgpu.Pacer):
    """A process's place among the peers of one GPU: joins when made, paces at `step()`.

    Alone, or beside idle peers, `step()` never sleeps. A pacer never breaks the program that embeds
    it: where it cannot join, `enabled` is False, `reason` says why, one warning is logged, and
    `step()` returns 0.0. It may be used by several threads, which share its turns. A forked child
    joins anew with a slot of its own when it first uses its copy.

    Args:
        weight: Relative claim on the compute, 0.001 to 1000: weight 2 beside weight 1 gets twice
            as much. Every active peer gets at least a floor of 10 % (before renormalising).
        name: Shown to the other peers; cut to 47 bytes. Default: the program's name.
        gpu: GPU key, or the number of the device. Default: `OCGPU_GPU_KEY`, else device 0.
        schedule: `turn`, or `grid`: windows of the wall clock, as peers have them that know no
            turns; one such peer at work puts all on the grid. Default: `OCGPU_SCHEDULE`, else
            `turn`.
        strict: Raise where the pacer would otherwise stay disabled.

    Raises:
        ConfigError: An argument, or one of `OCGPU_DIR`, `OCGPU_SHARE`, `OCGPU_SCHEDULE`, is outside
            its legal form.
        NoGpuError: `strict`, and there is neither a GPU nor a name for one.
        RegistryUnavailableError: `strict`, and the shared segment cannot be used.
    """

    __slots__ = ("__weakref__",)

    def __new__(
        cls,
        weight: float = 1.0,
        name: str | None = None,
        gpu: str | int | None = None,
        *,
        schedule: str | None = None,
        strict: bool = False,
        _gated: bool = True,
    ) -> Self:
        """Join; see the class."""
        wanted = resolve_schedule(schedule)
        share = arguments.number("weight", weight, _ocgpu.WEIGHT_FORM)
        label = program_name() if name is None else arguments.text("name", name, "a text")
        key, reason = _key_or_reason(gpu, strict=strict)
        try:
            joined = super().__new__(cls, key, reason, share, label, _gated, wanted)
        except RegistryUnavailableError as error:
            if strict:
                raise
            joined = super().__new__(cls, None, str(error), share, label, _gated, wanted)
        self = cast("Self", joined)
        _announce(self, key)
        _joined.add(self)
        return self

    @property
    def weight(self) -> float:
        """Relative claim on the compute, 0.001 to 1000; may be set while running."""
        return super().weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._set_weight(arguments.number("weight", weight, _ocgpu.WEIGHT_FORM))

    async def astep(self) -> float:
        """`step()` for coroutines: waits without blocking the event loop.

        Returns:
            Seconds waited, 0.0 when alone.
        """
        if self._arrive():
            return 0.0
        started = time.monotonic()
        try:
            while not self._look():
                wait = self._start_wait()
                if wait is not None:
                    await readable(wait)
        except BaseException:
            self._abandon()
            raise
        waited = time.monotonic() - started
        self._add_slept(waited)
        return waited

    def unit(self) -> "Unit":
        """One unit of GPU work: `step()` before it, `done()` after it; `async with` too."""
        return Unit(self)

    def request(self) -> "Request":
        """One request: active inside, idle at once when left, so that others get the time now."""
        return Request(self)

    def pace(self, items: "Iterable[T] | AsyncIterable[T]") -> "Paced[T]":
        """Iterate with a `step()` before each item is made, and `idle()` at the end.

        Args:
            items: What does its GPU work in `next()`, such as a stream of tokens; an asynchronous
                iterable is iterated with `async for`.
        """
        return Paced(self, items)

    def snapshot(self) -> Snapshot:
        """Everybody of this GPU now: `.self` is this process, `.peers` are the others."""
        return Snapshot(self)

    def __repr__(self) -> str:
        place = f"slot {self.slot}" if self.enabled else f"not paced: {self.reason}"
        return f"<Pacer weight={self.weight:g}, {place}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()


class Unit(AbstractContextManager["Unit"], AbstractAsyncContextManager["Unit"]):
    """What `Pacer.unit` returns; may be entered again and again."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer

    def __enter__(self) -> Self:
        self._pacer.step()
        return self

    def __exit__(self, *_: object) -> None:
        self._pacer.done()

    async def __aenter__(self) -> Self:
        await self._pacer.astep()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pacer.done()


class Request(AbstractContextManager["Request"], AbstractAsyncContextManager["Request"]):
    """What `Pacer.request` returns."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer

    def __enter__(self) -> Self:
        self._pacer._open_request()
        return self

    def __exit__(self, *_: object) -> None:
        self._pacer._close_request()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()


class Paced(Iterator[T], AsyncIterator[T]):
    """What `Pacer.pace` returns."""

    def __init__(self, pacer: Pacer, items: Iterable[T] | AsyncIterable[T]) -> None:
        if not isinstance(items, Iterable | AsyncIterable):
            raise TypeError(f"invalid `items`: `{type(items).__name__}`; use an iterable")
        self._pacer = pacer
        self._items = items
        self._iterator: Iterator[T] | None = None
        self._async_iterator: AsyncIterator[T] | None = None

    def __iter__(self) -> Self:
        if not isinstance(self._items, Iterable):
            raise TypeError(f"`{type(self._items).__name__}` is iterated with `async for`")
        self._iterator = iter(self._items)
        return self

    def __next__(self) -> T:
        if self._iterator is None:
            iter(self)
        assert self._iterator is not None  # noqa: S101  (set by __iter__)
        self._pacer.step()
        try:
            return next(self._iterator)
        except BaseException:
            self._pacer.idle()
            raise

    def __aiter__(self) -> Self:
        if not isinstance(self._items, AsyncIterable):
            raise TypeError(f"`{type(self._items).__name__}` is iterated with `for`")
        self._async_iterator = aiter(self._items)
        return self

    async def __anext__(self) -> T:
        if self._async_iterator is None:
            aiter(self)
        assert self._async_iterator is not None  # noqa: S101  (set by __aiter__)
        await self._pacer.astep()
        try:
            return await anext(self._async_iterator)
        except BaseException:
            self._pacer.idle()
            raise


def peers(gpu: str | int | None = None) -> Snapshot:
    """Look at the peers of a GPU without joining them: `.self` is None, `.peers` are all.

    Args:
        gpu: GPU key, or the number of the device. Default: `OCGPU_GPU_KEY`, else device 0.

    Raises:
        NoGpuError: There is neither a GPU nor a name for one.
        RegistryUnavailableError: There is a segment and it cannot be read.
        ConfigError: The key is outside its legal form.
    """
    return Snapshot(resolve_key(gpu))


def add_arguments(parser: "argparse.ArgumentParser") -> None:
    """Add `--gpu-share-weight` and `--gpu-share-name` to a program's parser."""
    group = parser.add_argument_group("gpu sharing")
    group.add_argument(
        "--gpu-share-weight",
        type=weight_argument,
        default=1.0,
        metavar="W",
        help=f"relative claim on the GPU's compute, {_ocgpu.WEIGHT_FORM} (default: 1.0)",
    )
    group.add_argument(
        "--gpu-share-name",
        default=None,
        metavar="NAME",
        help="what the other processes see (default: the program's name)",
    )


def weight_argument(text: str) -> float:
    """Read a weight from a command line.

    Raises:
        argparse.ArgumentTypeError: It is outside its legal form.
    """
    import argparse

    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not _ocgpu.is_weight(weight):
        raise argparse.ArgumentTypeError(f"invalid weight: {text!r}; use {_ocgpu.WEIGHT_FORM}")
    return weight


def program_name() -> str:
    """What this process is called: the script's file name, else the interpreter's."""
    # A program that embeds Python may have left anything there.
    argv = getattr(sys, "argv", None) or [""]
    script = str(argv[0]) if argv[0] not in {None, "", "-", "-c", "-m"} else ""
    name = Path(script).name or Path(sys.executable).name or "python"
    # A file's name may be no UTF-8.
    return name.encode("utf-8", "replace").decode()


def resolve_schedule(schedule: str | None) -> str:
    """What a peer wants: the argument, else `OCGPU_SCHEDULE`, else turns.

    Raises:
        ConfigError: It is not the name of a schedule.
    """
    name, value = "schedule", schedule
    if value is None:
        name, value = "OCGPU_SCHEDULE", os.environ.get("OCGPU_SCHEDULE") or SCHEDULE_DEFAULT
    if not _ocgpu.is_schedule(arguments.text(name, value, _ocgpu.SCHEDULE_FORM)):
        raise ConfigError(f"invalid `{name}`: {value!r}; use {_ocgpu.SCHEDULE_FORM}")
    return value


def _key_or_reason(gpu: str | int | None, *, strict: bool) -> tuple[str | None, str | None]:
    try:
        return resolve_key(gpu), None
    except NoGpuError as error:
        if strict:
            raise
        return None, str(error)


def _announce(pacer: Pacer, key: str | None) -> None:
    if not pacer.enabled:
        _log.warning("gpu-share: not paced: %s", pacer.reason)
        return
    alive = sum(peer.alive for peer in pacer.snapshot().peers)
    _log.info(
        "gpu-share: joined /opencoti-gpu-%s slot %d (weight %g, %d peers alive)",
        key,
        pacer.slot,
        pacer.weight,
        alive,
    )


@atexit.register
def _leave_all() -> None:
    for pacer in list(_joined):
        pacer.leave()
