"""The simulated ComfyUI does what the real one was recorded doing."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import ClientSession, ClientWebSocketResponse, FormData
from yarl import URL

from ocgpu.simulators import ComfySimulator
from tests.recordings import blur_workflow, events, recorded_websocket_types, recording

FREE = {"unload_models": True, "free_memory": True}
CUT = "<graph"
NOT_SIMULATED = ("/internal", "/api/internal", "/api/jobs", "/api/api", "/jobs")


@pytest.fixture
async def comfy() -> AsyncIterator[ComfySimulator]:
    simulator = ComfySimulator(node_time=0.0, history_lag=0.0)
    await simulator.start()
    yield simulator
    await simulator.stop()


@pytest.fixture
async def client(comfy: ComfySimulator) -> AsyncIterator[ClientSession]:
    async with ClientSession(comfy.url) as session:
        yield session


async def read_to_end_of_job(socket: ClientWebSocketResponse) -> list[dict[str, Any]]:
    messages = []
    while not messages or messages[-1]["data"].get("node", "") is not None:
        messages.append(await socket.receive_json(timeout=10))
    return messages


async def finished(client: ClientSession, prompt_id: str) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while True:
            async with client.get(f"/history/{prompt_id}") as answer:
                entry = (await answer.json()).get(prompt_id)
            if entry is not None:
                return dict(entry)


async def post(client: ClientSession, **changes: object) -> str:
    async with client.post("/prompt", json=blur_workflow(**changes)) as answer:
        assert answer.status == 200
        return str((await answer.json())["prompt_id"])


def slow(comfy: ComfySimulator) -> asyncio.Event:
    """Hold every job in its nodes until the event is set."""
    gate = asyncio.Event()

    async def hold(_job: object, _node: str) -> None:
        await gate.wait()

    comfy.jobs.before_node = hold
    return gate


def keys_of(messages: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    return [
        (message["type"], sorted(message["data"]))
        for message in messages
        if message["type"] != "progress_state"
    ]


async def test_a_job_sends_the_recorded_websocket_messages(client: ClientSession) -> None:
    recorded = [event["msg"] for event in events("success_ws", "ws")]

    async with client.ws_connect("/ws?clientId=client-a") as socket:
        await post(client)
        messages = await read_to_end_of_job(socket)

    assert keys_of(messages) == keys_of(recorded)
    progress = [message for message in messages if message["type"] == "progress_state"]
    assert len(progress) == recording("success_ws")["progress_state_messages_total"]
    first = next(message for message in recorded if message["type"] == "progress_state")
    assert progress[0]["data"]["nodes"]["1"].keys() == first["data"]["nodes"]["1"].keys()


async def test_a_finished_job_has_the_recorded_history_entry(client: ClientSession) -> None:
    recorded = next(
        next(iter(event["body"].values()))
        for event in events("success_ws", "http")
        if event["path"].startswith("/history/")
    )

    entry = await finished(client, await post(client))

    assert entry.keys() == recorded.keys()
    assert entry["prompt"][2] == recorded["prompt"][2]
    assert entry["prompt"][3].keys() == recorded["prompt"][3].keys()
    assert entry["prompt"][4] == recorded["prompt"][4]
    assert entry["outputs"] == recorded["outputs"]
    assert entry["meta"] == recorded["meta"]
    assert entry["status"]["completed"] is True
    assert entry["status"]["status_str"] == "success"
    assert [kind for kind, _ in entry["status"]["messages"]] == [
        kind for kind, _ in recorded["status"]["messages"]
    ]


async def test_a_job_enters_the_history_only_when_it_has_left_the_queue(
    comfy: ComfySimulator, client: ClientSession
) -> None:
    gate = slow(comfy)
    prompt_id = await post(client)

    async with client.get("/queue") as answer:
        queue = await answer.json()
    async with client.get(f"/history/{prompt_id}") as answer:
        history = await answer.json()
    gate.set()

    assert [item[1] for item in queue["queue_running"] + queue["queue_pending"]] == [prompt_id]
    assert history == {}
    await finished(client, prompt_id)
    async with client.get("/queue") as answer:
        assert await answer.json() == {"queue_running": [], "queue_pending": []}


@pytest.mark.parametrize(
    "event", events("rejected", "http"), ids=lambda event: f"{event['t']}-{event['status']}"
)
async def test_refusals_are_the_recorded_ones(client: ClientSession, event: dict[str, Any]) -> None:
    request = event["request"]
    if isinstance(request, str) and event["status"] == 200:
        request = json.dumps(blur_workflow())  # the recording cuts long bodies
    body = request if isinstance(request, str) else json.dumps(request)

    async with client.post("/prompt", data=body, headers=event["request_headers"]) as answer:
        text = await answer.text()

        assert answer.status == event["status"]
        assert answer.headers["Content-Type"] == event["headers"]["Content-Type"]
    if answer.status == 500:
        assert text == event["body"]
    elif answer.status == 400:
        assert json.loads(text) == event["body"]
    else:
        assert json.loads(text).keys() == event["body"].keys()
        assert json.loads(text)["node_errors"] == event["body"]["node_errors"]


ROUTED = [
    event
    for event in events("api_prefix", "http")
    if not event["path"].startswith(NOT_SIMULATED) and event["method"] != "POST"
] + [event for event in events("api_prefix", "http") if event["method"] == "POST"]


@pytest.mark.parametrize("event", ROUTED, ids=lambda event: f"{event['method']}-{event['path']}")
async def test_paths_are_routed_as_recorded(comfy: ComfySimulator, event: dict[str, Any]) -> None:
    url = URL(comfy.url + event["path"], encoded=True)
    body = json.dumps(blur_workflow()) if event["method"] == "POST" else None

    async with (
        ClientSession() as client,
        client.request(event["method"], url, data=body) as answer,
    ):
        assert answer.status == event["status"]
        assert answer.headers.get("Allow") == event.get("allow")


@pytest.mark.parametrize("event", events("origin", "check"), ids=lambda event: str(event["t"]))
async def test_host_and_origin_rule_is_the_recorded_one(
    client: ClientSession, event: dict[str, Any]
) -> None:
    names = {"Host": "host", "Origin": "origin", "Sec-Fetch-Site": "sec_fetch_site"}
    headers = {name: event[key] for name, key in names.items() if event[key] is not None}

    async with client.get("/queue", headers=headers) as answer:
        assert answer.status == event["get_queue"]
    async with client.post("/prompt", json={}, headers=headers) as answer:
        assert answer.status == event["post_prompt_empty"]


async def test_a_deleted_pending_job_never_enters_the_history(
    comfy: ComfySimulator, client: ClientSession
) -> None:
    gate = slow(comfy)
    running, pending = await post(client, color=1), await post(client, color=2)

    async with client.post("/queue", json={"delete": [pending, running]}) as answer:
        assert (answer.status, await answer.read()) == (200, b"")
    gate.set()

    await finished(client, running)
    async with client.get("/history") as answer:
        assert list(await answer.json()) == [running]


async def test_clearing_the_queue_leaves_the_running_job(
    comfy: ComfySimulator, client: ClientSession
) -> None:
    gate = slow(comfy)
    running = await post(client, color=1)
    await post(client, color=2)

    async with client.post("/queue", json={"clear": True}):
        pass
    gate.set()

    await finished(client, running)
    async with client.get("/prompt") as answer:
        assert await answer.json() == {"exec_info": {"queue_remaining": 0}}


async def test_a_wiped_history_shows_nothing(client: ClientSession) -> None:
    prompt_id = await post(client)
    await finished(client, prompt_id)

    async with client.post("/history", json={"clear": True}) as answer:
        assert answer.status == 200
    async with client.get(f"/history/{prompt_id}") as answer:
        assert await answer.json() == {}


async def test_free_acts_at_once_when_idle(comfy: ComfySimulator, client: ClientSession) -> None:
    await finished(client, await post(client))
    assert comfy.usage.resident_bytes > 0
    freed = asyncio.Event()
    comfy.usage.watch = lambda usage: None if usage.resident_bytes else freed.set()

    async with client.post("/free", json=FREE) as answer:
        assert (answer.status, await answer.read()) == (200, b"")

    async with asyncio.timeout(10):
        await freed.wait()


async def test_free_acts_after_the_running_job_and_before_the_next(
    comfy: ComfySimulator, client: ClientSession
) -> None:
    gate = slow(comfy)
    sizes: list[int] = []
    comfy.usage.watch = lambda usage: sizes.append(usage.resident_bytes)
    first, second = await post(client, color=1), await post(client, color=2)
    async with client.post("/free", json=FREE):
        pass
    assert comfy.usage.resident_bytes > 0

    gate.set()
    await finished(client, first)
    await finished(client, second)

    held = [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before]
    assert held == [comfy.jobs.model_bytes, 0, comfy.jobs.model_bytes]


@pytest.mark.parametrize(("body", "status"), [("{}", 200), ("", 500)])
async def test_free_answers_as_recorded(client: ClientSession, body: str, status: int) -> None:
    async with client.post("/free", data=body) as answer:
        assert answer.status == status


async def test_an_interrupted_job_ends_as_recorded(
    comfy: ComfySimulator, client: ClientSession
) -> None:
    recorded = recorded_websocket_types("interrupt_running")
    end = recorded[recorded.index("execution_interrupted") :][:3]
    gate = slow(comfy)

    async with client.ws_connect("/ws?clientId=client-a") as socket:
        prompt_id = await post(client)
        while (await socket.receive_json(timeout=10))["type"] != "executing":
            pass
        async with client.post("/interrupt") as answer:
            assert (answer.status, await answer.read()) == (200, b"")
        gate.set()
        messages = await read_to_end_of_job(socket)

    assert [message["type"] for message in messages][-3:] == end
    entry = await finished(client, prompt_id)
    assert entry["status"]["status_str"] == "error"
    assert entry["status"]["completed"] is False
    assert entry["status"]["messages"][-1][0] == "execution_interrupted"
    assert entry["outputs"] == {}


async def test_an_interrupt_without_a_job_does_not_hit_the_next(client: ClientSession) -> None:
    async with client.post("/interrupt") as answer:
        assert answer.status == 200

    entry = await finished(client, await post(client))

    assert entry["status"]["completed"] is True


async def test_a_targeted_interrupt_spares_other_jobs(
    comfy: ComfySimulator, client: ClientSession
) -> None:
    gate = slow(comfy)
    running, pending = await post(client, color=1), await post(client, color=2)

    async with client.post("/interrupt", json={"prompt_id": pending}):
        pass
    gate.set()

    assert (await finished(client, running))["status"]["completed"] is True
    assert (await finished(client, pending))["status"]["completed"] is True


async def test_a_node_that_fails_is_an_error_and_the_next_job_is_fine(
    client: ClientSession,
) -> None:
    failed = await post(client, width=16384, height=16384, batch_size=4096)

    entry = await finished(client, failed)

    assert entry["status"]["status_str"] == "error"
    assert entry["status"]["messages"][-1][0] == "execution_error"
    assert (await finished(client, await post(client)))["status"]["completed"] is True


async def test_jobs_run_in_the_recorded_order_with_front_first(
    comfy: ComfySimulator, client: ClientSession
) -> None:
    gate = slow(comfy)
    first, second = await post(client, color=1), await post(client, color=2)
    async with client.post("/prompt", json={**blur_workflow(color=3), "front": True}) as answer:
        front = await answer.json()
    gate.set()

    await finished(client, second)

    assert front["number"] < 0
    assert list(comfy.jobs.history) == [first, front["prompt_id"], second]


async def test_another_client_sees_of_a_job_its_status_only(client: ClientSession) -> None:
    async with client.ws_connect("/ws?clientId=watcher") as watcher:
        await finished(client, await post(client))
        await finished(client, await post(client, color=2))
        seen = [(await watcher.receive_json(timeout=10))["type"] for _ in range(7)]

    assert seen == ["status"] * 7


async def test_a_job_without_client_id_tells_everybody_what_was_recorded(
    comfy: ComfySimulator, client: ClientSession
) -> None:
    recorded = {event["msg"]["type"] for event in events("no_client_id", "ws")}
    gate = slow(comfy)
    body = blur_workflow()
    del body["client_id"]

    async with client.ws_connect("/ws?clientId=watcher") as watcher:
        async with client.post("/prompt", json=body) as answer:
            prompt_id = (await answer.json())["prompt_id"]
        seen = [await watcher.receive_json(timeout=10) for _ in range(4)]
        async with client.post("/interrupt"):
            pass
        gate.set()
        await finished(client, prompt_id)
        while seen[-1] != {
            "type": "status",
            "data": {"status": {"exec_info": {"queue_remaining": 0}}},
        }:
            seen.append(await watcher.receive_json(timeout=10))

    assert {message["type"] for message in seen} == recorded


async def test_the_same_graph_again_is_served_from_the_cache_until_freed(
    client: ClientSession,
) -> None:
    cached: list[list[str]] = []
    for free in (False, True, False):
        entry = await finished(client, await post(client))
        cached.append(entry["status"]["messages"][1][1]["nodes"])
        if free:
            async with client.post("/free", json=FREE):
                pass

    assert cached == [[], ["1", "10", "11", "12", "90"], []]


async def test_an_uploaded_image_can_be_viewed(client: ClientSession) -> None:
    form = FormData()
    form.add_field("image", b"png bytes", filename="rec.png", content_type="image/png")

    async with client.post("/upload/image", data=form) as answer:
        assert await answer.json() == {"name": "rec.png", "subfolder": "", "type": "input"}
    async with client.get("/view?filename=rec.png&type=input") as answer:
        assert await answer.read() == b"png bytes"
