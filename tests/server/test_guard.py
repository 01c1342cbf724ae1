"""Who may use the control plane."""

import pytest

from ocgpu.server.guard import make_guard

TOKEN = "right"  # noqa: S105 - of these tests


async def ask(
    headers: dict[str, str],
    *,
    path: str = "/gpulock/release",
    token: str = "",
    method: str = "POST",
) -> int | None:
    """Give the status of the refusal, or None when the request is let in."""
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    pairs = [(key.encode(), value.encode()) for key, value in headers.items()]
    scope = {"headers": pairs, "path": path, "method": method}
    refused = await make_guard(("gpu.lan",), token)(scope, send)
    assert refused == bool(sent)
    return sent[0]["status"] if sent else None


@pytest.mark.parametrize(
    "host",
    ["localhost:8190", "127.0.0.1:8190", "[::1]:8190", "gpu.lan", "GPU.lan:8190", "10.0.0.2"],
)
async def test_known_hosts_and_addresses_are_let_in(host: str) -> None:
    assert await ask({"host": host}) is None


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8190", "gpu.lan.evil.example", ""])
async def test_a_name_that_was_made_to_point_here_is_refused(host: str) -> None:
    assert await ask({"host": host}) == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9999"])
async def test_a_page_of_another_origin_is_refused(origin: str) -> None:
    assert await ask({"host": "127.0.0.1:8190", "origin": origin}) == 403


async def test_our_own_page_is_let_in() -> None:
    headers = {"host": "127.0.0.1:8190", "origin": "http://127.0.0.1:8190"}

    assert await ask(headers) is None


@pytest.mark.parametrize("value", ["", "Bearer wrong", "Basic right", "right"])
async def test_a_wrong_token_is_refused(value: str) -> None:
    headers = {"host": "localhost", "authorization": value}

    assert await ask(headers, token=TOKEN) == 401


async def test_the_right_token_is_let_in() -> None:
    headers = {"host": "localhost", "authorization": "Bearer right"}

    assert await ask(headers, token=TOKEN) is None


async def test_a_health_check_needs_no_token() -> None:
    headers = {"host": "localhost"}

    assert await ask(headers, path="/healthz", token=TOKEN, method="GET") is None
    assert await ask(headers, path="/metrics", token=TOKEN, method="GET") == 401
