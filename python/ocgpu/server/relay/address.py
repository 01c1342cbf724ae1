"""Where an upstream is: its URL, taken apart once."""

import base64
from typing import NamedTuple, Self
from urllib.parse import unquote_to_bytes, urlsplit

__all__ = ["Address"]

_PORTS = {"http": 80, "https": 443}


class Address(NamedTuple):
    """An upstream's URL.

    Attributes:
        url: As people may read it: without its login, no trailing slash.
        secure: Whether it speaks TLS.
        host: Name or IP address, without brackets.
        port: Port.
        authority: Host and port as they stand in a `Host` header.
        prefix: Path in front of every target, as bytes of the wire; b"" for none.
        authorization: Value of `Authorization` for the URL's login; None without one.
    """

    url: str
    secure: bool
    host: str
    port: int
    authority: bytes
    prefix: bytes
    authorization: bytes | None

    @classmethod
    def parse(cls, url: str) -> Self:
        """Take apart a URL that the settings have checked: `scheme://[login@]host[:port][/path]`.

        Raises:
            ValueError: It is none.
        """
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ValueError(url)
        login, at, authority = parts.netloc.rpartition("@")
        path = parts.path.rstrip("/")
        return cls(
            url=f"{parts.scheme}://{authority}{path}",
            secure=parts.scheme == "https",
            host=parts.hostname,
            port=parts.port or _PORTS[parts.scheme],
            authority=authority.encode("ascii"),
            prefix=path.encode("ascii"),
            authorization=_basic(login) if at else None,
        )


def _basic(login: str) -> bytes:
    """Give the header value of a `user:password` whose special bytes are percent-encoded.

    RFC 7617.
    """
    user, _, password = login.partition(":")
    return b"Basic " + base64.b64encode(unquote_to_bytes(user) + b":" + unquote_to_bytes(password))
