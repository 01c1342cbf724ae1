"""`ocgpu serve` as a process: its addresses, its numbers, its end, what it refuses."""

import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.fakes import Engines
from tests.processes import Processes
from tests.server.client import OpenCall, background, call
from tests.server.jobs import chat, open_chat, post_image
from tests.server.served import COMMAND, Served, serve_environ
from tests.waiting import wait_until

Serve = Callable[..., Served]

SERIES = (
    'gpulock_state{state="idle"}',
    'gpulock_state{state="llm"}',
    'gpulock_state{state="image"}',
    "gpulock_llm_inflight",
    'gpulock_image_jobs_total{result="done"}',
    'gpulock_lock_wait_seconds_bucket{kind="llm",le="+Inf"}',
    'gpulock_lock_wait_seconds_count{kind="image"}',
    "gpulock_unload_seconds_sum",
    "gpulock_unload_seconds_count",
)


def test_health_is_told_on_every_listener(served: Served) -> None:
    for listener in (served.ollama, served.comfy, served.admin):
        answer = call("GET", f"{listener}/healthz")

        assert answer.status == 200
        assert {"state": "idle", "llm_inflight": 0, "image_pending": False}.items() <= (
            answer.json().items()
        )


def test_health_is_our_own_and_reaches_no_upstream(engines: Engines, served: Served) -> None:
    served.health()

    assert "GET /healthz" not in engines.record.names()


def test_metrics_have_the_names_and_count(engines: Engines, served: Served) -> None:
    assert chat(served).status == 200
    assert post_image(served).status == 200
    served.wait_state("idle")

    metrics = served.metrics()

    assert set(SERIES) <= metrics.keys()
    assert metrics['gpulock_state{state="idle"}'] == 1
    assert metrics['gpulock_state{state="image"}'] == 0
    assert metrics['gpulock_image_jobs_total{result="done"}'] == 1
    assert metrics['gpulock_lock_wait_seconds_count{kind="llm"}'] == 1
    assert metrics['gpulock_lock_wait_seconds_count{kind="image"}'] == 1
    assert metrics["gpulock_unload_seconds_count"] == 1
    kind = call("GET", f"{served.ollama}/metrics").header("Content-Type") or ""
    assert kind.startswith("text/plain")
    assert call("GET", f"{served.admin}/metrics").status == 200


def test_metrics_on_the_comfyui_listener_are_comfyui_s(engines: Engines, served: Served) -> None:
    assert call("GET", f"{served.comfy}/metrics").status == 404
    assert "GET /metrics" in engines.record.names()


def test_every_phase_of_an_image_job_is_logged_with_its_prompt_id(served: Served) -> None:
    prompt_id = post_image(served).json()["prompt_id"]
    served.wait_state("idle")

    phases = [line for line in served.lines() if line.get("prompt_id") == prompt_id]
    assert len(phases) >= 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0(served: Served, number: signal.Signals) -> None:
    assert served.stop(number) == 0


def test_a_stream_in_flight_is_finished_before_the_end(engines: Engines, served: Served) -> None:
    last = engines.ollama.hold_token(3)
    with open_chat(served) as opened:
        opened.line()
        last.wait_reached()
        ending = background(served.stop)
        # The listener refuses new work once the drain has begun.
        assert chat_refused(served)
        last.open()

        assert opened.answer().body.count(b"\n") == 4
    assert ending.result() == 0


def chat_refused(served: Served) -> bool:
    while True:
        try:
            if chat(served, options={"num_predict": 1}).status == 503:
                return True
        except ConnectionError:
            return True


def test_a_waiting_request_is_refused_at_the_end(engines: Engines, served: Served) -> None:
    nodes = engines.comfy.hold_jobs()
    post_image(served)
    nodes.wait_reached()
    waiting = background(lambda: chat(served))
    served.wait_waiting("llm", 1)

    ending = background(served.stop)

    assert waiting.result().status == 503
    assert ending.result() == 0


def test_a_stream_without_end_does_not_keep_it(engines: Engines, serve: Serve) -> None:
    served = serve(DRAIN_TIMEOUT="300ms")
    engines.ollama.hold_token(3)
    with open_chat(served) as opened:
        opened.line()

        assert served.stop() == 0


def test_an_open_websocket_does_not_keep_it(served: Served) -> None:
    with connect(f"{served.comfy.replace('http', 'ws')}/ws") as opened:
        opened.recv(timeout=10)

        assert served.stop() == 0

        with pytest.raises(ConnectionClosed) as closed:
            opened.recv(timeout=10)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1001


def test_health_is_a_503_while_it_drains(engines: Engines, served: Served) -> None:
    last = engines.ollama.hold_token(3)
    health = OpenCall("GET", f"{served.ollama}/healthz")
    with open_chat(served) as opened, health:
        opened.line()
        last.wait_reached()
        assert health.answer().status == 200
        ending = background(served.stop)
        wait_until(lambda: health.again("GET", "/healthz").status == 503, what="drain")
        last.open()
        opened.answer()
    assert ending.result() == 0


