"""Nodes, allocations and the few ways to place GPUs on nodes that the policies share; nodes that fail, leave and come back.

Nodes fail, and jobs save checkpoints, by :class:`~ddltool.analyzers.job.planning.failures.Failures`; each node draws its
failures from a random stream of its own, so that they are the same under every policy. Events may be given in addition:
``fail`` and ``leave`` take a node away (``leave`` is announced, so that its jobs save a checkpoint first), ``join`` brings it
back. Given events at the same time happen in the given order. A node is up unless a drawn failure or a given event holds it
down. Nodes that join late or leave for good make the cluster elastic.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ddltool.analyzers.job.planning.failures import Failures
from ddltool.errors import CheckFailed, InputError

Allocation = tuple[tuple[int, int], ...]
"""(node, GPUs) pairs, each node once, GPUs >= 1; () is no allocation. The order is that of the ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """``N`` nodes; node i has ``gpus[i]`` GPUs of type ``gpu_types[i]``."""

    gpus: tuple[int, ...]
    gpu_types: tuple[str, ...]
    partial: bool = False
    """Whether nodes may be down. Such nodes have 0 GPUs and keep their number; a type without any GPU is not listed."""

    def __post_init__(self) -> None:
        """Raise InputError for no nodes, unless there is one type per node, and for nodes without GPUs that are not down."""
        if not self.gpus or len(self.gpus) != len(self.gpu_types) or min(self.gpus) < (0 if self.partial else 1):
            raise InputError("cluster", "has no nodes, or nodes without GPUs", "give one count and one type per node")

    @classmethod
    def homogeneous(cls, nodes: int, gpus_per_node: int, gpu_type: str = "gpu") -> ClusterSpec:
        """Return a cluster of ``nodes`` equal nodes."""
        return cls(gpus=(gpus_per_node,) * nodes, gpu_types=(gpu_type,) * nodes)

    @property
    def total_gpus(self) -> int:
        """Number of GPUs of all types."""
        return sum(self.gpus)

    @property
    def type_names(self) -> tuple[str, ...]:
        """GPU types in the order of their first node."""
        return tuple(dict.fromkeys(name for name, count in zip(self.gpu_types, self.gpus, strict=True) if count))

    def gpus_of(self, gpu_type: str) -> int:
        """Return the number of GPUs of one type."""
        return sum(count for count, name in zip(self.gpus, self.gpu_types, strict=True) if name == gpu_type)

    def nodes_of(self, gpu_type: str) -> tuple[int, ...]:
        """Return the nodes with GPUs of one type, ascending; those that are down are left out."""
        return tuple(node for node, name in enumerate(self.gpu_types) if name == gpu_type and self.gpus[node])

    def of_type(self, gpu_type: str) -> ClusterSpec:
        """Return a cluster of the nodes of one type, which are renumbered from 0 in the order of :meth:`nodes_of`."""
        nodes = self.nodes_of(gpu_type)
        return ClusterSpec(gpus=tuple(self.gpus[node] for node in nodes), gpu_types=(gpu_type,) * len(nodes))

    def by_type(self, allocation: Allocation) -> Counter[str]:
        """Return GPU type -> number of GPUs in an allocation."""
        held = Counter[str]()
        for node, count in allocation:
            held[self.gpu_types[node]] += count
        return held

    def type_of(self, allocation: Allocation) -> str:
        """Return the GPU type of an allocation. Raises CheckFailed when it has several types or no GPUs."""
        types = {self.gpu_types[node] for node, _ in allocation}
        if len(types) != 1:
            raise CheckFailed(f"an allocation spans the GPU types {', '.join(sorted(types)) or '(none)'}")
        return types.pop()


def count_gpus(allocation: Allocation) -> int:
    """Return the number of GPUs in an allocation."""
    return sum(count for _, count in allocation)


def free_gpus(cluster: ClusterSpec, allocations: Iterable[Allocation]) -> list[int]:
    """Return the GPUs of each node (N,) that are in none of the ``allocations``.

    Raises CheckFailed when more of a node's GPUs are allocated than it has.
    """
    free = list(cluster.gpus)
    for allocation in allocations:
        for node, count in allocation:
            free[node] -= count
            if count < 1 or free[node] < 0:
                raise CheckFailed(f"node {node} has {cluster.gpus[node]} GPUs, and more were given out")
    return free


