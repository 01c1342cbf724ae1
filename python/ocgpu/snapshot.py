"""`Snapshot`: all processes of one GPU at one moment."""

from ocgpu import _ocgpu
from ocgpu._ocgpu import Peer

__all__ = ["Peer", "Snapshot"]


class Snapshot(_ocgpu.Snapshot):
    """All processes of one GPU at one moment, as `Pacer.snapshot` and `peers` return it.

    Attributes:
        gpu_key: Which GPU.
        schedule: Which schedule is in force.
        self: The peer that looked, or None when it has no slot or looked from outside.
        peers: The others, in slot order.
    """

    __slots__ = ()

    @property
    def self(self) -> Peer | None:
        """The peer that looked, or None when it has no slot or looked from outside."""
        return self._own
