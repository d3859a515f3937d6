"""What one process of a training step holds, and when: sharded or not, with or without activation checkpointing.

A traced step says when every tensor is made and when it is used for the last time. Sharding adds what its framework
gathers and reduces beside them; checkpointing drops what a block saved and makes it again before its backward pass. Both
are known places in the program, so one sum over them is the memory at every place. :mod:`.traced_lifetimes` reads a step;
what to compute again under a budget is :mod:`.checkpointing`'s question.

Sources: FSDP2 as ``torch.distributed.fsdp.fully_shard`` does it (the root stays gathered, one block is gathered ahead, the
input of a reduce-scatter is held until the next one); non-reentrant ``torch.utils.checkpoint`` (recomputation ends with the
last tensor that is needed), selective: the outputs of chosen products are kept until the block is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import cast

import numpy as np
import torch

from ddltool.analyzers.step.costs.held import Held, Peak
from ddltool.analyzers.step.costs.optimizers import OPTIMIZERS, Parameter, parameters_of, state_shares, temporaries
from ddltool.analyzers.step.costs.saving import Checkpointing, Copies, SavedOps, Saving, split_way
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.recording.torch_costs import AS_TRACED, Scale, value_of
from ddltool.analyzers.step.tracing.torch_adapter import TracedStep
from ddltool.arrays import Floats, Ints
from ddltool.errors import InputError
from ddltool.graph import Graph
from ddltool.precision import precision_of

PARAMETER, GIVEN, GRADIENT, ACTIVATION = range(4)
"""The roles of a storage: a parameter, another input of the step, a parameter's gradient, or anything that the step makes."""
# cuDNN's FFT_TILING transforms tiles of 32 x 32 numbers. Of a real tile's transform half are kept: the others are conjugates.
_TILE, _COMPLEX_BYTES = 32, 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBlock:
    """A member of the model's list of blocks, and the places where it runs: indices of the program's nodes."""

    name: str
    first: int
    last: int
    """The first and the last place of its forward pass."""
    begins: int
    ends: int
    """The first and the last place of its backward pass: the nodes that read a storage that only this block owns, or make
    its gradients."""
    products: tuple[int, ...]
    """Places of the products of its forward pass (:func:`ddltool.plans.is_product`)."""
    keepable: tuple[int, ...]
    """Numbers of the products that may be kept: no later op overwrites their results in place."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorLifetimes:
    """The storages of a traced step; arrays are (s,) by storage. A place is the index of a node of the program."""

    traced: TracedStep
    nodes: int
    """Places of the traced program."""
    backward: int
    """The first place of the backward pass."""
    elements: tuple[int, ...]
    """(s,) at the traced batch size."""
    width: Floats
    """Bytes of one element."""
    alloc: Ints
    """The place that makes it; 0 for inputs and parameters."""
    forward: Ints
    """The place of its last use before the backward pass."""
    free: Ints
    """The place of its last use."""
    role: Ints
    """PARAMETER, GIVEN, GRADIENT or ACTIVATION."""
    owner: Ints
    """The block of a parameter or gradient; of an activation the only block whose forward pass uses it. -1: none."""
    product: Ints
    """The number of the product of its block that makes it; -1: no product does."""
    read: Ints
    """(r, 3) storage, block, place: inputs made before a block, and the last place of its forward pass that reads them."""
    trained_bytes: Floats
    """(blocks + 1,) bytes of the parameters that get a gradient, as they are kept, reduced and updated; those outside all
    blocks come last."""
    kept_share: float
    """Bytes of the parameters as they are kept (float32 under FSDP's mixed precision) over those that the ops read."""
    blocks: tuple[ModelBlock, ...]
    """In the order of their forward passes; empty if they do not run one after another."""
    gradient_of: tuple[str, ...] = ()
    """(s,) the parameter whose gradient it is; empty: of none."""
    numbers: Mapping[int, int] = field(default_factory=dict)
    """The index of each storage, by the address of torch's."""
    _sizes: dict[int | None, Floats] = field(default_factory=dict)
    """What :meth:`sizes` has computed, by batch size."""

    def sizes(self, batch_size: int | None = None) -> Floats:
        """Return (s,) the bytes of every storage at a batch size; None: the traced one. O(s) once for each batch size.

        Raises InputError for a batch size to which the trace cannot be scaled.
        """
        if batch_size not in self._sizes:
            scale = self._scale(batch_size)
            distinct_elements, inverse = np.unique(np.array(self.elements, dtype=np.int64), return_inverse=True)
            self._sizes[batch_size] = (
                np.array([float(scale.size(elements)) for elements in distinct_elements.tolist()])[inverse] * self.width
            )
        return self._sizes[batch_size]

    def _scale(self, batch_size: int | None) -> Scale:
        """Return what converts traced element counts to those at a batch size, None: the traced one.

        Raises InputError if the trace's shapes do not scale to it.
        """
        if batch_size is None or batch_size == self.traced.graph.batch_size:
            return AS_TRACED
        scale = self.traced.scale(batch_size)
        if scale is None:
            raise InputError("--batch-sizes", f"{batch_size} is not the traced one", "trace the step at it")
        return scale

    def workspace_bytes(self, batch_size: int | None = None) -> float:
        """Return the bytes of the largest workspace that cuDNN may try for a convolution of the step. O(nodes).

        It is that of Fourier transforms in tiles of 32 x 32, which only convolutions of stride 1 without groups have: a tile
        of complex numbers for every filter (k, c), and for every tile and channel of the images (n, c, h, w) and of the
        outputs. ``batch_size`` None: the traced one.
        """
        scale, most_bytes = self._scale(batch_size), 0.0
        for node in self.traced.program.nodes:
            if getattr(node.target, "overloadpacket", None) is not torch.ops.aten.convolution:
                continue
            images, weight, stride, groups = value_of(node.args[0]), value_of(node.args[1]), node.args[3], node.args[8]
            taps = weight.shape[2:]
            is_plain = images.dim() == 4 and math.prod(stride) == groups == 1
            if is_plain and taps.numel() > 1 and max(taps) < _TILE:
                outputs, inputs = weight.shape[:2]
                # Neighbouring tiles overlap by the filter's taps less one.
                tiles_of_image = math.prod(
                    math.ceil(size / (_TILE - tap + 1)) for size, tap in zip(images.shape[2:], taps, strict=True)
                )
                tile_count = inputs * outputs + scale.size(images.shape[0]) * tiles_of_image * (inputs + outputs)
                most_bytes = max(most_bytes, tile_count * _TILE * (_TILE // 2 + 1) * _COMPLEX_BYTES)
        return most_bytes

    def peak(
        self,
        sharding: Sharding,
        optimizer: str,
        saving: SavedOps | Saving | None = None,
        batch_size: int | None = None,
    ) -> Peak:
        """Return the most bytes of tensors that one process holds during a step. O(storages + nodes).

        ``optimizer``: a name of ``OPTIMIZERS``. ``saving``: what blocks save, or which of them are checkpointed (none by
        default) with the products that each keeps. ``batch_size`` None: the traced one.
        """
        return self.held(Recomputation(self, saving or {}), sharding, optimizer, self.sizes(batch_size)).peak()

    def held(self, recomputation: Recomputation, sharding: Sharding, optimizer: str, size: Floats) -> Held:
        """Return the bytes that one process holds at every place of the program with ``recomputation``.

        ``size`` (s,): the bytes of the storages, see :meth:`sizes`. ``optimizer``: a name of ``OPTIMIZERS``.
        """
        held = Held(self.nodes + recomputation.extra)
        self.hold_activations(held, recomputation, size)
        if sharding.gathers:
            self._hold_shards(held, recomputation, size, sharding, optimizer)
        else:
            self._hold_whole(held, recomputation, size, sharding, optimizer)
        return held

    @property
    def names(self) -> list[str]:
        """The names of the blocks in the order of their forward passes."""
        return [block.name for block in self.blocks]

    @cached_property
    def trained(self) -> tuple[Parameter, ...]:
        """The trained parameters with their shapes. Raises InputError for a graph that does not say them."""
        return parameters_of(self.traced.graph)

    def every_saving(self, way: str) -> Saving:
        """Return what every block saves under one kind of checkpointing; with ``:cpu`` behind, all but the last on the host.

        Raises InputError as :meth:`every_block` does.
        """
        checkpointing, is_on_host = split_way(way)
        if is_on_host:
            self.every_block("full")  # raises
        on_host = frozenset(block.name for block in self.blocks[:-1] if is_on_host)
        return Saving(saved_ops=self.every_block(cast(Checkpointing, checkpointing)), on_host=on_host)

    def every_block(self, checkpointing: Checkpointing) -> dict[str, tuple[int, ...]]:
        """Return the saved products of every block under one kind of checkpointing; {}: nothing is checkpointed.

        ``full`` saves none of a block's products, ``selective`` all that may be kept.
        Raises InputError for a model without a list of blocks.
        """
        if checkpointing == "none":
            return {}
        if not self.blocks:
            problem = f"{self.traced.graph.name} has no list of blocks that run one after another"
            raise InputError("--checkpointing", problem, "leave it out")
        keeps_products = checkpointing == "selective"
        return {block.name: block.keepable if keeps_products else () for block in self.blocks}

    def seconds(self, timed: Graph) -> Floats:
        """Return (nodes,) the seconds of each place: the durations of ``timed``, a graph of this step, at its ops' nodes."""
        seconds = np.zeros(self.nodes)
        places = self.op_places
        np.add.at(seconds, places[places >= 0], timed.duration_s[places >= 0])
        return seconds

    def recompute_s(self, recomputation: Recomputation, seconds: Floats) -> Floats:
        """Return (blocks,) the seconds in which each block is computed again, 0 for a block that is not.

        ``seconds`` (nodes,): of the places, see :meth:`seconds`.
        """
        recomputed_s = np.zeros(len(self.blocks))
        for index in np.flatnonzero(recomputation.length).tolist():
            recomputed_s[index] = seconds[self._recomputed_of(recomputation, index)].sum()
        return recomputed_s

    def copies(self, recomputation: Recomputation, seconds: Floats, size: Floats, bytes_per_s: float) -> Copies:
        """Return when the blocks' copies to and from the host may run, beside a program whose places take ``seconds`` (nodes,).

        ``size`` (s,): the bytes of all storages. ``bytes_per_s``: of the device's link to its host, one way.
        """
        clock_s, recompute_s = np.cumsum(seconds), self.recompute_s(recomputation, seconds)
        later_s = np.cumsum(recompute_s[::-1])[::-1] - recompute_s  # of the blocks whose backward passes come before
        copied_bytes = np.array([size[storages].sum() for storages in recomputation.copied])
        return Copies(
            ends=clock_s[[block.last for block in self.blocks]],
            begins=clock_s[[block.begins - 1 for block in self.blocks]] + later_s,
            copy_s=copied_bytes / bytes_per_s,
            window=recomputation.saving.window,
        )

    def lengthened(
        self, saving: SavedOps | Saving, timed: Graph, size: Floats | None = None, bytes_per_s: float = inf
    ) -> Graph:
        """Return ``timed``, a graph of this step, with the time of each block's recomputation added to one of its ops.

        That op is the first of the block's backward pass, before which the block is computed again. Waits for copies to
        and from the host are added to the ops that they hold up; the arguments beyond ``timed`` are those of :meth:`copies`.
        """
        if not self.blocks:
            return timed
        durations, places = timed.duration_s.copy(), self.op_places
        recomputation, seconds = Recomputation(self, saving), self.seconds(timed)
        after_s, before_s = self.copies(
            recomputation, seconds, self.sizes() if size is None else size, bytes_per_s
        ).waits()
        backward_s = self.recompute_s(recomputation, seconds) + before_s
        for block, forward_wait_s, added_s in zip(self.blocks, after_s.tolist(), backward_s.tolist(), strict=True):
            for place, each_s in ((block.last + 1, forward_wait_s), (block.begins, added_s)):
                durations[int(np.where(places >= place, places, self.nodes).argmin())] += each_s
        return timed.with_durations(durations, timed.estimate)

    def clock(self, recomputation: Recomputation, timed: Graph, copies: Copies | None = None) -> Floats:
        """Return (places,) when each place of the program with recomputation ends, in seconds from the step's start.

        The places run one after another, each as long as the durations of ``timed``, a graph of this step, say, and wait for
        ``copies``.
        """
        seconds = self.seconds(timed)
        place_s = np.zeros(self.nodes + recomputation.extra)
        place_s[recomputation.moved(np.arange(self.nodes))] = seconds
        for block_index in range(len(self.blocks)):
            places = self._recomputed_of(recomputation, block_index)
            recomputed_places = recomputation.start[block_index] + places - recomputation.first[block_index]
            place_s[recomputed_places] = seconds[places]
        if copies is not None:
            after_s, before_s = copies.waits()
            np.add.at(place_s, np.array([block.last + 1 for block in self.blocks]), after_s)
            np.add.at(place_s, recomputation.start, before_s)
        clock: Floats = np.cumsum(place_s)
        return clock

    def _recomputed_of(self, recomputation: Recomputation, index: int) -> Ints:
        """Return the places of the forward pass of the block with that index which are computed again.

        These are all up to the recomputation's end but the saved products.
        """
        block, length = self.blocks[index], int(recomputation.length[index])
        is_recomputed = np.ones(length, dtype=bool)
        saved_places = np.array(block.products, dtype=np.int64)[recomputation.saved[index, : len(block.products)]]
        is_recomputed[saved_places[saved_places < block.first + length] - block.first] = False
        places: Ints = block.first + np.flatnonzero(is_recomputed)
        return places

    @cached_property
    def block_numbers(self) -> dict[str, int]:
        """Return the index of every block by its name."""
        return {block.name: index for index, block in enumerate(self.blocks)}

    @cached_property
    def block_places(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Return four times (blocks,): the first and last places of the forward passes, then of the backward passes."""
        places = [(block.first, block.last, block.begins, block.ends) for block in self.blocks]
        first, last, begins, ends = np.array(places, dtype=np.int64).reshape(-1, 4).T
        return first, last, begins, ends

    @cached_property
    def owned(self) -> list[Ints]:
        """Return by block the indices of the activations that its forward pass alone uses."""
        activations = np.flatnonzero((self.role == ACTIVATION) & (self.owner >= 0))
        order = np.argsort(self.owner[activations], kind="stable")
        counts = np.bincount(self.owner[activations], minlength=len(self.blocks))
        return np.split(activations[order], np.cumsum(counts)[:-1])

    @cached_property
    def inputs(self) -> list[Ints]:
        """Return by block the indices of the activations made before it that its forward and backward passes alone read.

        No other backward pass needs them: they are gone before the one of the block before begins.
        """
        storages, readers = self.read[:, 0], self.read[:, 1]
        is_read_once = np.bincount(storages, minlength=1)[storages] == 1
        is_read_once &= self.role[storages] == ACTIVATION
        alone: list[Ints] = []
        for index, block in enumerate(self.blocks):
            own = storages[is_read_once & (readers == index)]
            # Gone before the backward pass of the block before begins, and not read before this block's own.
            until = self.blocks[index - 1].begins - 1 if index else block.ends
            is_needed_before = (self.free[own] >= self.backward) & (self.free[own] < block.begins)
            is_alone = (self.forward[own] <= block.last) & (self.free[own] <= until) & ~is_needed_before
            alone.append(own[is_alone])
        return alone

    @cached_property
    def op_places(self) -> Ints:
        """Return (ops,) the place of every op of the step's graph; -1: the op is no node of the program."""
        place_of = {node: position for position, node in enumerate(self.traced.program.nodes)}
        nodes = (self.traced.nodes.get(name) for name in self.traced.graph.names)
        return np.array([-1 if node is None else place_of[node] for node in nodes], dtype=np.int64)

    def activations(
        self, recomputation: Recomputation, size: Floats, read: Ints | None = None, among: Ints | None = None
    ) -> Floats:
        """Return (places,) the bytes of activations at every place of the program with ``recomputation``.

        The arguments are those of :meth:`hold_activations`.
        """
        held = Held(self.nodes + recomputation.extra)
        self.hold_activations(held, recomputation, size, read, among)
        return held.peak().curve

    @cached_property
    def all_activations(self) -> Ints:
        """Return the indices of all activations."""
        return np.flatnonzero(self.role == ACTIVATION)

    def hold_activations(
        self,
        held: Held,
        recomputation: Recomputation,
        size: Floats,
        read: Ints | None = None,
        among: Ints | None = None,
    ) -> None:
        """Add the step's inputs and activations to ``held``, over the places of the program with ``recomputation``.

        Activations outside checkpointed blocks live as traced, saved ones until their recomputation reads them. Dropped ones
        (those that are computed again) are held twice: until their last use in the forward pass, and once they are made again.
        So are those that are on the host in between: until their copy is done, and once there is room for what comes back.

        Args:
            held: what they are added to, as the part "activations".
            size: (s,) the bytes of all storages.
            read: the rows of ``self.read`` whose storages are held until a recomputation has read them; None: all rows.
            among: the indices of the activations to add, those of checkpointed blocks always with them; None: all of them,
                and the step's inputs.
        """
        if among is None:
            held.add("activations", 0, held.places, size[self.role == GIVEN])
        dropped, kept = recomputation.dropped, recomputation.kept
        # First the storages that stay from their making on; (s,) throughout, or by index of a storage.
        is_not_dropped = np.zeros(len(size), dtype=bool)
        is_not_dropped[self.all_activations if among is None else among] = True
        is_not_dropped[dropped] = False
        stays = np.flatnonzero(is_not_dropped)
        # (s,) the place of the program with recomputation from which on a storage is free.
        freed = recomputation.moved(self.free) + 1
        input_rows = self.read if read is None else read
        for storage, block_index, last_read in input_rows[is_not_dropped[input_rows[:, 0]]]:
            if recomputation.length[block_index]:  # the input is held until the recomputation has read it
                offset = min(last_read - self.blocks[block_index].first, recomputation.length[block_index] - 1)
                freed[storage] = max(freed[storage], recomputation.start[block_index] + offset + 1)
        owner = self.owner[kept]
        offsets = self.alloc[kept] - recomputation.first[owner]
        # A saved product is held until the recomputation reads it. One that the recomputation does not reach is held until
        # the end of the block's backward pass.
        backward_ends = recomputation.moved(self.block_places[3])[owner]
        is_reached = offsets < recomputation.length[owner]
        last_place = np.where(is_reached, recomputation.start[owner] + offsets, backward_ends)
        freed[kept] = np.maximum(freed[kept], last_place + 1)
        # Those on the host: until they are there, and from the place on at which there is room for what comes back.
        gone, (lent, out, back) = freed.copy(), recomputation.away
        gone[lent] = out
        held.add("activations", recomputation.moved(self.alloc[stays]), gone[stays], size[stays])
        held.add("activations", back, freed[lent], size[lent])
        # The dropped ones: in the forward pass, and again from their recomputation on.
        held.add("activations", self.alloc[dropped], self.forward[dropped] + 1, size[dropped])
        owner = self.owner[dropped]
        first, length, start = recomputation.first[owner], recomputation.length[owner], recomputation.start[owner]
        offsets = self.alloc[dropped] - first
        last_use = start + np.minimum(self.forward[dropped] - first, length - 1) + 1
        # What the backward pass reads stays until then; what only the recomputation reads, until its last use in it.
        freed_again = np.where(self.free[dropped] >= self.backward, freed[dropped], last_use)
        is_recomputed = offsets < length
        recomputed_bytes = size[dropped][is_recomputed]
        held.add("activations", (start + offsets)[is_recomputed], freed_again[is_recomputed], recomputed_bytes)

    def _hold_whole(
        self, held: Held, recomputation: Recomputation, size: Floats, sharding: Sharding, optimizer: str
    ) -> None:
        """Add what a process holds that keeps all parameters and gradients: under none, ddp and zero1.

        The arguments are those of :meth:`held`. ``zero1`` alone splits the optimizer's state over the ``sharding.shard``
        processes. DDP copies all gradients into buckets, to exchange many at a time; they stay for the whole step.
        """
        is_parameter, is_gradient = self.role == PARAMETER, self.role == GRADIENT
        bucket_bytes = float(self.trained_bytes.sum())
        held.add("parameters", 0, held.places, size[is_parameter])
        made = recomputation.moved(self.alloc)[is_gradient]
        # Of a later pass a gradient is added to the sum as soon as it is made.
        held.add("gradients", made, made + 1 if sharding.sums else held.places, size[is_gradient])
        if sharding.sums:
            held.add("gradients", 0, held.places, size[is_gradient])
        update = OPTIMIZERS[optimizer]
        if update.each is None:
            held.add("updating", held.places - 1, held.places, np.tile(size[is_gradient], update.temporaries))
        else:
            held.add("updating", held.places - 1, held.places, np.array(temporaries(self.trained, optimizer)))
        counters = np.full(int(is_gradient.sum()), float(update.counters))
        states = np.concatenate([self._states(size, optimizer), counters])
        held.add("optimizer", 0, held.places, states / sharding.shard)
        if sharding.kind != "none":
            held.add("buckets", 0, held.places, bucket_bytes)

    def _states(self, size: Floats, optimizer: str) -> Floats:
        """Return the bytes of each state tensor that the optimizer keeps for each parameter.

        ``size`` (s,): the bytes of the storages, gradients as wide as their parameters are kept.
        """
        update, gradients = OPTIMIZERS[optimizer], np.flatnonzero(self.role == GRADIENT)
        if update.each is not None:  # its states follow from the parameters' shapes
            shares = {parameter.name: state_shares(parameter, optimizer) for parameter in self.trained}
            states = ([size[g] * share for share in shares.get(self.gradient_of[g], ())] for g in gradients.tolist())
            return np.array([state for each in states for state in each], dtype=np.float64)
        kept_bytes = size[gradients]
        share_of_all = update.state_share(precision_of(self.traced.graph.meta.get("precision")).width)
        return np.tile(kept_bytes * share_of_all / max(update.states, 1), update.states)

    def _hold_shards(
        self, held: Held, recomputation: Recomputation, size: Floats, sharding: Sharding, optimizer: str
    ) -> None:
        """Add parameters, gradients and optimizer state of a process that gathers blocks as ``fully_shard`` does.

        The arguments are those of :meth:`held`. A block is gathered into a buffer ("gathering") and copied out of it
        ("gathered"); its gradients go through the input of a reduce-scatter ("reducing"). What lies outside all blocks stays
        gathered for the whole step.
        """
        is_parameter, is_gradient, is_root = self.role == PARAMETER, self.role == GRADIENT, self.owner < 0
        end, shard = held.places, sharding.shard
        if not sharding.on_host:
            held.add("parameters", 0, end, size[is_parameter] * self.kept_share / shard)
            held.add("optimizer", 0, end, self._states(size * self.kept_share, optimizer) / shard)
        held.add("gathered", 0, end, size[is_parameter & is_root])
        made = recomputation.moved(self.alloc)[is_gradient & is_root]
        held.add("gradients", made, end, size[is_gradient & is_root])
        self._hold_gathered_blocks(held, recomputation, size, sharding)
        self._hold_reduced_blocks(held, recomputation, size, sharding)
        if sharding.on_host:  # the host sums and updates
            return
        own_bytes = float(self.trained_bytes.sum()) / shard
        if sharding.sums:
            held.add("gradients", 0, end, own_bytes)
        update = OPTIMIZERS[optimizer]
        held.add("updating", end - 1, end, update.temporaries * own_bytes)
        if update.each is not None:  # a matrix that Muon updates is gathered whole
            parts = np.array(temporaries(self.trained, optimizer))
            held.add("updating", end - 1, end, parts if optimizer == "muon" else parts / shard)

    def _hold_gathered_blocks(self, held: Held, recomputation: Recomputation, size: Floats, sharding: Sharding) -> None:
        """Add the blocks' gathered parameters, and the buffers in which they arrive; arguments as for :meth:`_hold_shards`."""
        is_of_block = (self.role == PARAMETER) & (self.owner >= 0)
        # All by block, one entry for each. Ends are exclusive.
        block_bytes: Floats = np.bincount(self.owner[is_of_block], size[is_of_block], len(self.blocks)).astype(float)
        first, last, _, ends = self.block_places
        backward_ends, starts = recomputation.moved(ends), recomputation.start
        # The block before is next in the backward pass.
        next_bytes = np.append(0.0, block_bytes[:-1])
        # A part that comes from the host is copied whole before it is gathered.
        copied_share = self.kept_share / sharding.shard if sharding.on_host else 0.0
        # What was gathered is copied out, and kept until the next block has been gathered.
        copied_until = np.append(first[1:], self.backward)
        held.add("gathering", first - 1, copied_until, (1.0 + copied_share) * block_bytes)
        held.add("gathered", first, last + 1 if sharding.reshards else backward_ends + 1, block_bytes)
        if sharding.reshards:
            held.add("gathered", starts, backward_ends + 1, block_bytes)
            if sharding.forward_shard:  # a larger part stays between the two passes
                held.add("gathered", last + 1, starts, block_bytes / sharding.forward_shard)
            held.add("gathering", starts, backward_ends + 1, (1.0 + copied_share) * next_bytes)

    def _hold_reduced_blocks(self, held: Held, recomputation: Recomputation, size: Floats, sharding: Sharding) -> None:
        """Add the blocks' gradients, whole and reduced, and the inputs of reductions; arguments as for :meth:`_hold_shards`.

        After a block's backward pass, gradients are copied to the reduction's input at its end + 1, and given up with what was
        reduced there at end + 2. A block gives up its parameters before it reduces, and the input of the reduction before it.
        """
        is_own = (self.role == GRADIENT) & (self.owner >= 0)
        backward_ends, end = recomputation.moved(self.block_places[3]), held.places
        reduced_bytes = self.trained_bytes[:-1]  # by block, without what lies outside all
        made = recomputation.moved(self.alloc)[is_own]
        held.add("gradients", made, backward_ends[self.owner[is_own]] + 2, size[is_own])
        reduced_until = np.append(end - 1, backward_ends[:-1] + 1)
        held.add("reducing", backward_ends + 1, reduced_until, reduced_bytes)
        is_sent_on = sharding.sums or sharding.on_host  # to the sum, or to the host
        summed_at = backward_ends + 2 if is_sent_on else end
        held.add("gradients", backward_ends + 1, summed_at, reduced_bytes / sharding.shard)

    def host_bytes(self, sharding: Sharding, optimizer: str, size: Floats) -> float:
        """Return the bytes of a host's memory that its processes keep parameters, gradients and optimizer state in.

        0 where they keep them on their devices. ``size`` (s,): the bytes of the storages, see :meth:`sizes`.
        """
        kept = size * self.kept_share
        states = self._states(kept, optimizer).sum() if sharding.on_host else 0.0
        own_bytes = float(kept[self.role == PARAMETER].sum() + self.trained_bytes.sum() + states) / sharding.shard
        return sharding.on_host * own_bytes


class Recomputation:
    """The program of a step with the forward passes of checkpointed blocks repeated before their backward passes.

    A place is the index of a node in the traced program, or in the longer one with recomputation (:meth:`moved`). ``slots``
    (blocks,): places to insert for each block, at least as many as its recomputation has; None: just as many. A place at which
    nothing runs changes no peak, so programs of different choices can have one length.
    """

    def __init__(self, lifetimes: TensorLifetimes, saving: SavedOps | Saving, slots: Ints | None = None) -> None:
        """Find which storages are recomputed and which are saved, and how many places each recomputation takes.

        ``saving``: what blocks save, or by checkpointed block the numbers of the products that it saves on the device.
        """
        blocks = lifetimes.blocks
        self.saving = Saving.of(saving)
        saved_ops = self.saving.saved_ops
        self.first, self._last, self._begins, _ = lifetimes.block_places
        """(blocks,) the first place of the forward pass."""
        most_products = max((len(block.products) for block in blocks), default=0)
        self.saved = np.zeros((len(blocks), 1 + most_products), dtype=bool)
        """(blocks, products + 1) which products are saved; the last column is that of no product."""
        owned = []
        for name, products in saved_ops.items():
            block_index = lifetimes.block_numbers[name]
            self.saved[block_index, list(products)] = True
            owned.append(lifetimes.owned[block_index])
        activations = np.sort(np.concatenate(owned)) if owned else np.zeros(0, dtype=np.int64)
        is_saved = self.saved[lifetimes.owner[activations], lifetimes.product[activations]]
        self.dropped, self.kept = activations[~is_saved], activations[is_saved]
        """Indices of the checkpointed blocks' storages that are recomputed, and that are saved."""
        needed = self.dropped[lifetimes.free[self.dropped] >= lifetimes.backward]
        owner = lifetimes.owner[needed]
        self.length = np.zeros(len(blocks), dtype=np.int64)
        """(blocks,) places of the recomputation, which ends with the last tensor that the backward pass needs; 0: none."""
        np.maximum.at(self.length, owner, lifetimes.alloc[needed] - self.first[owner] + 1)
        self.slots = self.length if slots is None else slots
        self._nodes = lifetimes.nodes
        self.copied = [np.zeros(0, dtype=np.int64) for _ in blocks]
        """By block, the indices of the storages that it saves on the host."""
        for index, block in enumerate(blocks):
            if block.name in self.saving.on_host:
                own = lifetimes.owned[index]
                needed_backward = own[lifetimes.free[own] >= lifetimes.backward]
                # A block that is computed again needs its input only.
                self.copied[index] = lifetimes.inputs[index] if block.name in saved_ops else needed_backward

    @cached_property
    def _shift(self) -> Ints:
        """(nodes + 1,) how many places are inserted up to and before each place of the traced program."""
        inserted = np.zeros(self._nodes + 1, dtype=np.int64)
        np.add.at(inserted, self._begins, self.slots)
        return np.cumsum(inserted)

    @cached_property
    def start(self) -> Ints:
        """(blocks,) the first place of the recomputation."""
        start: Ints = self._begins + self._shift[self._begins] - self.slots
        return start

    @property
    def extra(self) -> int:
        """Places that all recomputations together add to the program."""
        return int(self._shift[-1])

    @cached_property
    def away(self) -> tuple[Ints, Ints, Ints]:
        """(c,) the storages that go to the host; the places from which on each is there, and is on the device again."""
        counts = np.array([len(storages) for storages in self.copied], dtype=np.int64)
        if not counts.any():
            return (np.zeros(0, dtype=np.int64),) * 3
        until = np.minimum(np.arange(len(counts)) + self.saving.window, len(counts) - 1)
        return (
            np.concatenate(self.copied),
            np.repeat(self._last[until] + 1, counts),
            np.repeat(self.start[until], counts),
        )

    def moved(self, place: Ints) -> Ints:
        """Return the indices that places of the traced program have in the program with recomputation."""
        moved: Ints = place + self._shift[place]
        return moved
