"""A log line is one line, with its fields, in both forms."""

import json
import logging

from ocgpu.server.logs import JsonFormatter, TextFormatter


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.makeLogRecord(
        {"levelname": "INFO", "msg": message, "created": 1.5, "msecs": 500}
    )
    vars(made).update(fields)
    return made


def test_text_has_time_level_message_and_fields() -> None:
    line = TextFormatter().format(record("state: llm", before="idle", prompt_id=None))

    assert line == "1970-01-01T00:00:01.500Z info state: llm before=idle"


def test_text_of_others_cannot_forge_a_line() -> None:
    line = TextFormatter().format(record("x", path="/a\n2026 error \x1b[2J"))

    assert line.endswith(r"path=/a\n2026 error \x1b[2J")
    assert "\n" not in line


def test_json_is_one_document_a_line() -> None:
    line = JsonFormatter().format(record("image job: done", prompt_id="a\nb", seconds=1.25))

    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:01.500Z",
        "level": "info",
        "message": "image job: done",
        "prompt_id": "a\nb",
        "seconds": 1.25,
    }
