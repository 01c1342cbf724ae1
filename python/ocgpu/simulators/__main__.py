"""`python -m ocgpu.simulators ollama|comfyui --port N`: one simulator as a process.

It prints one line, `listening on http://127.0.0.1:PORT`, and ends with 0 on SIGTERM and SIGINT.
"""

import argparse
import asyncio
import signal
import sys

from ocgpu.simulators import ComfySimulator, OllamaSimulator
from ocgpu.simulators.hosting import Simulator

__all__ = ["main"]

SECONDS = "seconds"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ocgpu.simulators", description=__doc__)
    engines = parser.add_subparsers(dest="engine", required=True)
    ollama = engines.add_parser("ollama", help="a small Ollama")
    ollama.add_argument("--load-time", type=float, default=0.5, metavar=SECONDS)
    ollama.add_argument("--token-time", type=float, default=0.03, metavar=SECONDS)
    ollama.add_argument("--tokens", type=int, default=24, metavar="number")
    comfyui = engines.add_parser("comfyui", help="a small ComfyUI")
    comfyui.add_argument("--node-time", type=float, default=0.3, metavar=SECONDS)
    for engine in (ollama, comfyui):
        engine.add_argument("--host", default="127.0.0.1")
        engine.add_argument("--port", type=int, default=0, help="0 takes a free one")
    return parser


def _simulator(options: argparse.Namespace) -> Simulator:
    if options.engine == "ollama":
        return OllamaSimulator(
            load_time=options.load_time, token_time=options.token_time, tokens=options.tokens
        )
    return ComfySimulator(node_time=options.node_time)


async def _serve(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    simulator = _simulator(options)
    await simulator.start(options.host, options.port)
    sys.stdout.write(f"listening on {simulator.url}\n")
    sys.stdout.flush()
    await stop.wait()
    await simulator.stop()


def main(argv: list[str] | None = None) -> int:
    """Run one simulator until it is told to end; returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        asyncio.run(_serve(options))
    except OSError as error:
        place = f"{options.host}:{options.port}"
        sys.stderr.write(f"cannot listen on `{place}`: {error.strerror}; choose another --port\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
