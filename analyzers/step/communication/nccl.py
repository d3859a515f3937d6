"""How long NCCL's collectives take on two levels of links: inside a node, and between nodes. Start at :class:`Fabric`.

The model is NCCL's own (src/graph/tuning.cc, NCCL 2.28): for each algorithm (ring, tree, NVLS) and protocol (LL, LL128,
Simple) a time ``latency + bytes / bandwidth``, of which NCCL takes the smallest. The latency sums the hops of each level;
the bandwidth is the slower level's, less what a protocol spends on flags and what a channel can carry. Three terms are added
that published nccl-tests show: the start of a kernel, the filling of a tree's chain by chunks, and the rates that links
reach (:mod:`ddltool.links`). Where a link is only known by a rate and a latency, NCCL's constants are zero: what is left is
the ring's formula (Patarasuk and Yuan, JPDC 2009) or the tree's.

Sizes are those of the whole: what is gathered on each process, or reduced; all functions broadcast over arrays of bytes.
Bus bandwidth is what each process sends over its link: it does not depend on how many processes there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ddltool.links import Kind, Link

Array = NDArray[np.float64]
Size = TypeVar("Size", float, Array)
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
Algorithm = Literal["ring", "tree", "nvls"]

PROTOCOLS = ("LL", "LL128", "Simple")
_LL128, _SIMPLE = 1, 2
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
# Posting each step of a ring through nodes to a card takes this long; LL, LL128, Simple.
_POST_US = (2.0, 2.0, 6.0)
# Messages of at least so many bytes per process and channel wait so many times as long for the steps of a ring through nodes
# ("plateau effect" there).
_PLATEAU_BYTES = 64.0
_PLATEAU_VOLTA, _PLATEAU_NEWER = 1.9, 1.4


@dataclass(frozen=True, slots=True)
class _Generation:
    """tuning.cc's limits of a GPU generation, GB/s; three figures are those on one node, on two, and on more."""

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
    """A ring of n processes loses the share ``few / n`` of the links' rate: fewer of them are busy at a time."""
    start_us: float = 12.0
    """A kernel's start as nccl-tests see it; RCCL's as XLA's tables do, on an MI300X."""


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
# A tree's bandwidth at 64 B times powers of two, by protocol (treeCorrectionFactor there).
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
# What rings of so many and more reach is the links' rate.
_MANY = 8
# Rack-scale domains of NVLink were measured to go round in rings: their switches reduce for 8 GPUs at a time here.
_LARGEST_NVLS = 8


class Reducer(Protocol):
    """Processes that reduce. Sizes in bytes (of any shape), times in seconds."""

    def all_reduce_s(self, size_bytes: Size) -> Size:
        """Return the seconds to reduce ``size_bytes`` on every process."""
        ...


