"""`ocgpu doctor` on the directory, its file system, its locks, and whose directory it is."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ocgpu import doctor
from ocgpu.doctor import container, mounts, place
from ocgpu.doctor.container import Surroundings
from ocgpu.doctor.mounts import Mount, mount_of, parse_mounts
from tests.namespaces import in_namespaces
from tests.remote import remote
from tests.users import BECOME, OTHER_UID, root_only

SHM = "/dev/shm"  # noqa: S108  # a name in texts
# Mounts a file system over the directory, then runs the rest of its arguments.
PRIVATE = ("sh", "-c", 'mount -t tmpfs none "$OCGPU_DIR" && exec "$@"', "sh")
MOUNTINFO = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
24 27 0:6 / /dev rw shared:2 master:1 - devtmpfs devtmpfs rw
25 24 0:23 / /dev/shm rw - tmpfs shm rw,size=65536k
27 1 254:0 / / rw - ext4 /dev/vda rw
40 27 0:60 / /mnt/two\040words rw - nfs4 server:/share rw
a line of another form
50 27 x:1 / /bad rw - tmpfs none rw
51 27 1:y / /bad rw - tmpfs none rw
52 27 0:1 / /bad rw tmpfs none rw
53 27 0:1 / /bad - tmpfs none rw
54 27 0:1 / /bad rw - tmpfs
"""
MOUNTS = parse_mounts(MOUNTINFO)
# Prints what the checks on the directory find, a status and a sentence each.
PROGRAM = """
import json, os
from ocgpu.doctor import _check_place
{first}
print(json.dumps([[f.check, f.status, f.found] for f in _check_place("card")]))
"""


def mount(kind: str, source: str = "none") -> Mount:
    return Mount((0, 1), "/", "/place", kind, source)


def checked(prefix: list[str], setup: str, first: str = "") -> dict[str, tuple[str, str]]:
    """Run the checks, behind `setup` in a shell and `first` in Python; findings by check."""
    program = PROGRAM.replace("{first}", first)
    command = [*prefix, "sh", "-ec", f'{setup}\nexec "$@"', "sh", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0 and "mount" in done.stderr:
        pytest.skip(f"no such mount: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return {check: (status, found) for check, status, found in json.loads(done.stdout)}


def test_mounts_are_read_and_other_lines_passed_over() -> None:
    assert [m.point for m in MOUNTS] == ["/proc", "/dev", SHM, "/", "/mnt/two words"]
    assert MOUNTS[2] == Mount((0, 23), "/", SHM, "tmpfs", "shm")
    assert MOUNTS[1].kind == "devtmpfs"


def test_a_path_lies_on_the_deepest_and_last_of_the_mounts_over_it(tmp_path: Path) -> None:
    deep = tmp_path / "deep"
    deep.mkdir()
    root = Mount((0, 1), "/", "/", "ext4", "a")
    lower, upper = (Mount((0, n), "/", str(tmp_path), "tmpfs", "b") for n in (2, 3))
    beside = Mount((0, 4), "/", str(tmp_path / "dee"), "nfs", "c")

    assert mount_of(deep, [root, lower, upper, beside]) == upper
    assert mount_of(deep, [root]) == root
    assert mount_of(deep, []) is None
    number = deep.stat().st_dev
    true = lower._replace(device=(os.major(number), os.minor(number)))
    assert mount_of(deep, [root, true, upper]) == true


def test_a_directory_of_ones_own_is_well(gpu_dir: Path) -> None:
    (finding,) = place.check_directory(gpu_dir)

    assert finding.status == "ok"


def test_a_directory_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    for name, words in (("gone", "does not exist"), ("file", "is no directory")):
        (finding,) = place.check_directory(tmp_path / name)
        assert finding.status == "error"
        assert words in finding.found
        assert "OCGPU_DIR" in str(finding.remedy)


def test_a_name_that_the_kernel_refuses_is_an_error(tmp_path: Path) -> None:
    (finding,) = place.check_directory(tmp_path / ("x" * 300))

    assert (finding.status, "File name too long" in finding.found) == ("error", True)


@root_only
def test_a_directory_of_another_user_is_an_error(shared_dir: Path) -> None:
    shared_dir.chmod(0o755)

    findings = checked([], "", BECOME)

    assert findings["directory"] == (
        "error",
        f"`{shared_dir}` cannot be written by uid {OTHER_UID}",
    )
    assert "locks" not in findings


@pytest.mark.parametrize(
    ("options", "words"),
    [("ro", "read-only"), ("size=4k", "is full"), ("nr_inodes=1", "no inode left")],
)
def test_a_directory_without_room_is_an_error(gpu_dir: Path, options: str, words: str) -> None:
    fill = 'head -c 4096 /dev/zero >"$OCGPU_DIR/filler"' if "size" in options else ""
    setup = f'mount -t tmpfs -o {options} none "$OCGPU_DIR"\n{fill}'

    status, found = checked(in_namespaces("--mount"), setup)["directory"]

    assert (status, words in found) == ("error", True), found
    assert list(gpu_dir.iterdir()) == []


@pytest.mark.usefixtures("gpu_dir")
def test_a_file_system_without_a_size_is_not_full() -> None:
    findings = checked(in_namespaces("--mount"), 'mount -t ramfs none "$OCGPU_DIR"')

    assert findings["directory"][0] == "ok"
    assert findings["file system"] == ("ok", f"ramfs at `{os.environ['OCGPU_DIR']}`, in memory")


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        ("tmpfs", "ok", "in memory"),
        ("ext4", "ok", "on a disk"),
        ("overlay", "warning", "another container"),
        ("fuse.sshfs", "warning", "a program serves"),
        ("virtiofs", "warning", "a program serves"),
        ("nfs4", "error", "this machine's kernel"),
        ("9p", "error", "this machine's kernel"),
        ("cifs", "error", "this machine's kernel"),
    ],
)
def test_a_file_system_is_judged_by_whose_locks_it_has(kind: str, status: str, words: str) -> None:
    (finding,) = place.check_file_system(mount(kind))

    assert (finding.status, words in finding.found) == (status, True)
    assert (finding.remedy is None) == (status == "ok")


