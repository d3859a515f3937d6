"""The time of NCCL's collectives on two levels of links: inside a node, and between nodes. Start at :class:`Fabric`.

The model is NCCL's own (src/graph/tuning.cc, NCCL 2.28): for each algorithm (ring, tree, NVLS) and protocol (LL, LL128,
Simple) a time ``latency + bytes / bandwidth``, of which NCCL takes the smallest. The latency sums the hops of each level;
the bandwidth is the slower level's, less what a protocol spends on flags and what a channel can carry. Three terms are added
that published nccl-tests show: the start of a kernel, the filling of a tree's chain by chunks, and the rates that links
reach (:mod:`ddltool.links`). Where a link is only known by a rate and a latency, NCCL's constants are zero: what is left is
the ring's formula (Patarasuk and Yuan, JPDC 2009) or the tree's.

Sizes are bytes of the whole tensor that is gathered or reduced, not of one process's part; all functions broadcast over arrays
of sizes. Bus bandwidth is the rate at which each process sends over its link, which does not depend on their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from ddltool.arrays import Floats
from ddltool.links import Kind, Link

Size = TypeVar("Size", float, Floats)
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
Algorithm = Literal["ring", "tree", "nvls"]

PROTOCOLS = ("LL", "LL128", "Simple")
"""NCCL's ways to send: LL with a flag of 4 bytes beside every 4, LL128 with 8 in every 128, Simple without flags, by chunks."""
_LL, _LL128, _SIMPLE = range(3)
# tuning.cc's baseLatencies and hwLatencies, microseconds per protocol: of the collective, and of a hop.
_BASE_US = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
_HOP_US = {
    "nvlink": {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)},
    "pcie": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7)},
    "infinity": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7)},
    "nic": {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)},
    "plain": {"tree": (0.0, 0.0, 0.0), "ring": (0.0, 0.0, 0.0)},
}
# Microseconds of a reduction in NVLink's switches, and of a hop of the tree over nodes that follows it.
_NVLS_US, _NVLS_HOP_US = 25.0, 20.9
# Microseconds to post a step of a ring through nodes to a network card, with LL, LL128 and Simple.
_POST_US = (2.0, 2.0, 6.0)
# For messages of at least so many bytes per process and channel, NCCL multiplies the latency of a ring through nodes by so much
# ("plateau effect" in tuning.cc).
_PLATEAU_BYTES = 64.0
_PLATEAU_VOLTA, _PLATEAU_NEWER = 1.9, 1.4


@dataclass(frozen=True, slots=True)
class _Generation:
    """tuning.cc's limits of a GPU generation, in GB/s; a tuple has an entry for one node, for two, and for more."""

    channels: int
    """Channels per collective, which work in parallel."""
    ll: tuple[float, float, float]
    """Bus bandwidth of the protocol LL, all channels together."""
    ring_ll128: float
    """Of one channel of a ring with the protocol LL128."""
    tree_ll128: tuple[float, float, float]
    """Of one channel of a tree with LL128."""
    tree: tuple[float, float, float]
    """Of one channel of a tree with Simple."""
    nvls: float = 0.0
    """Bus bandwidth of NVLS over that of rings: 480 GB/s on 8 H100, 840 on 8 B200; 0: no NVLS."""
    gathers: float = 1.0
    """Bus bandwidth of rings that gather or scatter over that of rings that reduce."""
    few: float = 0.0
    """A ring of n processes does not reach the share ``few / n`` of the links' rate, because fewer links are busy at a time."""
    start_us: float = 12.0
    """Microseconds to start a kernel, from nccl-tests; RCCL's from XLA's tables of an MI300X."""


