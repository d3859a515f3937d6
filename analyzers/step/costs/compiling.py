"""A step under ``torch.compile``: which ops become one kernel, and which tensors are kept for the backward pass.

Inductor (Ansel et al., "PyTorch 2", ASPLOS 2024) fuses element-wise ops, casts, copies, lookups, normalisations, softmaxes
and other reductions with their neighbours; convolutions, matrix products, attention, pooling and scatters stay kernels of
their own. A tensor that is made and read within one fused kernel is neither written to memory nor read from it. Before that,
the step is cut in two at the forward pass's cheapest set of tensors from which the backward pass can compute everything else
that it needs (``torch._functorch.partitioners.min_cut_rematerialization_partition``). Products, reductions, random numbers, and
what the backward pass would have to write again are never computed twice. Time and memory both follow from :func:`fuse`.

A product is an op that stays a kernel of its own, such as a matrix product. A kept (saved) tensor stays in memory from the
forward pass to the backward pass. The leader of a fused kernel is its last op, by whose index the kernel is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, connected_components, maximum_flow

from ddltool.analyzers.step.costs.memory import ACTIVATION, TensorLifetimes
from ddltool.analyzers.step.recording.op_rules import CLASS, CLASSES, class_of, names_in, normal_type
from ddltool.arrays import Flags, Floats, Ints
from ddltool.graph import COMPUTE, SEND, Graph, Layout, Recorded

# Classes of ops, and ops, that inductor fuses with their neighbours.
_FUSED = frozenset(("pointwise", "copy", "normalisation", "row_normalisation", "softmax", "reduction"))
_LOOKUPS = names_in("embedding index index_select gather unsafe_index take take_along_dim")
# What the names of random ops begin with.
_RANDOM = ("bernoulli", "rand", "normal", "uniform", "native_dropout")
# Ops that need a finished sum over samples before they read their input again, in a second kernel.
_READ_TWICE = ("native_batch_norm", "native_group_norm", "batch_norm_with_update", "native_layer_norm_backward")
# An op whose output has less than a quarter of its input's bytes is a reduction; one whose input has less than a quarter of its
# output's is computed again wherever it is read.
_QUARTER = 4.0
# Bytes of the largest single number.
_ONE_NUMBER = 8.0
# The partitioner's price of keeping a byte: doubled if no kernel would write it otherwise, and a tenth more for each op between
# it and the backward pass. The partitioner sees about three ops where a trace has one; the distance counts up to the last.
_UNWRITTEN, _PER_OP_AWAY, _FARTHEST = 2.0, 1.1**3, 8
# scipy's maximum flow uses int32: capacities are scaled so that the sum of all finite ones is at most the first number, and
# infinite ones are the largest int32.
_MOST_FLOW, _INFINITE_FLOW = 2**30, 2**31 - 1
# Inductor's constants for its choice of a layout: the time of grouped convolutions, and of others, in channels_last over that
# in channels_first (inference); the number of nodes per convolution from which on it keeps the layout; the most channels of a
# "small" convolution; and the taps of usual filters (3 x 3).
_GROUPED_COST, _OTHER_COST, _NODES_EACH, _SMALL, _TAPS = 1.358, 0.823, 300, 64, 9
# The sides of a product are padded to multiples of so many elements.
_PADDED = 8
FUSED = "inductor.fused"
"""The op type of a fused kernel."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Fusion:
    """The kernels of a compiled step, by op of its graph."""

    leader: NDArray[np.intp]
    """(n,) the last op of the fused kernel that an op is part of; -1: the op is part of none."""
    traffic: Floats
    """(n,) bytes that a fused kernel reads and writes, at its leader; 0 elsewhere."""
    written: Flags
    """(n,) whether an op's output is written to memory."""
    last: NDArray[np.intp]
    """(n,) the last op that reads an op's output from memory; the op itself if none does."""


def fuse(graph: Graph) -> Fusion:
    """Return the fused kernels of the step with that graph. O(n + e) for its ops and edges, and a minimum cut."""
    return _Fuser(graph).fuse()


