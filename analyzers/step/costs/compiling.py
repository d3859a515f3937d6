"""A step under ``torch.compile``: which ops become one kernel, and which tensors wait for the backward pass.

Inductor (Ansel et al., "PyTorch 2", ASPLOS 2024) fuses element-wise ops, casts, copies, lookups, normalisations, softmaxes
and other reductions with their neighbours; convolutions, matrix products, attention, pooling and scatters stay kernels of
their own. What passes within a fused kernel is neither written nor read. Before that the step is cut in two at the
tensors of the forward pass that the backward pass computes everything else from, at least cost
(``torch._functorch.partitioners.min_cut_rematerialization_partition``): no product is computed twice, nor what the backward
pass must write again, nor reductions or random numbers. Time and memory follow from one reading: :func:`fuse`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, connected_components, maximum_flow

from ddltool.analyzers.step.costs.memory import ACTIVATION, TensorLifetimes
from ddltool.analyzers.step.recording.op_rules import CLASSES, class_of, names_in, normal_type
from ddltool.graph import COMPUTE, SEND, Graph, Recorded

_FUSED = frozenset(("pointwise", "copy", "normalisation", "softmax", "reduction"))
_LOOKUPS = names_in("embedding index index_select gather unsafe_index take take_along_dim")
_RANDOM = ("bernoulli", "rand", "normal", "uniform", "native_dropout")
# Sums over samples end before the kernel starts that reads the tensor again; so do those of a parameter's gradient.
_READ_TWICE = ("native_batch_norm", "native_group_norm", "batch_norm_with_update", "native_layer_norm_backward")
# An op that makes a quarter of what it reads is a reduction, and one that reads a quarter of what it makes is made again
# wherever it is read.
_QUARTER = 4.0
_ONE_NUMBER = 8.0
# The partitioner's price of a byte: twice for what no kernel would write otherwise, and a tenth more for each op between it
# and the backward pass, of which it sees about three where a trace has one.
_UNWRITTEN, _AWAY, _FARTHEST = 2.0, 1.1**3, 8
_MOST_FLOW = 2**30
# Of inductor's choice of a layout: what convolutions in groups and others gain or lose by channels_last when only the forward
# pass runs; nodes for each convolution; channels of a small one, and the taps of usual filters.
_GROUPED_COST, _OTHER_COST, _FEW, _SMALL, _TAPS = 1.358, 0.823, 300, 64, 9
FUSED = "inductor.fused"
"""The op type of a fused kernel."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Fusion:
    """The kernels of a compiled step, by op of its graph."""

    leader: NDArray[np.intp]
    """(n,) the last op of the fused kernel that an op is part of; -1: of none."""
    traffic: NDArray[np.float64]
    """(n,) bytes that the fused kernel moves, at its leader."""
    written: NDArray[np.bool_]
    """(n,) whether an op's output comes to memory."""
    last: NDArray[np.intp]
    """(n,) the last op that reads an op's output from memory; the op itself where none does."""


def fuse(graph: Graph) -> Fusion:
    """Return the fused kernels of a traced or recorded step. O(n + e), and the cut."""
    return _Fuser(graph).fuse()


def compiled(graph: Graph) -> Graph:
    """Return the graph under ``torch.compile``: each fused kernel is one op, the others of it cost nothing.

    ``meta`` says so (``compiled``), and whether inductor turns images to channels_last. A graph without written bytes (from
    a file of an older version) only loses its launches.
    """
    fusion = fuse(graph)
    size, op_type, estimate = graph.size_bytes.copy(), list(graph.op_type), list(graph.estimate)
    members = np.flatnonzero(fusion.leader >= 0)
    size[members] = fusion.traffic[members]
    for op in members.tolist():
        if fusion.leader[op] == op and size[op] > 0:
            op_type[op] = FUSED
        else:
            estimate[op] = "free"
    meta = {**graph.meta, "compiled": True, "channels_last": bool(graph.meta.get("channels_last")) or _turns(graph)}
    return replace(graph, size_bytes=size, op_type=tuple(op_type), estimate=tuple(estimate), meta=meta)


