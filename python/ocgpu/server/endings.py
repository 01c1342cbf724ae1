"""What became of relayed requests: the failed ones are logged and counted, the others are not."""

import logging
from typing import Final

from ocgpu.server.metrics import Metrics
from ocgpu.server.relay.asgi import Scope
from ocgpu.server.relay.http import Ending

__all__ = ["Endings"]

logger: Final = logging.getLogger("ocgpu.server")

_FAILED: Final = frozenset((Ending.REFUSED, Ending.BROKEN))


class Endings:
    """Notes how the requests to one engine ended.

    Args:
        engine: Its name.
        metrics: Counts those that the engine failed.
    """

    def __init__(self, engine: str, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics

    def note(self, scope: Scope, ending: Ending) -> None:
        """Note one; only its path is named, for a query may hold keys."""
        if ending not in _FAILED:
            return
        self._metrics.engine_failures[self._engine, ending.name.lower()] += 1
        fields = {"engine": self._engine, "method": scope["method"], "path": scope["path"]}
        logger.warning("request failed: %s", ending.value, extra=fields)
