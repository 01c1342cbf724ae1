"""How many descriptors the process may have: a client takes one, a relayed request two."""

import logging
import sys
from typing import Final

if sys.platform != "win32":
    import resource

__all__ = ["raise_limit"]

logger: Final = logging.getLogger("ocgpu.server")


def raise_limit() -> None:
    """Raise our limit as far as we may.

    The soft limit is 1,024 for the sake of programs that use select(2), which we do not.
    """
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        # macOS says "unlimited" and does not mean it.
        hard = soft
    logger.debug("limit of descriptors", extra={"before": soft, "limit": hard})
