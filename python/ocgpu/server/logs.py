"""Log lines of `ocgpu serve`: text for a person, JSON for a machine, fields either way.

Bodies, tokens and header values are never logged: a prompt is private, and a ComfyUI prompt may
carry API keys.
"""

import json
import logging
import sys
import time
from typing import Any, Final, Literal

__all__ = ["JsonFormatter", "TextFormatter", "configure"]

# What every record has; anything else was given as a field.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(level: str, form: Literal["text", "json"]) -> None:
    """Send the log of `ocgpu` to standard error.

    Args:
        level: Least level, in lower case.
        form: `json` for one document a line.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logger = logging.getLogger("ocgpu")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {
        key: value
        for key, value in vars(record).items()
        if key not in _STANDARD and value is not None
    }


def _time(record: logging.LogRecord) -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{stamp}.{int(record.msecs):03d}Z"


class TextFormatter(logging.Formatter):
    """`time level message key=value …`; what could forge a second line is escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one line."""
        parts = [_time(record), record.levelname.lower(), _plain(record.getMessage())]
        parts += [f"{key}={_plain(str(value))}" for key, value in _fields(record).items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON document a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one line."""
        document = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


def _plain(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]