def compiled(graph: Graph) -> Graph:
    """Return the graph as it runs under ``torch.compile``, with the same ops.

    The last op of each fused kernel stands for the kernel, with its bytes; the kernel's other ops become free. The sides of
    matrix products are padded to multiples of 8, as inductor's ``shape_padding`` does. ``meta`` gets ``compiled``, and
    ``channels_last`` if inductor turns all images to that layout. In a graph without written bytes (a file of an older version)
    fusing saves only the launches of ops, not their traffic.
    """
    fusion = fuse(graph)
    size_bytes = graph.size_bytes.copy()
    op_types = list(graph.op_type)
    sources = list(graph.estimate)
    members = np.flatnonzero(fusion.leader >= 0)
    size_bytes[members] = fusion.traffic[members]
    for op in members.tolist():
        if fusion.leader[op] == op and size_bytes[op] > 0:
            op_types[op] = FUSED
        else:
            sources[op] = "free"
    is_product = _flags(class_of(name) == CLASS["matrix_product"] for name in graph.op_type)
    gemm = graph.gemm.copy()
    gemm[is_product, 1:] = np.ceil(gemm[is_product, 1:] / _PADDED) * _PADDED
    no_layouts: tuple[Layout, ...] = tuple("" for _ in range(len(graph)))  # one holds for all images: that of ``meta``
    meta = {
        **graph.meta,
        "compiled": True,
        "channels_last": bool(graph.meta.get("channels_last")) or _uses_channels_last(graph),
    }
    return replace(
        graph,
        size_bytes=size_bytes,
        op_type=tuple(op_types),
        estimate=tuple(sources),
        gemm=gemm,
        meta=meta,
        layout=no_layouts,
    )


def compiled_lifetimes(lifetimes: TensorLifetimes, *, blocks_only: bool = False) -> TensorLifetimes:
    """Return the lifetimes of a traced step's tensors under ``torch.compile``.

    A tensor that no kernel writes to memory gets elements of 0 bytes, and activations are freed after their last use by a
    kernel. ``blocks_only``: whether each block of the model is compiled by itself and the rest not at all, as in torchtitan;
    otherwise the whole step is compiled.
    """
    places = lifetimes.op_places
    size = np.array(lifetimes.elements) * lifetimes.width
    is_activation = lifetimes.role == ACTIVATION
    if blocks_only:  # what is made within a block's forward or backward pass
        forward_spans = [(block.first, block.last) for block in lifetimes.blocks]
        backward_spans = [(block.begins, block.ends) for block in lifetimes.blocks]
        is_inside = [
            (first <= lifetimes.alloc) & (lifetimes.alloc <= last) for first, last in forward_spans + backward_spans
        ]
        is_activation &= np.any(is_inside, axis=0)
    free, written = _lives_when_compiled(
        fuse(lifetimes.traced.graph), places, lifetimes.alloc, lifetimes.free, size, is_activation
    )
    return replace(
        lifetimes,
        width=np.where(written, lifetimes.width, 0.0),
        free=free,
        forward=np.minimum(lifetimes.forward, free),
        _sizes={},
    )


def compiled_storages(graph: Graph, recorded: Recorded) -> Recorded:
    """Return ``recorded`` with its storages' bytes and lives as they are under ``torch.compile``.

    A storage that no kernel writes to memory gets 0 bytes, and an activation is freed after its last use by a kernel. ``graph``
    and ``recorded`` are of the same step, recorded without ``torch.compile``. A place is the position of an op among the
    compute ops of the graph.
    """
    is_compute = graph.kind == COMPUTE
    places = np.where(is_compute, np.cumsum(is_compute) - 1, -1)  # (n,) of each op; -1: it is a transfer
    made = np.array(recorded.made)  # (s,) the place at which each storage is made
    # (s,) the last place at which each storage lives; -1: it outlives the step
    freed = np.array([-1 if place is None else place for place in recorded.freed])
    size = np.array(recorded.storage_bytes)
    is_activation = _flags(part == "activations" for part in recorded.parts) & (freed >= 0)
    last_use, is_written = _lives_when_compiled(fuse(graph), places, made, freed, size, is_activation)
    return replace(
        recorded,
        freed=tuple(  # None stays None: a storage that outlives the step does so compiled, too
            None if old is None else place for place, old in zip(last_use.tolist(), recorded.freed, strict=True)
        ),
        storage_bytes=tuple(np.where(is_written, size, 0.0).tolist()),
    )


