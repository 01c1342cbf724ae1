"""`ocgpu doctor` on the files of a key: rights, names, and who has other files than these."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ocgpu import Lease, Pacer
from ocgpu.doctor import files, processes
from ocgpu.doctor.files import Files, files_of
from ocgpu.doctor.finding import Finding
from ocgpu.doctor.processes import Use, Uses, find_uses, flocked
from tests.namespaces import in_namespaces
from tests.remote import remote
from tests.users import BECOME, OTHER_UID, root_only
from tests.waiting import wait_until

# Mounts a file system over the directory, then runs the rest of its arguments.
PRIVATE = ("sh", "-c", 'mount -t tmpfs none "$OCGPU_DIR" && exec "$@"', "sh")
MOVED = ("sh", "-c", 'mkdir -p "$OCGPU_DIR.2"; export OCGPU_DIR="$OCGPU_DIR.2"; exec "$@"', "sh")


def uses_of(paths: Files) -> list[Finding]:
    locks = Path("/proc/locks").read_text()
    return files.check_uses(paths, find_uses({path.name for path in paths}), flocked(locks))


def segment(paths: Files, *, private: bool = False) -> Finding:
    (finding,) = files.check_segment(paths, private=private)
    return finding


def lease_files(paths: Files, *, private: bool = False) -> Finding:
    (finding,) = files.check_lease_files(paths, private=private)
    return finding


@pytest.fixture
def paths(gpu_dir: Path, gpu_key: str) -> Files:
    found = files_of(gpu_key)
    assert found.lease.parent == gpu_dir
    return found


@contextmanager
def at_work() -> Iterator[None]:
    """A pacer and a lease of this process."""
    with Pacer(name="here") as pacer, Lease():
        assert pacer.enabled, pacer.reason
        yield


def test_the_names_are_those_that_pacers_and_leases_use(gpu_dir: Path, paths: Files) -> None:
    with at_work():
        assert sorted(gpu_dir.iterdir()) == sorted(paths)


def test_no_file_is_well_and_none_is_made(gpu_dir: Path, paths: Files) -> None:
    assert segment(paths).status == "ok"
    assert lease_files(paths).status == "ok"
    assert list(gpu_dir.iterdir()) == []


def test_files_of_a_pacer_and_a_lease_are_well(paths: Files) -> None:
    with at_work():
        assert segment(paths).status == "ok"
        assert "4096 bytes, mode 0666 of" in segment(paths).found
        assert lease_files(paths).status == "ok"


@pytest.mark.parametrize("private", [False, True])
def test_files_that_are_wider_or_narrower_than_was_asked_for_are_a_warning(
    paths: Files, *, private: bool
) -> None:
    with at_work():
        for path in (paths.segment, paths.lease):
            path.chmod(0o666 if private else 0o600)

        for finding in (segment(paths, private=private), lease_files(paths, private=private)):
            assert finding.status == "warning"
            assert "OCGPU_SHARE" in str(finding.remedy)
        for path in paths:
            path.chmod(0o600)
        assert segment(paths, private=True).status == "ok"
        assert lease_files(paths, private=True).status == "ok"


@root_only
def test_files_of_another_user_alone_are_an_error(shared_dir: Path, gpu_key: str) -> None:
    look = (
        "from ocgpu.doctor import files; paths = files.files_of({key!r})\n"
        "found = [f for check in (files.check_segment, files.check_lease_files)"
        " for f in check(paths, private=False)]"
    )
    with remote(environ={"OCGPU_SHARE": "user"}) as owner, remote() as other:
        owner.ask("import pwd; pacer = Pacer(); lease = Lease(); lease.acquire()")
        other.ask("from ocgpu.doctor import files")
        other.ask(BECOME)
        other.ask(look.format(key=gpu_key))

        for check, status, found, remedy in other.ask("found"):
            assert status == "error", check
            assert f"mode 0600 of root (uid 0): no rights for uid {OTHER_UID}" in found
            assert "unset `OCGPU_SHARE`" in remedy
    assert len(list(shared_dir.iterdir())) == 4


def test_two_files_under_the_two_names_are_an_error(paths: Files) -> None:
    with at_work():
        paths.plain.unlink()
        paths.plain.write_bytes(bytes(4096))
        paths.plain.chmod(0o666)

        assert segment(paths).status == "error"
        assert "two files" in segment(paths).found


def test_a_segment_that_has_one_of_its_names_yet_is_well(paths: Files) -> None:
    paths.plain.write_bytes(bytes(4096))
    paths.plain.chmod(0o666)

    assert segment(paths).status == "ok"
    assert str(paths.plain) in segment(paths).found


@pytest.mark.parametrize("what", ["link", "fifo"])
def test_something_else_in_the_place_of_a_file_is_an_error(paths: Files, what: str) -> None:
    for path in (paths.plain, paths.queue):
        if what == "link":
            path.symlink_to("nowhere")
        else:
            os.mkfifo(path)

    assert segment(paths) == Finding(
        "segment",
        "error",
        f"`{paths.plain}` is "
        + ("a symbolic link, which is not followed" if what == "link" else "no regular file"),
        "remove it",
    )
    assert lease_files(paths).status == "error"


def test_processes_that_use_the_same_files_are_counted(paths: Files) -> None:
    with at_work(), remote() as other:
        other.ask("pacer = Pacer(name='other')")

        (finding,) = uses_of(paths)

    assert finding.status == "ok"
    assert finding.found.startswith("other processes that use these files: 1")


def test_nobody_is_well(paths: Files) -> None:
    assert uses_of(paths)[0].found.startswith("other processes that use these files: 0")


def test_a_lease_that_is_held_on_a_deleted_file_is_an_error(paths: Files) -> None:
    with remote() as other:
        other.ask("lease = Lease(); lease.acquire()")
        paths.lease.unlink()

        found = uses_of(paths)
        assert [finding.status for finding in found] == ["error"]
        assert f"`{paths.lease}` was deleted while pid {other.pid} (" in found[0].found

        paths.lease.touch()
        assert "was replaced" in uses_of(paths)[0].found

        # It keeps its file open, and asks for the new one when it acquires again.
        other.ask("lease.release()")
        assert uses_of(paths)[0].status == "ok"


def test_a_segment_that_was_replaced_under_a_stopped_peer_is_an_error(paths: Files) -> None:
    with remote() as other:
        other.ask("pacer = Pacer(name='other')")
        with other.stopped():
            wait_until(lambda: processes.is_stopped(other.pid))
            paths.segment.unlink()
            paths.plain.unlink()

            findings = uses_of(paths)

            assert {finding.status for finding in findings} == {"error"}
            assert f"was deleted while pid {other.pid} (" in findings[0].found
        wait_until(lambda: uses_of(paths)[0].status == "ok")


def test_a_mapping_without_a_descriptor_is_seen(paths: Files) -> None:
    # Python's own mmap keeps a descriptor; the seed's C programs keep none.
    hold = (
        "import ctypes\n"
        "with Path({path!r}).open('r+b') as file:\n"
        "    ctypes.CDLL(None).mmap(None, 4096, 3, 1, file.fileno(), ctypes.c_long(0))"
    )
    paths.segment.write_bytes(bytes(4096))
    with remote() as seed:
        seed.ask(hold.format(path=str(paths.segment)))
        assert not any(paths.segment.name in fd for fd in seed.ask(DESCRIPTORS))
        assert uses_of(paths)[0].found.startswith("other processes that use these files: 1")

        paths.segment.unlink()

        assert uses_of(paths)[0].status == "error"


DESCRIPTORS = "[os.readlink(entry) for entry in Path('/proc/self/fd').iterdir() if entry.exists()]"


@pytest.mark.parametrize("prefix", [PRIVATE, MOVED], ids=["mount", "OCGPU_DIR"])
def test_a_peer_with_another_directory_is_an_error(paths: Files, prefix: tuple[str, ...]) -> None:
    spaces = in_namespaces("--mount") if prefix is PRIVATE else []
    with at_work(), remote([*spaces, *prefix]) as inside:
        inside.ask("pacer = Pacer(name='inside')")

        findings = uses_of(paths)

    assert [finding.status for finding in findings] == ["error"] * len(findings)
    said = f"{findings[0].found}; {findings[0].remedy}"
    assert ("`--ipc=host`" if spaces else "`OCGPU_DIR` to one directory") in said
    assert ("with mounts of its own" in said) == bool(spaces)


def test_a_peer_with_mounts_of_its_own_and_the_same_directory_is_well(paths: Files) -> None:
    with at_work(), remote(in_namespaces("--mount", "--pid")) as inside:
        inside.ask("pacer = Pacer(name='inside')")

        (use, *_) = find_uses({paths.segment.name}).seen
        assert use.elsewhere
        assert uses_of(paths)[0].status == "ok"


@root_only
def test_processes_that_may_not_be_looked_at_are_counted_and_said(
    shared_dir: Path, gpu_key: str
) -> None:
    look = (
        "from ocgpu.doctor import files, processes\n"
        f"paths = files.files_of({gpu_key!r})\n"
        "uses = processes.find_uses({path.name for path in paths})"
    )
    with remote() as owner, remote() as other:
        owner.ask("pacer = Pacer()")
        other.ask("from ocgpu.doctor import files, processes; import pwd")
        other.ask(BECOME)
        other.ask(look)

        assert other.ask("len(uses.seen)") == 0
        assert other.ask("uses.hidden") > 0
        (finding,) = other.ask("files.check_uses(paths, uses, set())")
    assert finding[1] == "ok"
    assert "; that may not be looked at: " in finding[2]
    assert finding[2].endswith(" (root may)")
    assert len(list(shared_dir.iterdir())) == 2


def test_a_command_name_cannot_forge_a_line(paths: Files) -> None:
    evil = Use(7, "a\nok  all is well\x1b[31m", paths.lease, (1, 1), elsewhere=True)

    (finding,) = files.check_uses(paths, Uses([evil], 0), {(1, 1)})

    assert finding.found.isprintable()
    assert "a\\nok" in finding.found


def test_files_with_a_flock_are_read_out_of_proc(tmp_path: Path) -> None:
    path = tmp_path / "locked"
    with path.open("w") as file:
        found = os.fstat(file.fileno())
        assert (found.st_dev, found.st_ino) not in flocked(Path("/proc/locks").read_text())
        fcntl.flock(file, fcntl.LOCK_SH)

        assert (found.st_dev, found.st_ino) in flocked(Path("/proc/locks").read_text())
    assert flocked("""1: OFDLCK ADVISORY  WRITE -1 fe:00:5 0 EOF
1: -> FLOCK  ADVISORY  WRITE 1 fe:00:6 0 EOF
2: FLOCK  ADVISORY  WRITE 1 <none>:0 0 EOF
3: FLOCK  ADVISORY  READ 1 fe:10:7 0 EOF
""") == {(os.makedev(0xFE, 0x10), 7)}


def test_a_stopped_process_is_told_from_one_that_runs() -> None:
    with remote() as other:
        other.ask("1")
        assert not processes.is_stopped(other.pid)
        with other.stopped():
            wait_until(lambda: processes.is_stopped(other.pid))
        pid = other.pid
    assert not processes.is_stopped(pid)
