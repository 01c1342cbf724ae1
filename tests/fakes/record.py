"""What the fakes were asked, in the order of asking."""

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Call", "Record"]


@dataclass
class Call:
    """One request that reached a fake.

    Attributes:
        engine: `ollama` or `comfyui`.
        method: As sent.
        raw_path: As sent, with the query.
        headers: As sent: order, case and repetition kept.
        body: As sent; empty for a multipart body, which is left to its handler.
        begun: `time.monotonic()` when it came.
        status: Of the answer, None while there is none.
        ended: `time.monotonic()` when its handler ended, None before.
        aborted: Its client left before the end.
    """

    engine: str
    method: str
    raw_path: str
    headers: list[tuple[str, str]]
    body: bytes
    begun: float = field(default_factory=time.monotonic)
    status: int | None = None
    ended: float | None = None
    aborted: bool = False

    @property
    def name(self) -> str:
        """`POST /api/chat`; an unload is told apart: `unload llama3.2`."""
        path = self.raw_path.split("?", 1)[0]
        if path == "/api/generate" and (model := self._unloads()):
            return f"unload {model}"
        if path.startswith("/history/"):
            path = "/history/*"
        return f"{self.method} {path}"

    def json(self) -> Any:  # noqa: ANN401 - the body is whatever the client sent
        """The body, parsed."""
        return json.loads(self.body)

    def _unloads(self) -> str | None:
        try:
            body = self.json()
        except ValueError:
            return None
        unload = body.get("keep_alive") == 0 and not body.get("prompt")
        return str(body["model"]) if unload else None

    def header(self, name: str) -> list[str]:
        """All values of one header."""
        return [value for key, value in self.headers if key.lower() == name.lower()]


class Record:
    """Every call to every fake, in order; read it from any thread."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._lock = threading.Lock()

    def add(self, call: Call) -> None:
        """Note a call that has come."""
        with self._lock:
            self._calls.append(call)

    def clear(self) -> None:
        """Forget what was noted, such as the probes at a start."""
        with self._lock:
            self._calls.clear()

    def calls(self, name: str = "") -> list[Call]:
        """The calls of that name, or all."""
        with self._lock:
            return [call for call in self._calls if not name or call.name == name]

    def names(self) -> list[str]:
        """Names in order, with repetitions in a row folded into one."""
        names: list[str] = []
        for call in self.calls():
            if not names or names[-1] != call.name:
                names.append(call.name)
        return names