@pytest.mark.usefixtures("gpu_dir")
def test_a_real_overlay_is_seen() -> None:
    setup = """
    mount -t tmpfs none "$OCGPU_DIR"
    cd "$OCGPU_DIR"
    mkdir lower upper work merged
    mount -t overlay -o userxattr,lowerdir=lower,upperdir=upper,workdir=work none merged
    export OCGPU_DIR="$OCGPU_DIR/merged"
    """

    findings = checked(in_namespaces("--mount"), setup)

    assert findings["file system"][0] == "warning"
    assert findings["locks"][0] == "ok"


def test_locks_of_a_local_directory_exclude_and_the_probe_is_gone(gpu_dir: Path) -> None:
    (finding,) = place.check_locks(gpu_dir)

    assert finding.status == "ok"
    assert list(gpu_dir.iterdir()) == []


def test_a_directory_where_no_file_can_be_made_is_an_error(tmp_path: Path) -> None:
    assert place.check_locks(tmp_path / "gone")[0].status == "error"


@pytest.mark.parametrize("failing", ["flock", "fcntl"])
def test_a_kernel_without_one_kind_of_lock_is_told(
    gpu_dir: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, failing, refuse)

    (finding,) = place.check_locks(gpu_dir)

    assert finding.status == ("error" if failing == "flock" else "warning")
    assert "Operation not supported" in finding.found
    assert list(gpu_dir.iterdir()) == []


def test_a_lock_that_two_get_is_an_error(gpu_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)

    (finding,) = place.check_locks(gpu_dir)

    assert (finding.status, "two hold it at once" in finding.found) == ("error", True)