def _lives_when_compiled(
    fusion: Fusion,
    places: Ints,
    alloc: Ints,
    free: Ints,
    size: Floats,
    is_activation: Flags,
) -> tuple[Ints, Flags]:
    """Return (s,) the place of each storage's last use once compiled, and (s,) whether it is written to memory at all.

    The largest of an op's storages is taken for its output. Its other storages, such as the statistics of a normalisation or
    the mask of a dropout, stay unchanged.

    Args:
        fusion: the kernels of the step, by op of its graph.
        places: (n,) the place at which each op runs, in the numbering of ``alloc`` and ``free``; -1 for a transfer.
        alloc, free: (s,) the places at which each storage is made and last used without compiling.
        size: (s,) bytes.
        is_activation: (s,) whether compiling may change a storage.
    """
    op_at = {place: op for op, place in enumerate(places.tolist()) if place >= 0}
    output_of: dict[int, int] = {}  # by place, the op's output
    for storage in np.flatnonzero(is_activation).tolist():
        place = int(alloc[storage])
        if place in op_at and (place not in output_of or size[storage] > size[output_of[place]]):
            output_of[place] = storage
    last_use, is_written = free.copy(), np.ones(len(size), dtype=bool)
    for place, storage in output_of.items():
        is_written[storage] = fusion.written[op_at[place]]
        last_use[storage] = max(place, int(places[fusion.last[op_at[place]]]))
    return last_use, is_written


