"""Does this process share the directory with the rest of the machine, or has it one of its own?"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ocgpu.doctor.finding import Finding, ok, warning
from ocgpu.doctor.mounts import Mount

__all__ = ["Surroundings", "check_container", "look_around"]

_CONTAINER: Final = "container"
_MARKERS: Final = ("/.dockerenv", "/run/.containerenv")
_VARIABLES: Final = ("KUBERNETES_SERVICE_HOST", "container")
_INITIAL_IPC: Final = 0xEFFFFFFF  # PROC_IPC_INIT_INO of linux/proc_ns.h, the same on every machine


class Surroundings(NamedTuple):
    """What tells a container from the machine itself.

    Attributes:
        evidence: Why this looks like a container; None when it does not.
        shared_with_init: Whether process 1 has the same directory; None where that cannot be seen.
        own_ipc: Whether this process has an IPC namespace of its own.
        mount: What the directory lies on; None where that is not known.
    """

    evidence: str | None
    shared_with_init: bool | None
    own_ipc: bool
    mount: Mount | None


def look_around(
    directory: Path,
    mount: Mount | None,
    environ: Mapping[str, str],
    init: Path = Path("/proc/1/root"),
    markers: Sequence[str] = _MARKERS,
) -> Surroundings:
    """Look at marker files, namespaces, and the directory as process 1 has it.

    Args:
        directory: Where segments and lease files lie.
        mount: What it lies on; None where that is not known.
        environ: The environment.
        init: The root directory of process 1.
        markers: Files that a container's runtime leaves in it.
    """
    own_ipc = _own_ipc(Path("/proc/self/ns/ipc"))
    return Surroundings(
        _evidence(environ, markers, own_ipc=own_ipc), _shared(directory, init), own_ipc, mount
    )


def _evidence(environ: Mapping[str, str], markers: Sequence[str], *, own_ipc: bool) -> str | None:
    for marker in markers:
        if Path(marker).exists():
            return f"`{marker}` exists"
    for name in _VARIABLES:
        if environ.get(name):
            return f"`{name}` is set"
    return "it has an IPC namespace of its own" if own_ipc else None


def _own_ipc(namespace: Path) -> bool:
    try:
        return namespace.stat().st_ino != _INITIAL_IPC
    except OSError:  # a kernel without such namespaces
        return False


def _shared(directory: Path, init: Path) -> bool | None:
    try:
        seen = Path(f"{init}{directory}").stat()
    except FileNotFoundError:
        return False
    except OSError:
        return None
    own = directory.stat()
    return (seen.st_dev, seen.st_ino) == (own.st_dev, own.st_ino)


def check_container(directory: Path, around: Surroundings, key: str | None) -> list[Finding]:
    """Judge whether programs outside can meet us in `directory`.

    Args:
        directory: Where segments and lease files lie.
        around: What was seen.
        key: Name of the GPU; None where there is none to share.
    """
    reason = _private(around)
    if reason is None:
        where = "no container" if around.evidence is None else f"a container ({around.evidence})"
        return [ok(_CONTAINER, f"{where}; `{directory}` is not seen to be private")]
    if key is None:
        return [ok(_CONTAINER, f"`{directory}` is private ({reason}), and no GPU is shared here")]
    found = f"`{directory}` is private ({reason}): programs elsewhere on this GPU are not met"
    remedy = (
        "start all containers on it with `--ipc=host`, or with one directory of the host: "
        f"`-v {directory}:{directory}`"
    )
    return [warning(_CONTAINER, found, remedy)]


def _private(around: Surroundings) -> str | None:
    if around.shared_with_init is False:
        return "process 1 has another one"
    if around.evidence is None or around.mount is None:
        return None
    if around.mount.kind == "overlay":
        return f"a layer of this container: {around.evidence}"
    # A runtime calls the memory that it makes for a container `shm`; the machine's is `tmpfs`.
    made_for_it = around.mount.source == "shm" or (
        around.own_ipc and around.mount.source != "tmpfs"
    )
    if around.mount.kind == "tmpfs" and made_for_it:
        return f"memory of this container: {around.evidence}"
    return None