def compiled_lifetimes(lifetimes: TensorLifetimes, *, blocks_only: bool = False) -> TensorLifetimes:
    """Return the lifetimes of a traced step's tensors under ``torch.compile``: what no kernel writes takes no memory.

    ``blocks_only``: each block of the model is compiled by itself, and the rest is not: torchtitan's way.
    """
    places = lifetimes.op_places
    size = np.array(lifetimes.elements) * lifetimes.width
    is_activation = lifetimes.role == ACTIVATION
    if blocks_only:
        spans = [span for block in lifetimes.blocks for span in ((block.first, block.last), (block.begins, block.ends))]
        is_inside = [(first <= lifetimes.alloc) & (lifetimes.alloc <= last) for first, last in spans]
        is_activation &= np.any(is_inside, axis=0)
    free, written = _under(fuse(lifetimes.traced.graph), places, lifetimes.alloc, lifetimes.free, size, is_activation)
    return replace(
        lifetimes,
        width=np.where(written, lifetimes.width, 0.0),
        free=free,
        forward=np.minimum(lifetimes.forward, free),
        _sizes={},
    )


def compiled_storages(graph: Graph, recorded: Recorded) -> Recorded:
    """Return a recorded step's storages under ``torch.compile``: what no kernel writes takes no memory."""
    is_compute = graph.kind == COMPUTE
    places = np.where(is_compute, np.cumsum(is_compute) - 1, -1)
    made, freed = np.array(recorded.made), np.array([-1 if place is None else place for place in recorded.freed])
    size = np.array(recorded.storage_bytes)
    is_activation = np.array([part == "activations" for part in recorded.parts], dtype=bool) & (freed >= 0)
    free, written = _under(fuse(graph), places, made, freed, size, is_activation)
    return replace(
        recorded,
        freed=tuple(
            place if old is not None else None for place, old in zip(free.tolist(), recorded.freed, strict=True)
        ),
        storage_bytes=tuple(np.where(written, size, 0.0).tolist()),
    )


