"""Recording and faults, common to both fakes."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ocgpu.simulators.hosting import Simulator
from tests.fakes.gate import Gate
from tests.fakes.record import Call, Record

__all__ = ["Fault", "FaultyFake", "answer", "cut_after", "drop", "old_embeddings", "stall"]

Fault = Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]


@dataclass
class Rule:
    """One fault: for which requests, how often yet."""

    name: str
    fault: Fault
    times: int | None


class FaultyFake(Simulator):
    """Base of the fakes: notes each call, then lets a fault or the simulator answer.

    Attributes:
        engine: Its name in the record.
        record: Where calls are noted.
    """

    engine = ""

    def __init__(self, record: Record, **options: float) -> None:
        super().__init__(**options)
        self.record = record
        self._rules: list[Rule] = []

    def fail(self, name: str, fault: Fault, times: int | None = None) -> None:
        """Answer calls of that name (`POST /api/chat`, or `*`) by `fault`.

        Args:
            name: As `Call.name`, without the names of models: `unload`.
            fault: Such as `answer(503)`, `stall(gate)`, `cut_after(20)`, `drop`.
            times: How often; None for always.
        """
        self._rules.append(Rule(name, fault, times))

    def heal(self) -> None:
        """No more faults."""
        self._rules.clear()

    def middlewares(self) -> Iterable[Middleware]:
        """The recorder before everything else."""
        return (self._note, *super().middlewares())

    @web.middleware
    async def _note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        headers = [(key.decode(), value.decode("latin-1")) for key, value in request.raw_headers]
        body = b"" if request.content_type.startswith("multipart/") else await request.read()
        call = Call(self.engine, request.method, request.raw_path, headers, body)
        self.record.add(call)
        try:
            response = await self._answer_call(call, request, handler)
        except (asyncio.CancelledError, ConnectionResetError):
            call.aborted = True
            raise
        else:
            call.status = response.status
            return response
        finally:
            call.ended = asyncio.get_running_loop().time()

    async def _answer_call(
        self, call: Call, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        for rule in self._rules:
            if rule.name in {"*", call.name, call.name.split(" ")[0]} and rule.times != 0:
                if rule.times is not None:
                    rule.times -= 1
                return await rule.fault(request, handler)
        return await handler(request)


def answer(status: int, body: bytes = b"", **headers: str) -> Fault:
    """Answer with these instead."""

    async def fault(_request: web.Request, _handler: Handler) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers=headers)

    return fault


def stall(gate: Gate) -> Fault:
    """Say nothing, no header either, until `gate` is open; then answer as always."""

    async def fault(request: web.Request, handler: Handler) -> web.StreamResponse:
        await gate.passing()
        return await handler(request)

    return fault


def cut_after(size: int, body: bytes = b"x" * 4096, *, chunked: bool = False) -> Fault:
    """Promise `body`, or chunks without an announced end; cut the connection after `size` bytes."""

    async def fault(request: web.Request, _handler: Handler) -> web.StreamResponse:
        response = web.StreamResponse()
        if chunked:
            response.enable_chunked_encoding()
        else:
            response.content_length = len(body)
        await response.prepare(request)
        await response.write(body[:size])
        return _cut(request, response)

    return fault


async def drop(request: web.Request, _handler: Handler) -> web.StreamResponse:
    """Cut the connection without a byte."""
    return _cut(request, web.Response())


async def old_embeddings(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse `/api/generate` for an embedding-only model, an unload too, as old versions did."""
    model = (await request.json())["model"]
    if "embed" in model:
        error = f'"{model}" does not support generate'
        return web.json_response({"error": error}, status=400)
    return await handler(request)


def _cut(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    # close and not abort: the bytes already written must still arrive.
    if request.transport is not None:
        request.transport.close()
    return response
