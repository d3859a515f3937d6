"""State in the host's memory: what FSDP2's ``CPUOffloadPolicy`` copies, and how long the host updates.

Each process copies its part of a block to the device on the stream of the gathers, before it is gathered, and its part of the
reduced gradients back behind the reduction: both run beside compute, as collectives do. The update waits for the last copy,
runs on the host at the speed of its memory, which the processes of a node share, and nothing hides it. With gradient
accumulation, from the second pass on the host adds the gradients, and waits for them. Memory:
:meth:`~.memory.TensorLifetimes.host_bytes`. Start at :class:`HostCopies`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ddltool.analyzers.step.communication.nccl import Communicator, Size
from ddltool.analyzers.step.costs.optimizers import OPTIMIZERS
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.device import Device
from ddltool.errors import InputError
from ddltool.graph import Graph
from ddltool.links import parse_link
from ddltool.precision import precision_of

HOST_BYTES_PER_S = 200e9
"""Of a node's memory, taken for all hosts: eight channels of DDR4-3200 have 205e9."""
_LANES = {"Kepler": "pcie3", "Maxwell": "pcie3", "Pascal": "pcie3", "Volta": "pcie3", "Turing": "pcie3"}
_LANES |= {"Hopper": "pcie5", "Blackwell": "pcie5", "CDNA3": "pcie5", "CDNA4": "pcie5"}
# NVLink-C2C joins a Grace CPU and its GPUs at 450e9 bytes per second one way (datasheets of GH200 and GB200), of which a copy
# is taken to reach as much as on other links.
_GRACE, _GRACE_BYTES_PER_S = ("GH200", "GB200", "GB300"), 0.76 * 450e9


def host_link_bytes_per_s(device: Device) -> float:
    """Return the bytes per second of a copy between a device and pinned memory of its host, one way.

    The link is NVLink-C2C beside a Grace CPU, else the PCIe version of the device's generation.
    """
    if device.name.startswith(_GRACE):
        return _GRACE_BYTES_PER_S
    return parse_link(_LANES.get(device.architecture, "pcie4")).bytes_per_s


def demand_host_update(optimizer: str) -> None:
    """Raise InputError for an optimizer whose update has no kernels on a host, or none that are known here."""
    update = OPTIMIZERS[optimizer]
    if update.each is not None or update.state_width is not None:
        raise InputError("--optimizer", f"{optimizer} is not known to update on a host", "give adamw")


def host_update_s(graph: Graph, sharding: Sharding) -> float:
    """Return the seconds in which a node's host updates the shards of its processes: all passes over its memory.

    ``graph``: one pass with times, whose ``meta`` names the optimizer and has the host's time to go through the tensors
    (``update_host_s``). ``sharding``: with shards on the host.
    """
    width = precision_of(graph.meta.get("precision")).width
    optimizer = OPTIMIZERS[str(graph.meta.get("optimizer") or "none")]
    memory_passes = sum(optimizer.kernels_at(width))  # how often the parameters' bytes are read or written
    tensors_s = float(graph.meta.get("update_host_s") or 0.0)
    return tensors_s + memory_passes * _own_part_s(graph, sharding)


def host_sum_s(graph: Graph, sharding: Sharding) -> float:
    """Return the seconds in which the host adds the gradients of one pass to those of the passes before.

    ``graph``: one pass with times. ``sharding``: with shards on the host.
    """
    launch_s = float(graph.meta.get("sum_launch_s") or 0.0)
    return launch_s + 3.0 * _own_part_s(graph, sharding)  # two gradients are read, and one is written


def _own_part_s(graph: Graph, sharding: Sharding) -> float:
    """Return the seconds in which a process reads its shard of the trained parameters from its host's memory once.

    All processes of the node do so at the same time, and share the rate of the memory.
    """
    shard_bytes = float(graph.trained_bytes) / sharding.shard
    own_bytes_per_s = HOST_BYTES_PER_S / sharding.on_host
    return shard_bytes / own_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class HostCopies:
    """A group whose processes copy their shards from the host before they gather, and to it once they have reduced.

    Its methods are those of any :class:`Communicator`; bytes are those of the whole tensor, not of a process's shard.
    """

    group: Communicator
    shard: int
    """Processes that share one copy of the parameters."""
    bytes_per_s: float
    """The rate of the slowest process's link to its host, one way."""
    kept_share: float
    """The bytes of parameters as they are kept over those as they are gathered."""

    @classmethod
    def around(
        cls, group: Communicator, sharding: Sharding, devices: Iterable[Device], kept_share: float
    ) -> Communicator:
        """Return ``group`` with copies to and from the host around its collectives; ``group`` itself where nothing lies there.

        ``sharding``: that of the processes of ``group``. ``devices``: the types of their devices. ``kept_share``: the bytes of
        parameters as they are kept over those as they are gathered.
        """
        if not sharding.on_host:
            return group
        rate = min(host_link_bytes_per_s(device) for device in devices)
        return cls(group=group, shard=sharding.shard, bytes_per_s=rate, kept_share=kept_share)

    @property
    def replicas(self) -> int:
        """Return how many processes there are."""
        return self.group.replicas

    def all_reduce_s(self, size_bytes: Size) -> Size:
        """Return the seconds to reduce ``size_bytes`` on every process."""
        return self.group.all_reduce_s(size_bytes)

    def all_gather_s(self, size_bytes: Size) -> Size:
        """Return the seconds to copy the own part of ``size_bytes``, as wide as it is kept, and to gather the whole."""
        return self.group.all_gather_s(size_bytes) + size_bytes * (self.kept_share / self.shard / self.bytes_per_s)

    def reduce_scatter_s(self, size_bytes: Size) -> Size:
        """Return the seconds to reduce ``size_bytes`` and to copy the own part of the result to the host."""
        return self.group.reduce_scatter_s(size_bytes) + size_bytes / (self.shard * self.bytes_per_s)
