"""`python engine_process.py`: an Ollama as a process, with a child as Ollama's runner is one.

It prints one line, `{"url": …, "runner": PID}`, and runs until it is killed.
"""

import asyncio
import json
import subprocess
import sys

from ocgpu.simulators import OllamaSimulator


async def main(runner: int) -> None:
    """Start the Ollama of this runner, say where both are, and wait."""
    simulator = OllamaSimulator(
        load_time=0.0, unload_time=0.0, memory_lag=0.0, token_time=0.0, tokens=4
    )
    await simulator.start()
    sys.stdout.write(f"{json.dumps({'url': simulator.url, 'runner': runner})}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(subprocess.Popen(["sleep", "1000"]).pid))
