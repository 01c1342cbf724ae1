"""Commands in namespaces of their own, where this machine permits them."""

import subprocess

import pytest

__all__ = ["in_namespaces"]


def in_namespaces(*kinds: str) -> list[str]:
    """What to put before a command; skips the test where the kernel refuses it.

    Args:
        kinds: Options of unshare(1), such as `--pid` or `--mount`.
    """
    command = ["unshare", "--user", "--map-root-user", *kinds, "--fork", "--kill-child"]
    try:
        done = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=10)
    except FileNotFoundError:
        pytest.skip("no namespaces: `unshare` is not installed")
    if done.returncode != 0:
        pytest.skip(f"no namespaces {' '.join(kinds)}: {done.stderr.strip()}")
    return command
