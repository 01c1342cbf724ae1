"""What the log, the metrics and the card say after something went wrong."""

from collections.abc import Callable

from tests.fakes import Engines, Gate
from tests.fakes.faults import answer, cut_after, drop
from tests.server.client import OpenCall, call
from tests.server.jobs import CHAT, chat, post_image
from tests.server.served import Served
from tests.waiting import wait_until

Serve = Callable[..., Served]


def lines(served: Served, message: str) -> list[dict]:
    return [line for line in served.lines() if line["message"].startswith(message)]


def test_a_request_that_the_engine_fails_is_in_the_log_and_in_the_metrics(
    engines: Engines, served: Served
) -> None:
    engines.ollama.fail("POST /api/chat", drop, times=1)
    assert call("POST", f"{served.ollama}/api/chat?key=s3cret", CHAT).status == 502
    engines.ollama.fail("POST /api/chat", cut_after(3), times=1)
    with OpenCall("POST", f"{served.ollama}/api/chat", CHAT) as opened:
        assert opened.response().status == 200
        wait_until(lambda: len(lines(served, "request failed")) == 2, what="both in the log")
    engines.kill(engines.ollama)
    assert call("GET", f"{served.ollama}/api/tags").status == 502

    wait_until(lambda: len(lines(served, "request failed")) == 3, what="all in the log")
    refused, broken, passing = lines(served, "request failed")
    assert (refused["engine"], refused["path"]) == ("ollama", "/api/chat")
    assert "broke off" in broken["message"]
    assert (passing["method"], passing["path"]) == ("GET", "/api/tags")
    assert "s3cret" not in served.log.read_text()
    series = 'gpulock_engine_failures_total{engine="ollama",ending="%s"}'
    assert served.metrics()[series % "refused"] == 2
    assert served.metrics()[series % "broken"] == 1


def test_an_image_for_a_comfyui_that_is_gone_costs_no_chat_model(
    engines: Engines, served: Served
) -> None:
    assert chat(served).status == 200
    engines.kill(engines.comfy)

    assert post_image(served).status == 502

    served.wait_state("idle", image_pending=False)
    assert engines.ollama.usage.resident_bytes > 0
    assert not lines(served, "image job: llm side unloaded")


def test_an_ollama_that_wants_a_login_does_not_hold_images_up(
    engines: Engines, served: Served
) -> None:
    engines.ollama.fail("GET /api/ps", answer(401))

    # Within the client's 20 s, and not after `UNLOAD_TIMEOUT` of a minute.
    assert post_image(served).status == 200

    assert lines(served, "image job: goes on, models may be loaded still")


def test_the_warm_model_comes_back_after_the_chats_that_waited(
    engines: Engines, serve: Serve
) -> None:
    served = serve(WARM_MODEL="qwen3:8b")
    nodes = engines.comfy.hold_jobs()
    assert post_image(served).status == 200
    nodes.wait_reached()
    token = engines.ollama.hold_token(1)
    with OpenCall("POST", f"{served.ollama}/api/chat", CHAT) as opened:
        served.wait_waiting("llm", 1)
        nodes.open()
        opened.line()
        token.open()

        wait_until(lambda: lines(served, "warm model: loaded"), what="the warm model")


def test_a_client_that_leaves_before_its_image_is_sent_is_no_failed_job(
    engines: Engines, served: Served
) -> None:
    hold = engines.ollama.ps_gate = Gate()
    image = {"prompt": {}}
    with OpenCall("POST", f"{served.comfy}/prompt", image):
        hold.wait_reached()

    wait_until(lambda: lines(served, "image job: its client left"), what="the log")
    hold.open()
    served.wait_state("idle", image_pending=False)
    assert engines.record.calls("POST /prompt") == []
    assert not [line for line in served.lines() if line["level"] in ("warning", "error")]