class _Fuser:
    """Reads one graph of n ops: which ops read which tensors, what is kept for the backward pass, and which ops fuse.

    A view counts as the tensor that it is a view of. Arrays (n,) and lists are by op of the graph; ``order`` are the indices of
    the ops that compute, in topological order.
    """

    def __init__(self, graph: Graph) -> None:
        """Find the kind of every op, what it reads and which ops read it; then cut the step in two."""
        self.graph = graph
        self.read_bytes = np.maximum(graph.size_bytes - graph.written_bytes, 0.0)
        """(n,) bytes that an op reads."""
        self._find_kinds()
        self.order = [op for op in graph.topological_order().tolist() if self.is_op[op]]
        self._find_reads()
        self._find_reductions()
        self.saved = self._cut()
        """(n,) whether an op is of the forward pass and its output is kept for the backward pass."""

    def _find_kinds(self) -> None:
        """Set the attributes (n,) bool that follow from the types and names of ops, such as ``is_view`` and ``is_fusible``."""
        graph = self.graph
        names = [normal_type(op_type).rpartition(".")[2] for op_type in graph.op_type]
        classes = [CLASSES[class_of(op_type)] for op_type in graph.op_type]
        # Some casts are free in an eager step, because a neighbour's kernel does them; here they are ops, not views.
        self.is_cast = _flags(name == "to_copy" for name in names)
        self.is_view = (graph.kind == COMPUTE) & _flags(mark == "free" for mark in graph.estimate) & ~self.is_cast
        self.is_op = (graph.kind == COMPUTE) & ~self.is_view
        """(n,) ops that compute: neither views nor transfers."""
        self.is_backward = _flags(name.startswith("backward") for name in graph.names)
        is_of_fused_kind = _flags(name in _LOOKUPS or kind in _FUSED for name, kind in zip(names, classes, strict=True))
        # Ops after both passes, the update, are not compiled.
        is_in_pass = _flags(name.startswith(("forward", "backward")) for name in graph.names)
        self.is_fusible = self.is_op & is_of_fused_kind & is_in_pass
        self.is_random = _flags(name.startswith(_RANDOM) and "backward" not in name for name in names)
        read_twice = _READ_TWICE if graph.mode == "training" else ("native_group_norm",)
        self.is_read_twice = _flags(name.startswith(read_twice) for name in names)
        """(n,) ops that read their inputs in two kernels, one after another."""
        # Norms and softmaxes reduce within a fused kernel, but their outputs are as large as their inputs.
        self.is_norm = _flags(kind in ("normalisation", "row_normalisation", "softmax") for kind in classes)

    def _find_reads(self) -> None:
        """Set ``reads``, ``own_bytes``, ``readers`` and ``sent``: what every op reads, and what reads its output."""
        graph = self.graph
        count = len(graph)
        # What a compute op makes is what it writes; a transfer's bytes are those of the parameter that it brings.
        made_bytes = np.where(graph.kind == COMPUTE, graph.written_bytes, graph.size_bytes)
        root = np.arange(count)  # by op, the op of which it is a view; itself if it is no view
        self.reads: list[dict[int, float]] = [{} for _ in range(count)]
        """By op the ops and parameters whose tensors it reads, with their bytes."""
        self.sent = np.zeros(count, dtype=bool)
        """(n,) ops whose output a transfer sends: gradients of parameters."""
        for op in graph.topological_order().tolist():
            inputs = graph.inputs_of(op).tolist()
            if self.is_view[op] and inputs:
                root[op] = root[inputs[0]]
            elif self.is_op[op]:
                reads = self.reads[op]
                for source in inputs:
                    source_root = int(root[source])
                    # Several views of one tensor are read once, as much as the largest of them.
                    reads[source_root] = max(reads.get(source_root, 0.0), float(made_bytes[source]))
                whole_bytes, own_bytes = sum(reads.values()), self.read_bytes[op]
                if whole_bytes > own_bytes and not self.is_cast[op]:  # it reads only a part of its inputs
                    self.reads[op] = {source: size * own_bytes / whole_bytes for source, size in reads.items()}
            elif graph.kind[op] == SEND:
                self.sent[[root[source] for source in inputs]] = True
        others_bytes = np.array([sum(each.values()) for each in self.reads])
        self.own_bytes = np.where(self.is_cast, 0.0, np.maximum(self.read_bytes - others_bytes, 0.0))
        """(n,) bytes that an op reads and no op made, such as tokens."""
        self.readers: list[list[int]] = [[] for _ in range(count)]
        """By op the ops that read its output, in their order."""
        for op in self.order:
            for source in self.reads[op]:
                self.readers[source].append(op)

    def _find_reductions(self) -> None:
        """Set the attributes that follow from the bytes of ops: ``ends`` and ``is_inlined``; and add to ``is_read_twice``."""
        written_bytes = self.graph.written_bytes
        is_plain = self.is_fusible & ~self.is_norm
        shrinks = is_plain & (_QUARTER * written_bytes < self.read_bytes)
        for op in np.flatnonzero(shrinks & self.is_backward).tolist():  # sums of a parameter's gradient
            self.is_read_twice[op] |= bool(self.sent[op] or any(self.sent[reader] for reader in self.readers[op]))
        self.ends = self.is_fusible & (written_bytes <= _ONE_NUMBER) & (self.read_bytes > _ONE_NUMBER)
        """(n,) ops that reduce a whole tensor to one number, which only another kernel can read."""
        self.is_inlined = is_plain & (_QUARTER * self.read_bytes < written_bytes) & ~self.is_random
        """(n,) ops that are computed again in each kernel that reads them."""

    def fuse(self) -> Fusion:
        """Return the fused kernels with the bytes that they read and write, and which outputs of all ops reach memory.

        A fused kernel reads each output of other kernels once, and writes what another kernel, a transfer or the backward
        pass needs. The outputs of its ops that nothing else needs stay in registers.
        """
        reads_of = {op: self._effective_reads(op) for op in self.order}
        leader = self._leaders(reads_of)
        read_elsewhere, last_reader, kernel_reads_bytes = self._reads_between_kernels(reads_of, leader)
        has_reader = np.array([bool(readers) for readers in self.readers])
        # A kernel that is not fused always writes its output; an output that nothing reads is a result of the step.
        written = read_elsewhere | (self.is_op & (~has_reader | self.sent | self.saved | ~self.is_fusible))
        # A fused kernel reads other kernels' outputs and what no op made, some of its ops read their inputs once more, and it
        # writes its outputs.
        traffic = np.zeros(len(self.graph))
        for op in self.order:
            if leader[op] >= 0:
                second_read_bytes = sum(reads_of[op].values()) if self.is_read_twice[op] else 0.0
                made_bytes = float(self.graph.written_bytes[op]) if written[op] else 0.0
                traffic[leader[op]] += made_bytes + second_read_bytes + float(self.own_bytes[op])
        traffic += kernel_reads_bytes
        self._share_storages(written, last_reader)
        return Fusion(leader=leader, traffic=traffic, written=written, last=last_reader)

    def _reads_between_kernels(
        self, reads_of: dict[int, dict[int, float]], leader: NDArray[np.intp]
    ) -> tuple[Flags, NDArray[np.intp], Floats]:
        """Return what kernels read of one another, as three arrays (n,).

        They are: whether another kernel reads an op's output; the last op that does (the op itself if none does); and, at the
        leader of a fused kernel, the bytes that the kernel reads of others, of each output as much as its op that reads most of
        it. ``reads_of``: by op its effective reads (:meth:`_effective_reads`). ``leader``: as in :class:`Fusion`.
        """
        count = len(self.graph)
        read_elsewhere = np.zeros(count, dtype=bool)
        last_reader = np.arange(count)
        kernel_reads: list[dict[int, float]] = [{} for _ in range(count)]  # at the leader, sources and bytes
        for op in self.order:
            own_leader = leader[op]
            is_fused = own_leader >= 0
            for source, size in reads_of[op].items():
                if is_fused and leader[source] == own_leader:  # it stays within the kernel
                    continue
                last_reader[source] = max(last_reader[source], op)
                read_elsewhere[source] = True
                if is_fused:
                    kernel_reads[own_leader][source] = max(kernel_reads[own_leader].get(source, 0.0), size)
        kernel_reads_bytes = np.array([sum(reads.values()) for reads in kernel_reads], dtype=np.float64)
        return read_elsewhere, last_reader, kernel_reads_bytes

    def _share_storages(self, written: Flags, last: NDArray[np.intp]) -> None:
        """Change ``written`` and ``last`` (n,) so that an op and an op that overwrites its output in place agree.

        The two share a storage: it is written if either output is, and last read where either is. ``written``: whether an op's
        output is written to memory; ``last``: the last op that reads it.
        """
        for op in reversed(self.order):  # backwards, so that in a chain of in-place ops it reaches the first
            if self.graph.op_type[op].endswith("_"):  # it works in place: its output is its first input's storage
                overwritten = next(iter(self.reads[op]), -1)
                if overwritten >= 0:
                    written[overwritten] |= written[op]
                    last[overwritten] = max(last[overwritten], last[op])

    def _effective_reads(self, op: int) -> dict[int, float]:
        """Return an op's effective reads: the ops and parameters whose outputs its kernel uses for it, with their bytes.

        An input that is not in memory, because it is not kept for the backward pass or is inlined (cheap enough to be computed
        wherever it is read), is computed again in the op's kernel; what this computation reads takes its place.
        """
        found: dict[int, float] = {}
        waiting = list(self.reads[op].items())
        computed_again: set[int] = set()
        while waiting:
            source, size = waiting.pop()
            if source in computed_again:
                continue
            is_of_forward = self.is_op[source] and self.is_backward[op] and not self.is_backward[source]
            is_dropped = is_of_forward and not self.saved[source]
            if is_dropped or (self.is_inlined[source] and self.is_fusible[op]):
                computed_again.add(source)
                waiting += self.reads[source].items()
            else:
                found[source] = max(found.get(source, 0.0), size)
        return found

    def _stages(self, reads_of: dict[int, dict[int, float]]) -> Ints:
        """Return (n,) the stage of each op: how many kernels must run one after another before the op's own.

        Ops of one stage can be one kernel, because no other kernel has to run between them. A new stage begins for the readers
        of an op that is not fused, and of a reduction to a single number. ``reads_of``: by op its effective reads
        (:meth:`_effective_reads`).
        """
        fusible = self.is_fusible
        stage = np.zeros(len(self.graph), dtype=np.int64)
        for op in self.order:
            for source in reads_of[op]:
                begins_stage = self.ends[source] or (self.is_op[source] and not fusible[source])
                stage[op] = max(stage[op], stage[source] + int(begins_stage))
        for op in reversed(self.order):  # an op that is read only in later stages is computed in the first of them
            if fusible[op] and not self.is_norm[op] and not self.saved[op]:
                readers = [reader for reader in self.readers[op] if self.is_backward[reader] == self.is_backward[op]]
                if readers and all(fusible[reader] for reader in readers):
                    stage[op] = max(stage[op], min(stage[reader] for reader in readers))
        return stage

    def _leaders(self, reads_of: dict[int, dict[int, float]]) -> NDArray[np.intp]:
        """Return (n,) the last op of each op's kernel, -1 for ops that are not fused.

        Two ops of one stage (:meth:`_stages`) and pass (forward or backward) are one kernel if one reads the other's output, or
        if both read the same tensor. ``reads_of``: by op its effective reads (:meth:`_effective_reads`).
        """
        count = len(self.graph)
        fusible = self.is_fusible
        stage = self._stages(reads_of)
        together: list[tuple[int, int]] = []  # pairs of ops of one kernel
        # By (tensor's op, stage, whether in the backward pass), the first op there that reads the tensor.
        first_reader: dict[tuple[int, int, bool], int] = {}
        for op in self.order:
            if not fusible[op]:
                continue
            for source in reads_of[op]:
                if not self.is_op[source]:
                    continue
                is_in_stage = fusible[source] and stage[source] == stage[op]
                if is_in_stage and self.is_backward[source] == self.is_backward[op]:
                    together.append((op, source))
                else:
                    read_where = (source, int(stage[op]), bool(self.is_backward[op]))
                    together.append((op, first_reader.setdefault(read_where, op)))
        one_ops, other_ops = np.array(together, dtype=np.intp).reshape(-1, 2).T
        links: Any = csr_array((np.ones(len(together)), (one_ops, other_ops)), shape=(count, count))
        _, kernel = connected_components(links, directed=False)  # (n,) the number of each op's kernel
        leader_of_kernel = np.full(count, -1, dtype=np.intp)
        for op in self.order:
            if fusible[op]:
                leader_of_kernel[kernel[op]] = max(leader_of_kernel[kernel[op]], op)
        return np.where(fusible, leader_of_kernel[kernel], -1)

    def _cut(self) -> Flags:
        """Return (n,) whether an op of the forward pass has its output kept for the backward pass, at the least total price.

        The choice is a minimum cut of a network. Each op is an edge from its own node "in" to its own node "out", whose
        capacity is the price of keeping its output. Ops that must not be computed again are linked to the source, ops that
        the backward pass reads to the sink, so that an output is kept on every path between the two.
        """
        saved = np.zeros(len(self.graph), dtype=bool)
        forward = [op for op in self.order if not self.is_backward[op]]
        candidates = self._needed_in_backward(forward)
        if not candidates:
            return saved
        distance = self._distances_to_backward(candidates)
        read_late = self._read_late(forward)
        source, sink = 0, 1
        node_in = {op: 2 + 2 * index for index, op in enumerate(candidates)}
        node_out = {op: node + 1 for op, node in node_in.items()}
        edges: list[tuple[int, int, float]] = []  # (from, to, capacity)
        for op in candidates:
            edges.append((node_in[op], node_out[op], self._price_of_keeping(op, distance[op])))
            if op in read_late or self._is_banned(op):  # it must not be computed again
                edges.append((source, node_in[op], np.inf))
            edges += [(node_out[each], node_in[op], np.inf) for each in self.reads[op] if each in node_out]
            if any(self.is_backward[reader] for reader in self.readers[op]):
                edges.append((node_out[op], sink, np.inf))
        is_reached = _reachable(edges, 2 + 2 * len(candidates), source, sink)
        for op in candidates:  # the edges of the cut are the outputs that are kept
            saved[op] = is_reached[node_in[op]] and not is_reached[node_out[op]]
        return saved

    def _needed_in_backward(self, forward: Sequence[int]) -> list[int]:
        """Return the ops of ``forward`` that the backward pass reads, and all that these are computed from, in its order."""
        needed = {op for op in forward if any(self.is_backward[reader] for reader in self.readers[op])}
        for op in reversed(forward):
            if op in needed:
                needed.update(source for source in self.reads[op] if self.is_op[source])
        return [op for op in forward if op in needed]

    def _distances_to_backward(self, ops: Sequence[int]) -> dict[int, int]:
        """Return, for each of ``ops`` (of the forward pass, in order), how many reads lead from it to the backward pass.

        1: an op of the backward pass reads its output. The fewest reads count, and ``_FARTHEST`` where none leads there.
        """
        distance = dict.fromkeys(ops, _FARTHEST)
        for op in reversed(ops):
            reader_distances = [
                1 if self.is_backward[reader] else 1 + distance.get(reader, _FARTHEST) for reader in self.readers[op]
            ]
            distance[op] = min(reader_distances, default=_FARTHEST)
        return distance

    def _price_of_keeping(self, op: int, distance: int) -> float:
        """Return the partitioner's price of keeping an op's output for the backward pass.

        It is the output's bytes, some more for each op on the way to the backward pass (``distance``, see
        :meth:`_distances_to_backward`), and doubled if no kernel would write the output otherwise.
        """
        price = float(self.graph.written_bytes[op]) * _PER_OP_AWAY ** min(distance, _FARTHEST)
        price = max(price, 1.0)  # so that an output of no bytes is kept only where it is needed
        is_unwritten = self.is_fusible[op] and all(self.is_fusible[reader] for reader in self.readers[op])
        return price * _UNWRITTEN if is_unwritten else price

    def _read_late(self, forward: Sequence[int]) -> set[int]:
        """Return the ops that read a tensor after a product has read it, such as the additions of a residual stream.

        They are not computed again, because each would need the one before it, and so all that came before. ``forward``: the
        ops of the forward pass in order.
        """
        place_of = {op: place for place, op in enumerate(forward)}
        late: set[int] = set()
        for op in forward:
            readers = sorted(place_of[reader] for reader in self.readers[op] if reader in place_of)
            if len(readers) > 1 and self.is_fusible[op]:
                product_place = self._first_product(readers, place_of, forward)
                late.update(forward[reader] for reader in readers if reader > product_place)
        return late

    def _first_product(self, readers: Sequence[int], place_of: Mapping[int, int], forward: Sequence[int]) -> int:
        """Return the place of the first product among a tensor's readers and the ops that depend on them.

        A product is an op that is not fused; a place is an index into ``forward``. Only ops up to the last reader are looked
        at; its place is returned if all of them are fused. ``readers``: their places, ascending; ``place_of``: the place of
        each op.
        """
        waiting = list(readers)  # a sorted list is a heap
        seen = set(readers)
        last_reader = readers[-1]
        while waiting:
            place = heappop(waiting)
            if not self.is_fusible[forward[place]]:
                return place
            for reader in self.readers[forward[place]]:
                reader_place = place_of.get(reader, last_reader + 1)
                if reader_place <= last_reader and reader_place not in seen:
                    seen.add(reader_place)
                    heappush(waiting, reader_place)
        return last_reader

    def _is_banned(self, op: int) -> bool:
        """Return whether the partitioner refuses to compute an op again in the backward pass.

        It refuses ops that are not fused (products), random ops, reductions (to less than a quarter of the bytes), and ops
        whose output is read in the backward pass by an op that is not fused, for which it would have to be written anyway.
        """
        read_bytes = sum(self.reads[op].values())
        is_reduction = not self.is_norm[op] and _QUARTER * self.graph.written_bytes[op] < read_bytes
        is_written_again = any(self.is_backward[each] and not self.is_fusible[each] for each in self.readers[op])
        return bool(not self.is_fusible[op] or self.is_random[op] or is_reduction or is_written_again)


