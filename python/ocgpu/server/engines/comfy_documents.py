"""What ComfyUI's documents say about its jobs, read without their graphs.

A queue and a history repeat the whole graph of every job, pictures in it included, so only the few
fields that count are made into objects. A document that is not of ComfyUI's form gives None: then
it tells nothing, which is not the same as an empty queue.
"""

import contextlib
import zlib
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from ocgpu.server.relay.asgi import header
from ocgpu.server.relay.control import Reply, json_object

__all__ = [
    "JobResult",
    "Queue",
    "read_history",
    "read_jobs",
    "read_prompt_id",
    "read_queue",
]

T = TypeVar("T")

# An answer to `/prompt` is a few hundred bytes; what inflates beyond this is none.
_ANSWER_MAX: Final = 1 << 20
# zlib and gzip, told apart by their head; then deflate without a head, which some servers send.
_WINDOWS: Final = (47, -15)


class JobResult(StrEnum):
    """How an image job ended."""

    DONE = "done"
    ERROR = "error"
    INTERRUPTED = "interrupted"
    LOST = "lost"
    TIMEOUT = "timeout"


class Queue(NamedTuple):
    """Ids of jobs that run and that wait."""

    running: list[str]
    pending: list[str]

    @property
    def ids(self) -> list[str]:
        """All of them, those that run first."""
        return [*self.running, *self.pending]


class _Queue(msgspec.Struct):
    # Items are [number, id, graph, …].
    queue_running: list[list[msgspec.Raw]]
    queue_pending: list[list[msgspec.Raw]]


class _Job(msgspec.Struct):
    id: str
    status: str


class _Page(msgspec.Struct):
    has_more: bool = False


class _Jobs(msgspec.Struct):
    jobs: list[_Job]
    pagination: _Page = msgspec.field(default_factory=_Page)


class _Entry(msgspec.Struct):
    # Versions of 2023 write no status.
    status: Any = None


_QUEUE: Final = msgspec.json.Decoder(_Queue)
_JOBS: Final = msgspec.json.Decoder(_Jobs)
_HISTORY: Final = msgspec.json.Decoder(dict[str, _Entry])


def read_queue(body: bytes) -> Queue | None:
    """Read `/queue`."""
    document = _decoded(_QUEUE, body)
    if document is None:
        return None
    items = (*document.queue_running, *document.queue_pending)
    if any(len(item) < 2 for item in items):
        return None
    return Queue(
        [_id(item[1]) for item in document.queue_running],
        [_id(item[1]) for item in document.queue_pending],
    )


def read_jobs(body: bytes) -> Queue | None:
    """Read `/api/jobs`; None also when it is not the whole list."""
    document = _decoded(_JOBS, body)
    if document is None or document.pagination.has_more:
        return None
    return Queue(
        [job.id for job in document.jobs if job.status == "in_progress"],
        [job.id for job in document.jobs if job.status == "pending"],
    )


def read_history(body: bytes) -> dict[str, JobResult] | None:
    """Read `/history` or a part of it: how each job in it ended."""
    document = _decoded(_HISTORY, body)
    if document is None:
        return None
    return {prompt_id: _result(entry.status) for prompt_id, entry in document.items()}


def read_prompt_id(reply: Reply) -> str | None:
    """Give the id of the job that an answer to `/prompt` announces; None for none."""
    if reply.status != 200:
        return None
    low = [(name.lower(), value) for name, value in reply.headers]
    body = reply.body
    if (header(low, b"content-encoding") or b"identity").lower() in (b"gzip", b"deflate"):
        body = _inflated(body)
    prompt_id = (json_object(body) or {}).get("prompt_id")
    if isinstance(prompt_id, int) and not isinstance(prompt_id, bool):
        return str(prompt_id)
    return prompt_id if isinstance(prompt_id, str) and prompt_id else None


def _inflated(body: bytes) -> bytes:
    for window in _WINDOWS:
        with contextlib.suppress(zlib.error):
            return zlib.decompressobj(window).decompress(body, _ANSWER_MAX)
    return b""


def _decoded(decoder: "msgspec.json.Decoder[T]", body: bytes) -> T | None:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _id(raw: msgspec.Raw) -> str:
    return str(msgspec.json.decode(raw))


def _result(status: object) -> JobResult:
    if not isinstance(status, dict) or status.get("completed") is True:
        return JobResult.DONE
    if status.get("status_str") != "error":
        return JobResult.DONE
    messages = status.get("messages")
    interrupted = isinstance(messages, list) and any(
        isinstance(message, list) and message[:1] == ["execution_interrupted"]
        for message in messages
    )
    return JobResult.INTERRUPTED if interrupted else JobResult.ERROR
