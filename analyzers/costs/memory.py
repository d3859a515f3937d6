"""What one process of a training step holds, and when: sharded or not, with or without activation checkpointing.

A traced step says when every tensor is made and when it is used for the last time. Sharding adds what its framework
gathers and reduces beside them; checkpointing drops what a block saved and makes it again before its backward pass. Both
are known places in the program, so one sum over them is the memory at every place. Start at :func:`ledger_of`; what to
compute again under a budget is :mod:`.checkpointing`'s question.

Sources: FSDP2 as ``torch.distributed.fsdp.fully_shard`` does it (the root stays gathered, one block is gathered ahead, the
input of a reduce-scatter is held until the next one); non-reentrant ``torch.utils.checkpoint`` (recomputation ends with the
last tensor that is needed), selective: the outputs of chosen products are kept until the block is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from ddltool.analyzers.communication.fsdp import block_container, block_of
from ddltool.analyzers.costs.allocator import reserved_bytes
from ddltool.analyzers.costs.model import OPTIMIZERS, Optimizer
from ddltool.analyzers.tracing.torch_adapter import TracedStep
from ddltool.analyzers.tracing.torch_costs import AS_TRACED, Scale, tensors_of, value_of
from ddltool.errors import InputError, did_you_mean
from ddltool.graph import RECV, SEND, Graph
from ddltool.plans import is_product

Array = NDArray[np.float64]
Places = NDArray[np.int64]
Kind = Literal["none", "ddp", "zero1", "zero2", "fsdp", "hsdp"]
Checkpointing = Literal["none", "selective", "full"]
# Checkpointed blocks, and which of their products each keeps.
Keeps = Mapping[str, Sequence[int]]
PARAMETER, GIVEN, GRADIENT, ACTIVATION = range(4)
# fully_shard's mixed precision keeps parameters, reduced gradients and state in float32, whatever is gathered.
_MASTER_BYTES = 4.0
# cuDNN's FFT_TILING: half of the numbers of a real tile's transform say all.
_TILE, _COMPLEX_BYTES = 32, 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How a step's state is spread over its replicas; ``shard``: over how many processes.

    ``forward_shard``: over how many a block's parameters are after its forward pass, where that is fewer.
    """

    kind: Kind = "ddp"
    shard: int = 1
    forward_shard: int = 0

    @classmethod
    def named(cls, text: str, replicas: int) -> Sharding:
        """Return ``none``, ``ddp``, ``zero1``, ``zero2``, ``fsdp``, ``fsdp:SHARD`` or ``hsdp:SHARD`` on a number of replicas.

        ``zero2`` is ``fully_shard`` with ``reshard_after_forward=False``, ``fsdp:SHARD`` with that number. Raises InputError
        for other texts, and for a shard that does not divide the replicas.
        """
        kind = next((known for known in get_args(Kind) if known == text.partition(":")[0]), None)
        size = text.partition(":")[2]
        if "offload" in text or text.endswith(":cpu"):
            raise InputError(
                "--sharding", f"{text!r}: offload to the CPU is not modelled", "give fsdp, which keeps its part"
            )
        if kind == "hsdp" and not size:
            raise InputError("--sharding", f"{text!r} does not say over how many", "give hsdp:SHARD, such as hsdp:8")
        if kind is None or (kind not in ("fsdp", "hsdp") and ":" in text):
            ways = ["none", "ddp", "zero1", "zero2", "fsdp", "fsdp:SHARD", "hsdp:SHARD"]
            raise InputError("--sharding", f"unknown {text!r}", did_you_mean(text, ways))
        if ":" not in text:
            return cls(kind=kind, shard=1 if kind in ("none", "ddp") else replicas)
        if not size.isdecimal() or int(size) < 1 or replicas % int(size):
            raise InputError("--sharding", f"{text!r} on {replicas} replicas", "give a SHARD that divides the replicas")
        if kind == "fsdp":
            return cls(kind=kind, shard=replicas, forward_shard=int(size))
        return cls(kind=kind, shard=int(size))

    @property
    def gathers(self) -> bool:
        """Whether parameters are held in shards, and gathered block by block."""
        return self.kind in ("zero2", "fsdp", "hsdp")

    @property
    def reshards(self) -> bool:
        """Whether a block's parameters are given up after its forward pass, and gathered again."""
        return self.kind in ("fsdp", "hsdp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A member of the model's list of blocks, and where it runs; places count the nodes of the program."""

    name: str
    first: int
    last: int
    """Of its forward pass."""
    begins: int
    ends: int
    """Of its backward pass: the nodes that read what it alone holds, or make its gradients."""
    products: tuple[int, ...]
    """Where the products of its forward pass are (:func:`ddltool.plans.is_product`)."""
    keepable: tuple[int, ...]
    """Which of them may be kept: no later op changes what they made in place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The most that is held at one time: in all, by part, and the curve (bytes by place) that it is the top of."""

    total_bytes: float
    parts: dict[str, float]
    curve: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Ledger:
    """Every storage of a traced step: arrays (s,), places of ``nodes`` nodes, the backward pass from ``backward`` on.

    ``owner``: the block of a parameter or gradient; of an activation the block that made it and alone uses it in its
    forward pass. -1: none. ``forward``: the last use before the backward pass. ``product``: which product of its block
    made it, -1: none. ``read``: (r, 3) a storage that is made before a block, the block, and the last place in its
    forward pass that reads it.
    """

    traced: TracedStep
    nodes: int
    backward: int
    elements: tuple[int, ...]
    width: Array
    born: Places
    forward: Places
    died: Places
    role: Places
    owner: Places
    product: Places
    read: Places
    trained_bytes: Array
    """(blocks + 1,) of the parameters that get a gradient; those outside all blocks come last."""
    master_bytes: Array
    """The same, of what ``fully_shard`` keeps, reduces and updates of them."""
    blocks: tuple[Block, ...]
    """In the order of their forward passes; none where they do not run one after another."""
    _sizes: dict[int | None, Array] = field(default_factory=dict)

    def sizes(self, batch_size: int | None = None) -> Array:
        """Return (s,) bytes at a batch size of a step whose work grows with its batch. O(s) once for each size."""
        if batch_size not in self._sizes:
            scale = self._scale(batch_size)
            distinct, which = np.unique(np.array(self.elements, dtype=np.int64), return_inverse=True)
            self._sizes[batch_size] = (
                np.array([float(scale.size(each)) for each in distinct.tolist()])[which] * self.width
            )
        return self._sizes[batch_size]

    def _scale(self, batch_size: int | None) -> Scale:
        if batch_size is None or batch_size == self.traced.graph.batch_size:
            return AS_TRACED
        found = self.traced.scale(batch_size)
        if found is None:
            raise InputError("--batch-sizes", f"{batch_size} is not the traced one", "trace the step at it")
        return found

    def workspace_bytes(self, batch_size: int | None = None) -> float:
        """Return the largest workspace that cuDNN may try for a convolution: Fourier transforms in tiles of 32 x 32. O(nodes).

        Of images (n, c, h, w), filters (k, c, r, s) and outputs, one tile of complex numbers each; stride 1, no groups.
        """
        scale, most = self._scale(batch_size), 0.0
        for node in self.traced.fx.graph.nodes:
            if getattr(node.target, "overloadpacket", None) is torch.ops.aten.convolution:
                images, weight = value_of(node.args[0]), value_of(node.args[1])
                plain = images.dim() == 4 and math.prod(node.args[3]) == node.args[8] == 1
                if plain and (taps := weight.shape[2:]).numel() > 1 and max(taps) < _TILE:
                    out, into = weight.shape[:2]
                    tiles = math.prod(
                        math.ceil(size / (_TILE - tap + 1)) for size, tap in zip(images.shape[2:], taps, strict=True)
                    )
                    maps = into * out + scale.size(images.shape[0]) * tiles * (into + out)
                    most = max(most, maps * _TILE * (_TILE // 2 + 1) * _COMPLEX_BYTES)
        return most

    def peak(
        self,
        sharding: Sharding,
        optimizer: str,
        keeps: Keeps | None = None,
        batch_size: int | None = None,
    ) -> Peak:
        """Return the most bytes of tensors that one process holds during a step. O(storages + nodes).

        ``keeps``: which blocks are checkpointed (none by default), and the products that each keeps.
        """
        return self.held(Recomputation(self, keeps or {}), sharding, optimizer, self.sizes(batch_size)).peak()

    def held(self, again: Recomputation, sharding: Sharding, optimizer: str, size: Array) -> Held:
        """Return what one process holds where, of storages of ``size`` (s,) bytes."""
        held = Held(self.nodes + again.extra)
        self._hold_activations(held, again, size)
        update = OPTIMIZERS[optimizer]
        if sharding.gathers:
            self._hold_shards(held, again, size, sharding, update)
        else:
            self._hold_whole(held, again, size, sharding, update)
        return held

    def every_block(self, checkpointing: Checkpointing) -> dict[str, tuple[int, ...]]:
        """Return a plan that treats all blocks alike. Raises InputError where there are none to checkpoint."""
        if checkpointing == "none":
            return {}
        if not self.blocks:
            problem = f"{self.traced.graph.name} has no list of blocks that run one after another"
            raise InputError("--checkpointing", problem, "leave it out")
        kept = checkpointing == "selective"
        return {block.name: block.keepable if kept else () for block in self.blocks}

    def seconds(self, timed: Graph) -> Array:
        """Return (nodes,) the seconds of each place, by the durations of a graph of this step."""
        made = np.zeros(self.nodes)
        at = self._places
        np.add.at(made, at[at >= 0], timed.duration_s[at >= 0])
        return made

    def again_s(self, again: Recomputation, seconds: Array) -> Array:
        """Return (blocks,) the seconds of each recomputation; ``seconds`` (nodes,) of the places."""
        return np.array([seconds[places].sum() for places in self._repeated(again)])

    def lengthened(self, keeps: Keeps, timed: Graph) -> Graph:
        """Return ``timed``, this graph, with recomputation in the first op of each backward pass that waits for it."""
        longer, at = timed.duration_s.copy(), self._places
        again = self.again_s(Recomputation(self, keeps), self.seconds(timed))
        for block, more in zip(self.blocks, again.tolist(), strict=True):
            longer[int(np.where(at >= block.begins, at, self.nodes).argmin())] += more
        return timed.with_durations(longer, timed.estimate)

    def clock(self, again: Recomputation, timed: Graph) -> Array:
        """Return (places,) when each place of the program with recomputation is over, in seconds."""
        seconds = self.seconds(timed)
        made = np.zeros(self.nodes + again.extra)
        made[again.moved(np.arange(self.nodes))] = seconds
        for number, places in enumerate(self._repeated(again)):
            made[again.start[number] + places - again.first[number]] = seconds[places]
        clock: Array = np.cumsum(made)
        return clock

    def _repeated(self, again: Recomputation) -> list[Places]:
        """Return by block the places of its forward pass that are computed again."""
        made = []
        for number, block in enumerate(self.blocks):
            kept = np.array(block.products, dtype=np.int64)[again.keep[number, : len(block.products)]]
            every = np.arange(block.first, block.first + again.length[number])
            made.append(every[~np.isin(every, kept)])
        return made

    @cached_property
    def _places(self) -> Places:
        """Return (ops,) where the ops of the step's graphs stand; -1: nowhere."""
        place = {node: position for position, node in enumerate(self.traced.fx.graph.nodes)}
        nodes = (self.traced.nodes.get(name) for name in self.traced.graph.names)
        return np.array([-1 if node is None else place[node] for node in nodes], dtype=np.int64)

    def activations(self, again: Recomputation, size: Array, read: Places | None = None) -> Array:
        """Return the bytes of activations at every place; ``read``: rows of its kind that count, all by default."""
        held = Held(self.nodes + again.extra)
        self._hold_activations(held, again, size, read)
        return held.peak().curve

    def _hold_activations(self, held: Held, again: Recomputation, size: Array, read: Places | None = None) -> None:
        held.add("activations", 0, held.places, size[self.role == GIVEN])
        dropped, kept = again.dropped, again.kept
        whole = self.role == ACTIVATION
        whole[dropped] = False
        died = again.moved(self.died) + 1
        read = self.read if read is None else read
        for storage, number, last in read[whole[read[:, 0]]]:  # there until the block is computed again
            if again.length[number]:
                used = min(last - self.blocks[number].first, again.length[number] - 1)
                died[storage] = max(died[storage], again.start[number] + used + 1)
        number = self.owner[kept]
        offset = self.born[kept] - again.first[number]
        # Until the repetition takes it; what that does not reach, until the block's backward pass is over.
        ends = again.moved(np.array([block.ends for block in self.blocks], dtype=np.int64))[number]
        taken = np.where(offset < again.length[number], again.start[number] + offset, ends) + 1
        died[kept] = np.maximum(died[kept], taken)
        held.add("activations", again.moved(self.born)[whole], died[whole], size[whole])
        held.add("activations", self.born[dropped], self.forward[dropped] + 1, size[dropped])
        number = self.owner[dropped]
        offset, length = self.born[dropped] - again.first[number], again.length[number]
        start = again.start[number] + offset
        used = again.start[number] + np.minimum(self.forward[dropped] - again.first[number], length - 1) + 1
        end = np.where(self.died[dropped] >= self.backward, died[dropped], used)
        made = offset < length
        held.add("activations", start[made], end[made], size[dropped][made])

    def _hold_whole(self, held: Held, again: Recomputation, size: Array, sharding: Sharding, update: Optimizer) -> None:
        parameter, gradient = self.role == PARAMETER, self.role == GRADIENT
        trained = float(self.trained_bytes.sum())
        held.add("parameters", 0, held.places, size[parameter])
        held.add("gradients", again.moved(self.born)[gradient], held.places, size[gradient])
        held.add("updating", held.places - 1, held.places, update.temporaries * float(size[gradient].sum()))
        states = np.tile(size[gradient], int(update.state_copies)) / sharding.shard
        held.add("optimizer", 0, held.places, states)
        if sharding.kind != "none":
            held.add("buckets", 0, held.places, trained)

    def _hold_shards(
        self, held: Held, again: Recomputation, size: Array, sharding: Sharding, update: Optimizer
    ) -> None:
        parameter, gradient = self.role == PARAMETER, self.role == GRADIENT
        born, end, shard = again.moved(self.born), held.places, sharding.shard
        reduced = self.master_bytes
        held.add("parameters", 0, end, size[parameter] * np.maximum(_MASTER_BYTES / self.width[parameter], 1.0) / shard)
        states = np.tile(
            size[gradient] * np.maximum(_MASTER_BYTES / self.width[gradient], 1.0), int(update.state_copies)
        )
        held.add("optimizer", 0, end, states / shard)
        held.add("gathered", 0, end, size[parameter & (self.owner < 0)])
        rooted = gradient & (self.owner < 0)
        held.add("gradients", born[rooted], end, size[rooted])
        own = [float(size[parameter & (self.owner == number)].sum()) for number in range(len(self.blocks))]
        ends = [int(again.moved(np.array(block.ends))) for block in self.blocks]
        for number, block in enumerate(self.blocks):
            before = number - 1 if number else None  # the block whose backward pass comes next
            # What was gathered is copied out, and kept until the next block has been gathered.
            leaves = self.blocks[number + 1].first if number + 1 < len(self.blocks) else self.backward
            held.add("gathering", block.first - 1, leaves, own[number])
            held.add("gathered", block.first, block.last + 1 if sharding.reshards else ends[number] + 1, own[number])
            if sharding.reshards:
                held.add("gathered", again.start[number], ends[number] + 1, own[number])
                if sharding.forward_shard:
                    held.add("gathered", block.last + 1, again.start[number], own[number] / sharding.forward_shard)
                held.add("gathering", again.start[number], ends[number] + 1, own[before] if before is not None else 0.0)
            mine = gradient & (self.owner == number)
            # A block gives up its parameters before it reduces, and the input of the reduction before it.
            held.add("gradients", born[mine], ends[number] + 2, size[mine])
            until = ends[before] + 1 if before is not None else end - 1
            held.add("reducing", ends[number] + 1, until, float(reduced[number]))
            held.add("gradients", ends[number] + 1, end, float(reduced[number]) / shard)
        held.add("updating", end - 1, end, update.temporaries * float(reduced.sum()) / shard)


class Recomputation:
    """Where a plan's recomputed forward passes stand in the program; arrays by block, but for two by storage.

    ``room`` (blocks,): places to leave for each, at least as many as it has; what nothing happens in changes no peak.
    """

    def __init__(self, ledger: Ledger, keeps: Keeps, room: Places | None = None) -> None:
        blocks = ledger.blocks
        self.first = np.array([block.first for block in blocks], dtype=np.int64)
        on = np.array([block.name in keeps for block in blocks], dtype=bool)
        self.keep = np.zeros((len(blocks), 1 + max((len(block.products) for block in blocks), default=0)), dtype=bool)
        for number, block in enumerate(blocks):
            self.keep[number, list(keeps.get(block.name, ()))] = True
        mine = np.flatnonzero((ledger.role == ACTIVATION) & (ledger.owner >= 0))
        mine = mine[on[ledger.owner[mine]]]
        stays = self.keep[ledger.owner[mine], ledger.product[mine]]
        self.dropped, self.kept = mine[~stays], mine[stays]
        needed = self.dropped[ledger.died[self.dropped] >= ledger.backward]
        self.length = np.zeros(len(blocks), dtype=np.int64)
        number = ledger.owner[needed]
        np.maximum.at(self.length, number, ledger.born[needed] - self.first[number] + 1)
        self.room = room = self.length if room is None else room
        inserted = np.zeros(ledger.nodes + 1, dtype=np.int64)
        begins = np.array([block.begins for block in blocks], dtype=np.int64)
        np.add.at(inserted, begins, room)
        self._shift = np.cumsum(inserted)
        self.start = begins + self._shift[begins] - room
        self.extra = int(self._shift[-1])

    def moved(self, place: Places) -> Places:
        """Return places of the traced program in the one with recomputation."""
        made: Places = place + self._shift[place]
        return made


class Held:
    """Bytes held over the places of a program, by what they are."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._change: dict[str, Array] = {}
        self._spans: list[tuple[str, Places, Places, Array]] = []

    def add(self, part: str, start: Places | int, end: Places | int, size: Array | float) -> None:
        """Add ``size`` bytes from each ``start`` up to each ``end``, which is left out."""
        if part not in self._change:
            self._change[part] = np.zeros(self.places + 1)
        change = self._change[part]
        if isinstance(size, float):  # of one thing: most are of blocks, one by one
            begins, over = (min(max(int(place), 0), self.places) for place in (start, end))
            change[begins] += size
            change[over] -= size
            self._spans.append((part, np.array([begins]), np.array([over]), np.array([size])))
            return
        starts, ends, sizes = np.broadcast_arrays(np.asarray(start), np.asarray(end), np.asarray(size, dtype=float))
        starts, ends = np.clip(starts, 0, self.places), np.clip(ends, 0, self.places)
        np.add.at(change, starts, sizes)
        np.subtract.at(change, ends, sizes)
        self._spans.append((part, starts.ravel(), ends.ravel(), sizes.ravel()))

    def curves(self) -> dict[str, Array]:
        """Return the bytes (places,) of each part."""
        return {part: np.cumsum(change)[:-1] for part, change in self._change.items()}

    def peak(self) -> Peak:
        """Return the sum and its top."""
        curves = self.curves()
        curve = np.sum(list(curves.values()), axis=0)
        top = int(curve.argmax())
        return Peak(
            total_bytes=float(curve[top]), parts={name: float(each[top]) for name, each in curves.items()}, curve=curve
        )

    def reserved_bytes(self, limit_bytes: float = inf) -> int | None:
        """Return what torch's caching allocator takes of a device for all of it, by playing it.

        None where ``limit_bytes`` do not suffice. O(tensors log tensors).
        """
        lasting: list[float] = []
        later: list[float] = []
        spans: list[tuple[int, int, float]] = []
        for part, starts, ends, sizes in self._spans:
            real = (ends > starts) & (sizes > 0)
            lasts = real & (starts == 0) & (ends == self.places)
            (later if part == "optimizer" else lasting).extend(sizes[lasts].tolist())
            rest = real & ~lasts
            spans += zip(starts[rest].tolist(), ends[rest].tolist(), sizes[rest].tolist(), strict=True)
        return reserved_bytes(lasting, later, spans, limit_bytes)


def ledger_of(traced: TracedStep) -> Ledger:
    """Return what a traced training step holds. O(nodes).

    Its blocks are the members of the list with most of the parameters; none where there is no such list, or where its
    members do not run one after another, each once.
    """
    return _Reader(traced).read()


class _Reader:
    """Goes once through a recorded step; all lists by storage, in the order in which they come first."""

    def __init__(self, traced: TracedStep) -> None:
        self.traced, graph = traced, traced.graph
        self.nodes: list[Node] = list(traced.fx.graph.nodes)
        self.names = {node: name for name, node in traced.nodes.items()}
        received = graph.kind == RECV
        held = [graph.parameter[op] or "" for op in np.flatnonzero(received).tolist()]
        self.container = block_container(held, graph.size_bytes[received].tolist())
        self.parameters = dict(zip((node for node in self.nodes if node.op == "placeholder"), held, strict=False))
        starts = (place for place, node in enumerate(self.nodes) if self.names.get(node, "").startswith("backward"))
        self.backward = next(starts, len(self.nodes) - 1)
        self.block = self._running_block()
        self.spans = self._spans()
        self.number = {name: number for number, name in enumerate(self.spans)}
        self.storage: dict[int, int] = {}
        self.elements: list[int] = []
        self.width: list[float] = []
        self.columns: list[list[int]] = []  # born, forward, died, role, owner
        self.reads: dict[tuple[int, int], int] = {}

    def read(self) -> Ledger:
        """Return the ledger."""
        used: list[list[int]] = []
        for place, node in enumerate(self.nodes):
            sources = (*node.all_input_nodes, node)
            used.append([self._use(source, tensor, place) for source in sources for tensor in _tensors(source)])
        self._mark_gradients()
        table = np.array(self.columns, dtype=np.int64).reshape(-1, 5)
        born, forward, died, role, owner = table.T
        for storage in np.flatnonzero((role == ACTIVATION) & (born < self.backward)).tolist():
            name = self.block[born[storage]] if self.spans else ""
            if name and forward[storage] <= self.spans[name][1]:
                owner[storage] = self.number[name]
        touched: list[list[int]] = [[] for _ in self.spans]
        for place in range(self.backward, len(self.nodes) - 1):
            for number in {int(owner[storage]) for storage in used[place] if owner[storage] >= 0}:
                touched[number].append(place)
        changed = self._changed()
        blocks = tuple(
            Block(
                name=name, first=span[0], last=span[1], begins=places[0], ends=places[-1],
                products=(products := self._products(span)),
                keepable=tuple(which for which, place in enumerate(products) if not changed & self._stored(place)),
            )
            for (name, span), places in zip(self.spans.items(), touched, strict=True)
            if places
        )  # fmt: skip
        if len(blocks) < len(self.spans):  # one that is not trained
            owner[:], blocks = -1, ()
        made = {place: which for block in blocks for which, place in enumerate(block.products)}
        read = [(s, n, last) for (s, n), last in self.reads.items() if blocks and born[s] < blocks[n].first]
        return Ledger(
            traced=self.traced,
            nodes=len(self.nodes),
            backward=self.backward,
            elements=tuple(self.elements),
            width=np.array(self.width),
            born=born,
            forward=forward,
            died=died,
            role=role,
            owner=owner,
            product=np.array([made.get(place, -1) for place in born.tolist()], dtype=np.int64),
            read=np.array(read, dtype=np.int64).reshape(-1, 3),
            trained_bytes=self._trained(blocks, master=False),
            master_bytes=self._trained(blocks, master=True),
            blocks=blocks,
        )

    def _use(self, source: Node, tensor: Tensor, place: int) -> int:
        """Return the number of a tensor's storage, which a node of this place makes or reads."""
        kept = tensor.untyped_storage()
        given = source.op == "placeholder"
        if kept._cdata not in self.storage:
            self.storage[kept._cdata] = len(self.elements)
            self.elements.append(kept.nbytes() // tensor.element_size())
            self.width.append(tensor.element_size())
            role = (PARAMETER if source in self.parameters else GIVEN) if given else ACTIVATION
            self.columns.append([0 if given else place, 0, 0, role, self._owner(self.parameters.get(source, ""))])
        number = self.storage[kept._cdata]
        row = self.columns[number]
        row[2] = max(row[2], place)
        if place < self.backward:
            row[1] = max(row[1], place)
            if self.spans and self.block[place]:
                self.reads[number, self.number[self.block[place]]] = place
        return number

    def _owner(self, parameter: str) -> int:
        return self.number.get(block_of(parameter, self.container), -1) if self.container is not None else -1

    def _mark_gradients(self) -> None:
        graph = self.traced.graph
        sent = [graph.parameter[op] or "" for op in np.flatnonzero(graph.kind == SEND).tolist()]
        returned = self.nodes[-1].args[0]
        made = returned[1:] if isinstance(returned, (list, tuple)) else ()
        for name, gradient in zip(sent, (value for value in made if isinstance(value, Node)), strict=False):
            for tensor in _tensors(gradient):
                row = self.columns[self.storage[tensor.untyped_storage()._cdata]]
                row[2:5] = [len(self.nodes) - 1, GRADIENT, self._owner(name)]

    def _trained(self, blocks: Sequence[Block], *, master: bool) -> Array:
        graph = self.traced.graph
        width = {name: _tensors(node)[0].element_size() for node, name in self.parameters.items() if name}
        made = np.zeros(len(blocks) + 1)
        for op in np.flatnonzero(graph.kind == SEND).tolist():
            name = graph.parameter[op] or ""
            wider = max(_MASTER_BYTES / width[name], 1.0) if master else 1.0
            made[self._owner(name) if blocks else -1] += graph.size_bytes[op] * wider
        return made

    def _products(self, span: tuple[int, int]) -> tuple[int, ...]:
        return tuple(place for place in range(span[0], span[1] + 1) if _is_product(self.nodes[place]))

    def _stored(self, place: int) -> set[int]:
        return {self.storage[tensor.untyped_storage()._cdata] for tensor in _tensors(self.nodes[place])}

    def _changed(self) -> set[int]:
        """Return the storages of the forward pass that an op changes in place."""
        made = set()
        for node in self.nodes[: self.backward]:
            if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
                for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
                    if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Node):
                        made |= {self.storage[tensor.untyped_storage()._cdata] for tensor in _tensors(value)}
        return made

    def _running_block(self) -> list[str]:
        """Return for each node of the forward pass the block that it runs in; what has no name, with the one before."""
        made: list[str] = []
        last = ""
        for node in self.nodes[: self.backward]:
            if (name := self.names.get(node)) is not None:
                scope = name.rpartition("/")[0].partition("/")[2]
                last = block_of(f"{scope}.", self.container) if scope and self.container is not None else ""
            made.append(last)
        return made

    def _spans(self) -> dict[str, tuple[int, int]]:
        """Return by block the first and the last place of its forward pass; nothing where one is left and entered again."""
        spans: dict[str, tuple[int, int]] = {}
        inside: Sequence[str] = [name for name in self.block if name]
        runs = 1 + sum(one != other for one, other in pairwise(inside)) if inside else 0
        for place, name in enumerate(self.block):
            if name:
                spans[name] = (spans.get(name, (place, place))[0], place)
        return spans if len(spans) == runs and len(spans) > 1 else {}


def _is_product(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and is_product(node.target.overloadpacket.__name__)


def _tensors(node: Node) -> list[Tensor]:
    return tensors_of(value_of(node))