def test_a_taken_port_ends_it_with_1_and_its_name(
    processes: Processes, engines: Engines, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environ = {**serve_environ(engines), "LISTEN_COMFY": f"127.0.0.1:{port}"}

        process = processes.start(COMMAND, log=tmp_path / "log", environ=environ)

        assert process.wait(timeout=20) == 1
    assert str(port) in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UNLOAD_TIMEOUT", "soon"),
        ("LISTEN_OLLAMA", "11435x"),
        ("OLLAMA_URL", "ftp://127.0.0.1"),
        ("GPU_SHARE_WEIGHT", "-1"),
        ("JOB_TIMEOUT_ACTION", "panic"),
        ("LOG_FORMAT", "xml"),
    ],
)
def test_a_bad_setting_ends_it_with_2_and_the_legal_form(
    processes: Processes, engines: Engines, tmp_path: Path, name: str, value: str
) -> None:
    environ = {**serve_environ(engines), name: value}

    process = processes.start(COMMAND, log=tmp_path / "log", environ=environ)

    assert process.wait(timeout=20) == 2
    text = (tmp_path / "log").read_text()
    assert re.search(rf"invalid `{name}`: {re.escape(value)}; use ", text), text
    assert engines.record.calls() == []


def test_upstreams_that_are_down_at_the_start_are_logged_and_not_fatal(
    processes: Processes, engines: Engines, tmp_path: Path
) -> None:
    environ = serve_environ(engines)
    engines.kill(engines.ollama)
    engines.kill(engines.comfy)

    served = Served(
        processes.start(COMMAND, log=tmp_path / "log", environ=environ), tmp_path / "log"
    )

    served.wait_state("idle")
    assert served.stop() == 0
    assert "127.0.0.1" in served.log.read_text()


def test_a_hangup_is_ignored_and_told_each_time(served: Served) -> None:
    for number in (1, 2):
        served.process.send_signal(signal.SIGHUP)
        wait_until(lambda number=number: len(told(served, "SIGHUP ignored")) == number)

    served.wait_state("idle")
    assert served.stop() == 0


def told(served: Served, text: str) -> list[str]:
    return [line["message"] for line in served.lines() if line["message"].startswith(text)]


def test_a_bad_file_ends_it_with_2_and_its_path(
    processes: Processes, engines: Engines, tmp_path: Path
) -> None:
    config = tmp_path / "ocgpu.toml"
    config.write_text('drain_timeout = "soon"\ncomfy_url = "http://me:s3cret@box?"\n')
    environ = serve_environ(engines)
    del environ["COMFY_URL"]

    process = processes.start(
        (*COMMAND, "--config", str(config)), log=tmp_path / "log", environ=environ
    )

    assert process.wait(timeout=20) == 2
    text = (tmp_path / "log").read_text()
    assert "invalid `DRAIN_TIMEOUT`: soon; use a duration such as" in text, text
    assert f"in `{config}`" in text
    assert "http://…@box" in text
    assert "s3cret" not in text


def test_two_of_them_on_one_port_are_told_apart(
    processes: Processes, engines: Engines, tmp_path: Path, served: Served
) -> None:
    taken = served.comfy.removeprefix("http://")
    environ = {**serve_environ(engines), "LISTEN_COMFY": taken}

    process = processes.start(COMMAND, log=tmp_path / "second", environ=environ)

    assert process.wait(timeout=20) == 1
    text = (tmp_path / "second").read_text()
    assert f"cannot listen on {taken}: address already in use; stop what listens there" in text
    assert call("GET", f"{served.comfy}/healthz").status == 200


def test_a_login_in_a_url_is_told_nobody(
    processes: Processes, engines: Engines, tmp_path: Path
) -> None:
    login = "http://me:s3cret@"
    environ = serve_environ(engines)
    environ |= {
        "OLLAMA_URL": engines.ollama.url.replace("http://", login),
        "COMFY_URL": f"{login}127.0.0.1:9/x",
    }
    served = Served(
        processes.start(COMMAND, log=tmp_path / "log", environ=environ), tmp_path / "log"
    )

    def known(name: str) -> bool:
        return served.health()["upstreams"][name]["reachable"] is not None

    wait_until(lambda: known("ollama") and known("comfyui"), what="both probes")
    assert chat(served).status == 200
    refused = call("GET", f"{served.comfy}/queue")
    assert refused.status == 502

    shown = [refused.body, call("GET", f"{served.ollama}/healthz").body]
    shown += [call("GET", f"{served.admin}{path}").body for path in ("/", "/events", "/metrics")]
    assert served.stop() == 0
    for text in (*shown, (tmp_path / "log").read_bytes()):
        assert b"s3cret" not in text
        assert b"me:" not in text
        assert b"bWU6czNjcmV0" not in text, "base64 of the login"