_INF = math.inf
_VOLTA = _Generation(6, (39.0, 39.0, 20.4), 20.0, (20.0, 20.0, 20.0), (26.5, 18.5, 10.0))
_AMPERE = _Generation(12, (87.7, 22.5, 19.0), 20.0, (20.0, 20.0, 20.0), (24.0, 23.6, 17.8))
_HOPPER = _Generation(18, (141.0, 45.0, 35.0), 36.7, (36.7, 36.7, 29.0), (38.7, 41.4, 36.0), nvls=1.29, few=0.75)
_BLACKWELL = _Generation(
    18, (282.0, 90.0, 70.0), 40.0, (55.6, 31.67, 20.0), (70.0, 42.8, 24.0), nvls=1.0, gathers=0.83, few=0.3
)
_RCCL = _Generation(16, (_INF, _INF, _INF), _INF, (_INF, _INF, _INF), (_INF, _INF, _INF), start_us=170.0)
_ANY = _Generation(1, (_INF, _INF, _INF), _INF, (_INF, _INF, _INF), (_INF, _INF, _INF))
_GENERATIONS: dict[Kind, _Generation] = {
    "nvlink1": _VOLTA,
    "nvlink2": _VOLTA,
    "nvlink3": _AMPERE,
    "nvlink4": _HOPPER,
    "nvlink5": _BLACKWELL,
    "pcie3": _VOLTA,
    "pcie4": _AMPERE,
    "pcie5": replace(_HOPPER, nvls=0.0, few=0.0),
    "infinity": _RCCL,
}
# Factors on a tree's bandwidth: a row for each protocol, a column for each size of 64 B times a power of two
# (treeCorrectionFactor in tuning.cc).
_CORRECTION = np.array(
    [
        [1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1, 1],
        [0.9] * 7 + [0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9],
    ]
)
# A chunk of Simple is an eighth of NCCL's buffer of 4 MiB.
_CHUNK_BYTES = 2.0**19
# A message is cut into at least so many chunks per channel.
_LEAST_CHUNKS = 8.0
# Shares of the links' rate that protocols reach: LL and LL128 in rings, and in trees over nodes.
_RING_SHARES, _TREE_SHARES = (0.5, 0.92, 1.0), (1 / 3.8, 0.9375, 1.0)
# Rings of so many processes reach the links' rate.
_MANY = 8
# NVLS is used for at most so many GPUs of a node: larger (rack-scale) NVLink domains were measured to use rings.
_LARGEST_NVLS = 8


class Reducer(Protocol):
    """Anything that can say how long an all-reduce takes. Sizes are bytes, a number or an array."""

    def all_reduce_s(self, size_bytes: Size) -> Size:
        """Return the seconds to reduce ``size_bytes`` on every process."""
        ...


