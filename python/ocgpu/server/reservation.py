"""What the bodies of locked requests take of memory, each from its first byte to its end."""

from typing import TYPE_CHECKING

from ocgpu.server.arbiter import Kind
from ocgpu.server.refusal import RefusedError

if TYPE_CHECKING:
    from ocgpu.server.admission import Admission

__all__ = ["BodyReservation"]


class BodyReservation:
    """Memory that the body of one locked request takes out of `MAX_WAITING_BYTES`."""

    __slots__ = ("_admission", "_kind", "_size")

    def __init__(self, admission: "Admission", kind: Kind) -> None:
        self._admission = admission
        self._kind = kind
        self._size = 0

    def check(self, size: int) -> None:
        """See whether `size` more bytes could be had now.

        Raises:
            RefusedError: All bodies together would be larger than allowed, or this one alone.
        """
        admission = self._admission
        if self._size + size > admission.max_waiting_bytes:
            limit = admission.max_waiting_bytes
            message = f"request body too large: over {limit} bytes; raise `MAX_WAITING_BYTES`"
            raise admission.refuse(
                self._kind, "body_too_large", message, status=413, retry_after=None
            )
        if admission.waiting_bytes + size > admission.max_waiting_bytes:
            message = "too many request bodies are waiting for the gpu"
            raise admission.refuse(self._kind, "body_memory", message)

    def grow(self, size: int) -> None:
        """Take `size` more bytes.

        Raises:
            RefusedError: As `check`.
        """
        self.check(size)
        self._admission.waiting_bytes += size
        self._size += size

    def too_slow(self) -> RefusedError:
        """Give the refusal of a body that does not arrive."""
        message = "the request body did not arrive in time"
        return self._admission.refuse(
            self._kind, "body_timeout", message, status=408, retry_after=None
        )

    def release(self) -> None:
        """Give all of it back. Twice is harmless."""
        self._admission.waiting_bytes -= self._size
        self._size = 0
