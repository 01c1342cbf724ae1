"""A second user of the machine, which only root can become."""

import os

import pytest

__all__ = ["BECOME", "OTHER_UID", "root_only"]

root_only = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can be two users: run as root, as CI does"
)
OTHER_UID = 54321
BECOME = f"os.setgroups([]); os.setgid({OTHER_UID}); os.setuid({OTHER_UID})"
"""What such a process runs."""
