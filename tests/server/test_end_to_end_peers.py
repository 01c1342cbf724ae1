"""What `ocgpu serve` shows of the processes that share the card (the seed's gate G1)."""

from typing import Any

from tests.server.client import call
from tests.server.served import Served
from tests.sharers import sharers
from tests.waiting import wait_until

STEP_BYTES = str(64 * 1024)


def shown(served: Served, listener: str) -> dict[str, Any]:
    document: dict[str, Any] = call("GET", f"{listener}/gpu/peers").json()
    return document


def test_an_idle_serve_shows_three_processes_with_50_25_25_percent(
    served: Served, gpu_key: str
) -> None:
    wanted = {"a": 50.0, "b": 25.0, "c": 25.0}
    lines = [
        ["--name", name, "--weight", weight, "--step-bytes", STEP_BYTES]
        for name, weight in (("a", "2"), ("b", "1"), ("c", "1"))
    ]

    def shares(listener: str) -> dict[str, float]:
        peers = shown(served, listener)["peers"]
        return {peer["name"]: peer["share_pct"] for peer in peers if peer["active"]}

    with sharers(*lines) as workers:
        for worker in workers:
            worker.tell("work")

        for listener in (served.ollama, served.admin):
            wait_until(lambda url=listener: shares(url) == wanted, 10)  # type: ignore[misc]
        document = shown(served, served.ollama)
        assert document["gpu_key"] == gpu_key
        assert document["self"]["name"] == "ocgpu-serve"
        assert (document["self"]["active"], document["self"]["share_pct"]) == (False, 0.0)

        workers[0].process.kill()
        wait_until(lambda: shares(served.ollama) == {"b": 50.0, "c": 50.0}, 10)
