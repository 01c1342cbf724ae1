"""Nothing that a client or an engine keeps secret stands in the log, whatever goes wrong."""

import contextlib
import http.client
import socket
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.processes import Processes
from tests.server.client import call
from tests.server.recorder import Recorder
from tests.server.served import COMMAND, Served
from tests.server.wire import Asked

MARK = "kEepThis7Quiet"
FORMS = (MARK.lower(), b64encode(MARK.encode()).decode().rstrip("=").lower(), MARK.encode().hex())
SECRET = MARK.encode()
TOKEN = f"admin-{MARK}"
HEADERS = {
    "Authorization": f"Bearer {MARK}",
    "Cookie": f"session={MARK}",
    "Proxy-Authorization": f"Basic {MARK}",
    "X-Api-Key": MARK,
    "Referer": f"http://localhost/?key={MARK}",
    "User-Agent": MARK,
    "X-Forwarded-For": MARK,
    "X-Forwarded-Host": MARK,
    "Sec-WebSocket-Protocol": MARK,
    "Forwarded": f"for={MARK}",
}
BODY = {
    "model": "m",
    "prompt": {"1": {"inputs": {"text": MARK}}},
    "messages": [{"role": "user", "content": MARK}],
    "extra_data": {"api_key_comfy_org": MARK},
    "client_id": MARK,
}


def answer(body: bytes, status: bytes = b"200 OK", header: bytes = b"X-Own: " + SECRET) -> bytes:
    lines = [b"HTTP/1.1 " + status, header, b"Set-Cookie: " + SECRET]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body)]) + b"\r\n\r\n" + body


# What the engines may say to anything, one after the other.
SAID = [
    answer(SECRET),
    answer(b'{"%s":"%s"}' % (SECRET, SECRET)),
    answer(b'{"models":"%s","queue_running":"%s","version":7}' % (SECRET, SECRET)),
    answer(b'{"error":"%s"}' % SECRET, b"500 " + SECRET),
    answer(b'{"error":"%s"}' % SECRET, b"401 " + SECRET),
    answer(b"{}", b"999 " + SECRET),
    answer(b"{}", b"099 " + SECRET),
    answer(b"{}", header=b"X-Own: %s\0" % SECRET),
    answer(b"{}", header=b"%s (x): a" % SECRET),
    answer(b"{}", header=b"Content-Length: " + SECRET),
    answer(b"{}", header=b"Transfer-Encoding: " + SECRET),
    answer(SECRET * 10)[:-20],
    SECRET + b"\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + SECRET,
    b"",
]
RUNNING = answer(b'{"queue_running":[[0,"an-id",{},{},[]]],"queue_pending":[]}')
MALFORMED = [
    b"GET /?%b HTTP/1.1\r\nHost: %b\r\nHost: x\r\n\r\n" % (SECRET, SECRET),
    b"GET /?%b HTTP/9.9\r\nHost: x\r\n\r\n" % SECRET,
    b"CONNECT %b:443 HTTP/1.1\r\nHost: x\r\n\r\n" % SECRET,
    b"POST /api/chat HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: %b, chunked\r\n\r\n" % SECRET,
    b"POST /api/chat HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%b" % SECRET,
    b"POST /api/chat HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n%b" % SECRET,
    b"GET /ws?%b HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Protocol: %b\r\nCookie: %b\r\n\r\n" % (SECRET, SECRET, SECRET),
]
CALLS = (
    ("GET", "/x"),
    ("GET", "/healthz"),
    ("GET", "/gpu/peers"),
    ("GET", "/props"),
    ("GET", "/nothing"),
    ("POST", "/api/chat"),
    ("POST", "/api/generate"),
    ("POST", "/prompt"),
    ("POST", "/gpulock/release"),
    ("POST", "/gpulock/unload"),
)


class Tongue:
    """What the engines say: the next of `SAID`, or that a job is running."""

    def __init__(self) -> None:
        self.running = False
        self._next = 0

    def __call__(self, asked: Asked) -> bytes:
        if self.running and b" /queue " in asked.line:
            return RUNNING
        if self.running and b"/prompt" in asked.line:
            return answer(b'{"prompt_id":"an-id"}')
        self._next += 1
        return SAID[self._next % len(SAID)]


