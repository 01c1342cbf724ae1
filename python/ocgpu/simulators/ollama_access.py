"""Who may ask an Ollama that is bound to loopback: its rules for Host and Origin."""

import ipaddress
import socket
from urllib.parse import urlsplit

__all__ = ["host_allowed", "origin_allowed"]

LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
LOCAL_ORIGIN_HOSTS = ("localhost", "127.0.0.1", "0.0.0.0")  # noqa: S104 - compared, never bound
APP_SCHEMES = ("app", "file", "tauri", "vscode-webview", "vscode-file")


def host_allowed(header: str) -> bool:
    """Whether `header`, a Host, names this machine or a private address."""
    host = (urlsplit(f"//{header}").hostname or "").lower()
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        own = socket.gethostname().lower()
        return host in {"", "localhost", own} or host.endswith(LOCAL_SUFFIXES)
    return address.is_loopback or address.is_private or address.is_unspecified


def origin_allowed(origin: str, host: str, extra: tuple[str, ...]) -> bool:
    """Whether a page of `origin` may ask: a local one, the same host, an app, or in `extra`."""
    if origin in extra or "*" in extra or origin in {f"http://{host}", f"https://{host}"}:
        return True
    parts = urlsplit(origin)
    if parts.scheme in APP_SCHEMES:
        return True
    return parts.scheme in {"http", "https"} and parts.hostname in LOCAL_ORIGIN_HOSTS
