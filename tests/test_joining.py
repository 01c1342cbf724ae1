"""Many processes join at once, and some die while they do."""

from pathlib import Path

import pytest

from tests.remote import remote

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")

AT_ONCE = """
def join_at_once(key, count):
    go, start = os.pipe()
    told, tell = os.pipe()
    stay, leave = os.pipe()
    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            os.close(leave)
            os.read(go, 1)
            pacer = Pacer(gpu=key)
            os.write(tell, f"{pacer.slot}\\n".encode())
            os.read(stay, 1)
            os._exit(0)
        children.append(child)
    os.write(start, b"x" * count)
    answers = b""
    while answers.count(b"\\n") < count:
        answers += os.read(told, 4096)
    listed = len(peers(key).peers)
    os.close(leave)
    for child in children:
        os.waitpid(child, 0)
    for end in (go, start, told, tell, stay):
        os.close(end)
    return answers.decode().split("\\n")[:-1], listed
"""
KILLED = """
def kill_a_creator(key, after_s):
    go, start = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go, 1)
        Pacer(gpu=key)
        time.sleep(60)
        os._exit(0)
    os.write(start, b"x")
    until = time.perf_counter() + after_s
    while time.perf_counter() < until:
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(go); os.close(start)
    before = len(list(Path(os.environ["OCGPU_DIR"]).glob("opencoti-gpu-" + key)))
    with Pacer(gpu=key, strict=True) as pacer:
        # In the dead one's slot, or beside it until a beat has freed it.
        return [before, pacer.enabled, pacer.slot in (0, 1)]
"""


def test_64_processes_that_join_a_new_gpu_at_once_get_16_different_slots(gpu_dir: Path) -> None:
    with remote() as process:
        process.ask(AT_ONCE)
        for number in range(5):
            answers, listed = process.ask(f"join_at_once('gpu-{number}', 64)")

            slots = [str(slot) for slot in range(16)]
            assert sorted(answers) == sorted([*slots, *["None"] * 48])
            assert listed == 16

    # Two names a GPU, and nothing else.
    files = [path.stat() for path in gpu_dir.iterdir()]
    assert len(files) == 10
    assert len({status.st_ino for status in files}) == 5
    assert {status.st_size for status in files} == {4096}


def test_a_creator_killed_at_any_moment_leaves_a_gpu_that_can_be_joined(gpu_dir: Path) -> None:
    # The first is dead before it begins, the last when it has joined; the rest are in between.
    moments = [0.0, *(0.00001 * number for number in range(150)), 0.5]
    with remote() as process:
        process.ask(KILLED)
        answers = [
            process.ask(f"kill_a_creator('gpu-{number}', {after})")
            for number, after in enumerate(moments)
        ]

    assert {tuple(answer[1:]) for answer in answers} == {(True, True)}
    # Some died before the segment had its second name, some after.
    assert {answer[0] for answer in answers} == {0, 1}
    for number in range(len(moments)):
        content = (gpu_dir / f"opencoti-gpu-gpu-{number}").read_bytes()
        assert content[:16] == b"OCGPU\0\0\0\1\0\0\0\x10\0\0\0"
        assert content[1536:1544] == b"OCGPUEX1"