@pytest.fixture
def tongue() -> Tongue:
    return Tongue()


@pytest.fixture
def engine(tongue: Tongue) -> Iterator[Recorder]:
    with Recorder(tongue, keep=False) as started:
        yield started


@pytest.fixture
def start(engine: Recorder, processes: Processes, tmp_path: Path) -> Callable[..., Served]:
    """Starts a real serve before engines that talk in secrets."""

    def begin(**settings: str) -> Served:
        environ = {
            **engine.environ(),
            "ADMIN_TOKEN": TOKEN,
            "LOG_LEVEL": "debug",
            "JOB_TIMEOUT": "100ms",
            "LLM_WAIT_TIMEOUT": "200ms",
            "MAX_WAITING_BYTES": "64KiB",
            **settings,
        }
        log = tmp_path / "serve.log"
        return Served(processes.start(COMMAND, log=log, environ=environ), log)

    return begin


def assert_quiet(text: str) -> None:
    low = text.lower()
    for form in FORMS:
        at = low.find(form)
        assert at < 0, text[max(0, at - 300) : at + 60]


def send_raw(url: str, request: bytes) -> None:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as client:
        client.sendall(request)
        client.settimeout(0.05)
        try:
            client.recv(65_536)
        except OSError:
            return


def send(method: str, url: str, body: object = None, headers: dict[str, str] = HEADERS) -> None:
    """Send a request; whatever is answered."""
    with contextlib.suppress(http.client.HTTPException, ConnectionError):
        call(method, f"{url}?api_key={MARK}", body, headers)


def say_it_all(served: Served) -> None:
    """Send every request with secrets everywhere to every listener."""
    for url in (served.ollama, served.comfy, served.admin):
        for method, path in CALLS:
            body = BODY if method == "POST" else None
            send(method, url + path, body)
            send(method, url + path, body, {**HEADERS, "Host": MARK})
        send("POST", f"{url}/api/chat", SECRET * 10_000)
        for request in MALFORMED:
            send_raw(url, request)


@pytest.mark.timeout(120)
def test_no_secret_of_client_or_engine_reaches_the_log(
    start: Callable[..., Served], tongue: Tongue
) -> None:
    served = start()
    for _ in range(3):
        say_it_all(served)
    tongue.running = True
    send("POST", f"{served.comfy}/prompt", BODY)
    send("POST", f"{served.ollama}/api/chat", BODY)
    send("POST", f"{served.ollama}/api/chat", SECRET * 10_000)
    send("POST", f"{served.admin}/gpulock/release", BODY, {"Authorization": f"Bearer {TOKEN}"})
    tongue.running = False
    served.stop()

    text = served.log.read_text()
    assert "refused: " in text
    assert "lock reset by force" in text
    assert "image job" in text
    assert_quiet(text)


@pytest.mark.parametrize(
    "environ",
    [
        {"JOB_TIMEOUT": "x", "ADMIN_TOKEN": TOKEN},
        {"ADMIN_TOKEN": f"{TOKEN} with a space"},
        {"JOB_TIMEOUT": "x", "OLLAMA_URL": f"http://user:{MARK}@127.0.0.1:1"},
        {"JOB_TIMEOUT": "x", "OLLAMA_URL": f"http://user:{MARK}/more@127.0.0.1:1"},
        {"JOB_TIMEOUT": "x", "COMFY_URL": f"http:user:{MARK}@127.0.0.1:1"},
        {"JOB_TIMEOUT": "x", "COMFY_URL": f"htp://user:{MARK}@127.0.0.1:1/?q"},
        {"LISTEN_OLLAMA": "127.0.0.1:7", "OLLAMA_URL": f"http://user:{MARK}@127.0.0.1:7"},
    ],
)
def test_a_refused_setting_keeps_its_secret(
    processes: Processes, tmp_path: Path, environ: dict[str, str]
) -> None:
    log = tmp_path / "serve.log"
    process = processes.start(COMMAND, log=log, environ=environ)

    assert process.wait(20) != 0
    assert "invalid `" in log.read_text()
    assert_quiet(log.read_text())
