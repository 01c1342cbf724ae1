"""Second half of `ocgpu demo`: an image job waits for a chat, and a chat for the image job."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
from rich.console import Console
from rich.markup import escape

from ocgpu.server.serve import Bound, serve
from ocgpu.settings import load_settings
from ocgpu.simulators import ComfySimulator, OllamaSimulator, Usage

__all__ = ["play"]

MODEL: Final = "llama3.2:latest"
TOKENS: Final = 24
# An image of five blurred passes: about two seconds in the simulator.
PASSES: Final = 5
NODE_S: Final = 0.3
TOKEN_S: Final = 0.06
ANSWERS_FOR_S: Final = 4.0


async def play(console: Console, gpu_key: str) -> None:
    """Run the engines, the real proxy and its clients, and print what the lock does."""
    console.print("\n[bold]lock[/]   `ocgpu serve` between clients, an Ollama and a ComfyUI")
    console.print("  both engines are simulators of the package; the proxy is the real one\n")
    stage = _Stage(console)
    async with _engines(stage) as (ollama, comfyui), _proxy(ollama, comfyui, gpu_key) as bound:
        with stage.listening():
            await _script(stage, bound)
        _tell_addresses(console, bound)
        await asyncio.sleep(ANSWERS_FOR_S)


class _Stage(logging.Handler):
    """Prints what happens, each line with its time."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console
        self._began = time.monotonic()
        self._usages: dict[str, Usage] = {}
        self.collisions = 0

    def say(self, who: str, colour: str, text: str) -> None:
        """Print one line."""
        elapsed = time.monotonic() - self._began
        self._console.print(f"  {elapsed:4.1f} s  [{colour}]{who:<7}[/] {escape(text)}")

    def listening(self) -> "_Listening":
        """Print the proxy's own log while the block runs."""
        return _Listening(self)

    def watch(self, usage: Usage) -> None:
        """Count the moments at which both engines compute."""
        self._usages[usage.kind] = usage
        if all(other.computing for other in self._usages.values()) and len(self._usages) > 1:
            self.collisions += 1

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line of the proxy's log."""
        message = record.getMessage()
        if message.startswith("state: "):
            before = getattr(record, "before", None)
            self.say("lock", "bold magenta", f"{before} → {message.removeprefix('state: ')}")
        elif message.startswith("image job: "):
            self.say("proxy", "magenta", message.removeprefix("image job: "))


class _Listening:
    """The handler on the proxy's logger, for as long as a block runs."""

    def __init__(self, stage: _Stage) -> None:
        self._stage = stage
        self._logger = logging.getLogger("ocgpu.server")
        self._level = self._logger.level

    def __enter__(self) -> None:
        self._logger.addHandler(self._stage)
        self._logger.setLevel(logging.INFO)

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self._stage)
        self._logger.setLevel(self._level)


@asynccontextmanager
async def _engines(stage: _Stage) -> AsyncIterator[tuple[OllamaSimulator, ComfySimulator]]:
    ollama = OllamaSimulator(token_time=TOKEN_S, tokens=TOKENS)
    comfyui = ComfySimulator(node_time=NODE_S)
    for usage in (ollama.usage, comfyui.usage):
        usage.watch = stage.watch
    await ollama.start()
    try:
        await comfyui.start()
        try:
            yield ollama, comfyui
        finally:
            await comfyui.stop()
    finally:
        await ollama.stop()


@asynccontextmanager
async def _proxy(
    ollama: OllamaSimulator, comfyui: ComfySimulator, gpu_key: str
) -> AsyncIterator[Bound]:
    settings = load_settings(
        {
            "LISTEN_OLLAMA": "127.0.0.1:0",
            "LISTEN_COMFY": "127.0.0.1:0",
            "LISTEN_ADMIN": "127.0.0.1:0",
            "OLLAMA_URL": ollama.url,
            "COMFY_URL": comfyui.url,
            "OCGPU_GPU_KEY": gpu_key,
            "DRAIN_TIMEOUT": "1s",
        }
    )
    ready: asyncio.Future[Bound] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(settings, ready=ready.set_result, stop=stop))
    try:
        await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise RuntimeError(f"the proxy did not start: {serving.exception()}")
        yield ready.result()
    finally:
        stop.set()
        await serving


async def _script(stage: _Stage, bound: Bound) -> None:
    async with aiohttp.ClientSession() as session:
        first = asyncio.create_task(_chat(stage, session, bound, "chat 1", "cyan"))
        await asyncio.sleep(0.9)
        image = asyncio.create_task(_image(stage, session, bound))
        await asyncio.sleep(0.4)
        second = asyncio.create_task(_chat(stage, session, bound, "chat 2", "blue"))
        await asyncio.gather(first, image, second)
    verdict = "never" if stage.collisions == 0 else f"{stage.collisions} times"
    stage.say("card", "bold green", f"both engines computed at once: {verdict}")


async def _chat(
    stage: _Stage, session: aiohttp.ClientSession, bound: Bound, who: str, colour: str
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "why is the sky blue?"}]}
    stage.say(who, colour, "POST /api/chat")
    sent = time.monotonic()
    chunks = 0
    async with session.post(f"{bound.ollama_url}/api/chat", json=body) as reply:
        async for _ in reply.content:
            chunks += 1
            if chunks == 1:
                stage.say(who, colour, f"first token after {time.monotonic() - sent:.1f} s")
    stage.say(who, colour, f"done: {chunks} chunks")


async def _image(stage: _Stage, session: aiohttp.ClientSession, bound: Bound) -> None:
    stage.say("image", "yellow", "POST /prompt")
    sent = time.monotonic()
    async with session.ws_connect(f"{bound.comfy_url}/ws?clientId=demo") as socket:
        body = {"prompt": _graph(), "client_id": "demo"}
        async with session.post(f"{bound.comfy_url}/prompt", json=body) as reply:
            accepted: dict[str, Any] = await reply.json()
        waited = time.monotonic() - sent
        stage.say("image", "yellow", f"accepted after {waited:.1f} s, while chats were let finish")
        async for message in socket:
            event = message.json()
            if event["type"] == "execution_success":
                break
    stage.say("image", "yellow", f"rendered ({accepted['prompt_id'][:8]})")


def _graph() -> dict[str, Any]:
    graph: dict[str, Any] = {
        "1": {
            "class_type": "EmptyImage",
            "inputs": {"width": 768, "height": 768, "batch_size": 1, "color": 4210752},
        }
    }
    for number in range(2, 2 + PASSES):
        inputs = {"image": [str(number - 1), 0], "blur_radius": 15, "sigma": 5.0}
        graph[str(number)] = {"class_type": "ImageBlur", "inputs": inputs}
    last = str(1 + PASSES)
    graph["99"] = {"class_type": "PreviewImage", "inputs": {"images": [last, 0]}}
    return graph


def _tell_addresses(console: Console, bound: Bound) -> None:
    console.print(
        f"\n  Ollama clients   {bound.ollama_url}"
        f"\n  ComfyUI clients  {bound.comfy_url}"
        f"\n  control plane    {bound.admin_url}"
        f"\n  try within {ANSWERS_FOR_S:.0f} s:  curl {bound.ollama_url}/healthz"
    )
