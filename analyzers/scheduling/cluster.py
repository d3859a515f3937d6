"""Nodes, allocations and the few ways to place GPUs on nodes that the policies share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddltool.errors import CheckFailed, InputError

Allocation = tuple[tuple[int, int], ...]
"""(node, GPUs) pairs, each node once, GPUs >= 1; () is no allocation. The order is that of the ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """``N`` nodes; node i has ``gpus[i]`` GPUs of type ``gpu_types[i]``."""

    gpus: tuple[int, ...]
    gpu_types: tuple[str, ...]
    partial: bool = False
    """Whether nodes may be down: these have 0 GPUs and keep their number; a type that is down altogether is not there."""

    def __post_init__(self) -> None:
        if not self.gpus or len(self.gpus) != len(self.gpu_types) or min(self.gpus) < (0 if self.partial else 1):
            raise InputError("cluster", "has no nodes, or nodes without GPUs", "give one count and one type per node")

    @classmethod
    def homogeneous(cls, nodes: int, gpus_per_node: int, gpu_type: str = "gpu") -> ClusterSpec:
        """Return ``nodes`` equal nodes."""
        return cls(gpus=(gpus_per_node,) * nodes, gpu_types=(gpu_type,) * nodes)

    @property
    def total_gpus(self) -> int:
        """All GPUs of all types."""
        return sum(self.gpus)

    @property
    def type_names(self) -> tuple[str, ...]:
        """GPU types in the order of their first node."""
        return tuple(dict.fromkeys(name for name, count in zip(self.gpu_types, self.gpus, strict=True) if count))

    def gpus_of(self, gpu_type: str) -> int:
        """Return how many GPUs of one type there are."""
        return sum(count for count, name in zip(self.gpus, self.gpu_types, strict=True) if name == gpu_type)

    def nodes_of(self, gpu_type: str) -> tuple[int, ...]:
        """Return the nodes with GPUs of one type, ascending; those that are down are left out."""
        return tuple(node for node, name in enumerate(self.gpu_types) if name == gpu_type and self.gpus[node])

    def of_type(self, gpu_type: str) -> ClusterSpec:
        """Return the nodes of one type alone, numbered anew from 0 in the order of :meth:`nodes_of`."""
        nodes = self.nodes_of(gpu_type)
        return ClusterSpec(gpus=tuple(self.gpus[node] for node in nodes), gpu_types=(gpu_type,) * len(nodes))

    def by_type(self, allocation: Allocation) -> Counter[str]:
        """Return how many GPUs of each type an allocation has."""
        held = Counter[str]()
        for node, count in allocation:
            held[self.gpu_types[node]] += count
        return held

    def type_of(self, allocation: Allocation) -> str:
        """Return the GPU type of an allocation. Raises CheckFailed when it mixes types."""
        found = {self.gpu_types[node] for node, _ in allocation}
        if len(found) != 1:
            raise CheckFailed(f"an allocation spans the GPU types {', '.join(sorted(found)) or '(none)'}")
        return found.pop()


def count_gpus(allocation: Allocation) -> int:
    """Return how many GPUs an allocation has."""
    return sum(count for _, count in allocation)


def free_gpus(cluster: ClusterSpec, allocations: Iterable[Allocation]) -> list[int]:
    """Return the free GPUs per node, (N,). Raises CheckFailed when a node's GPUs are given out twice."""
    free = list(cluster.gpus)
    for allocation in allocations:
        for node, count in allocation:
            free[node] -= count
            if count < 1 or free[node] < 0:
                raise CheckFailed(f"node {node} has {cluster.gpus[node]} GPUs, and more were given out")
    return free


def take_most_free(free: list[int], wanted: int, nodes: Sequence[int] | None = None) -> Allocation:
    """Take ``wanted`` GPUs from the nodes with the most free ones first (ties: lowest node), and return them.

    This is how the published simulator places Tiresias' and Optimus' jobs. ``free`` (N,) is reduced; ``nodes``: take
    from these only. The caller sees to it that enough are free.
    """
    among = range(len(free)) if nodes is None else nodes
    made: list[tuple[int, int]] = []
    while wanted > 0:
        node = max(among, key=free.__getitem__)
        count = min(free[node], wanted)
        if count == 0:
            raise CheckFailed(f"{wanted} GPUs are wanted and none is free")
        made.append((node, count))
        free[node] -= count
        wanted -= count
    return tuple(made)


def free_by_type(cluster: ClusterSpec, free: Sequence[int]) -> dict[str, int]:
    """Return how many of the ``free`` (N,) GPUs are of each type, in the order of the cluster's types."""
    return {name: sum(free[node] for node in cluster.nodes_of(name)) for name in cluster.type_names}


def packed(cluster: ClusterSpec, replicas: int) -> tuple[int, ...]:
    """Return the GPUs per node of ``replicas`` packed on as few of the cluster's nodes as possible.

    >>> packed(ClusterSpec.homogeneous(4, 4), 6)
    (4, 2)
    """
    sizes, made = sorted(cluster.gpus, reverse=True), list[int]()
    while replicas > 0:
        made.append(min(sizes[min(len(made), len(sizes) - 1)], replicas))
        replicas -= made[-1]
    return tuple(made)


def interfering(allocations: Mapping[int, Allocation]) -> set[int]:
    """Return the jobs that span nodes and share one of them with another such job."""
    spanning = {job: allocation for job, allocation in allocations.items() if len(allocation) > 1}
    users = Counter(node for allocation in spanning.values() for node, _ in allocation)
    return {job for job, allocation in spanning.items() if any(users[node] > 1 for node, _ in allocation)}
