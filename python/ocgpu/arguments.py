"""Arguments of the public classes whose type alone may be wrong: refused by name, as values are."""

from ocgpu.errors import ConfigError

__all__ = ["number", "text"]


def number(name: str, value: object, legal: str) -> float:
    """Take anything that is a number; a text that looks like one, and a truth value, are none.

    Raises:
        ConfigError: It is no number.
    """
    if not isinstance(value, str | bytes | bytearray | bool):
        try:
            return float(value)  # type: ignore[arg-type]  # whatever says how it is one
        except (TypeError, ValueError, OverflowError):
            pass
    raise ConfigError(f"invalid `{name}`: {value!r}; use {legal}")


def text(name: str, value: object, legal: str) -> str:
    """Take a text.

    Raises:
        ConfigError: It is none, or has halves of letters, as names of files have that are no UTF-8.
    """
    if isinstance(value, str) and not _has_surrogates(value):
        return value
    raise ConfigError(f"invalid `{name}`: {value!r}; use {legal}")


def _has_surrogates(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return True
    return False
