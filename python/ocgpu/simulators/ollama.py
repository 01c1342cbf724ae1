"""A small Ollama: its routes, its JSON, its model loading, its Host and Origin rules."""

import asyncio
import base64
import contextlib
import hashlib
import json
import struct
from collections.abc import AsyncIterator, Iterable
from typing import Any

from aiohttp import web

from ocgpu.simulators.hosting import Handler, Middleware, Simulator, is_loopback
from ocgpu.simulators.ollama_access import host_allowed, origin_allowed
from ocgpu.simulators.ollama_models import DEFAULT_MODELS, Model, full_name, parse_keep_alive
from ocgpu.simulators.ollama_scheduler import Scheduler
from ocgpu.simulators.ollama_shapes import (
    ChatShape,
    GenerateShape,
    OpenAiChatShape,
    OpenAiTextShape,
    Shape,
)
from ocgpu.simulators.usage import Usage

__all__ = ["OllamaSimulator"]

VERSION = "0.32.5"
EMBEDDING_LENGTH = 8
ANSWER = "the card is free now so the answer comes word by word and nobody has to wait"
WORDS = tuple(ANSWER.split(" "))


class RefusedError(Exception):
    """A request that Ollama refuses, with the status and the words it does so with."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class OllamaSimulator(Simulator):
    """Answers as Ollama does, without a card.

    Args:
        models: What is on the shelf.
        load_time: Seconds until a model is loaded; until then `/api/ps` does not list it.
        unload_time: Seconds from an answered unload until `/api/ps` no longer lists the model.
        memory_lag: Seconds from there until its memory is back.
        token_time: Seconds a token takes.
        tokens: Length of an answer where the request does not bound it.
        keep_alive: Seconds a model stays where the request does not say.
        allowed_origins: OLLAMA_ORIGINS.

    Attributes:
        usage: What it holds of the card.
    """

    def __init__(
        self,
        *,
        models: Iterable[Model] = DEFAULT_MODELS,
        load_time: float = 0.5,
        unload_time: float = 0.2,
        memory_lag: float = 0.2,
        token_time: float = 0.03,
        tokens: int = 24,
        keep_alive: float = 300.0,
        allowed_origins: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.usage = Usage("llm")
        self.models = {model.name: model for model in models}
        self.token_time = token_time
        self.tokens = tokens
        self.allowed_origins = allowed_origins
        self.scheduler = Scheduler(
            self.usage,
            load_seconds=load_time,
            unload_seconds=unload_time,
            memory_lag_seconds=memory_lag,
            keep_alive_seconds=keep_alive,
        )

    def routes(self) -> Iterable[web.AbstractRouteDef]:
        """Ollama's own routes and OpenAI's."""
        return [
            web.get("/", self._root),
            web.get("/api/version", self._version),
            web.get("/api/tags", self._tags),
            web.get("/api/ps", self.ps, allow_head=False),
            web.post("/api/show", self._show),
            web.post("/api/pull", self._pull),
            web.post("/api/generate", self._generate),
            web.post("/api/chat", self._chat),
            web.post("/api/embed", self._embed),
            web.post("/api/embeddings", self._embeddings),
            web.post("/v1/chat/completions", self._open_ai_chat),
            web.post("/v1/completions", self._open_ai_text),
            web.post("/v1/embeddings", self._open_ai_embeddings),
            web.get("/v1/models", self._open_ai_models, allow_head=False),
            web.get("/v1/models/{model:.+}", self._open_ai_model, allow_head=False),
        ]

    def middlewares(self) -> Iterable[Middleware]:
        """The Host and Origin rule, then refusals as JSON."""
        return (self._guard, self._refusals)

    async def close(self) -> None:
        """Forget the loaded models."""
        await self.scheduler.close()

    async def before_token(self, request: web.Request, index: int) -> None:
        """Take the time of token `index` (0 is the first) of `request`; a fake may hold it here."""
        await asyncio.sleep(self.token_time)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get("Host", "")
        if is_loopback(self.host) and not host_allowed(host):
            return web.Response(status=403)
        origin = request.headers.get("Origin")
        if origin is not None and not origin_allowed(origin, host, self.allowed_origins):
            return web.Response(status=403)
        if request.method == "OPTIONS":
            return web.Response(status=204)
        return await handler(request)

    @web.middleware
    async def _refusals(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except RefusedError as refusal:
            return web.json_response(_refusal_body(request, refusal), status=refusal.status)

    async def _root(self, _request: web.Request) -> web.Response:
        return web.Response(text="Ollama is running")

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _tags(self, _request: web.Request) -> web.Response:
        return web.json_response({"models": [model.tag() for model in self.models.values()]})

    async def ps(self, _request: web.Request) -> web.StreamResponse:
        """The loaded models; a fake may lie here."""
        entries = [runner.entry() for runner in self.scheduler.loaded()]
        return web.json_response({"models": entries})

    async def _show(self, request: web.Request) -> web.Response:
        return web.json_response(self._find(await _body(request)).show())

    async def _pull(self, request: web.Request) -> web.StreamResponse:
        model = self._find(await _body(request))
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        statuses = ("pulling manifest", f"pulling {model.digest[:12]}", "success")
        for index, status in enumerate(statuses):
            await self.before_token(request, index)
            await response.write(json.dumps({"status": status}).encode() + b"\n")
        return response

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        shape = GenerateShape(str(body.get("model")))
        return await self._native(request, body, shape, empty=not body.get("prompt"))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        shape = ChatShape(str(body.get("model")))
        return await self._native(request, body, shape, empty=not body.get("messages"))

    async def _native(
        self, request: web.Request, body: dict[str, Any], shape: GenerateShape, *, empty: bool
    ) -> web.StreamResponse:
        model = self._find(body)
        keep_alive = _keep_alive(body)
        if empty and keep_alive == 0:
            self.scheduler.expire(model)
            return web.json_response(shape.bare("", "unload"))
        if empty:
            async with self._serving(model, keep_alive):
                return web.json_response(shape.bare("", "load"))
        bound = (body.get("options") or {}).get("num_predict")
        async with self._generating(model, keep_alive):
            return await self._answer(request, shape, bound, stream=body.get("stream", True))

    async def _open_ai_chat(self, request: web.Request) -> web.StreamResponse:
        return await self._open_ai(request, OpenAiChatShape)

    async def _open_ai_text(self, request: web.Request) -> web.StreamResponse:
        return await self._open_ai(request, OpenAiTextShape)

    async def _open_ai(
        self, request: web.Request, kind: type[OpenAiChatShape]
    ) -> web.StreamResponse:
        body = await _body(request)
        model = self._find(body)
        usage = (body.get("stream_options") or {}).get("include_usage", False)
        shape = kind(str(body["model"]), usage=usage)
        async with self._generating(model, None):
            bound = body.get("max_tokens")
            return await self._answer(request, shape, bound, stream=body.get("stream", False))

    async def _answer(
        self, request: web.Request, shape: Shape, bound: int | None, *, stream: bool
    ) -> web.StreamResponse:
        count = self.tokens if bound is None or bound < 0 else min(bound, self.tokens)
        if stream:
            return await self._stream(request, shape, count)
        text = ""
        for index in range(count):
            await self.before_token(request, index)
            text += _word(index)
        return web.json_response(shape.whole(text, count))

    async def _stream(self, request: web.Request, shape: Shape, count: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": shape.stream_type})
        # The headers go out with the first token, as Ollama's do.
        for index in range(count):
            await self.before_token(request, index)
            if not response.prepared:
                await response.prepare(request)
            await response.write(shape.chunk(_word(index)))
        if not response.prepared:
            await response.prepare(request)
        await response.write(shape.end(count))
        return response

    async def _embed(self, request: web.Request) -> web.Response:
        body = await _body(request)
        vectors = await self._vectors(request, body, _texts(body.get("input")))
        return web.json_response(
            {
                "model": body["model"],
                "embeddings": vectors,
                "total_duration": 14143917,
                "load_duration": 1019500,
                "prompt_eval_count": 8 * len(vectors),
            }
        )

    async def _embeddings(self, request: web.Request) -> web.Response:
        body = await _body(request)
        vectors = await self._vectors(request, body, _texts(body.get("prompt")))
        return web.json_response({"embedding": vectors[0] if vectors else []})

    async def _open_ai_embeddings(self, request: web.Request) -> web.Response:
        body = await _body(request)
        vectors: list[Any] = await self._vectors(request, body, _texts(body.get("input")))
        if body.get("encoding_format") == "base64":
            vectors = [_packed(vector) for vector in vectors]
        data = [
            {"object": "embedding", "embedding": vector, "index": index}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": 8 * len(data), "total_tokens": 8 * len(data)}
        answer = {"object": "list", "data": data, "model": body["model"], "usage": usage}
        return web.json_response(answer)

    async def _vectors(
        self, request: web.Request, body: dict[str, Any], texts: list[str]
    ) -> list[list[float]]:
        async with self._serving(self._find(body), _keep_alive(body)):
            if texts:
                with self.usage.compute():
                    await self.before_token(request, 0)
            return [_vector(text) for text in texts]

    async def _open_ai_models(self, _request: web.Request) -> web.Response:
        data = [model.open_ai() for model in self.models.values()]
        return web.json_response({"object": "list", "data": data})

    async def _open_ai_model(self, request: web.Request) -> web.Response:
        return web.json_response(self._find(dict(request.match_info)).open_ai())

    def _find(self, body: dict[str, Any]) -> Model:
        name = str(body.get("model") or body.get("name") or "")
        model = self.models.get(full_name(name))
        if not name:
            raise RefusedError(400, "model is required")
        if model is None:
            raise RefusedError(404, f"model '{name}' not found")
        return model

    @contextlib.asynccontextmanager
    async def _serving(self, model: Model, keep_alive: float | None) -> AsyncIterator[None]:
        if model.cloud:
            yield
            return
        async with self.scheduler.use(model, keep_alive):
            yield

    @contextlib.asynccontextmanager
    async def _generating(self, model: Model, keep_alive: float | None) -> AsyncIterator[None]:
        if model.embedding:
            raise RefusedError(400, f'"{model.name}" does not support generate')
        async with self._serving(model, keep_alive):
            with contextlib.nullcontext() if model.cloud else self.usage.compute():
                yield


async def _body(request: web.Request) -> dict[str, Any]:
    raw = await request.read()
    if not raw:
        raise RefusedError(400, "missing request body")
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise RefusedError(400, str(error)) from error
    if not isinstance(body, dict):
        raise RefusedError(400, "json: cannot unmarshal into Go value")
    return body


def _keep_alive(body: dict[str, Any]) -> float | None:
    try:
        return parse_keep_alive(body.get("keep_alive"))
    except ValueError as error:
        raise RefusedError(400, str(error)) from error


def _refusal_body(request: web.Request, refusal: RefusedError) -> dict[str, Any]:
    if not request.path.startswith("/v1/"):
        return {"error": refusal.message}
    kind = "not_found_error" if refusal.status == web.HTTPNotFound.status_code else "api_error"
    return {"error": {"message": refusal.message, "type": kind, "param": None, "code": None}}


def _word(index: int) -> str:
    return ("" if index == 0 else " ") + WORDS[index % len(WORDS)]


def _texts(value: object) -> list[str]:
    if isinstance(value, list):
        return [str(item) for item in value]
    return [str(value)] if value else []


def _vector(text: str) -> list[float]:
    digest = hashlib.sha256(text.encode()).digest()
    return [byte / 255 for byte in digest[:EMBEDDING_LENGTH]]


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