def take_most_free(free: list[int], wanted: int, nodes: Sequence[int] | None = None) -> Allocation:
    """Take ``wanted`` GPUs, always from the node with most free ones (ties: lowest node), and return the allocation.

    The published simulator places Tiresias' and Optimus' jobs in this way. ``free`` (N,) is changed: the GPUs are subtracted.
    ``nodes``: those to take from; None: all. Raises CheckFailed where fewer than ``wanted`` are free.
    """
    candidates = range(len(free)) if nodes is None else nodes
    taken: list[tuple[int, int]] = []
    while wanted > 0:
        node = max(candidates, key=free.__getitem__)
        count = min(free[node], wanted)
        if count == 0:
            raise CheckFailed(f"{wanted} GPUs are wanted and none is free")
        taken.append((node, count))
        free[node] -= count
        wanted -= count
    return tuple(taken)


def fewest_nodes(free: Sequence[int], order: Sequence[int], count: int) -> Allocation:
    """Return an allocation of ``count`` of the ``free`` (N,) GPUs on as few nodes as possible; () if there are too few.

    ``order``: the nodes that may be used, those with the most free GPUs first. These are filled one after the other; the rest
    goes to the node with the fewest free GPUs that has enough, in ties to the first in ``order``.
    """
    pieces: list[tuple[int, int]] = []
    for position, node in enumerate(order):
        if free[node] >= count:
            fitting = [candidate for candidate in order[position:] if free[candidate] >= count]
            return tuple(sorted([*pieces, (min(fitting, key=free.__getitem__), count)]))
        pieces.append((node, free[node]))
        count -= free[node]
    return ()


def free_by_type(cluster: ClusterSpec, free: Sequence[int]) -> dict[str, int]:
    """Return GPU type -> number of ``free`` (N,) GPUs of that type, in the order of the cluster's types."""
    return {name: sum(free[node] for node in cluster.nodes_of(name)) for name in cluster.type_names}


def packed(cluster: ClusterSpec, replicas: int) -> tuple[int, ...]:
    """Return the GPUs per node of ``replicas`` packed on as few of the cluster's nodes as possible.

    Where the cluster has too few GPUs, more nodes of the smallest size are assumed.

    >>> packed(ClusterSpec.homogeneous(4, 4), 6)
    (4, 2)
    """
    node_sizes = sorted(cluster.gpus, reverse=True)
    gpus_by_node: list[int] = []
    while replicas > 0:
        node = min(len(gpus_by_node), len(node_sizes) - 1)  # the last, smallest one again beyond the cluster's nodes
        used = min(node_sizes[node], replicas)
        gpus_by_node.append(used)
        replicas -= used
    return tuple(gpus_by_node)


def interfering(allocations: Mapping[int, Allocation]) -> set[int]:
    """Return the indices of the jobs that span nodes and share one with another such job, so that their traffic competes.

    ``allocations``: job index -> allocation.
    """
    spanning = {job: allocation for job, allocation in allocations.items() if len(allocation) > 1}
    users = Counter(node for allocation in spanning.values() for node, _ in allocation)
    return {job for job, allocation in spanning.items() if any(users[node] > 1 for node, _ in allocation)}