def _under(
    fusion: Fusion,
    places: NDArray[np.int64],
    alloc: NDArray[np.int64],
    free: NDArray[np.int64],
    size: NDArray[np.float64],
    is_activation: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the (s,) place of each storage's last use once compiled, and whether it comes to memory.

    ``places`` (n,): of the graph's ops. Of an op's storages the largest is its output; what else it makes, such as the
    statistics of a normalisation or the mask of a dropout, stays as it is.
    """
    op_at = {place: op for op, place in enumerate(places.tolist()) if place >= 0}
    output: dict[int, int] = {}
    for storage in np.flatnonzero(is_activation).tolist():
        place = int(alloc[storage])
        if place in op_at and (place not in output or size[storage] > size[output[place]]):
            output[place] = storage
    free, written = free.copy(), np.ones(len(size), dtype=bool)
    for place, storage in output.items():
        written[storage] = fusion.written[op_at[place]]
        free[storage] = max(place, int(places[fusion.last[op_at[place]]]))
    return free, written


class _Fuser:
    """Reads one graph: its readers through views, the cut before its backward pass, its kernels."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        count = len(graph)
        is_compute = graph.kind == COMPUTE
        names = [normal_type(op_type).rpartition(".")[2] for op_type in graph.op_type]
        # Eager kernels take some casts for nothing; they are ops all the same, and no views.
        is_cast = np.array([name == "to_copy" for name in names], dtype=bool)
        is_free = np.array([mark == "free" for mark in graph.estimate], dtype=bool) & ~is_cast
        self.is_op = is_compute & ~is_free
        self.is_backward = np.array([name.startswith("backward") for name in graph.names], dtype=bool)
        self.is_fusible = self.is_op & np.array(
            [
                name in _LOOKUPS or CLASSES[class_of(op_type)] in _FUSED
                for name, op_type in zip(names, graph.op_type, strict=True)
            ],
            dtype=bool,
        )
        # What comes after both passes is not compiled.
        self.is_fusible &= np.array([name.startswith(("forward", "backward")) for name in graph.names], dtype=bool)
        self.is_random = np.array([name.startswith(_RANDOM) and "backward" not in name for name in names], dtype=bool)
        twice = _READ_TWICE if graph.mode == "training" else ("native_group_norm",)
        self.is_read_twice = np.array([name.startswith(twice) for name in names], dtype=bool)
        self.is_norm = np.array(
            [CLASSES[class_of(op_type)] in ("normalisation", "softmax") for op_type in graph.op_type]
        )
        self.order = [op for op in graph.topological_order().tolist() if self.is_op[op]]
        root, sent = np.arange(count), np.zeros(count, dtype=bool)
        self.reads: list[dict[int, float]] = [{} for _ in range(count)]
        """By op the ops and parameters whose tensors it reads, with their bytes."""
        read_bytes = np.maximum(graph.size_bytes - graph.written_bytes, 0.0)
        for op in graph.topological_order().tolist():
            inputs = graph.inputs_of(op).tolist()
            if is_compute[op] and is_free[op] and inputs:
                root[op] = root[inputs[0]]
            elif self.is_op[op]:
                for source in inputs:
                    made = float((graph.written_bytes if is_compute[source] else graph.size_bytes)[source])
                    self.reads[op][int(root[source])] = max(self.reads[op].get(int(root[source]), 0.0), made)
                whole = sum(self.reads[op].values())
                if whole > read_bytes[op] and not is_cast[op]:  # a part of each
                    self.reads[op] = {source: size * read_bytes[op] / whole for source, size in self.reads[op].items()}
            elif graph.kind[op] == SEND:
                sent[[root[source] for source in inputs]] = True
        self.own_bytes = read_bytes - np.array([sum(each.values()) for each in self.reads])
        self.own_bytes = np.where(is_cast, 0.0, np.maximum(self.own_bytes, 0.0))
        """(n,) bytes read that no op made, such as tokens."""
        self.sent = sent
        self.readers: list[list[int]] = [[] for _ in range(count)]
        for op in self.order:
            for source in self.reads[op]:
                self.readers[source].append(op)
        shrinks = self.is_fusible & (_QUARTER * graph.written_bytes < read_bytes) & ~self.is_norm
        for op in np.flatnonzero(shrinks & self.is_backward).tolist():
            self.is_read_twice[op] |= bool(sent[op] or any(sent[reader] for reader in self.readers[op]))
        is_small = self.is_fusible & (_QUARTER * read_bytes < graph.written_bytes) & ~self.is_random
        self.ends = self.is_fusible & (graph.written_bytes <= _ONE_NUMBER) & (read_bytes > _ONE_NUMBER)
        """(n,) ops that make one number of a whole tensor: what reads it is another kernel."""
        self.is_inlined = is_small & ~self.is_norm
        """(n,) ops that are made again in each kernel that reads them."""
        self.saved = self._cut()

    def fuse(self) -> Fusion:
        """Return the kernels, and what they write and read."""
        effective = {op: self._effective(op) for op in self.order}
        leader = self._leaders(effective)
        count = len(self.graph)
        written, last = np.zeros(count, dtype=bool), np.arange(count)
        traffic = np.zeros(count)
        read: list[dict[int, float]] = [{} for _ in range(count)]
        for op in self.order:
            own = leader[op]
            for source, size in effective[op].items():
                if own < 0 or leader[source] != own:
                    last[source] = max(last[source], op)
                    written[source] = True
                    if own >= 0:
                        read[own][source] = max(read[own].get(source, 0.0), size)
        has_reader = np.array([bool(readers) for readers in self.readers])
        written |= self.is_op & (~has_reader | self.sent | self.saved | ~self.is_fusible)
        for op in self.order:
            if leader[op] >= 0:
                twice = sum(effective[op].values()) if self.is_read_twice[op] else 0.0
                made = float(self.graph.written_bytes[op]) if written[op] else 0.0
                traffic[leader[op]] += made + twice + float(self.own_bytes[op])
        traffic += [sum(each.values()) for each in read]
        for op in reversed(self.order):  # what an op writes in place is its input's storage
            if self.graph.op_type[op].endswith("_") and (kept := next(iter(self.reads[op]), -1)) >= 0:
                written[kept] |= written[op]
                last[kept] = max(last[kept], last[op])
        return Fusion(leader=leader, traffic=traffic, written=written, last=last)

    def _effective(self, op: int) -> dict[int, float]:
        """Return what an op reads once dropped and inlined tensors are computed from what is there: sources and bytes."""
        found: dict[int, float] = {}
        waiting = list(self.reads[op].items())
        passed: set[int] = set()
        while waiting:
            source, size = waiting.pop()
            if source in passed:
                continue
            is_dropped = self.is_op[source] and self.is_backward[op] and not self.is_backward[source]
            if (is_dropped and not self.saved[source]) or (self.is_inlined[source] and self.is_fusible[op]):
                passed.add(source)
                waiting += self.reads[source].items()
            else:
                found[source] = max(found.get(source, 0.0), size)
        return found

    def _stages(self, effective: dict[int, dict[int, float]]) -> NDArray[np.int64]:
        """Return (n,) the stage of each op: a stage ends with what products make of it.

        Ops of one stage have no other kernel between them.
        """
        fusible, stage = self.is_fusible, np.zeros(len(self.graph), dtype=np.int64)
        for op in self.order:
            for source in effective[op]:
                ends = self.ends[source] or (self.is_op[source] and not fusible[source])
                stage[op] = max(stage[op], stage[source] + int(ends))
        for op in reversed(self.order):  # what is only read later is made where it is read
            if fusible[op] and not self.is_norm[op] and not self.saved[op]:
                readers = [reader for reader in self.readers[op] if self.is_backward[reader] == self.is_backward[op]]
                if readers and all(fusible[reader] for reader in readers):
                    stage[op] = max(stage[op], min(stage[reader] for reader in readers))
        return stage

    def _leaders(self, effective: dict[int, dict[int, float]]) -> NDArray[np.intp]:
        """Return (n,) the last op of each op's kernel, -1 for ops that are not fused.

        One kernel is what reads another op's output in its stage and pass, or reads the same tensor there.
        """
        count, fusible, stage = len(self.graph), self.is_fusible, self._stages(effective)
        together: list[tuple[int, int]] = []
        first_reader: dict[tuple[int, int, bool], int] = {}
        for op in self.order:
            if not fusible[op]:
                continue
            for source in effective[op]:
                if not self.is_op[source]:
                    continue
                is_beside = fusible[source] and stage[source] == stage[op]
                if is_beside and self.is_backward[source] == self.is_backward[op]:
                    together.append((op, source))
                else:
                    place = (source, int(stage[op]), bool(self.is_backward[op]))
                    together.append((op, first_reader.setdefault(place, op)))
        ends = np.array(together, dtype=np.intp).reshape(-1, 2).T
        links: Any = csr_array((np.ones(len(together)), (ends[0], ends[1])), shape=(count, count))
        _, kernel = connected_components(links, directed=False)
        leader = np.full(count, -1, dtype=np.intp)
        for op in self.order:
            if fusible[op]:
                leader[kernel[op]] = max(leader[kernel[op]], op)
        return np.where(fusible, leader[kernel], -1)

    def _cut(self) -> NDArray[np.bool_]:
        """Return (n,) the ops of the forward pass whose outputs are kept for the backward pass: a minimum cut."""
        count = len(self.graph)
        saved = np.zeros(count, dtype=bool)
        forward = [op for op in self.order if not self.is_backward[op]]
        needed = {op for op in forward if any(self.is_backward[reader] for reader in self.readers[op])}
        for op in reversed(forward):  # what recomputation may start from
            if op in needed:
                needed.update(source for source in self.reads[op] if self.is_op[source])
        chosen = [op for op in forward if op in needed]
        if not chosen:
            return saved
        distance = dict.fromkeys(chosen, _FARTHEST)
        for op in reversed(chosen):
            ways = [
                1 if self.is_backward[reader] else 1 + distance.get(reader, _FARTHEST) for reader in self.readers[op]
            ]
            distance[op] = min(ways, default=_FARTHEST)
        apart = self._read_apart(forward)
        node = {op: 2 + 2 * place for place, op in enumerate(chosen)}
        source, sink = 0, 1
        edges: list[tuple[int, int, float]] = []
        for op in chosen:
            into, out = node[op], node[op] + 1
            is_unwritten = self.is_fusible[op] and all(self.is_fusible[reader] for reader in self.readers[op])
            price = float(self.graph.written_bytes[op]) * _AWAY ** min(distance[op], _FARTHEST)
            edges.append((into, out, max(price, 1.0) * (_UNWRITTEN if is_unwritten else 1.0)))
            if op in apart or self._is_banned(op):
                edges.append((source, into, np.inf))
            edges += [(node[each] + 1, into, np.inf) for each in self.reads[op] if each in node]
            if any(self.is_backward[reader] for reader in self.readers[op]):
                edges.append((out, sink, np.inf))
        is_reached = _reachable(edges, 2 + 2 * len(chosen), source, sink)
        for op in chosen:
            saved[op] = is_reached[node[op]] and not is_reached[node[op] + 1]
        return saved

    def _read_apart(self, forward: Sequence[int]) -> set[int]:
        """Return the ops that read a tensor again after a product of it, such as the sums of a residual stream.

        To compute them again is to compute again all that came before.
        """
        place = {op: number for number, op in enumerate(forward)}
        apart: set[int] = set()
        for op in forward:
            readers = sorted(place[reader] for reader in self.readers[op] if reader in place)
            if len(readers) > 1 and self.is_fusible[op]:
                product = self._first_product(readers, place, forward)
                apart.update(forward[reader] for reader in readers if reader > product)
        return apart

    def _first_product(self, readers: Sequence[int], place: Mapping[int, int], forward: Sequence[int]) -> int:
        """Return the first place behind some, and before the last of them, of an op that is not fused; else that last one."""
        waiting, seen = list(readers), set(readers)  # sorted, and so a heap
        while waiting:
            number = heappop(waiting)
            if not self.is_fusible[forward[number]]:
                return number
            for reader in self.readers[forward[number]]:
                if (after := place.get(reader, readers[-1] + 1)) <= readers[-1] and after not in seen:
                    seen.add(after)
                    heappush(waiting, after)
        return readers[-1]

    def _is_banned(self, op: int) -> bool:
        """Return whether nothing computes an op again: a product, a reduction, random, or written again if it were."""
        read_bytes = sum(self.reads[op].values())
        is_reduction = not self.is_norm[op] and _QUARTER * self.graph.written_bytes[op] < read_bytes
        is_written_again = any(self.is_backward[each] and not self.is_fusible[each] for each in self.readers[op])
        return bool(not self.is_fusible[op] or self.is_random[op] or is_reduction or is_written_again)


def _reachable(edges: Sequence[tuple[int, int, float]], count: int, source: int, sink: int) -> NDArray[np.bool_]:
    """Return (count,) which nodes the source reaches once the flow to the sink is as large as it can be."""
    start, end, capacity = (np.array(column) for column in zip(*edges, strict=True))
    finite = capacity[np.isfinite(capacity)]
    whole = np.maximum(np.where(np.isfinite(capacity), capacity, 0.0) * (_MOST_FLOW / finite.sum()), 1.0)
    units = np.where(np.isfinite(capacity), whole, 2**31 - 1).astype(np.int64)
    network: Any = csr_array((units.astype(np.int32), (start, end)), shape=(count, count))
    left = (network - maximum_flow(network, source, sink).flow).tocoo()
    is_open = left.data > 0
    residual = csr_array((left.data[is_open], (left.row[is_open], left.col[is_open])), shape=(count, count))
    reached = np.zeros(count, dtype=bool)
    reached[breadth_first_order(residual, source, return_predecessors=False)] = True
    return reached


def _turns(graph: Graph) -> bool:
    """Return whether inductor runs a graph's convolutions in channels_last: ``GraphLowering.decide_layout_opt``."""
    is_convolution = np.array([normal_type(op_type) == "convolution" for op_type in graph.op_type], dtype=bool)
    is_convolution &= graph.gemm[:, 1] > 0
    if not is_convolution.any() or (graph.kind == COMPUTE).sum() >= _FEW * is_convolution.sum():
        return False
    groups, _, outputs, taps = graph.gemm[is_convolution].T
    is_grouped = (groups > 1) & (outputs > 1)
    if graph.mode == "inference":
        share = graph.flops[is_convolution][is_grouped].sum() / graph.flops[is_convolution].sum()
        return bool(_GROUPED_COST * share + _OTHER_COST * (1.0 - share) <= 1.0)
    # So do filters of 3 x 3 that make half as many channels, or fewer, and models of 64 channels at most.
    is_narrowing, is_small = taps >= 2 * _TAPS * outputs, (outputs * groups <= _SMALL) & (taps <= _TAPS * _SMALL)
    return not bool((is_grouped | is_narrowing).any() or is_small.all())
