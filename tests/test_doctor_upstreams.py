"""`ocgpu doctor` on upstreams: the fakes, a real serve, and servers that are no engine."""

import socket
import ssl
import threading
import time
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from ocgpu.doctor import upstreams
from ocgpu.doctor import web as doctor_web
from ocgpu.doctor.finding import Finding
from ocgpu.forms import Listen
from tests.fakes import Engines
from tests.fakes.faults import answer
from tests.one_answer import document, server
from tests.processes import Processes
from tests.server.served import start_serve

TLS = Path(__file__).parent / "data" / "tls"
LISTEN = Listen(host="::", port=8189)


def ollama(url: str) -> Finding:
    (finding,) = upstreams.check_ollama(url)
    return finding


def comfy(url: str, listen: Listen | None = LISTEN) -> Finding:
    (finding,) = upstreams.check_comfy(url, listen)
    return finding


def test_engines_that_answer_are_named_with_their_version(engines: Engines) -> None:
    assert ollama(engines.ollama.url).status == "ok"
    assert ollama(engines.ollama.url).found.startswith(f"{engines.ollama.url} is Ollama 0.")
    assert comfy(engines.comfy.url).status == "ok"
    assert comfy(engines.comfy.url).found.startswith(f"{engines.comfy.url} is ComfyUI 0.")


def test_engines_that_are_off_are_well() -> None:
    assert (ollama("").status, comfy("").status) == ("ok", "ok")


def test_an_engine_that_is_down_is_an_error(engines: Engines) -> None:
    engines.kill(engines.ollama)

    assert ollama(engines.ollama.url) == Finding(
        "ollama",
        "error",
        f"{engines.ollama.url}: refuses connections",
        "start it, or correct the port in its URL",
    )


@pytest.mark.parametrize("body", ['{"system": 1, "devices": []}', '{"system": {}}', "{}"])
def test_a_document_of_another_shape_is_no_comfyui(body: str) -> None:
    with server(document(body)) as port:
        finding = comfy(f"http://127.0.0.1:{port}")

    assert (finding.status, "is no ComfyUI" in finding.found) == ("error", True)


def test_a_comfyui_that_does_not_tell_its_version_is_one() -> None:
    with server(document('{"system": {}, "devices": []}')) as port:
        finding = comfy(f"http://127.0.0.1:{port}")

    assert (finding.status, "of unknown version" in finding.found) == ("ok", True)


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_name_that_cannot_be_one_is_an_error(host: str) -> None:
    assert "its name is not known" in ollama(f"http://{host}:1").found


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("[" * 60000, "is no Ollama"),
        ('{"version": "' + "\x1b[2J" * 10 + '"}', "is no Ollama"),
        ('{"version": "' + "\\u001b[2J" * 6000 + '"}', "Ollama \\x1b[2J\\x1b[2J"),
        ('{"version": 1}', "is no Ollama"),
        ("[1]", "is no Ollama"),
    ],
    ids=["deep", "raw", "escapes", "number", "list"],
)
def test_an_answer_that_means_harm_is_shown_short_and_harmless(body: str, words: str) -> None:
    with server(document(body)) as port:
        finding = ollama(f"http://127.0.0.1:{port}")

    assert words in finding.found
    assert finding.found.isprintable()
    assert len(finding.found) < 2100


def test_an_engine_that_nobody_needs_yet_is_a_warning_when_it_is_down(engines: Engines) -> None:
    engines.kill(engines.comfy)

    (down,) = upstreams.check_comfy(engines.comfy.url, LISTEN, needed=False)
    (wrong,) = upstreams.check_ollama("http://engine.invalid:1", needed=False)

    assert (down.status, "no serve runs" in down.found) == ("warning", True)
    assert "`COMFY_URL`" in str(down.remedy)
    assert wrong.status == "error"


def test_a_name_that_nobody_knows_is_an_error() -> None:
    finding = ollama("http://engine.invalid:1")

    assert (finding.status, "its name is not known" in finding.found) == ("error", True)


