"""One HTTP request of our own, by the standard library: no proxy, no redirect, bounded in time."""

import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from ocgpu.server.relay.address import Address

__all__ = ["Answer", "AskError", "ask"]

_SECONDS: Final = 3.0
_BODY_MAX_BYTES: Final = 64 * 1024


class Answer(NamedTuple):
    """What came back.

    Attributes:
        location: The header `Location`, "" without one.
        body: Its first 64 KiB.
    """

    status: int
    location: str
    body: bytes

    def document(self) -> dict[str, Any]:
        """Read the body as a JSON object; empty where it is none."""
        try:
            document = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}


class AskError(Exception):
    """There was no answer.

    Attributes:
        found: What happened.
        remedy: What to do about it.
        refused: Whether nobody listens there.
    """

    def __init__(self, found: str, remedy: str, *, refused: bool = False) -> None:
        super().__init__(found)
        self.found = found
        self.remedy = remedy
        self.refused = refused


def ask(address: Address, path: str, headers: Mapping[str, str] | None = None) -> Answer:
    """GET `path` of an upstream, with its login where the URL has one.

    Args:
        address: Where.
        path: Behind the URL's own path.
        headers: Over ours; a `Host` takes the place of the upstream's.

    Raises:
        AskError: There was no answer within 3 seconds, or it was no HTTP.
    """
    sent = {"Host": address.authority.decode(), "Accept": "application/json"}
    if address.authorization is not None:
        sent["Authorization"] = address.authorization.decode()
    target = address.prefix.decode() + path
    try:
        with _connected(address) as connection:
            return _exchange(connection, target, sent | dict(headers or {}))
    except ssl.SSLError as problem:
        raise AskError(*_no_tls(problem)) from None
    except UnicodeError:  # of a host with a label that no name may have
        raise AskError(*_no_answer(socket.gaierror())) from None
    except OSError as problem:
        refused = isinstance(problem, ConnectionRefusedError)
        raise AskError(*_no_answer(problem), refused=refused) from None
    except http.client.HTTPException as problem:
        found = f"does not speak HTTP: {type(problem).__name__}"
        raise AskError(found, "see what listens there; use `https://` if it wants TLS") from None


def _exchange(
    connection: http.client.HTTPConnection, target: str, headers: Mapping[str, str]
) -> Answer:
    connection.putrequest("GET", target, skip_host=True, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    body = response.read(_BODY_MAX_BYTES)
    return Answer(response.status, response.getheader("Location", ""), body)


@contextlib.contextmanager
def _connected(address: Address) -> Iterator[http.client.HTTPConnection]:
    kind = http.client.HTTPSConnection if address.secure else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=_SECONDS)
    late = threading.Event()
    # The time-out of a socket is one of each read: an upstream that drips bytes would keep us.
    watchdog = threading.Timer(_SECONDS, _cut, [connection, late])
    watchdog.daemon = True
    try:
        connection.connect()
        watchdog.start()
        yield connection
    except (OSError, http.client.HTTPException):
        if not late.is_set():
            raise
    finally:
        watchdog.cancel()
        connection.close()
    if late.is_set():
        raise TimeoutError


def _cut(connection: http.client.HTTPConnection, late: threading.Event) -> None:
    late.set()
    with contextlib.suppress(OSError, AttributeError):  # it ended in this moment
        connection.sock.shutdown(socket.SHUT_RDWR)


def _no_tls(problem: ssl.SSLError) -> tuple[str, str]:
    if isinstance(problem, ssl.SSLCertVerificationError):
        found = f"its certificate is refused: {problem.verify_message}"
        return found, "use a name that it is made for; name its authority in `SSL_CERT_FILE`"
    if problem.reason in {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"}:
        return "does not speak TLS", "use `http://` in its URL"
    return f"TLS fails: {problem.reason}", "see its TLS settings"


def _no_answer(problem: OSError) -> tuple[str, str]:
    if isinstance(problem, socket.gaierror):
        return "its name is not known", "correct the host in its URL, or see DNS"
    if isinstance(problem, TimeoutError):
        found = f"no answer within {_SECONDS:g} s"
        return found, "see whether it hangs, or a firewall drops packets"
    if isinstance(problem, ConnectionRefusedError):
        return "refuses connections", "start it, or correct the port in its URL"
    if isinstance(problem, ConnectionResetError):
        found = "closes the connection without an answer"
        return found, "see its log; use `https://` if it wants TLS"
    return f"{problem.strerror}", "see that it runs and can be reached from here"