def _flags(values: Iterable[bool]) -> Flags:
    """Return (n,) the values as an array of bool, which it is for no values, too."""
    return np.array(list(values), dtype=bool)


def _reachable(edges: Sequence[tuple[int, int, float]], count: int, source: int, sink: int) -> Flags:
    """Return (count,) whether each node can be reached from ``source`` over unused capacity once the flow is maximal.

    The edges from a reached node to one that is not reached are the minimum cut. ``edges``: (from, to, capacity), where an
    infinite capacity marks an edge that must not be cut. Capacities are scaled to integers, each of at least 1.
    """
    start, end, capacity = (np.array(column) for column in zip(*edges, strict=True))
    is_finite = np.isfinite(capacity)
    finite_sum = capacity[is_finite].sum()
    scaled = np.maximum(np.where(is_finite, capacity, 0.0) * (_MOST_FLOW / finite_sum), 1.0)
    units = np.where(is_finite, scaled, _INFINITE_FLOW).astype(np.int64)
    network: Any = csr_array((units.astype(np.int32), (start, end)), shape=(count, count))
    unused = (network - maximum_flow(network, source, sink).flow).tocoo()
    is_open = unused.data > 0
    residual = csr_array((unused.data[is_open], (unused.row[is_open], unused.col[is_open])), shape=(count, count))
    reached = np.zeros(count, dtype=bool)
    reached[breadth_first_order(residual, source, return_predecessors=False)] = True
    return reached


