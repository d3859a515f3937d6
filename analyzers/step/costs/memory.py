"""What one process of a training step holds, and when: sharded or not, with or without activation checkpointing.

A traced step says when every tensor is made and when it is used for the last time. Sharding adds what its framework
gathers and reduces beside them; checkpointing drops what a block saved and makes it again before its backward pass. Both
are known places in the program, so one sum over them is the memory at every place. :mod:`.traced_lifetimes` reads a step;
what to compute again under a budget is :mod:`.checkpointing`'s question.

A place is the index of a node of the traced program. A storage is the memory of a tensor and its views. A product is a matrix
product, convolution or attention, whose result a checkpointed block may keep.

Sources: FSDP2 as ``torch.distributed.fsdp.fully_shard`` does it (the root stays gathered, one block is gathered ahead, the
input of a reduce-scatter is held until the next one); non-reentrant ``torch.utils.checkpoint`` (recomputation ends with the
last tensor that is needed), selective: the outputs of chosen products are kept until the block is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    """The number of places of the traced program."""
    backward: int
    """The first place of the backward pass."""
    elements: tuple[int, ...]
    """(s,) the number of elements at the traced batch size."""
    width: Floats
    """(s,) bytes of one element; 0 for a tensor that is not in memory."""
    alloc: Ints
    """(s,) the place that makes it; 0 for inputs and parameters."""
    forward: Ints
    """(s,) the place of its last use before the backward pass."""
    free: Ints
    """(s,) the place of its last use."""
    role: Ints
    """(s,) PARAMETER, GIVEN, GRADIENT or ACTIVATION."""
    owner: Ints
    """(s,) the index of the block of a parameter or gradient; of an activation, that of the only block whose forward pass uses
    it. -1: none."""
    product: Ints
    """(s,) the number, within its block, of the product that makes it; -1: no product does."""
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
            # Layers repeat, so each distinct number of elements is converted only once.
            distinct_elements, index_of_storage = np.unique(
                np.array(self.elements, dtype=np.int64), return_inverse=True
            )
            scaled_elements = np.array([float(scale.size(elements)) for elements in distinct_elements.tolist()])
            self._sizes[batch_size] = scaled_elements[index_of_storage] * self.width
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
        outputs. 0.0 for a step without such convolutions. ``batch_size`` None: the traced one.
        """
        scale = self._scale(batch_size)
        most_bytes = 0.0
        for node in self.traced.program.nodes:
            if getattr(node.target, "overloadpacket", None) is not torch.ops.aten.convolution:
                continue
            images, weight = value_of(node.args[0]), value_of(node.args[1])
            stride, groups = node.args[3], node.args[8]
            filter_sides = weight.shape[2:]
            is_plain = images.dim() == 4 and math.prod(stride) == groups == 1
            if not is_plain or filter_sides.numel() <= 1 or max(filter_sides) >= _TILE:
                continue
            output_channels, input_channels = weight.shape[:2]
            # Neighbouring tiles overlap by the filter's side less one.
            tiles_of_image = math.prod(
                math.ceil(size / (_TILE - side + 1)) for size, side in zip(images.shape[2:], filter_sides, strict=True)
            )
            filter_tiles = input_channels * output_channels
            image_tiles = scale.size(images.shape[0]) * tiles_of_image * (input_channels + output_channels)
            tile_bytes = _TILE * (_TILE // 2 + 1) * _COMPLEX_BYTES
            most_bytes = max(most_bytes, (filter_tiles + image_tiles) * tile_bytes)
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

        Args:
            recomputation: which blocks are computed again, in a program that is longer by their recomputations.
            sharding: how the replicas share parameters, gradients and optimizer states.
            optimizer: a name of ``OPTIMIZERS``.
            size: (s,) the bytes of the storages, see :meth:`sizes`.
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
        """Return what every block saves under one kind of checkpointing.

        ``way``: none, selective or full; with ``:cpu`` behind, all blocks but the last save on the host. Raises InputError for
        a model without a list of blocks, except for none.
        """
        checkpointing, is_on_host = split_way(way)
        on_host: frozenset[str] = frozenset()
        if is_on_host:
            self.every_block("full")  # raises for a model without blocks, which "none:cpu" would not do below
            on_host = frozenset(block.name for block in self.blocks[:-1])
        return Saving(saved_ops=self.every_block(cast(Checkpointing, checkpointing)), on_host=on_host)

    def every_block(self, checkpointing: Checkpointing) -> dict[str, tuple[int, ...]]:
        """Return, by name of every block, the numbers of the products that it saves; {}: nothing is checkpointed.

        ``checkpointing``: ``full`` saves none of a block's products, ``selective`` all that may be kept. Raises InputError for
        a model without a list of blocks, except for ``none``.
        """
        if checkpointing == "none":
            return {}
        if not self.blocks:
            problem = f"{self.traced.graph.name} has no list of blocks that run one after another"
            raise InputError("--checkpointing", problem, "leave it out")
        keeps_products = checkpointing == "selective"
        return {block.name: block.keepable if keeps_products else () for block in self.blocks}

    def seconds(self, timed: Graph) -> Floats:
        """Return (nodes,) the seconds that each place of the program takes; 0 for nodes that are no ops.

        ``timed``: the graph of this step with times, whose durations they are.
        """
        seconds = np.zeros(self.nodes)
        places = self.op_places
        np.add.at(seconds, places[places >= 0], timed.duration_s[places >= 0])
        return seconds

    def recomputed(self, recomputation: Recomputation, of_place: Floats) -> Floats:
        """Return (blocks,) the sums of ``of_place`` over what is computed again of each block: seconds, or numbers of kernels.

        ``of_place`` (nodes,): seconds or kernels of each place, see :meth:`seconds`.
        """
        sums = np.zeros(len(self.blocks))
        for index in np.flatnonzero(recomputation.length).tolist():
            sums[index] = of_place[self._recomputed_of(recomputation, index)].sum()
        return sums

    def copies(self, recomputation: Recomputation, seconds: Floats, size: Floats, bytes_per_s: float) -> Copies:
        """Return when the blocks' copies to and from the host may run, beside the compute of the step.

        Args:
            recomputation: which blocks are computed again, and which storages go to the host.
            seconds: (nodes,) the time of each place, see :meth:`seconds`.
            size: (s,) the bytes of all storages.
            bytes_per_s: of the device's link to its host, one way.
        """
        clock_s = np.cumsum(seconds)
        recompute_s = self.recomputed(recomputation, seconds)
        # Backward passes run from the last block on, so each comes after the recomputation of all blocks behind it.
        later_s = np.cumsum(recompute_s[::-1])[::-1] - recompute_s
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
        """Return the graph of a step with the time of recomputation, and of waits for the host, added to some of its ops.

        A block is computed again before the first op of its backward pass, which gets that time. Waits for copies to and from
        the host are added to the ops that they hold up. The host issues the ops of recomputation as well: ``issued_s`` of
        ``meta`` grows by their share of all ops.

        Args:
            saving: what blocks save, or by checkpointed block the products that it saves on the device.
            timed: the graph of this step with times.
            size: (s,) the bytes of all storages; None: those of the traced batch size.
            bytes_per_s: of the device's link to its host, one way; infinite: copies take no time.
        """
        if not self.blocks:
            return timed
        durations = timed.duration_s.copy()
        places = self.op_places
        recomputation = Recomputation(self, saving)
        seconds = self.seconds(timed)
        if size is None:
            size = self.sizes()
        after_s, before_s = self.copies(recomputation, seconds, size, bytes_per_s).waits()
        backward_s = self.recomputed(recomputation, seconds) + before_s

        def op_from(place: int) -> int:
            """Return the index of the first op that runs at that place of the program or after it."""
            return int(np.where(places >= place, places, self.nodes).argmin())

        for block, forward_wait_s, added_s in zip(self.blocks, after_s.tolist(), backward_s.tolist(), strict=True):
            durations[op_from(block.last + 1)] += forward_wait_s
            durations[op_from(block.begins)] += added_s
        # Each kernel takes the host as long as any other, and a view next to nothing.
        is_kernel = (timed.duration_s[places >= 0] > 0).astype(np.float64)
        kernels: Floats = np.bincount(places[places >= 0], weights=is_kernel, minlength=self.nodes).astype(np.float64)
        reissued_share = self.recomputed(recomputation, kernels).sum() / max(kernels.sum(), 1.0)
        issued_s = float(timed.meta.get("issued_s") or 0.0) * float(1.0 + reissued_share)
        lengthened = replace(timed, meta={**timed.meta, "issued_s": issued_s})
        return lengthened.with_durations(durations, timed.estimate)

    def clock(self, recomputation: Recomputation, timed: Graph, copies: Copies | None = None) -> Floats:
        """Return (places,) when each place of the program with recomputation ends, in seconds from the step's start.

        The places run one after another. ``timed``: the graph of this step with times, which its recomputation takes once more.
        ``copies``: to and from the host, for which the program waits; None: there are none.
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
        """Return the places of the traced forward pass that are computed again of the block with that index.

        These are all from the block's first place up to the recomputation's end, without the saved products.
        """
        block = self.blocks[index]
        length = int(recomputation.length[index])  # in places
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
    def most_products(self) -> int:
        """Return the most products of any block."""
        return max((len(block.products) for block in self.blocks), default=0)

    @cached_property
    def block_places(self) -> tuple[Ints, Ints, Ints, Ints]:
        """The places of all blocks: ``first``, ``last``, ``begins`` and ``ends`` of :class:`ModelBlock`, each (blocks,)."""
        places = [(block.first, block.last, block.begins, block.ends) for block in self.blocks]
        first, last, begins, ends = np.array(places, dtype=np.int64).reshape(-1, 4).T
        return first, last, begins, ends

    @cached_property
    def owned(self) -> list[Ints]:
        """Return, by index of a block, the indices of the activations that no other block's forward pass uses."""
        activations = np.flatnonzero((self.role == ACTIVATION) & (self.owner >= 0))
        order = np.argsort(self.owner[activations], kind="stable")
        counts = np.bincount(self.owner[activations], minlength=len(self.blocks))
        return np.split(activations[order], np.cumsum(counts)[:-1])

    @cached_property
    def inputs(self) -> list[Ints]:
        """Return, by index of a block, the indices of the activations that are inputs of this block alone.

        They are made before the block, and only its forward and backward passes read them. So a checkpointed block may send
        them to the host: they are not needed before its backward pass, and gone before that of the block before begins.
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

        ``size`` (s,): the bytes of all storages. ``read`` and ``among`` leave out some of the activations; see
        :meth:`hold_activations`.
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
            recomputation: which blocks are computed again, and what they save.
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
        offloaded, gone_at, back_at = recomputation.away
        first_freed = freed.copy()
        first_freed[offloaded] = gone_at
        held.add("activations", recomputation.moved(self.alloc[stays]), first_freed[stays], size[stays])
        held.add("activations", back_at, freed[offloaded], size[offloaded])
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
        """Add to ``held`` what a process holds that keeps all parameters and gradients: under none, ddp and zero1.

        The other arguments are those of :meth:`held`. ``zero1`` alone splits the optimizer's state over the ``sharding.shard``
        processes. DDP copies all gradients into buckets, to exchange many at a time; they stay for the whole step.
        """
        is_parameter, is_gradient = self.role == PARAMETER, self.role == GRADIENT
        bucket_bytes = float(self.trained_bytes.sum())
        held.add("parameters", 0, held.places, size[is_parameter])
        made = recomputation.moved(self.alloc)[is_gradient]
        if sharding.sums:  # in a later pass a gradient is added to the sum, which stays, as soon as it is made
            held.add("gradients", made, made + 1, size[is_gradient])
            held.add("gradients", 0, held.places, size[is_gradient])
        else:
            held.add("gradients", made, held.places, size[is_gradient])
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
        """Return the bytes of every state tensor that the optimizer keeps, several for each trained parameter.

        ``size`` (s,): the bytes of the storages; those of gradients stand for their parameters', as these are kept.
        ``optimizer``: a name of ``OPTIMIZERS``.
        """
        update = OPTIMIZERS[optimizer]
        gradients = np.flatnonzero(self.role == GRADIENT)
        if update.each is not None:  # its states follow from the parameters' shapes
            shares_by_parameter = {parameter.name: state_shares(parameter, optimizer) for parameter in self.trained}
            states = [
                size[gradient] * share
                for gradient in gradients.tolist()
                for share in shares_by_parameter.get(self.gradient_of[gradient], ())
            ]
            return np.array(states, dtype=np.float64)
        kept_bytes = size[gradients]
        share_of_all = update.state_share(precision_of(self.traced.graph.meta.get("precision")).width)
        return np.tile(kept_bytes * share_of_all / max(update.states, 1), update.states)

    def _hold_shards(
        self, held: Held, recomputation: Recomputation, size: Floats, sharding: Sharding, optimizer: str
    ) -> None:
        """Add to ``held`` parameters, gradients and optimizer state of a process that gathers blocks as ``fully_shard`` does.

        The other arguments are those of :meth:`held`. A block is gathered into a buffer (part "gathering") and copied out of it
        ("gathered"); its gradients go through the input of a reduce-scatter ("reducing"). What lies outside all blocks, the
        root, stays gathered for the whole step.
        """
        is_parameter, is_gradient = self.role == PARAMETER, self.role == GRADIENT
        is_root = self.owner < 0
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
        if update.each is not None:
            temporary_bytes = np.array(temporaries(self.trained, optimizer))
            if optimizer != "muon":  # a matrix that Muon updates is gathered whole
                temporary_bytes = temporary_bytes / shard
            held.add("updating", end - 1, end, temporary_bytes)

    def _hold_gathered_blocks(self, held: Held, recomputation: Recomputation, size: Floats, sharding: Sharding) -> None:
        """Add to ``held`` the blocks' gathered parameters, and the buffers in which they arrive; see :meth:`_hold_shards`.

        The next block is gathered while one computes. With ``reshard_after_forward`` a block's parameters are freed after its
        forward pass, and gathered again where its recomputation, or else its backward pass, starts.
        """
        is_of_block = (self.role == PARAMETER) & (self.owner >= 0)
        # All by block, one entry for each. Ends are exclusive.
        block_bytes: Floats = np.bincount(self.owner[is_of_block], size[is_of_block], len(self.blocks)).astype(float)
        first, last, _, ends = self.block_places
        backward_ends = recomputation.moved(ends)
        starts = recomputation.start
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
        """Add to ``held`` the blocks' gradients, whole and reduced, and the inputs of reductions; see :meth:`_hold_shards`.

        At the place after a block's backward pass, its gradients are copied to the input of a reduce-scatter; at the next one
        they are given up. The input stays until the reduction of the block that comes next in the backward pass.
        """
        is_own = (self.role == GRADIENT) & (self.owner >= 0)
        _, _, _, ends = self.block_places
        backward_ends = recomputation.moved(ends)
        end = held.places
        reduced_bytes = self.trained_bytes[:-1]  # by block, without what lies outside all
        made = recomputation.moved(self.alloc)[is_own]
        held.add("gradients", made, backward_ends[self.owner[is_own]] + 2, size[is_own])
        reduced_until = np.append(end - 1, backward_ends[:-1] + 1)
        held.add("reducing", backward_ends + 1, reduced_until, reduced_bytes)
        is_sent_on = sharding.sums or sharding.on_host  # to the sum, or to the host
        summed_at = backward_ends + 2 if is_sent_on else end
        held.add("gradients", backward_ends + 1, summed_at, reduced_bytes / sharding.shard)

    def host_bytes(self, sharding: Sharding, optimizer: str, size: Floats) -> float:
        """Return the bytes of one node's host memory in which its processes keep parameters, gradients and optimizer state.

        0.0 where they keep them on their devices. ``size`` (s,): the bytes of the storages, see :meth:`sizes`.
        """
        if not sharding.on_host:
            return 0.0
        kept = size * self.kept_share
        parameter_bytes = kept[self.role == PARAMETER].sum()
        state_bytes = self._states(kept, optimizer).sum()
        own_bytes = float(parameter_bytes + self.trained_bytes.sum() + state_bytes) / sharding.shard
        return sharding.on_host * own_bytes


class Recomputation:
    """The program of a step with the forward passes of checkpointed blocks repeated before their backward passes.

    A place is the index of a node in the traced program, or in the longer one with recomputation (:meth:`moved`).
    """

    def __init__(self, lifetimes: TensorLifetimes, saving: SavedOps | Saving, slots: Ints | None = None) -> None:
        """Find which storages are recomputed and which are saved, and how many places each recomputation takes.

        Args:
            lifetimes: the step's storages and blocks.
            saving: what blocks save, or by checkpointed block the numbers of the products that it saves on the device.
            slots: (blocks,) how many places to insert for each block, at least as many as its recomputation has; None: just
                as many. A place at which nothing runs changes no peak, so that programs of different choices can have one
                length.
        """
        blocks = lifetimes.blocks
        self.saving = Saving.of(saving)
        saved_ops = self.saving.saved_ops
        self.first, self._last, self._begins, _ = lifetimes.block_places
        """(blocks,) the first and last places of the forward passes, and the first of the backward passes, as traced."""
        self.saved = np.zeros((len(blocks), 1 + lifetimes.most_products), dtype=bool)
        """(blocks, products + 1) which products are saved; the last column is that of no product."""
        owned_by_block = []
        for name, products in saved_ops.items():
            block_index = lifetimes.block_numbers[name]
            self.saved[block_index, list(products)] = True
            owned_by_block.append(lifetimes.owned[block_index])
        owned = np.sort(np.concatenate(owned_by_block)) if owned_by_block else np.zeros(0, dtype=np.int64)
        # The product -1 of a storage that no product makes finds the last column, which is False.
        is_saved = self.saved[lifetimes.owner[owned], lifetimes.product[owned]]
        self.dropped, self.kept = owned[~is_saved], owned[is_saved]
        """Indices of the checkpointed blocks' storages that are recomputed, and that are saved."""
        needed = self.dropped[lifetimes.free[self.dropped] >= lifetimes.backward]
        owner = lifetimes.owner[needed]
        self.length = np.zeros(len(blocks), dtype=np.int64)
        """(blocks,) places of the recomputation, which ends with the last tensor that the backward pass needs; 0: none."""
        np.maximum.at(self.length, owner, lifetimes.alloc[needed] - self.first[owner] + 1)
        self.slots = self.length if slots is None else slots
        self._nodes = lifetimes.nodes
        self.copied = [np.zeros(0, dtype=np.int64)] * len(blocks)
        """By block, the indices of the storages that it saves on the host."""
        for name in self.saving.on_host:
            index = lifetimes.block_numbers[name]
            own = lifetimes.owned[index]
            needed_backward = own[lifetimes.free[own] >= lifetimes.backward]
            # A block that is computed again needs its input only.
            self.copied[index] = lifetimes.inputs[index] if name in saved_ops else needed_backward

    @cached_property
    def _shift(self) -> Ints:
        """(nodes + 1,) how many places are inserted before each place of the traced program; the last entry has them all."""
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
        """What is on the host for a time, as three arrays (c,).

        They are: the indices of the storages that go there; the place from which on each is there and its memory on the device
        is free; the place from which on it has memory on the device again.
        """
        if not self.saving.on_host:
            return (np.zeros(0, dtype=np.int64),) * 3
        counts = np.array([len(storages) for storages in self.copied], dtype=np.int64)
        # By block, the index of the block ``window`` later, whose passes bound the copies.
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
