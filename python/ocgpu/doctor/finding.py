"""What a check found: a status, a sentence, and what to do about it."""

from typing import Final, Literal, NamedTuple

from ocgpu.text import printable

__all__ = ["Finding", "Status", "error", "ok", "split_message", "warning"]

_LENGTH_MAX: Final = 2000  # 16 peers with long names; not all that an upstream may say
Status = Literal["ok", "warning", "error"]


class Finding(NamedTuple):
    """One line of `ocgpu doctor`.

    Attributes:
        check: What was looked at.
        status: How it is.
        found: What was found, fit to be shown.
        remedy: What to do, fit to be shown; None where nothing is to be done.
    """

    check: str
    status: Status
    found: str
    remedy: str | None = None


def ok(check: str, found: str) -> Finding:
    """Say that nothing is wrong. Names and reasons in `found` may be as others wrote them."""
    return Finding(check, "ok", _shown(found))


def warning(check: str, found: str, remedy: str) -> Finding:
    """Say that somebody may stumble over this; texts as for `ok`."""
    return Finding(check, "warning", _shown(found), _shown(remedy))


def error(check: str, found: str, remedy: str) -> Finding:
    """Say that something does not work, or not as it seems; texts as for `ok`."""
    return Finding(check, "error", _shown(found), _shown(remedy))


def _shown(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= _LENGTH_MAX else f"{shown[:_LENGTH_MAX]}…"


def split_message(message: str) -> tuple[str, str]:
    """Take a message of our errors apart: what is wrong, and what to do about it."""
    found, _, remedy = message.rpartition("; ")
    return (found, remedy) if found else (remedy, "see what the message says")
