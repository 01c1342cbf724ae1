"""Who may use the control plane, and which page may ask for what is ours elsewhere."""

import pytest

from ocgpu.server.guard import host_names, is_foreign_page, make_guard, malformed

TOKEN = "right"  # noqa: S105 - of these tests
Pairs = list[tuple[bytes, bytes]]


def pairs(headers: dict[str, str]) -> Pairs:
    return [(key.encode(), value.encode("latin-1")) for key, value in headers.items()]


async def ask(
    headers: dict[str, str] | Pairs,
    *,
    path: str = "/gpulock/release",
    token: str = "",
    method: str = "POST",
    hosts: tuple[str, ...] = ("gpu.lan",),
) -> int | None:
    """Give the status of the refusal, or None when the request is let in."""
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    given = pairs(headers) if isinstance(headers, dict) else headers
    scope = {
        "type": "http",
        "http_version": "1.1",
        "headers": given,
        "path": path,
        "method": method,
    }
    refused = await make_guard(hosts, token)(scope, send)
    assert refused == bool(sent)
    return sent[0]["status"] if sent else None


@pytest.mark.parametrize(
    "host",
    [
        "localhost:8190",
        "LOCALHOST",
        "localhost.",
        "localhost.:8190",
        "gpu.localhost",
        "127.0.0.1:8190",
        "[::1]:8190",
        "[::ffff:127.0.0.1]",
        "[FE80::1]",
        "gpu.lan",
        "GPU.lan:8190",
        "gpu.lan.",
        "gpu.lan:",
        "10.0.0.2",
        "203.0.113.7",
    ],
)
async def test_known_hosts_and_addresses_are_let_in(host: str) -> None:
    assert await ask({"host": host}) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8190",
        "gpu.lan.evil.example",
        "127.0.0.1.evil.example",
        "evil-localhost",
        "notgpu.lan",
        "printer.local",
        "2130706433",
        "0x7f000001",
        "127.1",
        "127.0.0.256",
    ],
)
async def test_a_name_that_was_made_to_point_here_is_refused(host: str) -> None:
    assert await ask({"host": host}) == 403
    assert await ask({"host": host}, method="GET", path="/healthz") == 403


@pytest.mark.parametrize(
    "host",
    [
        "",
        " ",
        ".",
        ":8190",
        "localhost..",
        "localhost@evil.example",
        "evil.example@localhost",
        "localhost:80@evil.example",
        "evil.example:localhost",
        "localhost:evil.example",
        "localhost:99999999",
        "localhost:80:80",
        "localhost:-1",
        "localhost, evil.example",
        "localhost evil.example",
        "localhost/evil.example",
        "localhost?",
        "localhost#",
        "localhost%2eevil.example",
        "[::1].evil.example",
        "[::1",
        "::1",
        "[fe80::1%eth0]",
        "[fe80::1%25eth0]",
        "[localhost]",
        "http://localhost",
        "l\xf6calhost",
        "a" * 300,
    ],
)
async def test_a_host_that_is_none_is_refused(host: str) -> None:
    assert await ask({"host": host}) == 400


async def test_two_hosts_are_refused_whichever_comes_first() -> None:
    both = [(b"host", b"localhost"), (b"host", b"evil.example")]

    assert await ask(both) == 400
    assert await ask(both[::-1]) == 400
    assert await ask([both[0]] * 2) == 400


async def test_a_host_in_any_spelling_stands_in_the_settings() -> None:
    assert await ask({"host": "gpu.lan"}, hosts=("GPU.lan.",)) is None


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "",
        "http://127.0.0.1:9999",
        "http://127.0.0.1",
        "http://localhost:8190",
        "chrome-extension://127.0.0.1:8190",
        "http://127.0.0.1:8190.evil.example",
        "http://127.0.0.1:8190/",
    ],
)
@pytest.mark.parametrize("method", ["POST", "GET", "OPTIONS"])
async def test_a_page_of_another_origin_is_refused(origin: str, method: str) -> None:
    assert await ask({"host": "127.0.0.1:8190", "origin": origin}, method=method) == 403


async def test_a_second_origin_does_not_hide_behind_the_first() -> None:
    headers = [
        (b"host", b"localhost"),
        (b"origin", b"http://localhost"),
        (b"origin", b"http://evil.example"),
    ]

    assert await ask(headers) == 403


@pytest.mark.parametrize(
    "site", ["cross-site", "same-site", "", "other", "Same-Origin, cross-site"]
)
async def test_what_a_browser_says_comes_from_another_site_is_refused(site: str) -> None:
    assert await ask({"host": "localhost", "sec-fetch-site": site}) == 403


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_our_own_page_is_let_in(scheme: str) -> None:
    headers = {
        "host": "127.0.0.1:8190",
        "origin": f"{scheme}://127.0.0.1:8190",
        "sec-fetch-site": "same-origin",
    }

    assert await ask(headers) is None