class Communicator(Reducer, Protocol):
    """Processes that communicate: what a collective among them costs."""

    @property
    def replicas(self) -> int:
        """Return how many processes there are."""
        ...

    def all_gather_s(self, size_bytes: Size) -> Size:
        """Return the seconds to gather ``size_bytes`` (the whole, not one's part) on every process."""
        ...

    def reduce_scatter_s(self, size_bytes: Size) -> Size:
        """Return the seconds to reduce ``size_bytes`` and leave each process its part."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCollective:
    """What nccl-tests measured of one collective on one set of processes: (k,) ascending bytes, and seconds."""

    collective: Collective
    replicas: int
    nodes: int
    size_bytes: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Variant:
    """One algorithm of a collective with one protocol (an index of ``PROTOCOLS``), and its cost by size.

    A rate of ``bytes_per_us`` is of the message's bytes, not of those on the links.
    """

    algorithm: Algorithm
    protocol: int
    latency_us: float
    longer_us: float
    """Added to the latency of messages of :data:`_PLATEAU_BYTES` and more per process and channel."""
    bytes_per_us: float
    fill_us_per_byte: float = 0.0
    """Microseconds per byte of a chunk, until a tree's chain is full."""
    corrected: bool = False
    """Whether :data:`_CORRECTION` scales the rate."""


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Nodes of GPUs: ``inside`` joins those of a node, ``between`` the nodes."""

    inside: Link
    between: Link
    gpus_per_node: int = 1
    algorithms: tuple[Algorithm, ...] = ("ring", "tree", "nvls")
    """What NCCL_ALGO lets it choose from; NCCL_CUMEM_ENABLE=0 takes nvls away."""
    measured: tuple[MeasuredCollective, ...] = ()
    """Tables that scale the model: by the ratio of table and model on the table's own processes."""

    @classmethod
    def flat(cls, bytes_per_s: float, latency_s: float) -> Fabric:
        """Return a fabric of nodes with one process each, behind links of one rate (bytes per second) and latency (seconds)."""
        link = Link(kind="plain", bytes_per_s=bytes_per_s, latency_s=latency_s)
        return cls(inside=link, between=link)

    @classmethod
    def joined(cls, fabrics: Mapping[str, Fabric], devices: Mapping[str, int]) -> Group:
        """Return the group of processes on devices of several types, each type on nodes of its own.

        ``fabrics``: by type; ``devices``: how many processes run on each type. All go as fast as the slowest links. The link
        inside a node counts only of types with several processes on a node, and nodes are as large as the smallest type's.
        """
        counts = {name: count for name, count in devices.items() if count}
        node_counts = {name: math.ceil(count / fabrics[name].gpus_per_node) for name, count in counts.items()}
        with_neighbours = [name for name in counts if counts[name] > node_counts[name]] or list(counts)
        slowest = min((fabrics[name].inside for name in with_neighbours), key=lambda link: link.bytes_per_s)
        slowest_card = min((fabrics[name].between for name in counts), key=lambda link: link.bytes_per_s)
        per_node = min(fabrics[name].gpus_per_node for name in counts)
        fabric = replace(fabrics[with_neighbours[0]], inside=slowest, between=slowest_card, gpus_per_node=per_node)
        return fabric.over(sum(counts.values()), sum(node_counts.values()))

    @property
    def text(self) -> str:
        """Return the links in words, such as "8 a node on NVLink 4 at 370.8 GB/s, 10 Gbit/s between nodes"."""
        between = f"{self.between.bytes_per_s * 8 / 1e9:.4g} Gbit/s"
        if self.gpus_per_node == 1:
            return between
        name = f"{self.inside.text} at " if self.inside.text else ""
        inside = f"{self.gpus_per_node} a node on {name}{self.inside.bytes_per_s / 1e9:.4g} GB/s"
        # a link through the host stands where no network was named, for nothing leaves the node
        return inside if self.between.kind.startswith("pcie") else f"{inside}, {between} between nodes"

    def over(self, replicas: int, nodes: int | None = None) -> Group:
        """Return the group of ``replicas`` processes on ``nodes`` nodes; None: on the fewest that hold them."""
        return Group(fabric=self, replicas=replicas, nodes=nodes or math.ceil(replicas / self.gpus_per_node))

    def sharded(self, replicas: int, shard: int, nodes: int | None = None) -> Communicator:
        """Return one of the groups of ``shard`` neighbours, whose parts are reduced over the groups as well (HSDP).

        A shard of all replicas is a single group. ``nodes``: of all replicas, as of :meth:`over`.
        """
        if shard >= replicas:
            return self.over(replicas, nodes)
        groups = replicas // shard
        nodes = nodes or math.ceil(replicas / self.gpus_per_node)
        # one process of each group, all of the same rank within it: as far apart as the groups are
        between = self.over(groups, min(groups, nodes))
        # all ranks reduce over the groups at once: a node's cards carry a group for each of its processes, or for each pair of
        # them where two shard groups lie on the node, and so on
        sharing = max(1, math.ceil(replicas / nodes) * between.nodes // groups)
        return Replicated(inside=self.over(shard), between=between, sharing=sharing if between.nodes > 1 else 1)


@dataclass(frozen=True, kw_only=True)
class Group:
    """``replicas`` processes on ``nodes`` nodes of a fabric: what collectives among them cost by NCCL's model."""

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
        """Return the algorithm and the protocol (of ``PROTOCOLS``) that NCCL takes for a message, by its own model."""
        variants = self._variants[collective]
        times_us = self._variant_times_us(variants, np.array([float(size_bytes)]))[:, 0]
        fastest = variants[int(np.argmin(times_us))]
        return fastest.algorithm, PROTOCOLS[fastest.protocol]

    def collective_s(self, collective: Collective, size_bytes: Size) -> Size:
        """Return the seconds of a collective over ``size_bytes``, 0 for one process.

        They are the model's, scaled by the ratio of measured and modelled time in the most similar table. Between its sizes
        the logarithm of the ratio is interpolated; beyond them it stays what it is at the end.
        """
        if self.replicas < 2:
            return size_bytes * 0.0
        size = np.atleast_1d(np.asarray(size_bytes, dtype=np.float64))
        seconds = self._model_s(collective, size)
        if (table := self._nearest_table(collective)) is not None:
            measured_group = replace(self, replicas=table.replicas, nodes=table.nodes)
            measured_bytes = np.array(table.size_bytes)
            log_ratio = np.log(np.array(table.seconds) / measured_group._model_s(table.collective, measured_bytes))
            seconds = seconds * np.exp(np.interp(np.log(np.maximum(size, 1.0)), np.log(measured_bytes), log_ratio))
        return float(seconds[0]) if np.ndim(size_bytes) == 0 else seconds.reshape(np.shape(size_bytes))  # type: ignore[return-value]

    def _nearest_table(self, collective: Collective) -> MeasuredCollective | None:
        """Return the most similar table of the fabric, None where nothing was measured.

        Tables with the same levels of links come first, then those of the collective, then those of the nearest counts.
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

    def _model_s(self, collective: Collective, size: Array) -> Array:
        """Return the modelled seconds of a collective over ``size`` (...) bytes: those of its fastest variant."""
        fastest_us: Array = self._variant_times_us(self._variants[collective], size).min(axis=0)
        return fastest_us * 1e-6

    def _variant_times_us(self, variants: Sequence[_Variant], size: Array) -> Array:
        """Return (variants, ...) the microseconds of messages of ``size`` (...) bytes by each variant.

        Each is latency and bytes over rate, and for trees the time until their chains are full.
        """
        channels = self._generation.channels
        octave = np.log2(np.maximum(size / 64.0, 1.0))  # fractional column of _CORRECTION, which begins at 64 bytes
        is_long = size / (channels * self.replicas) >= _PLATEAU_BYTES
        chunk = np.minimum(size / (channels * _LEAST_CHUNKS), _CHUNK_BYTES)
        times_us = np.empty((len(variants), *size.shape))
        for index, variant in enumerate(variants):
            rate: float | Array = variant.bytes_per_us
            if variant.corrected:
                rate = rate * np.interp(octave, np.arange(_CORRECTION.shape[1]), _CORRECTION[variant.protocol])
            times_us[index] = (
                variant.latency_us + variant.longer_us * is_long + variant.fill_us_per_byte * chunk + size / rate
            )
        return times_us

    @cached_property
    def _per_node(self) -> int:
        """Return the processes on the fullest node."""
        return math.ceil(self.replicas / self.nodes)

    @cached_property
    def _generation(self) -> _Generation:
        """Return the limits of the GPUs' generation, told by the link inside a node; a link of another kind has no limits."""
        return _GENERATIONS.get(self.fabric.inside.kind, _ANY)

    @cached_property
    def _levels(self) -> list[Link]:
        """Return the links that are in use: inside a node where one holds several processes, and between nodes if several."""
        inside = [self.fabric.inside] if self._per_node > 1 else []
        return inside + ([self.fabric.between] if self.nodes > 1 else [])

    @cached_property
    def _variants(self) -> dict[Collective, list[_Variant]]:
        """Return the variants of each collective among which NCCL chooses on these processes.

        An all-reduce may go by ring, tree or NVLS, as far as the fabric allows it; the others go by ring or chain.
        """
        all_reduces = [*self._ring_variants(2.0), *self._tree_variants(), *self._nvls_variants()]
        variants: dict[Collective, list[_Variant]] = {
            "all_reduce": [variant for variant in all_reduces if variant.algorithm in self.fabric.algorithms],
            "all_gather": list(self._ring_variants(1.0)),
            "reduce_scatter": list(self._ring_variants(1.0)),
            "broadcast": list(self._broadcast_variants()),
        }
        # LL128 needs stores of 128 bytes that stay whole: NVLink and RDMA keep them so
        has_ll128 = all(link.kind.startswith(("nvlink", "nic")) for link in self._levels)
        return {
            collective: [variant for variant in candidates if has_ll128 or variant.protocol != _LL128]
            for collective, candidates in variants.items()
        }

    @cached_property
    def _has_constants(self) -> bool:
        """Return whether NCCL's constants are in the times: where any link is known by more than a rate and a latency."""
        return any(link.kind != "plain" for link in self._levels)

    def _base_us(self, algorithm: Algorithm, protocol: int) -> float:
        """Return the microseconds of a variant before its first hop; ``protocol``: an index of ``PROTOCOLS``."""
        return self._generation.start_us + _BASE_US[algorithm][protocol] if self._has_constants else 0.0

    def _hop_us(self, link: Link, algorithm: Algorithm, protocol: int) -> float:
        """Return the microseconds of a hop over a link: NCCL's of its kind, at least the link's own latency."""
        kind = link.kind if link.kind in _HOP_US else link.kind[:-1]  # "nvlink3" is an "nvlink"
        return max(_HOP_US[kind][algorithm][protocol], 1e6 * link.latency_s)

    def _bus_rate(self, card_factor: float = 1.0) -> float:
        """Return GB/s of bus bandwidth that the slowest level lets through; the cards' rate counts ``card_factor`` times.

        Few processes on a node do not reach the rate of its links: a ring of few keeps fewer of them busy, and GPUs that are
        wired to ``peers`` others use only the links to those that take part.
        """
        inside, few = self.fabric.inside, self._generation.few
        # a link's rate is what rings of _MANY processes reach: 1 for those
        reached_share = min((1.0 - few / self._per_node) / (1.0 - few / _MANY), 1.0)
        if inside.peers:
            reached_share = min((self._per_node - 1) / inside.peers, 1.0)
        rates = [reached_share * inside.bytes_per_s] if self._per_node > 1 else []
        rates += [card_factor * self.fabric.between.bytes_per_s] if self.nodes > 1 else []
        return min(rates) / 1e9

    @property
    def _node_count_index(self) -> int:
        """Return the index of these nodes in figures for one node, two, and more."""
        return min(self.nodes, 3) - 1

    def _ring_variants(self, turns: float) -> Iterator[_Variant]:
        """Yield a ring for each protocol, with its latency and rate.

        Data goes ``turns`` times round the ring, each time in ``replicas - 1`` steps: twice for an all-reduce (to reduce and
        to gather), once for a gather or a scatter.
        """
        generation = self._generation
        steps, steps_between = turns * (self.replicas - 1), turns * (self.nodes - 1)
        # over many nodes no channel was measured to carry more than a tree's does
        most_gb_per_s = generation.tree[2] * generation.channels if self.nodes > 2 else math.inf
        link_gb_per_s = min(self._bus_rate(), most_gb_per_s) * (generation.gathers if turns == 1 else 1.0)
        limits = (generation.ll[self._node_count_index], generation.channels * generation.ring_ll128, math.inf)
        has_cards = self.nodes > 1 and self.fabric.between.kind != "plain"
        for protocol, (share, limit) in enumerate(zip(_RING_SHARES, limits, strict=True)):
            inside_us = max(self._hop_us(self.fabric.inside, "ring", protocol), has_cards * _POST_US[protocol])
            # with one process per node nothing is hidden: a tree's hop
            between_us = self._hop_us(self.fabric.between, "tree" if self._per_node == 1 else "ring", protocol)
            hops_us = (steps - steps_between) * inside_us + steps_between * between_us
            plateau = _PLATEAU_VOLTA if generation is _VOLTA else _PLATEAU_NEWER
            yield _Variant(
                algorithm="ring",
                protocol=protocol,
                latency_us=self._base_us("ring", protocol) + hops_us,
                longer_us=hops_us * (plateau - 1.0) if protocol == _SIMPLE and turns > 1 and has_cards else 0.0,
                # every link carries the share steps / replicas of the message; 1 GB/s is 1e3 bytes per microsecond
                bytes_per_us=1e3 * min(share * link_gb_per_s, limit) * self.replicas / steps,
            )

    def _tree_variants(self) -> Iterator[_Variant]:
        """Yield a double binary tree over the nodes for each protocol, with a chain through the processes of each node.

        Data goes up the tree and down again, so that every hop counts twice, and the rate half.
        """
        generation, counts = self._generation, self._node_count_index
        chain, depth = self._per_node - 1, math.ceil(math.log2(self.nodes))
        # On two nodes each of both trees has its root on one of them: half of the data crosses each way. NCCL takes 0.92 of the
        # links' rate; published sweeps reach all of it.
        link_gb_per_s = self._bus_rate(2.0 if self.nodes == 2 else 1.0)
        tree_gb_per_s = min(link_gb_per_s, generation.channels * generation.tree[counts])
        limits = (generation.ll[counts], generation.channels * generation.tree_ll128[counts], math.inf)
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
                fill_us_per_byte=fill_us_per_byte if protocol and self._has_constants else 0.0,
                corrected=self._has_constants,
            )

    def _nvls_variants(self) -> Iterator[_Variant]:
        """Yield the all-reduce in NVLink's switches (NVLS), with a tree over several nodes; nothing where GPUs lack it.

        It needs three or more processes on a node, and no more than the switches of one domain join.
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
        """Yield for each protocol a chain from one process through all others, at the rate at which a ring's links work.

        A chain has a hop less than a ring, and passes every byte over each link once.
        """
        hops_between = self.nodes - 1
        hops_inside = self.replicas - 1 - hops_between
        for ring in self._ring_variants(1.0):
            latency_us = self._base_us("ring", ring.protocol)
            latency_us += hops_inside * self._hop_us(self.fabric.inside, "ring", ring.protocol)
            latency_us += hops_between * self._hop_us(self.fabric.between, "ring", ring.protocol)
            bytes_per_us = ring.bytes_per_us * (self.replicas - 1) / self.replicas
            yield replace(ring, latency_us=latency_us, bytes_per_us=bytes_per_us)


_Line = tuple[float, float, float]
"""Of one variant: ``start_us``, ``us_per_byte`` and ``fill_us_per_byte``, see :class:`Floor`."""


class _FastestVariants:
    """Each variant of an all-reduce at its fastest in any group that :meth:`Floor.of` bounds, with a method for each algorithm.

    n is the number of processes of ``used``: those that join only add hops, and bytes over each link. Rates are bytes per
    microsecond; a card that joins can only lower them.
    """

    def __init__(self, used: Group, fabrics: Sequence[Fabric], most_nodes: int) -> None:
        """Note what the variants share. The arguments are those of :meth:`Floor.of`."""
        self.used, self.fabrics = used, fabrics
        n, nodes = used.replicas, used.nodes
        self.generations = [_GENERATIONS.get(fabric.inside.kind, _ANY) for fabric in fabrics]
        self.start_us = min(generation.start_us for generation in self.generations)
        self.has_cards = all(fabric.between.kind != "plain" for fabric in fabrics)
        # Whether NCCL's constants are in the times of every such group, see Group._has_constants.
        self.has_constants = self.has_cards or (n > nodes and all(fabric.inside.kind != "plain" for fabric in fabrics))
        self.card_rate = used.fabric.between.bytes_per_s / 1e6  # of the slowest card so far
        self.tree_rate = self.card_rate * (2.0 if nodes == 2 else 1.0)  # on two nodes half of the data crosses each way
        self.chain = (
            math.ceil(n / most_nodes) - 1
        )  # hops through the processes of a node, as few as ``most_nodes`` allow
        self.depth = math.ceil(math.log2(nodes))  # hops of a binary tree over the nodes
        self.ring_passes = 2.0 * (n - 1) / n  # how often a ring passes every byte over a link

    def _base_us(self, algorithm: Algorithm, protocol: int) -> float:
        """Return the least microseconds before the first hop."""
        return self.start_us + _BASE_US[algorithm][protocol] if self.has_constants else 0.0

    def _hops_us(self, algorithm: Algorithm, protocol: int) -> tuple[float, float]:
        """Return the microseconds of the shortest hop of all fabrics, inside a node and between nodes."""
        inside_us = min(self.used._hop_us(fabric.inside, algorithm, protocol) for fabric in self.fabrics)
        return inside_us, min(self.used._hop_us(fabric.between, algorithm, protocol) for fabric in self.fabrics)

    def ring(self, protocol: int) -> _Line:
        """Return a ring's line: twice round in ``n - 1`` hops, of which ``nodes - 1`` between nodes, at the card's rate.

        A hop between nodes may cost as little as a tree's, which it does where each node has one process.
        """
        inside_us, between_us = self._hops_us("ring", protocol)
        inside_us = max(inside_us, _POST_US[protocol]) if self.has_cards else inside_us
        between_us = min(between_us, self._hops_us("tree", protocol)[1])
        n, nodes = self.used.replicas, self.used.nodes
        ring_us = 2.0 * ((nodes - 1) * between_us + (n - nodes) * inside_us)
        return (
            self._base_us("ring", protocol) + ring_us,
            self.ring_passes / (_RING_SHARES[protocol] * self.card_rate),
            0.0,
        )

    def tree(self, protocol: int) -> _Line:
        """Return a tree's line: up and down the chain of a node and the tree over the nodes, every byte twice over a card.

        All hops pass a first chunk on before the rate is reached.
        """
        inside_us, between_us = self._hops_us("tree", protocol)
        tree_us = 2.0 * (self.chain * inside_us + self.depth * between_us)
        is_filled = self.has_constants and protocol  # LL, protocol 0, has no chunks
        fill = 2.0 * (self.chain + self.depth) / (_LEAST_CHUNKS * self.tree_rate) if is_filled else 0.0
        return self._base_us("tree", protocol) + tree_us, 2.0 / (_TREE_SHARES[protocol] * self.tree_rate), fill

    @property
    def may_use_nvls(self) -> bool:
        """Return whether any fabric has NVLS, and links inside a node that are no faster than those in use already."""
        # The slowest link decides: a group whose links are slower than a fabric's stays without that fabric's NVLS.
        slowest_inside = self.used.fabric.inside.bytes_per_s if self.used.replicas > self.used.nodes else math.inf
        return any(
            generation.nvls and fabric.inside.bytes_per_s <= slowest_inside
            for generation, fabric in zip(self.generations, self.fabrics, strict=True)
        )

    def nvls(self) -> _Line:
        """Return the line of NVLS: a reduction in the switches, and up and down a tree over the nodes at the card's rate."""
        return self.start_us + _NVLS_US + 2.0 * self.depth * _NVLS_HOP_US, self.ring_passes / self.tree_rate, 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Floor:
    """A lower bound on the all-reduces of every group that holds certain processes: the least over ``w`` variants.

    A variant is an algorithm with a protocol, which takes ``start_us`` and ``us_per_byte`` of the message, and the filling of
    a tree's chains. Searches over sets of processes use it to rule out all supersets of a set at once. Arrays are (w, 1, 1).
    The bound is concave in the size: several messages take no less than one of all their bytes.
    """

    start_us: Array
    us_per_byte: Array
    fill_us_per_byte: Array
    """Added per byte, up to ``most_filled_bytes``."""
    most_filled_bytes: float
    """Bytes that fill a tree's chains, at most."""

    @classmethod
    def of(cls, used: Group, fabrics: Sequence[Fabric], most_nodes: int) -> Floor | None:
        """Return the floor of all groups that hold the processes of ``used``, and others on links of any of the ``fabrics``.

        None: no bound is known, on one node and where measured tables scale the model. Each variant is taken at its fastest:
        the slowest card so far at its full rate, no hop shorter than any link's, the processes spread over ``most_nodes``.
        """
        if used.nodes < 2 or any(fabric.measured for fabric in fabrics):
            return None
        fastest = _FastestVariants(used, fabrics, most_nodes)
        lines = [line(protocol) for protocol in range(len(PROTOCOLS)) for line in (fastest.ring, fastest.tree)]
        lines += [fastest.nvls()] if fastest.may_use_nvls else []
        start_us, us_per_byte, fill = np.array(lines).T[:, :, None, None]  # to broadcast over sizes of up to two axes
        most = _LEAST_CHUNKS * _CHUNK_BYTES * min(generation.channels for generation in fastest.generations)
        return cls(start_us=start_us, us_per_byte=us_per_byte, fill_us_per_byte=fill, most_filled_bytes=most)

    def all_reduce_s(self, size_bytes: Size) -> Size:
        """Return the seconds below which none of the groups reduces ``size_bytes``, a number or an array of one to two axes."""
        size = np.atleast_2d(np.asarray(size_bytes, dtype=np.float64))
        fill_us = self.fill_us_per_byte * np.minimum(size, self.most_filled_bytes)
        least_s = 1e-6 * (self.start_us + self.us_per_byte * size + fill_us).min(axis=0)
        return float(least_s[0, 0]) if np.ndim(size_bytes) == 0 else least_s.reshape(np.shape(size_bytes))  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class Replicated:
    """One shard group of several: what it has reduced is reduced over the groups as well (HSDP)."""

    inside: Group
    """The processes of the shard group."""
    between: Group
    """The processes that hold the same part, one of each shard group."""
    sharing: int
    """Groups of ``between`` that go through the same cards at once."""

    @property
    def replicas(self) -> int:
        """Return how many processes share one set of parameters."""
        return self.inside.replicas

    def all_gather_s(self, size_bytes: Size) -> Size:
        """Return the seconds to gather ``size_bytes`` (the whole) within the group."""
        return self.inside.all_gather_s(size_bytes)

    def reduce_scatter_s(self, size_bytes: Size) -> Size:
        """Return the seconds to reduce and scatter within the group, and then to reduce each part over the groups."""
        # the parts that share a card take as long as one message of all their bytes
        part_bytes = size_bytes * (self.sharing / self.inside.replicas)
        return self.inside.reduce_scatter_s(size_bytes) + self.between.all_reduce_s(part_bytes)

    def all_reduce_s(self, size_bytes: Size) -> Size:
        """Return the seconds to reduce on every process of every group: scattered, over the groups, and gathered again."""
        return self.reduce_scatter_s(size_bytes) + self.inside.all_gather_s(size_bytes)
