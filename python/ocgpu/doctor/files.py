"""The segment and the lease files of one key: may we use them, and do all mean the same ones?"""

import hashlib
import os
import pwd
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple

from ocgpu.doctor.finding import Finding, error, ok, warning
from ocgpu.doctor.processes import Identity, Use, Uses
from ocgpu.lease import Lease

__all__ = ["Files", "check_lease_files", "check_segment", "check_uses", "files_of"]

_SEGMENT: Final = "segment"
_LEASE: Final = "lease files"
_USES: Final = "files in use"
_DELETE: Final = "delete it while no program uses it"
_USER_SHARE: Final = 0o600
_MACHINE_SHARE: Final = 0o666


class Files(NamedTuple):
    """Paths of one key.

    Attributes:
        segment: The segment under the name that Cosmopolitan's `shm_open` gives it, ours too.
        plain: The same file under the name of glibc's `shm_open`.
        lease: The file whose lock is the lease.
        queue: The file beside it, with the order of those who wait.
    """

    segment: Path
    plain: Path
    lease: Path
    queue: Path


def files_of(key: str) -> Files:
    """Name the files of a key, in the directory of `OCGPU_DIR`; none of them is opened."""
    lease = Lease(key).path
    shared = f"opencoti-gpu-{key}"
    # What Cosmopolitan's libc/calls/shm_path_np.c makes of the name; a slash belongs to it.
    hashed = hashlib.blake2b(f"/{shared}".encode(), digest_size=32).hexdigest()
    return Files(
        segment=lease.with_name(f"{hashed}.sem"),
        plain=lease.with_name(shared),
        lease=lease,
        queue=lease.with_name(f"{lease.name}.q"),
    )


def check_segment(files: Files, *, private: bool) -> list[Finding]:
    """See that this user can join, and that both names are one file.

    Args:
        files: What to look at.
        private: Whether this user set `OCGPU_SHARE=user`.
    """
    named = [path for path in (files.segment, files.plain) if _is_there(path)]
    if not named:
        return [ok(_SEGMENT, f"none yet; the first peer makes `{files.segment}`")]
    findings = [_unusable(_SEGMENT, path, private=private) for path in named]
    bad = [finding for finding in findings if finding is not None]
    if bad:
        return bad[:1]
    first = named[0].lstat()
    if len(named) == 2 and first.st_ino != named[1].lstat().st_ino:
        found = f"`{files.segment}` and `{files.plain}` are two files: peers meet in either"
        return [error(_SEGMENT, found, f"delete `{files.plain}`; it is linked again by itself")]
    return [ok(_SEGMENT, f"`{named[0]}`, {_described(first)}")]


def check_lease_files(files: Files, *, private: bool) -> list[Finding]:
    """See that this user can take the lease and queue for it; arguments as of `check_segment`."""
    named = [path for path in (files.lease, files.queue) if _is_there(path)]
    if not named:
        return [ok(_LEASE, f"none yet; the first lease makes `{files.lease}`")]
    findings = [_unusable(_LEASE, path, private=private) for path in named]
    bad = [finding for finding in findings if finding is not None]
    return bad[:1] or [ok(_LEASE, f"`{named[0]}`, {_described(named[0].lstat())}")]


def _is_there(path: Path) -> bool:
    """Whether anything has this name, a symbolic link that leads nowhere too."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def _unusable(check: str, path: Path, *, private: bool) -> Finding | None:
    """Say what is wrong with one file; None when nothing is."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return error(check, f"`{path}` is a symbolic link, which is not followed", "remove it")
    if not stat.S_ISREG(found.st_mode):
        return error(check, f"`{path}` is no regular file", "remove it")
    described = f"`{path}` is {_described(found)}"
    if not os.access(path, os.R_OK | os.W_OK, effective_ids=True):
        return error(check, f"{described}: no rights for uid {os.geteuid()}", _rights(path, found))
    mode = stat.S_IMODE(found.st_mode)
    if not private and mode & _MACHINE_SHARE != _MACHINE_SHARE:
        return warning(check, f"{described}: other users cannot use it", _rights(path, found))
    if private and mode & ~_USER_SHARE:
        text = f"{described}: others can use it, though OCGPU_SHARE is `user`"
        return warning(check, text, f"`chmod 600 {path}`, or unset `OCGPU_SHARE`")
    return None


def _rights(path: Path, found: os.stat_result) -> str:
    owner = _user(found.st_uid)
    return (
        f"as {owner}: unset `OCGPU_SHARE` and `chmod 666 {path}`; or {_DELETE}; "
        "or set `OCGPU_DIR` to a directory of your own"
    )


def _described(found: os.stat_result) -> str:
    return f"{found.st_size} bytes, mode {stat.S_IMODE(found.st_mode):04o} of {_user(found.st_uid)}"


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def check_uses(files: Files, uses: Uses, locked: Collection[Identity]) -> list[Finding]:
    """Compare what other processes have open with what the paths name here.

    Args:
        files: What to look at.
        uses: What processes have open under these names.
        locked: Files that carry a flock(2).
    """
    current = {path: _identity(path) for path in files}
    by_name = {path.name: path for path in files}
    findings: list[Finding] = []
    for use in uses.seen:
        path = by_name[use.path.name]
        # A lease object keeps its files open; without a lock on them an old file does no harm.
        idle = path in {files.lease, files.queue} and use.identity not in locked
        if use.identity != current[path] and not idle:
            findings.append(_other_file(use, path, current[path]))
    count = len({use.pid for use in uses.seen})
    found = f"other processes that use these files: {count}"
    if uses.hidden:
        found += f"; that may not be looked at: {uses.hidden}"
        found += " (root may)" if os.geteuid() else ""
    return findings or [ok(_USES, found)]


def _identity(path: Path) -> Identity | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _other_file(use: Use, path: Path, current: Identity | None) -> Finding:
    who = f"pid {use.pid} ({use.command})"
    if use.elsewhere:
        found = f"{who}, in a container or service with mounts of its own, has another `{use.path}`"
        remedy = (
            f"give it the directory `{path.parent}` of the machine: `--ipc=host` or "
            f"`-v {path.parent}:{path.parent}`"
        )
        return error(_USES, found, remedy)
    if use.path.parent != path.parent:
        found = f"{who} uses `{use.path}`, not `{path}`"
        return error(_USES, found, "set `OCGPU_DIR` to one directory for all programs")
    state = "was deleted" if current is None else "was replaced"
    remedy = (
        "look again: pacers join anew within 1 s; restart what stays, and keep cleaners out of "
        f"`{path.parent}` (`RemoveIPC=` of systemd-logind is one)"
    )
    return error(_USES, f"`{path}` {state} while {who} has it open", remedy)
