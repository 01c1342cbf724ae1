"""An Ollama that records its calls and can misbehave."""

from aiohttp import web

from ocgpu.simulators import OllamaSimulator
from tests.fakes.faults import FaultyFake
from tests.fakes.gate import Gate
from tests.fakes.oracle import Oracle
from tests.fakes.record import Record

__all__ = ["FakeOllama"]


class FakeOllama(FaultyFake, OllamaSimulator):
    """As fast as can be, until a test holds it.

    Attributes:
        token_gates: Held before the token of that index, of every request.
        ps_gate: Where set, `/api/ps` hangs here.
        ps_stuck: `/api/ps` goes on listing `llama3.2:latest` whatever happens.
    """

    engine = "ollama"

    def __init__(self, record: Record, oracle: Oracle, *, tokens: int = 4) -> None:
        super().__init__(
            record, load_time=0.0, unload_time=0.0, memory_lag=0.0, token_time=0.0, tokens=tokens
        )
        oracle.watch(self.usage)
        self.token_gates: dict[int, Gate] = {}
        self.ps_gate: Gate | None = None
        self.ps_stuck = False

    def hold_token(self, index: int) -> Gate:
        """Hold every answer before its token `index` (0 is the first) until the gate is open."""
        return self.token_gates.setdefault(index, Gate())

    async def before_token(self, request: web.Request, index: int) -> None:
        """Stop at the gate of this token."""
        if index in self.token_gates:
            await self.token_gates[index].passing()
        await super().before_token(request, index)

    async def ps(self, request: web.Request) -> web.StreamResponse:
        """The truth, or what the attributes ask for."""
        if self.ps_gate is not None:
            await self.ps_gate.passing()
        if self.ps_stuck:
            return web.json_response({"models": [self.models["llama3.2:latest"].tag()]})
        return await super().ps(request)
