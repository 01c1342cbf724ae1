"""Versions of what runs here, and limits of the process."""

import platform
from collections.abc import Callable
from importlib import metadata
from typing import Final

import ocgpu
from ocgpu.doctor.finding import Finding, error, ok, warning

__all__ = ["check_open_files", "check_versions", "open_files_limit"]

_VERSIONS: Final = "versions"
_LIMITS: Final = "open files"
_NEEDED: Final = ("granian", "litestar", "httptools", "aiohttp", "msgspec", "rich", "nvidia-ml-py")
_FEW: Final = 256
_PER_REQUEST: Final = 2  # descriptors: one to the client, one to the upstream
_OWN: Final = 64  # listeners, logs, the segment, lease files, the loop's own


def check_versions(version: Callable[[str], str] = metadata.version) -> list[Finding]:
    """Name the versions of ocgpu, its compiled core, and what serve needs.

    Args:
        version: Version of an installed distribution.
    """
    system = f"Python {platform.python_version()}, {platform.system()} {platform.release()}"
    try:
        package = version("ocgpu")
    except metadata.PackageNotFoundError:
        package = None
    found: dict[str, str] = {}
    missing = []
    for name in _NEEDED:
        try:
            found[name] = version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        text = f"not installed: {', '.join(missing)}"
        return [error(_VERSIONS, text, f"`pip install {' '.join(missing)}`")]
    if package is not None and package != ocgpu.__version__:
        text = f"ocgpu {package} is installed, its compiled core is {ocgpu.__version__}"
        return [warning(_VERSIONS, text, "install ocgpu anew, or build it with `make dev`")]
    others = ", ".join(f"{name} {text}" for name, text in found.items())
    return [ok(_VERSIONS, f"ocgpu {ocgpu.__version__}, {system}, {others}")]


def open_files_limit() -> int | None:
    """How many descriptors a serve started from here may have, which raises its own limit.

    None where that is not limited.
    """
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


def check_open_files(limit: int | None, max_queue: int) -> list[Finding]:
    """Judge the limit of descriptors against the requests that serve may hold.

    Args:
        limit: The hard one of this process, and so of a serve started here; None for none.
        max_queue: `MAX_QUEUE`, requests that may wait.
    """
    if limit is None:
        return [ok(_LIMITS, "no limit")]
    wanted = max_queue + _OWN * _PER_REQUEST
    remedy = f"`ulimit -Hn {max(wanted, 4096)}`, or `LimitNOFILE=` of its systemd unit"
    if limit < _FEW:
        return [error(_LIMITS, f"at most {limit}: serve needs {_PER_REQUEST} a request", remedy)]
    if limit < wanted:
        found = f"at most {limit}, though {max_queue} requests may wait (MAX_QUEUE)"
        return [warning(_LIMITS, found, f"{remedy}; or lower `MAX_QUEUE`")]
    return [ok(_LIMITS, f"at most {limit}")]