def test_a_lock_that_another_process_does_not_see_is_an_error(
    gpu_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def for_this_process_alone(*_: object) -> None:
        taken.append(None)
        if len(taken) > 1:
            raise BlockingIOError

    taken: list[None] = []
    monkeypatch.setattr(fcntl, "flock", for_this_process_alone)

    (finding,) = place.check_locks(gpu_dir)

    assert (finding.status, "two processes" in finding.found) == ("error", True)


HOST = Surroundings(None, shared_with_init=None, own_ipc=False, mount=mount("tmpfs", "tmpfs"))
DOCKER = HOST._replace(evidence="`/.dockerenv` exists", own_ipc=True, mount=mount("tmpfs", "shm"))


@pytest.mark.parametrize(
    ("around", "status", "words"),
    [
        (HOST, "ok", "no container"),
        (HOST._replace(shared_with_init=True), "ok", "no container"),
        (HOST._replace(mount=None), "ok", "no container"),
        (HOST._replace(mount=mount("tmpfs", "shm")), "ok", "no container"),
        (DOCKER, "warning", "memory of this container"),
        (DOCKER._replace(own_ipc=False), "warning", "memory of this container"),
        (DOCKER._replace(own_ipc=False, mount=mount("tmpfs", "none")), "ok", "a container"),
        (DOCKER._replace(mount=None), "ok", "a container"),
        (DOCKER._replace(mount=mount("tmpfs", "tmpfs")), "ok", "a container"),
        (DOCKER._replace(mount=mount("tmpfs", "none")), "warning", "memory of this container"),
        (DOCKER._replace(mount=mount("ext4", "/dev/sda")), "ok", "a container"),
        (DOCKER._replace(mount=mount("overlay")), "warning", "a layer of this container"),
        (HOST._replace(shared_with_init=False), "warning", "process 1 has another one"),
    ],
)
def test_a_directory_of_a_container_alone_is_told_from_one_of_the_machine(
    around: Surroundings, status: str, words: str
) -> None:
    (finding,) = container.check_container(Path(SHM), around, "card")

    assert (finding.status, words in finding.found) == (status, True)
    if status == "warning":
        assert "`--ipc=host`" in str(finding.remedy)
        assert "-v /dev/shm:/dev/shm" in str(finding.remedy)


def test_what_tells_a_container_is_named(tmp_path: Path) -> None:
    def evidence(environ: dict[str, str], *, marked: bool = False) -> str | None:
        marker = tmp_path if marked else tmp_path / "none"
        return container.look_around(tmp_path, None, environ, markers=[str(marker)]).evidence

    # The tests may run in a container themselves.
    assert evidence({}) in {None, "it has an IPC namespace of its own"}
    assert evidence({"container": "podman"}) == "`container` is set"
    assert evidence({"container": ""}, marked=True) == f"`{tmp_path}` exists"


def test_an_ipc_namespace_of_ones_own_tells_a_container() -> None:
    with remote(in_namespaces("--ipc")) as inside:
        inside.ask("from ocgpu.doctor import container")
        inside.ask("around = container.look_around(Path('/'), None, {}, markers=[])")

        assert inside.ask("around.own_ipc") is True
        assert inside.ask("around.evidence") == "it has an IPC namespace of its own"


def test_without_a_gpu_a_private_directory_parts_nobody() -> None:
    (finding,) = container.check_container(Path(SHM), DOCKER, None)

    assert (finding.status, "no GPU" in finding.found) == ("ok", True)


@pytest.mark.usefixtures("gpu_dir")
def test_a_process_with_memory_and_ipc_of_its_own_is_warned() -> None:
    setup = 'mount -t tmpfs shm "$OCGPU_DIR"'

    findings = checked(in_namespaces("--mount", "--ipc"), setup)

    assert findings["container"][0] == "warning"
    assert "is private" in findings["container"][1]


def test_a_directory_that_process_1_does_not_have_is_private(gpu_dir: Path) -> None:
    for prefix, shared in (((), True), ((*in_namespaces("--mount"), *PRIVATE), False)):
        with remote(prefix) as init:
            pid = int(init.ask("Path('/proc/self').readlink().name"))

            around = container.look_around(gpu_dir, None, {}, Path(f"/proc/{pid}/root"))

        assert around.shared_with_init is shared
    assert container.check_container(gpu_dir, around, "card")[0].status == "warning"


def test_a_process_1_that_may_not_be_looked_at_says_nothing(gpu_dir: Path) -> None:
    around = container.look_around(gpu_dir, None, {}, Path("/proc/self/status"))

    assert around.shared_with_init is None


@pytest.mark.parametrize(
    ("seen", "checks"),
    [
        (mount("nfs4"), ["directory", "file system", "container"]),
        (mount("ext4"), ["directory", "file system", "locks", "container"]),
        (None, ["directory", "locks", "container"]),
    ],
    ids=["network", "local", "unknown"],
)
@pytest.mark.usefixtures("gpu_dir")
def test_locks_are_not_tried_where_they_could_hang(
    monkeypatch: pytest.MonkeyPatch, seen: Mount | None, checks: list[str]
) -> None:
    monkeypatch.setattr(mounts, "mount_of", lambda *_: seen)

    assert [finding.check for finding in doctor._check_place("card")] == checks


def test_the_directory_is_looked_at_without_a_gpu_too(
    gpu_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OCGPU_GPU_KEY", raising=False)

    finding = doctor._check_place(None)[0]

    assert (finding.status, f"`{gpu_dir}`" in finding.found) == ("ok", True)
    assert list(gpu_dir.iterdir()) == []