Kind = Literal["fail", "leave", "join"]
KINDS: tuple[Kind, ...] = ("fail", "leave", "join")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeEvent:
    """An event of node ``node`` (from 0, in the cluster's order) at ``time_s`` seconds."""

    time_s: float
    node: int
    kind: Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFailures(Failures):
    """Failures of whole nodes, by the model for one job's plan with nodes as its devices, and given events.

    A running job saves a checkpoint every ``checkpoint_interval_s`` of training (None: the best interval for the number of its
    nodes) and whenever the policy stops it, which takes no time beyond the restart delay. ``restart_s`` is not used: the replay
    has its own restart delay. Raises InputError for values out of range.
    """

    checkpoint_s: float = 0.0
    checkpoint_interval_s: float | None = 600.0
    repair_s: float = 1800.0
    events: tuple[NodeEvent, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise InputError for a value out of range; events are checked where their file is read."""
        Failures.__post_init__(self)  # super() does not know a dataclass with slots
        if not self.repair_s:
            raise InputError("repair", "is 0 s", "above 0 and at most 604800 seconds (a week)")
        if not (self.checkpoint_s or self.checkpoint_interval_s):
            raise InputError("checkpoint interval", "is missing", "checkpoints that take no time have no best one")
        if self.seed < 0:
            raise InputError("failure seed", f"is {self.seed}", "a whole number >= 0")


class NodeStates:
    """The nodes that are up over time: call :meth:`next_s` for the time of the next event, then :meth:`pop` to apply it.

    All nodes are up at the beginning. Drawn failures never end, and depend on the seed alone. O(log N) per event.
    """

    def __init__(self, failures: NodeFailures, cluster: ClusterSpec) -> None:
        """Sort the given events, and draw the first failure of every node from that node's own stream."""
        self.failures = failures
        self.down_until: dict[int, float] = {}
        """Node under repair -> second at which it is repaired."""
        self.away: set[int] = set()
        """Nodes that a given event took away."""
        self.failed = 0
        """Number of failures of nodes that were up."""
        self._given_events = sorted(failures.events, key=lambda event: event.time_s)[::-1]
        """Given events that have not happened yet, the next one last."""
        self._drawn_events: list[tuple[float, int]] = []
        """Heap of (seconds, node): the next failure of each node, or the end of its repair where it is down."""
        if failures.mtbf_s < math.inf:
            self._generators = [np.random.default_rng([failures.seed, node]) for node in range(len(cluster.gpus))]
            self._drawn_events = sorted((self._life_s(node), node) for node in range(len(cluster.gpus)))

    @property
    def down(self) -> frozenset[int]:
        """Nodes that are not up."""
        return frozenset(self.away) | frozenset(self.down_until)

    @property
    def returns(self) -> bool:
        """Whether some node that is down will come back."""
        return bool(self.down - self.gone)

    @property
    def gone(self) -> frozenset[int]:
        """Nodes that a given event took away and no later one brings back."""
        return frozenset(self.away) - {event.node for event in self._given_events if event.kind == "join"}

    def next_s(self) -> float:
        """Return the second of the next event; inf if there is none."""
        given_s = self._given_events[-1].time_s if self._given_events else math.inf
        return min(given_s, self._drawn_events[0][0] if self._drawn_events else math.inf)

    def pop(self) -> tuple[list[int], list[int]]:
        """Apply the next event, and return (nodes that failed, nodes that left) by it.

        Both are [] where a node came back, or where the event changes nothing because the node was down already.
        """
        before = self.down
        kind = self._advance()
        lost = sorted(self.down - before)
        if kind == "fail":
            self.failed += len(lost)
            return lost, []
        return [], lost

    def _life_s(self, node: int) -> float:
        """Return the seconds from a node's repair to its next failure, drawn from the node's own stream."""
        return float(self._generators[node].exponential(self.failures.mtbf_s))

    def _advance(self) -> Kind:
        """Apply the next event, a given one before a drawn one of the same time, and return its kind."""
        if self._given_events and (not self._drawn_events or self._given_events[-1].time_s <= self._drawn_events[0][0]):
            event = self._given_events.pop()
            if event.kind == "join":
                self.away.discard(event.node)
            else:
                self.away.add(event.node)
            return event.kind
        now_s, node = self._drawn_events[0]
        if node in self.down_until:  # its repair ends
            del self.down_until[node]
            heapq.heapreplace(self._drawn_events, (now_s + self._life_s(node), node))
            return "join"
        self.down_until[node] = now_s + self.failures.repair_s
        heapq.heapreplace(self._drawn_events, (self.down_until[node], node))
        return "fail"


def without(cluster: ClusterSpec, down: Collection[int]) -> ClusterSpec:
    """Return the cluster with 0 GPUs on the nodes that are ``down``; nodes keep their numbers.

    >>> without(ClusterSpec.homogeneous(3, 4), [1]).gpus
    (4, 0, 4)
    """
    gpus = tuple(0 if node in down else count for node, count in enumerate(cluster.gpus))
    return ClusterSpec(gpus=gpus, gpu_types=cluster.gpu_types, partial=True)
