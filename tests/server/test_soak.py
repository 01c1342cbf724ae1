"""A house full of people in quick motion: everything at once, engines that restart, nothing left.

`OCGPU_SOAK_SECONDS` (default 15) is how long the traffic lasts, after a third as much to warm up.
"""

import contextlib
import http.client
import os
import random
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable

import psutil
import pytest
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from tests.fakes import Engines
from tests.recordings import blur_workflow
from tests.server.client import Answer, OpenCall, call
from tests.server.jobs import MESSAGES, MODEL, chat, open_chat, post_image
from tests.server.served import Served
from tests.waiting import wait_until

SECONDS = float(os.environ.get("OCGPU_SOAK_SECONDS", "15"))
ACTORS = 10
RESTART_EVERY_SECONDS = 1.5
# What a client meets while an engine is down or restarts: no fault of ours.
WEATHER = (OSError, http.client.HTTPException, WebSocketException)
LEGAL = (200, 502)
# The interpreter's own growth is 1 to 2 MiB over minutes; a leak of requests is far more.
GROWTH_MAX_BYTES = 16 * 2**20


class Traffic:
    """Actors that do random things until they are told to stop.

    Attributes:
        done: How often each thing was done.
        faults: What nobody may see.
    """

    def __init__(self, engines: Engines, served: Served, seconds: float) -> None:
        self.done: Counter[str] = Counter()
        self.faults: list[str] = []
        self._engines = engines
        self._served = served
        self._until = time.monotonic() + seconds
        self._over = threading.Event()
        self._actions: list[tuple[int, Callable[[random.Random], None]]] = [
            (6, self.chat),
            (3, self.openai),
            (4, self.leave_a_chat),
            (3, self.image),
            (2, self.leave_an_image),
            (2, self.cancel_an_image),
            (2, self.socket),
            (2, self.unload),
            (6, self.look),
        ]

    def run(self) -> None:
        """Have all of them act, and engines restart, until the time is over."""
        actors = [threading.Thread(target=self._act, args=(seed,)) for seed in range(ACTORS)]
        restarts = threading.Thread(target=self._restart)
        for thread in (*actors, restarts):
            thread.start()
        for thread in actors:
            thread.join()
        self._over.set()
        restarts.join()

    def _act(self, seed: int) -> None:
        choice = random.Random(seed)  # noqa: S311 - the same actor in every run
        weights = [weight for weight, _ in self._actions]
        while time.monotonic() < self._until:
            (_, action) = choice.choices(self._actions, weights)[0]
            try:
                action(choice)
            except WEATHER as error:
                self.done[f"{action.__name__}: {type(error).__name__}"] += 1
            except Exception:  # noqa: BLE001 - told at the end, with the actor that met it
                self.faults.append(f"actor {seed}: {traceback.format_exc()}")
            else:
                self.done[action.__name__] += 1

    def _restart(self) -> None:
        choice = random.Random(ACTORS)  # noqa: S311 - as above
        while not self._over.wait(RESTART_EVERY_SECONDS):
            engine = choice.choice((self._engines.ollama, self._engines.comfy))
            self._engines.kill(engine)
            self._over.wait(choice.random() * 0.2)
            self._engines.restart(engine)
            self.done["restart"] += 1

    def _expect(self, answer: Answer) -> None:
        # What the fakes' HTTP library says by itself of a request that its own end cut.
        dying = answer.body.startswith(b"400: Bad Request")
        if answer.status not in LEGAL and not dying:
            self.faults.append(f"{answer.status} {answer.headers} {answer.body[:300]!r}")

    def chat(self, choice: random.Random) -> None:
        self._expect(chat(self._served, stream=choice.random() < 0.7))

    def openai(self, choice: random.Random) -> None:
        body = {"model": MODEL, "messages": MESSAGES, "stream": choice.random() < 0.5}
        self._expect(call("POST", f"{self._served.ollama}/v1/chat/completions", body))

    def leave_a_chat(self, choice: random.Random) -> None:
        with open_chat(self._served) as opened:
            for _ in range(choice.randrange(3)):
                opened.line()

    def image(self, choice: random.Random) -> None:
        self._expect(post_image(self._served, color=choice.randrange(2**24)))

    def leave_an_image(self, choice: random.Random) -> None:
        body = blur_workflow(color=choice.randrange(2**24))
        with OpenCall("POST", f"{self._served.comfy}/prompt", body):
            time.sleep(choice.random() * 0.01)

    def cancel_an_image(self, choice: random.Random) -> None:
        body = {**blur_workflow(color=choice.randrange(2**24)), "prompt_id": str(uuid.uuid4())}
        self._expect(call("POST", f"{self._served.comfy}/prompt", body))
        if choice.random() < 0.5:
            call("POST", f"{self._served.comfy}/queue", {"delete": [body["prompt_id"]]})
        else:
            call("POST", f"{self._served.comfy}/interrupt", {"prompt_id": body["prompt_id"]})

    def socket(self, choice: random.Random) -> None:
        address = self._served.comfy.replace("http:", "ws:")
        with connect(f"{address}/ws?clientId={uuid.uuid4().hex}", open_timeout=10) as opened:
            for _ in range(choice.randrange(3)):
                with contextlib.suppress(TimeoutError):
                    opened.recv(timeout=0.05)

    def unload(self, _choice: random.Random) -> None:
        body = {"model": MODEL, "keep_alive": 0}
        self._expect(call("POST", f"{self._served.ollama}/api/generate", body))

    def look(self, choice: random.Random) -> None:
        paths = [
            "ollama/api/tags",
            "ollama/api/ps",
            "comfy/queue",
            "comfy/history",
            "ollama/metrics",
        ]
        listener, _, path = choice.choice(paths).partition("/")
        url = self._served.ollama if listener == "ollama" else self._served.comfy
        self._expect(call("GET", f"{url}/{path}"))


@pytest.mark.slow
# The fakes leave connections behind when they are killed in the middle of them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(SECONDS * 2 + 240)
def test_a_day_of_mixed_traffic_leaves_nothing_behind(
    engines: Engines, serve: Callable[..., Served]
) -> None:
    served = serve(LOG_LEVEL="info")
    process = psutil.Process(served.process.pid)
    Traffic(engines, served, SECONDS / 3).run()
    quiet(served, process)
    before = process.memory_info().rss, process.num_fds()

    traffic = Traffic(engines, served, SECONDS)
    traffic.run()

    assert not traffic.faults, "\n".join(traffic.faults[:5])
    quiet(served, process)
    wait_until(lambda: process.num_fds() <= before[1] + 2, 60, "descriptors where they began")
    assert process.memory_info().rss - before[0] < GROWTH_MAX_BYTES
    engines.oracle.assert_exclusive()
    assert min(engines.oracle.uses("llm"), engines.oracle.uses("image")) > 10, traffic.done


def quiet(served: Served, process: psutil.Process) -> None:
    """Wait until nothing is in flight, nothing waits, and no idle upstream connection is left."""
    wanted = {"llm": 0, "image": 0, "bytes": 0}
    assert process.is_running()
    wait_until(
        lambda: (
            {"state": "idle", "llm_inflight": 0, "waiting": wanted}.items()
            <= served.health().items()
        ),
        60,
        "idle",
    )
