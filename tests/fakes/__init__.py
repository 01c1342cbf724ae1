"""Ollama and ComfyUI for tests: the simulators, every call recorded, with faults on request."""

from tests.fakes.comfy import FakeComfy
from tests.fakes.engines import Engines
from tests.fakes.gate import Gate
from tests.fakes.ollama import FakeOllama
from tests.fakes.oracle import Oracle
from tests.fakes.record import Call, Record

__all__ = ["Call", "Engines", "FakeComfy", "FakeOllama", "Gate", "Oracle", "Record"]