class Communicator(Reducer, Protocol):
    """Anything that can say how long collectives among its processes take."""

    @property
    def replicas(self) -> int:
        """The number of processes."""
        ...

    def all_gather_s(self, size_bytes: Size) -> Size:
        """Return the seconds to gather ``size_bytes`` (the whole, not one's part) on every process."""
        ...

    def reduce_scatter_s(self, size_bytes: Size) -> Size:
        """Return the seconds to reduce ``size_bytes`` and leave each process its part."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCollective:
    """What nccl-tests measured of one collective among certain processes."""

    collective: Collective
    replicas: int
    """The number of processes."""
    nodes: int
    """The number of nodes that they were on."""
    size_bytes: tuple[float, ...]
    """(k,) sizes of messages, ascending."""
    seconds: tuple[float, ...]
    """(k,) the time of a message of each size."""


@dataclass(frozen=True, slots=True)
class _Variant:
    """One algorithm of a collective with one protocol (an index of ``PROTOCOLS``), and its cost by size.

    A rate of ``bytes_per_us`` is of the message's bytes, not of those on the links.
    """

    algorithm: Algorithm
    protocol: int
    latency_us: float
    longer_us: float
    """Microseconds added to ``latency_us`` for messages of :data:`_PLATEAU_BYTES` and more per process and channel."""
    bytes_per_us: float
    fill_us_per_byte: float = 0.0
    """Microseconds per byte of a chunk, until a tree's chain is full."""
    corrected: bool = False
    """Whether :data:`_CORRECTION` scales the rate."""


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The network of a cluster: ``inside`` links the GPUs of a node, ``between`` links the nodes."""

    inside: Link
    between: Link
    gpus_per_node: int = 1
    algorithms: tuple[Algorithm, ...] = ("ring", "tree", "nvls")
    """The algorithms that NCCL may choose from (NCCL_ALGO); without nvls under NCCL_CUMEM_ENABLE=0."""
    measured: tuple[MeasuredCollective, ...] = ()
    """Tables that scale the model, by the ratio of measured to modelled time for the table's own processes."""

    @classmethod
    def flat(cls, bytes_per_s: float, latency_s: float) -> Fabric:
        """Return a fabric of nodes with one process each, behind links of one rate (bytes per second) and latency (seconds)."""
        link = Link(kind="plain", bytes_per_s=bytes_per_s, latency_s=latency_s)
        return cls(inside=link, between=link)

    @classmethod
    def joined(cls, fabrics: Mapping[str, Fabric], devices: Mapping[str, int]) -> Group:
        """Return the group of processes on devices of several types, each type on nodes of its own.

        ``fabrics``: by device type; ``devices``: the number of processes on each type. The group has the slowest link between
        nodes, the slowest link inside a node among types with several processes on a node, and nodes as large as those of the
        type with the smallest nodes.
        """
        counts = {name: count for name, count in devices.items() if count}
        node_counts = {name: math.ceil(count / fabrics[name].gpus_per_node) for name, count in counts.items()}
        # Types whose links inside a node are used; where there is none, the links do not matter, and any will do.
        with_neighbours = [name for name in counts if counts[name] > node_counts[name]] or list(counts)
        slowest_inside = min((fabrics[name].inside for name in with_neighbours), key=lambda link: link.bytes_per_s)
        slowest_between = min((fabrics[name].between for name in counts), key=lambda link: link.bytes_per_s)
        per_node = min(fabrics[name].gpus_per_node for name in counts)
        fabric = replace(
            fabrics[with_neighbours[0]], inside=slowest_inside, between=slowest_between, gpus_per_node=per_node
        )
        return fabric.over(sum(counts.values()), sum(node_counts.values()))

    @property
    def text(self) -> str:
        """A text for the links, such as "8 a node on NVLink 4 at 370.8 GB/s, 10 Gbit/s between nodes"."""
        between = f"{self.between.bytes_per_s * 8 / 1e9:.4g} Gbit/s"
        if self.gpus_per_node == 1:
            return between
        name = f"{self.inside.text} at " if self.inside.text else ""
        inside = f"{self.gpus_per_node} a node on {name}{self.inside.bytes_per_s / 1e9:.4g} GB/s"
        # a PCIe link between nodes is a placeholder for a single node, where no network was named
        return inside if self.between.kind.startswith("pcie") else f"{inside}, {between} between nodes"

    def over(self, replicas: int, nodes: int | None = None) -> Group:
        """Return the group of ``replicas`` processes on ``nodes`` nodes; None: on the fewest that hold them."""
        return Group(fabric=self, replicas=replicas, nodes=nodes or math.ceil(replicas / self.gpus_per_node))

    def sharded(self, replicas: int, shard: int, nodes: int | None = None) -> Communicator:
        """Return the communicator of parameters that are divided among ``shard`` neighbouring processes (HSDP).

        ``replicas`` processes form several such shard groups; within a group parameters are gathered and gradients scattered,
        and between the groups gradients are reduced, too. A shard of all ``replicas`` is a plain group. ``nodes``: of all
        replicas; None: the fewest that hold them.
        """
        if shard >= replicas:
            return self.over(replicas, nodes)
        groups = replicas // shard
        nodes = nodes or math.ceil(replicas / self.gpus_per_node)
        # The processes that hold the same part, one of each shard group: as far apart as the groups are.
        between = self.over(groups, min(groups, nodes))
        sharing = 1
        if between.nodes > 1:
            # All groups like ``between`` reduce at once, so a node's cards carry one message for each of its processes, divided
            # by the shard groups on the node, because processes of one group like ``between`` do not leave the node to reach
            # each other. On 2 nodes of 8 processes, 8 messages share the cards with shards of 8, and 4 with shards of 4.
            processes_per_node = math.ceil(replicas / nodes)
            sharing = max(1, processes_per_node * between.nodes // groups)
        return Replicated(inside=self.over(shard), between=between, sharing=sharing)


@dataclass(frozen=True, kw_only=True)
class Group:
    """``replicas`` processes on ``nodes`` nodes of a fabric: what collectives among them cost by NCCL's model.

    A variant is an algorithm (ring, tree, NVLS: in the switches) with a protocol (LL, LL128, Simple: how data are sent); of a
    collective's variants the fastest is taken. A channel is one of several rings or trees that work in parallel.
    """

    fabric: Fabric
    replicas: int
    nodes: int = 1

    def all_reduce_s(self, size_bytes: Size) -> Size:
        """Return the seconds to reduce ``size_bytes`` on every process."""
        return self.collective_s("all_reduce", size_bytes)

    def all_gather_s(self, size_bytes: Size) -> Size:
        """Return the seconds to gather ``size_bytes`` (the whole, not one's part) on every process."""
        return self.collective_s("all_gather", size_bytes)

    def reduce_scatter_s(self, size_bytes: Size) -> Size:
        """Return the seconds to reduce ``size_bytes`` and leave each process its part."""
        return self.collective_s("reduce_scatter", size_bytes)

    def chosen(self, collective: Collective, size_bytes: float) -> tuple[Algorithm, str]:
        """Return the algorithm and the protocol (one of ``PROTOCOLS``) that NCCL chooses for a message by its own model."""
        variants = self._variants[collective]
        times_us = self._variant_times_us(variants, np.array([float(size_bytes)]))[:, 0]
        fastest = variants[int(np.argmin(times_us))]
        return fastest.algorithm, PROTOCOLS[fastest.protocol]

    def collective_s(self, collective: Collective, size_bytes: Size) -> Size:
        """Return the seconds of a collective over ``size_bytes``, 0 for one process.

        They are the model's, multiplied by the ratio of measured to modelled time in the most similar table, if there is one.
        Between the table's sizes the logarithm of the ratio is interpolated; beyond them the ratio at the end is taken.
        """
        if self.replicas < 2:
            return size_bytes * 0.0
        size = np.atleast_1d(np.asarray(size_bytes, dtype=np.float64))
        seconds = self._model_s(collective, size)
        table = self._nearest_table(collective)
        if table is not None:
            measured_group = replace(self, replicas=table.replicas, nodes=table.nodes)
            measured_bytes = np.array(table.size_bytes)
            modelled_s = measured_group._model_s(table.collective, measured_bytes)
            log_ratio = np.log(np.array(table.seconds) / modelled_s)
            seconds = seconds * np.exp(np.interp(np.log(np.maximum(size, 1.0)), np.log(measured_bytes), log_ratio))
        return float(seconds[0]) if np.ndim(size_bytes) == 0 else seconds.reshape(np.shape(size_bytes))  # type: ignore[return-value]

    def _nearest_table(self, collective: Collective) -> MeasuredCollective | None:
        """Return the most similar table of the fabric, None if it has none.

        Tables on one node or on several, as this group is, are preferred, because other links limit them; then those of the
        same collective; then those with the nearest number of processes, and of nodes.
        """
        return min(
            self.fabric.measured,
            key=lambda table: (
                (table.nodes > 1) != (self.nodes > 1),
                table.collective != collective,
                abs(math.log(table.replicas / self.replicas)),
                abs(math.log(table.nodes / self.nodes)),
            ),
            default=None,
        )

    def _model_s(self, collective: Collective, size: Floats) -> Floats:
        """Return the modelled seconds of a collective over ``size`` (...) bytes: those of its fastest variant."""
        fastest_us: Floats = self._variant_times_us(self._variants[collective], size).min(axis=0)
        return fastest_us * 1e-6

    def _variant_times_us(self, variants: Sequence[_Variant], size: Floats) -> Floats:
        """Return (variants, ...) the microseconds of messages of ``size`` (...) bytes by each variant.

        They are latency plus bytes over rate, and for trees the time until the first chunk has passed their chains.
        """
        channels = self._generation.channels
        octave = np.log2(np.maximum(size / 64.0, 1.0))  # fractional column of _CORRECTION, which begins at 64 bytes
        is_long = size / (channels * self.replicas) >= _PLATEAU_BYTES
        chunk = np.minimum(size / (channels * _LEAST_CHUNKS), _CHUNK_BYTES)
        times_us = np.empty((len(variants), *size.shape))
        for index, variant in enumerate(variants):
            rate: float | Floats = variant.bytes_per_us
            if variant.corrected:
                rate = rate * np.interp(octave, np.arange(_CORRECTION.shape[1]), _CORRECTION[variant.protocol])
            times_us[index] = (
                variant.latency_us + variant.longer_us * is_long + variant.fill_us_per_byte * chunk + size / rate
            )
        return times_us

    @cached_property
    def _per_node(self) -> int:
        """The number of processes on the fullest node."""
        return math.ceil(self.replicas / self.nodes)

    @cached_property
    def _generation(self) -> _Generation:
        """The limits of the GPUs' generation, by the kind of link inside a node; ``_ANY``, without limits, for other kinds."""
        return _GENERATIONS.get(self.fabric.inside.kind, _ANY)

    @cached_property
    def _levels(self) -> list[Link]:
        """The links in use: inside a node if one holds several processes, and between nodes if there are several."""
        levels: list[Link] = []
        if self._per_node > 1:
            levels.append(self.fabric.inside)
        if self.nodes > 1:
            levels.append(self.fabric.between)
        return levels

    @cached_property
    def _variants(self) -> dict[Collective, list[_Variant]]:
        """The variants of each collective among which NCCL chooses for these processes.

        An all-reduce may use a ring, a tree or NVLS, as far as the fabric allows; the others use a ring or a chain.
        """
        all_reduces = [*self._ring_variants(2.0), *self._tree_variants(), *self._nvls_variants()]
        variants: dict[Collective, list[_Variant]] = {
            "all_reduce": [variant for variant in all_reduces if variant.algorithm in self.fabric.algorithms],
            "all_gather": list(self._ring_variants(1.0)),
            "reduce_scatter": list(self._ring_variants(1.0)),
            "broadcast": list(self._broadcast_variants()),
        }
        # LL128 needs links that do not split stores of 128 bytes, as NVLink and RDMA
        has_ll128 = all(link.kind.startswith(("nvlink", "nic")) for link in self._levels)
        return {
            collective: [variant for variant in candidates if has_ll128 or variant.protocol != _LL128]
            for collective, candidates in variants.items()
        }

    @cached_property
    def _has_constants(self) -> bool:
        """Whether times include NCCL's constants: if any link in use is known by more than a rate and a latency."""
        return any(link.kind != "plain" for link in self._levels)

    def _base_us(self, algorithm: Algorithm, protocol: int) -> float:
        """Return the microseconds of a variant before its first hop; ``protocol``: an index of ``PROTOCOLS``."""
        return self._generation.start_us + _BASE_US[algorithm][protocol] if self._has_constants else 0.0

    def _hop_us(self, link: Link, algorithm: Algorithm, protocol: int) -> float:
        """Return the microseconds of a hop over a link: NCCL's of its kind, at least the link's own latency."""
        kind = link.kind if link.kind in _HOP_US else link.kind[:-1]  # "nvlink3" is an "nvlink"
        return max(_HOP_US[kind][algorithm][protocol], 1e6 * link.latency_s)

    def _bus_rate(self, card_factor: float = 1.0) -> float:
        """Return the bus bandwidth in GB/s of the slowest level of links; that of the cards is multiplied by ``card_factor``.

        Few processes on a node do not reach the rate of its links: a small ring keeps fewer of them busy, and a GPU that is
        wired to ``peers`` others uses only its links to those that take part.
        """
        inside = self.fabric.inside
        rates: list[float] = []  # bytes per second
        if self._per_node > 1:
            if inside.peers:
                reached_share = (self._per_node - 1) / inside.peers
            else:  # relative to a ring of _MANY processes, for which a link's rate is given
                few = self._generation.few
                reached_share = (1.0 - few / self._per_node) / (1.0 - few / _MANY)
            rates.append(min(reached_share, 1.0) * inside.bytes_per_s)
        if self.nodes > 1:
            rates.append(card_factor * self.fabric.between.bytes_per_s)
        return min(rates) / 1e9

    @property
    def _node_count_index(self) -> int:
        """The index in those tuples of :class:`_Generation` that have an entry for one node, for two, and for more."""
        return min(self.nodes, 3) - 1

    def _ring_variants(self, passes: float) -> Iterator[_Variant]:
        """Yield a ring for each protocol, with its latency and rate.

        ``passes``: how often the data passes round the ring, each time in ``replicas - 1`` steps: 2 for an all-reduce (to
        reduce and to gather), 1 for a gather or a scatter.
        """
        generation = self._generation
        steps = passes * (self.replicas - 1)
        steps_between = passes * (self.nodes - 1)  # those that lead to another node
        # Over more than two nodes, no channel was measured to carry more than a tree's.
        most_gb_per_s = generation.tree[2] * generation.channels if self.nodes > 2 else math.inf
        link_gb_per_s = min(self._bus_rate(), most_gb_per_s)
        if passes == 1:
            link_gb_per_s *= generation.gathers
        limits = (generation.ll[self._node_count_index], generation.channels * generation.ring_ll128, math.inf)
        has_cards = self.nodes > 1 and self.fabric.between.kind != "plain"
        for protocol, (share, limit) in enumerate(zip(_RING_SHARES, limits, strict=True)):
            inside_us = max(self._hop_us(self.fabric.inside, "ring", protocol), has_cards * _POST_US[protocol])
            # with one process per node a ring's hops are not hidden behind others, and take as long as a tree's
            between_us = self._hop_us(self.fabric.between, "tree" if self._per_node == 1 else "ring", protocol)
            hops_us = (steps - steps_between) * inside_us + steps_between * between_us
            plateau = _PLATEAU_VOLTA if generation is _VOLTA else _PLATEAU_NEWER
            yield _Variant(
                algorithm="ring",
                protocol=protocol,
                latency_us=self._base_us("ring", protocol) + hops_us,
                longer_us=hops_us * (plateau - 1.0) if protocol == _SIMPLE and passes > 1 and has_cards else 0.0,
                # every link carries the share steps / replicas of the message; 1 GB/s is 1e3 bytes per microsecond
                bytes_per_us=1e3 * min(share * link_gb_per_s, limit) * self.replicas / steps,
            )

    def _tree_variants(self) -> Iterator[_Variant]:
        """Yield a double binary tree over the nodes for each protocol, with a chain through the processes of each node.

        Data goes up the tree and down again, so that every hop counts twice and the rate is halved.
        """
        generation = self._generation
        node_count = self._node_count_index
        chain = self._per_node - 1  # hops through a node's processes
        depth = math.ceil(math.log2(self.nodes))  # hops of the tree over the nodes
        # On two nodes each of both trees has its root on one of them: half of the data crosses each way. NCCL takes 0.92 of the
        # links' rate; published sweeps reach all of it.
        link_gb_per_s = self._bus_rate(2.0 if self.nodes == 2 else 1.0)
        tree_gb_per_s = min(link_gb_per_s, generation.channels * generation.tree[node_count])
        limits = (generation.ll[node_count], generation.channels * generation.tree_ll128[node_count], math.inf)
        # On one node NCCL gives LL128 in a tree 7/9 of the rate.
        shares = (_TREE_SHARES[0], 7 / 9 if self.nodes == 1 else _TREE_SHARES[1], 1.0)
        fill_us_per_byte = 2.0 * (chain + depth) * generation.channels / (1e3 * tree_gb_per_s)
        for protocol, (share, limit) in enumerate(zip(shares, limits, strict=True)):
            inside_us = self._hop_us(self.fabric.inside, "tree", protocol)
            between_us = self._hop_us(self.fabric.between, "tree", protocol)
            yield _Variant(
                algorithm="tree",
                protocol=protocol,
                latency_us=self._base_us("tree", protocol) + 2.0 * (chain * inside_us + depth * between_us),
                longer_us=0.0,
                bytes_per_us=1e3 * min(share * tree_gb_per_s, limit) * 0.5,
                fill_us_per_byte=fill_us_per_byte if protocol != _LL and self._has_constants else 0.0,
                corrected=self._has_constants,
            )

    def _nvls_variants(self) -> Iterator[_Variant]:
        """Yield the all-reduce in NVLink's switches (NVLS), with a tree over several nodes.

        Yields nothing if the GPUs lack NVLS, or a node holds fewer than three processes or more than ``_LARGEST_NVLS``.
        """
        generation = self._generation
        if not (generation.nvls and 2 < self._per_node <= _LARGEST_NVLS):
            return
        bus_gb_per_s = generation.nvls * self.fabric.inside.bytes_per_s / 1e9
        latency_us = generation.start_us + _NVLS_US
        if self.nodes > 1:
            # As for trees: on two nodes half of the data crosses each way.
            card_factor = 2.0 if self.nodes == 2 else 1.0
            bus_gb_per_s = min(bus_gb_per_s, card_factor * self.fabric.between.bytes_per_s / 1e9)
            hop_us = max(_NVLS_HOP_US, 1e6 * self.fabric.between.latency_s)
            latency_us += 2.0 * math.ceil(math.log2(self.nodes)) * hop_us
        bytes_per_us = 1e3 * bus_gb_per_s * self.replicas / (2.0 * (self.replicas - 1))
        yield _Variant("nvls", _SIMPLE, latency_us, longer_us=0.0, bytes_per_us=bytes_per_us)

    def _broadcast_variants(self) -> Iterator[_Variant]:
        """Yield for each protocol a chain from one process through all others, whose links have the rate of a ring's.

        A chain has a hop less than a ring, and every byte passes over each link once.
        """
        hops_between = self.nodes - 1
        hops_inside = self.replicas - 1 - hops_between
        for ring in self._ring_variants(1.0):
            latency_us = self._base_us("ring", ring.protocol)
            latency_us += hops_inside * self._hop_us(self.fabric.inside, "ring", ring.protocol)
            latency_us += hops_between * self._hop_us(self.fabric.between, "ring", ring.protocol)
            bytes_per_us = ring.bytes_per_us * (self.replicas - 1) / self.replicas
            yield replace(ring, latency_us=latency_us, bytes_per_us=bytes_per_us)


class _Line(NamedTuple):
    """The time of one variant as a line over the size of the message; see :class:`Floor`."""

    start_us: float
    us_per_byte: float
    fill_us_per_byte: float = 0.0
    """Microseconds per byte to fill a tree's chains, up to a certain size."""


class _FastestVariants:
    """The least time of each variant of an all-reduce in any of the groups that :meth:`Floor.of` bounds, by algorithm.

    n is the number of processes of ``used``; more processes only add hops, and bytes over each link. Rates are bytes per
    microsecond; more cards can only lower them.
    """

    def __init__(self, used: Group, fabrics: Sequence[Fabric], most_nodes: int) -> None:
        """Work out what the variants have in common.

        ``used``: the group that all bounded groups contain; ``fabrics``: of any process; ``most_nodes``: on which the
        processes of ``used`` may be spread.
        """
        self.used, self.fabrics = used, fabrics
        n, nodes = used.replicas, used.nodes
        self.generations = [_GENERATIONS.get(fabric.inside.kind, _ANY) for fabric in fabrics]
        self.start_us = min(generation.start_us for generation in self.generations)
        self.has_cards = all(fabric.between.kind != "plain" for fabric in fabrics)
        # Whether NCCL's constants are in the times of every such group, see Group._has_constants.
        self.has_constants = self.has_cards or (n > nodes and all(fabric.inside.kind != "plain" for fabric in fabrics))
        self.card_rate = used.fabric.between.bytes_per_s / 1e6  # of the slowest card so far
        self.tree_rate = self.card_rate * (2.0 if nodes == 2 else 1.0)  # on two nodes half of the data crosses each way
        self.chain = math.ceil(n / most_nodes) - 1  # hops through a node's processes, as few as ``most_nodes`` allow
        self.depth = math.ceil(math.log2(nodes))  # hops of a binary tree over the nodes
        self.ring_passes = 2.0 * (n - 1) / n  # how often a ring passes every byte over a link

    def _base_us(self, algorithm: Algorithm, protocol: int) -> float:
        """Return the least microseconds before the first hop."""
        return self.start_us + _BASE_US[algorithm][protocol] if self.has_constants else 0.0

    def _hops_us(self, algorithm: Algorithm, protocol: int) -> tuple[float, float]:
        """Return the microseconds of the shortest hop in any of the fabrics: (inside a node, between nodes)."""
        inside_us = min(self.used._hop_us(fabric.inside, algorithm, protocol) for fabric in self.fabrics)
        between_us = min(self.used._hop_us(fabric.between, algorithm, protocol) for fabric in self.fabrics)
        return inside_us, between_us

    def ring(self, protocol: int) -> _Line:
        """Return the line of a ring: twice round, each time ``n - 1`` hops, ``nodes - 1`` of them between nodes.

        The rate is the card's. A hop between nodes is taken at a tree's cost if that is less, because rings with one process
        on each node have that cost.
        """
        inside_us, between_us = self._hops_us("ring", protocol)
        _, tree_between_us = self._hops_us("tree", protocol)
        if self.has_cards:
            inside_us = max(inside_us, _POST_US[protocol])
        n, nodes = self.used.replicas, self.used.nodes
        ring_us = 2.0 * ((nodes - 1) * min(between_us, tree_between_us) + (n - nodes) * inside_us)
        return _Line(
            start_us=self._base_us("ring", protocol) + ring_us,
            us_per_byte=self.ring_passes / (_RING_SHARES[protocol] * self.card_rate),
        )

    def tree(self, protocol: int) -> _Line:
        """Return the line of a tree: up and down a node's chain and the tree over the nodes, every byte twice over a card.

        The fill is the time in which a first chunk passes all hops.
        """
        inside_us, between_us = self._hops_us("tree", protocol)
        tree_us = 2.0 * (self.chain * inside_us + self.depth * between_us)
        has_chunks = self.has_constants and protocol != _LL
        fill = 2.0 * (self.chain + self.depth) / (_LEAST_CHUNKS * self.tree_rate) if has_chunks else 0.0
        return _Line(
            start_us=self._base_us("tree", protocol) + tree_us,
            us_per_byte=2.0 / (_TREE_SHARES[protocol] * self.tree_rate),
            fill_us_per_byte=fill,
        )

    @property
    def may_use_nvls(self) -> bool:
        """Whether any of the groups could use NVLS: a fabric has it, and no faster links than those in use already."""
        # A joined group has its slowest type's links, and NVLS only if these have it: a faster fabric's does not count.
        slowest_inside = self.used.fabric.inside.bytes_per_s if self.used.replicas > self.used.nodes else math.inf
        return any(
            generation.nvls and fabric.inside.bytes_per_s <= slowest_inside
            for generation, fabric in zip(self.generations, self.fabrics, strict=True)
        )

    def nvls(self) -> _Line:
        """Return the line of NVLS: a reduction in the switches, then up and down a tree over the nodes at the card's rate."""
        hops_us = 2.0 * self.depth * _NVLS_HOP_US
        return _Line(self.start_us + _NVLS_US + hops_us, self.ring_passes / self.tree_rate)


@dataclass(frozen=True, kw_only=True, eq=False)
class Floor:
    """A lower bound on the time of an all-reduce in every group that contains certain processes: the least over ``w`` variants.

    A variant, an algorithm with a protocol, takes ``start_us``, ``us_per_byte`` of the message, and the time to fill a tree's
    chains. Arrays are (w, 1, 1). Searches over sets of processes rule out all supersets of a set with it at once. The bound is
    concave in the size, so that several messages take no less than a single one of all their bytes.
    """

    start_us: Floats
    us_per_byte: Floats
    fill_us_per_byte: Floats
    """Microseconds per byte of the message, up to ``most_filled_bytes``."""
    most_filled_bytes: float
    """The most bytes of a message that count for filling a tree's chains."""

    @classmethod
    def of(cls, used: Group, fabrics: Sequence[Fabric], most_nodes: int) -> Floor | None:
        """Return the bound for all groups that contain ``used`` and further processes, on links of any of the ``fabrics``.

        Each variant is taken at its fastest: the slowest card of ``used`` at its full rate, every hop as short as the
        shortest of any fabric, the processes spread over ``most_nodes`` nodes. None: no bound is known, because ``used`` is
        on one node, or measured tables scale the model.
        """
        if used.nodes < 2 or any(fabric.measured for fabric in fabrics):
            return None
        fastest = _FastestVariants(used, fabrics, most_nodes)
        lines = [line(protocol) for protocol in range(len(PROTOCOLS)) for line in (fastest.ring, fastest.tree)]
        if fastest.may_use_nvls:
            lines.append(fastest.nvls())
        start_us, us_per_byte, fill = np.array(lines).T[:, :, None, None]  # to broadcast over sizes of up to two axes
        most = _LEAST_CHUNKS * _CHUNK_BYTES * min(generation.channels for generation in fastest.generations)
        return cls(start_us=start_us, us_per_byte=us_per_byte, fill_us_per_byte=fill, most_filled_bytes=most)

    def all_reduce_s(self, size_bytes: Size) -> Size:
        """Return a lower bound on the seconds to reduce ``size_bytes``, a number or an array of one or two axes."""
        size = np.atleast_2d(np.asarray(size_bytes, dtype=np.float64))
        fill_us = self.fill_us_per_byte * np.minimum(size, self.most_filled_bytes)
        least_s = 1e-6 * (self.start_us + self.us_per_byte * size + fill_us).min(axis=0)
        return float(least_s[0, 0]) if np.ndim(size_bytes) == 0 else least_s.reshape(np.shape(size_bytes))  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class Replicated:
    """One shard group of several whose reduced parts are also reduced over the groups (HSDP)."""

    inside: Group
    """The processes of the shard group."""
    between: Group
    """The processes that hold the same part, one in each shard group."""
    sharing: int
    """How many groups like ``between`` use the same network cards at once."""

    @property
    def replicas(self) -> int:
        """The number of processes that share one set of parameters."""
        return self.inside.replicas

    def all_gather_s(self, size_bytes: Size) -> Size:
        """Return the seconds to gather ``size_bytes`` (the whole) within the group."""
        return self.inside.all_gather_s(size_bytes)

    def reduce_scatter_s(self, size_bytes: Size) -> Size:
        """Return the seconds to reduce and scatter within the group, and then to reduce each part over the groups."""
        # parts that share a card take as long as one message of all their bytes
        part_bytes = size_bytes * (self.sharing / self.inside.replicas)
        return self.inside.reduce_scatter_s(size_bytes) + self.between.all_reduce_s(part_bytes)

    def all_reduce_s(self, size_bytes: Size) -> Size:
        """Return the seconds to reduce on every process of every group: scattered, over the groups, and gathered again."""
        return self.reduce_scatter_s(size_bytes) + self.inside.all_gather_s(size_bytes)
