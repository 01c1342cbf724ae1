"""The JSON that Ollama streams and answers, in its own form and in OpenAI's."""

import json
import time
from typing import Any, Protocol

from ocgpu.simulators.ollama_models import now

__all__ = ["ChatShape", "GenerateShape", "OpenAiChatShape", "OpenAiTextShape", "Shape"]

PROMPT_TOKENS = 26


class Shape(Protocol):
    """How one kind of request is answered."""

    stream_type: str

    def chunk(self, text: str) -> bytes:
        """One streamed token."""

    def end(self, tokens: int) -> bytes:
        """What follows the last token of a stream."""

    def whole(self, text: str, tokens: int) -> dict[str, Any]:
        """The answer that is not streamed."""


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


class GenerateShape:
    """`/api/generate`: NDJSON with a `response` each."""

    stream_type = "application/x-ndjson"

    def __init__(self, model: str) -> None:
        self._model = model
        self._begin = time.monotonic_ns()

    def chunk(self, text: str) -> bytes:
        """One streamed token."""
        return _line({**self._head(), **self._content(text), "done": False})

    def end(self, tokens: int) -> bytes:
        """The line with `done`, the reason and the figures."""
        return _line(self.whole("", tokens))

    def whole(self, text: str, tokens: int) -> dict[str, Any]:
        """The same as one object."""
        total = time.monotonic_ns() - self._begin
        return {
            **self.bare(text, "stop"),
            "total_duration": total,
            "load_duration": total // 10,
            "prompt_eval_count": PROMPT_TOKENS,
            "prompt_eval_duration": total // 10,
            "eval_count": tokens,
            "eval_duration": total * 8 // 10,
        }

    def bare(self, text: str, reason: str) -> dict[str, Any]:
        """A last object without figures, as a load (`load`) and an unload (`unload`) get."""
        return {**self._head(), **self._content(text), "done": True, "done_reason": reason}

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": now()}

    def _content(self, text: str) -> dict[str, Any]:
        return {"response": text}


class ChatShape(GenerateShape):
    """`/api/chat`: NDJSON with a `message` each."""

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}


class OpenAiChatShape:
    """`/v1/chat/completions`: server-sent events that end with `[DONE]`."""

    stream_type = "text/event-stream"
    prefix = "chatcmpl"
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, model: str, *, usage: bool = False) -> None:
        self._model = model
        self._usage = usage
        self._id = f"{self.prefix}-{time.monotonic_ns() % 1000}"

    def chunk(self, text: str) -> bytes:
        """One streamed token."""
        return _event(self._object(self.chunk_name, self._delta(text), None))

    def end(self, tokens: int) -> bytes:
        """The chunk with the finish reason, the usage where it was asked for, and `[DONE]`."""
        last = _event(self._object(self.chunk_name, self._delta(""), "stop"))
        if self._usage:
            figures = self._object(self.chunk_name, {}, None)
            last += _event({**figures, "choices": [], "usage": self._figures(tokens)})
        return last + b"data: [DONE]\n\n"

    def whole(self, text: str, tokens: int) -> dict[str, Any]:
        """The answer that is not streamed."""
        answer = self._object(self.name, self._content(text), "stop")
        return {**answer, "usage": self._figures(tokens)}

    def _object(self, name: str, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": name,
            "created": int(time.time()),
            "model": self._model,
            "system_fingerprint": "fp_ollama",
            "choices": [{"index": 0, **content, "finish_reason": reason}],
        }

    def _figures(self, tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": tokens,
            "total_tokens": PROMPT_TOKENS + tokens,
        }

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": text}}

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}


class OpenAiTextShape(OpenAiChatShape):
    """`/v1/completions`: the same with a bare `text`."""

    prefix = "cmpl"
    name = "text_completion"
    chunk_name = "text_completion"

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}
