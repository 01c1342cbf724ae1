"""A request that is answered with an error of ours instead of the card."""

from typing import Final

__all__ = ["RETRY_AFTER", "RefusedError"]

# Seconds that a refused client is told to wait. A card changes hands in seconds.
RETRY_AFTER: Final = 5


class RefusedError(Exception):
    """The request is answered with an error of ours.

    Attributes:
        reason: One word for programs: one of `metrics.REFUSALS`.
        message: What a person reads.
        retry_after: Seconds, for `Retry-After`; None where trying again would not help.
        status: The answer's status.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        retry_after: int | None = RETRY_AFTER,
        status: int = 503,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        self.status = status