@pytest.mark.parametrize("drip", [False, True])
def test_an_engine_that_says_nothing_or_too_slowly_is_an_error_in_time(
    monkeypatch: pytest.MonkeyPatch, *, drip: bool
) -> None:
    monkeypatch.setattr(doctor_web, "_SECONDS", 0.5)
    ended = threading.Event()

    def hang(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
        while not ended.wait(0.1):
            if drip:
                connection.sendall(b"x")

    before = time.monotonic()
    with server(hang) as port:
        finding = ollama(f"http://127.0.0.1:{port}")
        took = time.monotonic() - before
        ended.set()

    assert (finding.status, "no answer within 0.5 s" in finding.found) == ("error", True)
    assert took < 5.0


def test_a_listener_of_our_own_as_upstream_is_an_error(
    engines: Engines, processes: Processes, tmp_path: Path
) -> None:
    served = start_serve(processes, engines, tmp_path / "log")

    assert ollama(served.ollama).status == "error"
    assert "an `ocgpu serve`, not an engine" in ollama(served.ollama).found
    assert "an `ocgpu serve`" in comfy(served.comfy).found


def test_engines_that_are_swapped_are_an_error_that_says_so(engines: Engines) -> None:
    assert ollama(engines.comfy.url).status == "error"
    assert "is ComfyUI, not Ollama" in ollama(engines.comfy.url).found
    assert "is Ollama, not ComfyUI" in comfy(engines.ollama.url).found


def test_a_server_that_is_no_engine_is_an_error() -> None:
    with server(document("<html>", "404 Not Found")) as port:
        finding = comfy(f"http://127.0.0.1:{port}")

    assert finding.status == "error"
    assert "is no ComfyUI: it answers 404 to /system_stats" in finding.found


def test_a_version_under_another_status_is_none() -> None:
    with server(document('{"version": "1"}', "404 Not Found")) as port:
        finding = ollama(f"http://127.0.0.1:{port}")

    assert finding.found.endswith("is no Ollama: it answers 404 to /api/version")
    assert finding.remedy == "set `OLLAMA_URL` to Ollama itself"


def test_a_server_of_the_open_ai_api_is_a_warning_in_the_place_of_ollama() -> None:
    with server(document('{"data": []}')) as port:
        finding = ollama(f"http://127.0.0.1:{port}")
        assert (finding.status, "is no Ollama" in finding.found) == ("warning", True)

        finding = comfy(f"http://127.0.0.1:{port}")
        assert (finding.status, "is no ComfyUI" in finding.found) == ("error", True)


def test_an_engine_behind_a_gateway_that_is_down_is_a_warning(engines: Engines) -> None:
    engines.ollama.fail("*", answer(502))

    assert ollama(engines.ollama.url).status == "warning"


def test_a_redirect_is_an_error_that_shows_no_login(engines: Engines) -> None:
    engines.comfy.fail("*", answer(302, Location="https://me:s3cret@there/"))

    finding = comfy(engines.comfy.url)

    assert finding.status == "error"
    assert finding.found.endswith("(302): https://…@there/")


@pytest.mark.parametrize(("login", "words"), [("", "asks for a login"), ("me:s3cret@", "refuses")])
def test_a_login_that_is_missing_or_wrong_is_an_error_and_not_shown(
    engines: Engines, login: str, words: str
) -> None:
    engines.ollama.fail("*", answer(401))

    finding = ollama(engines.ollama.url.replace("//", f"//{login}"))

    assert (finding.status, words in finding.found) == ("error", True)
    assert "s3cret" not in str(finding)


def test_the_login_of_the_url_is_sent(engines: Engines) -> None:
    assert ollama(engines.ollama.url.replace("//", "//me:s3%20cret@")).status == "ok"

    (call, *_) = engines.record.calls("GET /api/version")
    assert ("Authorization", "Basic bWU6czMgY3JldA==") in call.headers


def test_an_ollama_that_refuses_our_host_is_an_error(engines: Engines) -> None:
    # The name is known on this machine alone, and is none of those that Ollama takes for local.
    async def by_host(request: web.Request, handler: Handler) -> web.StreamResponse:
        local = request.headers["Host"].startswith("localhost")
        return await handler(request) if local else web.Response(status=403)

    engines.ollama.fail("*", by_host)

    finding = ollama(engines.ollama.url)

    assert finding.status == "error"
    assert f"answers 403 to the Host `127.0.0.1:{engines.ollama.port}`" in finding.found
    assert "`OLLAMA_HOST=0.0.0.0`" in str(finding.remedy)


def test_an_engine_that_refuses_everybody_is_an_error(engines: Engines) -> None:
    engines.comfy.fail("*", answer(403))

    assert comfy(engines.comfy.url).status == "error"
    assert comfy(engines.comfy.url).found == f"{engines.comfy.url} answers 403"


async def refuse_pages(request: web.Request, handler: Handler) -> web.StreamResponse:
    """403 to whatever names an Origin."""
    return web.Response(status=403) if "Origin" in request.headers else await handler(request)


def test_an_ollama_that_refuses_local_pages_is_a_warning(engines: Engines) -> None:
    engines.ollama.fail("*", refuse_pages)

    finding = ollama(engines.ollama.url)

    assert (finding.status, "(Origin)" in finding.found) == ("warning", True)
    assert "`OLLAMA_ORIGINS`" in str(finding.remedy)


def test_a_comfyui_that_refuses_browsers_that_come_through_us_is_an_error(
    engines: Engines,
) -> None:
    engines.comfy.fail("*", refuse_pages)

    finding = comfy(engines.comfy.url)

    assert (finding.status, "403 to a browser" in finding.found) == ("error", True)
    assert "`127.0.0.1:8189`" in str(finding.remedy)
    assert comfy(engines.comfy.url, None).status == "error"


def test_the_real_rule_of_comfyui_lets_a_browser_through_us(engines: Engines) -> None:
    comfy(engines.comfy.url)

    page = [call for call in engines.record.calls("GET /system_stats") if call.status == 200][-1]
    assert {("Host", "127.0.0.1:8189"), ("Origin", "http://127.0.0.1:8189")} <= set(page.headers)


def certified() -> ssl.SSLContext:
    """The TLS of a server with the certificate of the tests."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    return context


def test_a_certificate_that_is_not_trusted_is_an_error_and_a_trusted_one_is_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with server(document('{"version": "0.12.0"}'), certified()) as port:
        url = f"https://localhost:{port}"
        finding = ollama(url)
        assert (finding.status, "its certificate is refused: self-signed" in finding.found) == (
            "error",
            True,
        )
        assert "`SSL_CERT_FILE`" in str(finding.remedy)

        monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "cert.pem"))
        assert ollama(url) == Finding("ollama", "ok", f"{url} is Ollama 0.12.0")


def test_tls_that_fails_otherwise_is_an_error_with_its_reason() -> None:
    without_certificate = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with server(document(""), without_certificate) as port:
        finding = ollama(f"https://localhost:{port}")

    assert (finding.status, "TLS fails: " in finding.found) == ("error", True)
    assert "HANDSHAKE_FAILURE" in finding.found


def test_an_address_that_the_kernel_refuses_is_an_error_with_its_reason() -> None:
    finding = ollama("http://255.255.255.255:1")  # broadcast, which no TCP can reach

    assert finding.status == "error"
    assert finding.found.removeprefix("http://255.255.255.255:1: ") in {
        "Permission denied",
        "Network is unreachable",
    }


def test_the_wrong_scheme_is_an_error_that_names_the_other_one(engines: Engines) -> None:
    finding = ollama(engines.ollama.url.replace("http:", "https:"))
    assert (finding.status, "does not speak TLS" in finding.found) == ("error", True)
    assert "`http://`" in str(finding.remedy)

    with server(lambda _: None, certified()) as port:
        finding = ollama(f"http://127.0.0.1:{port}")
    assert (finding.status, "`https://`" in str(finding.remedy)) == ("error", True)

    with server(document("plain HTTP was sent to an HTTPS port", "400 Bad Request")) as port:
        finding = ollama(f"http://127.0.0.1:{port}")
    assert (finding.status, "`https://`" in str(finding.remedy)) == ("error", True)


def test_tls_is_not_advised_to_who_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "cert.pem"))
    with server(document("", "400 Bad Request"), certified()) as port:
        finding = ollama(f"https://localhost:{port}")

    assert "it answers 400" in finding.found
    assert "`https://`" not in str(finding.remedy)


def test_a_server_that_speaks_something_else_is_an_error() -> None:
    with server(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")) as port:
        finding = ollama(f"http://127.0.0.1:{port}")

    assert (finding.status, "does not speak HTTP" in finding.found) == ("error", True)


def test_no_proxy_of_the_environment_is_used(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    assert ollama(engines.ollama.url).status == "ok"