def _uses_channels_last(graph: Graph) -> bool:
    """Return whether inductor turns a graph's convolutions to channels_last, by its ``GraphLowering.decide_layout_opt``.

    It does not if few of the ops are convolutions. In inference it weighs the FLOPs of grouped convolutions, which it slows
    down, against those of others, which it speeds up; in training it does not if any convolution is grouped or narrowing, or
    all are small.
    """
    is_convolution = _flags(normal_type(op_type) == "convolution" for op_type in graph.op_type)
    is_convolution &= graph.gemm[:, 1] > 0
    if not is_convolution.any() or (graph.kind == COMPUTE).sum() >= _NODES_EACH * is_convolution.sum():
        return False
    # Of one group: its output channels, and its input channels times the filter's taps.
    groups, _, outputs, inputs_by_taps = graph.gemm[is_convolution].T
    is_grouped = (groups > 1) & (outputs > 1)
    if graph.mode == "inference":
        grouped_share = graph.flops[is_convolution][is_grouped].sum() / graph.flops[is_convolution].sum()
        return bool(_GROUPED_COST * grouped_share + _OTHER_COST * (1.0 - grouped_share) <= 1.0)
    # A narrowing convolution is a filter of 3 x 3 that makes at most half as many channels as it reads.
    is_narrowing = inputs_by_taps >= 2 * _TAPS * outputs
    is_small = (outputs * groups <= _SMALL) & (inputs_by_taps <= _TAPS * _SMALL)
    return not bool((is_grouped | is_narrowing).any() or is_small.all())