async def test_a_person_may_follow_a_link_but_no_page_may_post_or_frame() -> None:
    link = {
        "host": "localhost",
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": "navigate",
        "sec-fetch-dest": "document",
    }

    assert await ask(link, method="GET", path="/") is None
    assert await ask(link, method="POST") == 403
    assert await ask({**link, "sec-fetch-dest": "iframe"}, method="GET", path="/") == 403
    assert await ask({**link, "sec-fetch-mode": "no-cors"}, method="GET", path="/") == 403
    assert await ask({**link, "origin": "null"}, method="GET", path="/") == 403


@pytest.mark.parametrize(
    "value", ["", "Bearer wrong", "Basic right", "right", "Bearer", "Bearer righ", "Bearer right x"]
)
async def test_a_wrong_token_is_refused(value: str) -> None:
    headers = {"host": "localhost", "authorization": value}

    assert await ask(headers, token=TOKEN) == 401


@pytest.mark.parametrize("value", ["Bearer right", "bearer right", "Bearer  right "])
async def test_the_right_token_is_let_in(value: str) -> None:
    headers = {"host": "localhost", "authorization": value}

    assert await ask(headers, token=TOKEN) is None


async def test_the_right_token_does_not_open_the_door_to_a_foreign_page() -> None:
    headers = {"host": "localhost", "authorization": "Bearer right"}

    assert await ask({**headers, "origin": "http://evil.example"}, token=TOKEN) == 403
    assert await ask({**headers, "host": "evil.example"}, token=TOKEN) == 403


async def test_a_health_check_needs_no_token() -> None:
    headers = {"host": "localhost"}

    assert await ask(headers, path="/healthz", token=TOKEN, method="GET") is None
    assert await ask(headers, path="/healthz", token=TOKEN, method="HEAD") is None
    for path in ("/metrics", "/healthz/", "//healthz", "/gpulock/release"):
        assert await ask(headers, path=path, token=TOKEN, method="GET") == 401
    assert await ask(headers, path="/healthz", token=TOKEN, method="POST") == 401


PAGE = {"accept-language": "en", "referer": "http://x/"}


def foreign(**headers: str) -> bool:
    given = {key.replace("_", "-"): value for key, value in headers.items()}
    return is_foreign_page(pairs(given), host_names(("gpu.example.org",)))


@pytest.mark.parametrize("mark", ["accept-language", "referer", "upgrade-insecure-requests"])
def test_a_page_whose_name_was_made_to_point_here_is_foreign(mark: str) -> None:
    # Over plain HTTP a browser sends no `Sec-Fetch-Site`, and no `Origin` for its own server.
    assert foreign(host="evil.example:11435", **{mark: "*"})
    assert foreign(host="evil.example:11435", x_forwarded_host="gpu.example.org", **{mark: "*"})


@pytest.mark.parametrize("host", ["", "evil.example@gpulock", "127.0.0.1.evil.example"])
def test_a_page_under_an_odd_name_is_foreign(host: str) -> None:
    assert foreign(host=host, accept_language="en")


@pytest.mark.parametrize(
    "host",
    [
        "gpulock:11435",
        "localhost:11435",
        "10.0.0.2:11435",
        "[fd00::1]:11435",
        "box.local",
        "box.internal",
        "box.home.arpa.",
        "GPU.example.org",
    ],
)
def test_a_page_under_a_name_of_ours_is_not_foreign(host: str) -> None:
    assert not foreign(host=host, **PAGE)


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_a_name_that_a_certificate_vouches_for_is_not_foreign(site: str) -> None:
    assert not foreign(host="ai.example.com", sec_fetch_site=site, **PAGE)


@pytest.mark.parametrize("site", ["cross-site", "same-site", ""])
def test_a_page_of_another_site_is_foreign_under_every_name(site: str) -> None:
    assert foreign(host="localhost", sec_fetch_site=site)
    assert foreign(host="localhost", origin="http://evil.example")


@pytest.mark.parametrize("host", ["ai.example.com", "gpu.example.org", "", "no host"])
def test_a_monitor_asks_under_any_name(host: str) -> None:
    assert not foreign(host=host, user_agent="Prometheus/3.1", accept="*/*")


def test_two_hosts_none_and_a_tunnel_are_malformed() -> None:
    def scope(*hosts: bytes, method: str = "GET", version: str = "1.1") -> dict:
        headers = [(b"host", host) for host in hosts]
        return {"headers": headers, "method": method, "http_version": version}

    assert malformed(scope(b"a", b"a")) == "more than one Host"
    assert malformed(scope()) == "no Host"
    assert malformed(scope(b"")) == "no Host"
    for host in (b"a/b", b"me@a", b"a b", b"a?", b"\xe4", b"a\t"):
        assert malformed(scope(host)) == "a Host that is none", host
    for host in (b"a", b"a_b.example:80", b"[::1]:80", b"[fe80::1%25eth0]", b"127.0.0.1"):
        assert malformed(scope(host)) is None, host
    assert malformed(scope(version="1")) is None
    assert malformed({"type": "websocket", "headers": [(b"host", b"a")]}) is None
