"""Steps of replicas that are each spread over several GPUs: by tensors inside a block, and by blocks in a pipeline.

GPUs = replicas x pipeline x tensor. A rank is a GPU of a tensor group, whose GPUs share the matrix products of a block; a stage
is a GPU of a pipeline, with the blocks that it runs. As Megatron-LM places them, the ranks of one tensor group are neighbours,
then come the replicas, and the stages of a pipeline lie farthest apart. A rank's work is :mod:`.tensor_parallel`'s; a stage has
as many blocks as any other, the first with the embedding, the last with the head and the loss. A step's passes are the
micro-batches of the schedule 1F1B (Narayanan et al., arXiv:2104.04473), or of its interleaved form where a GPU has several
stages; it is simulated pass by pass, so that the idle time of uneven stages (the bubble) is what it is. Where the replicas hold
whole parameters, memory and updates are Megatron-LM's: ``bf16`` and ``fp16`` compute with parameters of the half type, sum
gradients in one float32 buffer, which is reduced after the last pass, and update float32 copies; shards are FSDP2's. Start at
:func:`parallel_curve`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from ddltool.analyzers.step.communication.fsdp import Unit, simulate_fsdp
from ddltool.analyzers.step.communication.nccl import Communicator, Fabric
from ddltool.analyzers.step.communication.program import Program
from ddltool.analyzers.step.costs.compiling import compiled
from ddltool.analyzers.step.costs.expert_parallel import all_to_all_s, share_experts
from ddltool.analyzers.step.costs.held import Held
from ddltool.analyzers.step.costs.memory import ACTIVATION, GRADIENT, PARAMETER, Recomputation, TensorLifetimes
from ddltool.analyzers.step.costs.model import CostModel, Exchanges, estimate
from ddltool.analyzers.step.costs.optimizers import state_share
from ddltool.analyzers.step.costs.saving import ON_HOST, SavedOps, Saving
from ddltool.analyzers.step.costs.setting import ParallelDegrees, Placement, Setting
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.tensor_parallel import Rank, rank_of
from ddltool.analyzers.step.costs.work import StepSeconds, WorkCurve, gathered_matrices_s, own_update_s
from ddltool.analyzers.step.costs.wrapping import copy_rate
from ddltool.analyzers.step.recording.torch_costs import tensors_of, value_of
from ddltool.analyzers.step.tracing.torch_adapter import TracedStep
from ddltool.arrays import Floats, Ints
from ddltool.device import Network
from ddltool.errors import InputError
from ddltool.graph import SEND, Graph
from ddltool.precision import precision_of

# Parameters that are kept in more than this many times the bytes in which ops read them have a float32 copy to update.
_COPIED = 1.5
# How often an update with copies passes over the bytes of the float32 parameters beside the optimizer's own kernels: once to
# read the gradients for their norm, and half to write parameters of the half type. The buffer of gradients is filled with zeros
# once, and as a whole even if the update is shared.
_NORM_AND_CAST, _ZEROED = 1.5, 1.0


def parallel_curve(curve: WorkCurve, setting: Setting) -> WorkCurve:
    """Return the work of one GPU under a setting's layout of several GPUs per replica; ``curve`` itself for a layout of one.

    ``curve``: the work of the step on one GPU. Raises InputError for a model that so many ranks or stages cannot share, and for
    settings that are not modelled beside such a layout: shards or saved tensors on the host, a budget of memory, and degrees
    that do not go together.
    """
    layout = setting.layout
    if layout == ParallelDegrees():
        return curve
    if layout.sequence and layout.tensor == 1:
        raise InputError(
            "--sequence-parallel", "shares tokens within a tensor group of 1", "give --tensor-parallel, too"
        )
    if layout.overlapped and not layout.sequence:
        problem = "divides reduce-scatters and all-gathers, and without sequence parallelism there are only all-reduces"
        raise InputError("--async-tensor-parallel", problem, "give --sequence-parallel, too")
    if layout.virtual > 1 and (layout.pipeline == 1 or setting.accumulation % layout.pipeline):
        problem = f"{layout.virtual} of {layout.pipeline} GPUs in {setting.accumulation} passes"
        remedy = "give --pipeline-parallel above 1, and --accumulation in multiples of it"
        raise InputError("--virtual-stages", problem, remedy)
    for option, text in {"--sharding": setting.sharding, "--checkpointing": setting.checkpointing}.items():
        if isinstance(text, str) and text.endswith(ON_HOST):
            problem = f"{text!r} beside tensor or pipeline parallelism is not modelled"
            raise InputError(option, problem, f"give {text.removesuffix(ON_HOST)}")
    if layout.tensor > 1 and curve.traced.graph.meta.get("load_in_4bit"):
        problem = "weights of 4 bits are not divided among GPUs"
        raise InputError("--load-in-4bit", problem, "give --tensor-parallel 1")
    if layout.expert > 1 and layout.tensor > 1:
        problem = "experts that several replicas share are not modelled beside tensor parallelism"
        raise InputError("--expert-parallel", problem, "give --tensor-parallel 1")
    if setting.budget_bytes is not None:
        raise InputError("--checkpointing", "no budget is kept stage by stage", "give none, selective or full")
    parallel = ParallelCurve.of(curve, layout, setting.accumulation)
    parallel.lifetimes(parallel.traced.graph.batch_size or 1)  # raises if the stages do not divide the blocks
    return parallel


class _Ranks:
    """Makes the step of one rank of a tensor group from each trace of a whole step, once for each batch size."""

    def __init__(self, curve: WorkCurve, layout: ParallelDegrees) -> None:
        """Keep ``curve``, the work of the whole step, and ``layout``, whose ``tensor`` ranks share it."""
        self.curve, self.layout = curve, layout
        self._known: dict[int | None, Rank] = {}
        """What :meth:`rank` has returned, by traced batch size."""

    def rank(self, traced: TracedStep) -> Rank:
        """Return the step of one rank of a tensor group; the whole step if the group has one rank.

        ``traced``: a trace of the whole step. Tracing the result at another batch size gives a rank's step, too.
        """
        size = traced.graph.batch_size
        if size not in self._known:
            rank = Rank(traced=traced, exchanges=(), divided={})
            if self.layout.expert > 1:
                rank = share_experts(traced, self.layout.expert)
            elif self.layout.tensor > 1:
                blocks = self.curve.lifetimes(size or 1).blocks
                rank = rank_of(traced, blocks, self.layout.tensor, sequence=self.layout.sequence)

            def retrace(other_size: int) -> TracedStep:
                """Return the rank's step, traced at another batch size."""
                return self.rank(traced.traced_at(other_size)).traced

            self._known[size] = replace(rank, traced=replace(rank.traced, retrace=retrace))
        return self._known[size]


@dataclass(frozen=True, kw_only=True, eq=False)
class ParallelCurve(WorkCurve):
    """The work of one GPU of a layout at any batch size; ``traced`` is a rank's step through the blocks of all stages."""

    whole: WorkCurve
    """The work of the whole step on one GPU."""
    ranks: _Ranks
    """Makes a rank's step from a trace of the whole one."""
    layout: ParallelDegrees
    """How the GPUs of one replica share its model."""
    passes: int
    """How many micro-batches of a step go through the pipeline, on which its memory depends."""
    _stages: dict[int, Stages] = field(default_factory=dict)
    """By traced batch size."""

    @classmethod
    def of(cls, curve: WorkCurve, layout: ParallelDegrees, passes: int) -> ParallelCurve:
        """Return the work of one GPU of a layout; a layout of one GPU gives the step as Megatron-LM runs it.

        ``curve``: the work of the whole step; ``passes``: micro-batches of a step.
        """
        curve = curve.under(Sharding(kind="fsdp"))  # as Megatron-LM does, it computes in the half type without casts
        ranks = _Ranks(curve, layout)
        return cls(traced=ranks.rank(curve.traced).traced, whole=curve, ranks=ranks, layout=layout, passes=passes)

    def under(self, sharding: Sharding, compile: bool = False) -> WorkCurve:
        """Return this work itself: it has no casts between ops under any sharding, and compiling does not change its memory."""
        return self

    def lifetimes(self, batch_size: int) -> TensorLifetimes:
        """Return the lifetimes of a rank's tensors; see :meth:`WorkCurve.lifetimes`."""
        return self._stages_at(batch_size).lifetimes

    def held(
        self, batch_size: int, sharding: Sharding, optimizer: str, saving: SavedOps | Saving | str = "none"
    ) -> Held | None:
        """Return the bytes that a process of the stage with the highest peak holds at every place of the program.

        The arguments are those of :meth:`WorkCurve.held`; None: the step cannot be traced at so large a batch.
        """
        if self.traced.largest is not None and batch_size > self.traced.largest:
            return None
        stages = self._stages_at(batch_size)
        size = stages.lifetimes.sizes(self.scaled(batch_size))
        saving = stages.lifetimes.every_saving(saving) if isinstance(saving, str) else saving
        recomputation = Recomputation(stages.lifetimes, saving)
        held_by_stage = (
            stages.held(stage, recomputation, sharding, optimizer, size, self.passes)
            for stage in range(self.layout.pipeline)
        )
        return max(held_by_stage, key=lambda held: held.peak().total_bytes)

    def timed(self, batch_size: int, model: CostModel, setting: Setting) -> Graph:
        """Return the graph of a rank's pass through all stages, with the model's times.

        The time for which a rank waits for an exchange within the tensor group is added to that of the op that it follows.
        """
        graph = self.traced.at(batch_size)
        stages = self._stages_at(batch_size)
        group = setting.fabric.over(self.layout.tensor)
        exchanged_bytes = np.array(stages.rank.exchanged_bytes(batch_size))
        if any(exchange.of_experts for exchange in stages.rank.exchanges):
            seconds = all_to_all_s(setting.fabric, self.layout.expert, exchanged_bytes)
        else:
            seconds = group.all_reduce_s(exchanged_bytes) if len(exchanged_bytes) else exchanged_bytes
        # a reduce-scatter and an all-gather, unless every rank needs the whole sum
        is_divided = np.array(
            [self.layout.sequence and not exchange.whole for exchange in stages.rank.exchanges], dtype=bool
        )
        if is_divided.any():
            divided_s = group.reduce_scatter_s(exchanged_bytes) + group.all_gather_s(exchanged_bytes)
            seconds = np.where(is_divided, divided_s, seconds)
        index_of = {name: index for index, name in enumerate(graph.names)}

        def by_op(each_s: Floats) -> Floats:
            """Return (n,) the seconds of the exchanges that follow each op of the graph, from those of each exchange."""
            sums = np.zeros(len(graph))
            np.add.at(sums, [index_of[exchange.op] for exchange in stages.rank.exchanges], each_s)
            return sums

        is_overlapped = is_divided & self.layout.overlapped
        executed = compiled(graph) if setting.compile else graph
        exchanges = Exchanges(
            seconds=by_op(seconds * ~is_overlapped),
            restarts=stages.restarts(graph),
            overlapped_s=by_op(seconds * is_overlapped),
            pieces=self.layout.tensor,
        )
        return estimate(executed, model, Network(), optimizer=setting.optimizer, exchanges=exchanges)

    def step_time(
        self, graph: Graph, program: Program, model: CostModel, setting: Setting, placement: Placement, batch_size: int
    ) -> StepSeconds:
        """Return the time of a step: the pipeline's schedule, then what replicas exchange, then the update.

        The schedule is simulated with the passes of every piece; if replicas are sharded, a stage's passes are lengthened by
        what FSDP's communication adds. ``graph``: a rank's timed pass through all stages, see :meth:`timed`. ``program`` is
        not used.
        """
        stages, layout = self._stages_at(batch_size), self.layout
        size = stages.lifetimes.sizes(self.scaled(batch_size))
        # The schedule without what replicas exchange.
        forward_s, backward_s = stages.seconds(graph)
        trained_bytes = stages.trained_bytes(size)  # by piece
        bytes_per_s = model.memory_bytes_per_s
        # Each backward pass adds its gradients to the buffer, whose sums are read and written.
        backward_s = backward_s + 2.0 * stages.summed_share * trained_bytes / bytes_per_s
        sharding = setting.sharded(placement.num_replicas)
        if sharding.gathers and placement.num_replicas > 1:
            copied_forward_s, copied_backward_s = stages.copied_s(graph, size, sharding)
            forward_s, backward_s = forward_s + copied_forward_s, backward_s + copied_backward_s
        transfer_s = stages.transfer_s(size, setting.fabric, placement)
        alone_s = float(play(forward_s, backward_s, layout.pipeline, setting.accumulation, transfer_s).max())
        update_s = (
            own_update_s(graph, sharding) * stages.trained_share(size) * stages.shared_factor(size, sharding.shard)
        )
        if stages.has_copies and not sharding.gathers:
            passes = _NORM_AND_CAST / sharding.shard + _ZEROED
            update_s = update_s + passes * stages.by_stage(trained_bytes) / bytes_per_s
        if placement.num_replicas == 1:
            step_s = alone_s + float(update_s.max())
            return StepSeconds(step_s=step_s, passes_s=alone_s, update_s=step_s - alone_s)
        # With it: within the passes, or after them.
        group = replica_group(setting.fabric, layout, placement.num_replicas, sharding)
        after_s = np.zeros(layout.pipeline)
        if sharding.gathers:
            after_s += gathered_matrices_s(graph, group, sharding) * stages.trained_share(size)
            near = setting.fabric.over(sharding.forward_shard) if sharding.forward_shard else None
            factor = stages.fsdp_factor(forward_s + backward_s, graph, size, sharding, group, near)
            forward_s, backward_s = forward_s * factor, backward_s * factor
        else:  # the buffer of gradients is reduced after the last pass
            gradient_bytes = stages.summed_share * stages.by_stage(trained_bytes)
            if sharding.kind == "zero1":
                parameter_bytes = stages.by_stage(stages.parameter_bytes(size))
                after_s = group.reduce_scatter_s(gradient_bytes) + group.all_gather_s(parameter_bytes)
            else:
                after_s = group.all_reduce_s(gradient_bytes)
        ends_s = play(forward_s, backward_s, layout.pipeline, setting.accumulation, transfer_s)
        step_s = float((ends_s + after_s + update_s).max())  # the slowest stage ends the step
        return StepSeconds(step_s=step_s, passes_s=alone_s, update_s=float(update_s.max()))

    def _stages_at(self, batch_size: int) -> Stages:
        """Return the stages of the trace that is used for a batch size; batch sizes of one trace share them."""
        whole = self.whole.lifetimes(batch_size)
        size = whole.traced.graph.batch_size or 0
        if size not in self._stages:
            self._stages[size] = Stages(whole, self.ranks.rank(whole.traced), self.layout)
        return self._stages[size]


class Stages:
    """The stages of a pipeline in a traced step: which places of the program and which storages belong to each.

    A piece is a run of neighbouring blocks on one GPU; with interleaving a GPU has several. Arrays by piece are
    (pipeline x virtual,); piece ``i`` is on GPU ``i % pipeline``. A stage is a GPU of the pipeline, with all its pieces.
    """

    def __init__(self, whole: TensorLifetimes, rank: Rank, layout: ParallelDegrees) -> None:
        """Divide the blocks among the pieces, and find the places and storages of each.

        ``whole``: the lifetimes of the whole step; ``rank``: one rank's part of it. Raises InputError for a number of blocks
        that the pieces do not divide.
        """
        self.rank, self.layout = rank, layout
        self.pieces = layout.pipeline * layout.virtual
        blocks = whole.blocks
        if self.pieces > 1 and (not blocks or len(blocks) % self.pieces):
            count = f"{self.pieces} stages of {len(blocks)} blocks" if blocks else "the model has no list of blocks"
            is_of_virtual = layout.virtual > 1 and len(blocks) % layout.pipeline == 0
            option = "--virtual-stages" if is_of_virtual else "--pipeline-parallel"
            raise InputError(option, count, f"give a divisor of {len(blocks)}" if blocks else "leave it out")
        held_share = np.ones(len(whole.elements))  # (s,) of each storage, what one rank holds
        for address, share in rank.divided.items():
            if address in whole.numbers:
                held_share[whole.numbers[address]] = share
        self.is_expert = (held_share < 1.0) & (whole.role == PARAMETER) & (layout.expert > 1)
        """(s,) whether a storage is of experts, of which the GPU has a part."""
        graph = rank.traced.graph
        # By block, with what lies outside all blocks at the end, where the index -1 finds it.
        trained_bytes = np.zeros(len(blocks) + 1)
        for op in np.flatnonzero(graph.kind == SEND).tolist():
            parameter = graph.parameter[op] or ""
            owner = next((index for index, block in enumerate(blocks) if parameter.startswith(f"{block.name}.")), -1)
            trained_bytes[owner] += graph.size_bytes[op]
        self.lifetimes = replace(
            whole, traced=rank.traced, width=whole.width * held_share, trained_bytes=trained_bytes, _sizes={}
        )
        """The lifetimes of the rank's tensors in all stages; a tensor that ranks divide has narrower elements, not fewer."""
        self.has_copies = whole.kept_share > _COPIED
        """Whether parameters are read in a half type and updated in float32."""
        # Megatron-LM sums gradients in float32 for bfloat16 alone.
        is_half = self.has_copies and precision_of(graph.meta.get("precision")).computes == "float16"
        self.summed_share = 0.5 if is_half else 1.0
        """The bytes of the summed gradients over those of the parameters as they are updated."""
        self.piece_of_block = np.arange(len(blocks)) * self.pieces // max(len(blocks), 1)
        self.piece_at = self._pieces_at()
        """(nodes,) the piece in which each place of the program runs."""
        self.holds, self.sent = self._held_and_sent()
        """(pieces, s) whether a piece holds a storage, and (s,) whether the next piece gets it."""

    def _pieces_at(self) -> Ints:
        """Return (nodes,) the piece in which each place of the program runs.

        Places before the first block belong to the first piece, and places between two blocks to the block that ran last: in
        the forward pass the earlier block of the model, in the backward pass the later one.
        """
        blocks, life = self.lifetimes.blocks, self.lifetimes
        if not blocks:
            return np.zeros(life.nodes, dtype=np.int64)
        places = np.arange(life.nodes)
        first = np.array([block.first for block in blocks])
        begins = np.array([block.begins for block in blocks])
        forward = np.searchsorted(first, places, side="right") - 1
        backward = (begins[:, None] > places).sum(axis=0)
        block = np.clip(np.where(places < life.backward, forward, backward), 0, len(blocks) - 1)
        pieces: Ints = self.piece_of_block[block]
        return pieces

    def _held_and_sent(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (pieces, s) whether a piece holds a storage, and (s,) whether a storage is sent to the next piece.

        A piece holds the storages that its nodes read or make. A storage is sent if the forward pass of a block makes it and
        the next piece reads it; a piece that makes it and does not read it itself does not keep it.
        """
        life = self.lifetimes
        reads = np.zeros((self.pieces, len(life.elements)), dtype=bool)
        makes = np.zeros_like(reads)
        for place, node in enumerate(life.traced.program.nodes):
            if node.op in ("placeholder", "output"):
                continue
            piece = self.piece_at[place]
            for source in (*node.all_input_nodes, node):
                for tensor in tensors_of(value_of(source)):
                    storage = life.numbers.get(tensor.untyped_storage()._cdata)
                    if storage is not None:
                        is_made_here = source is node and life.alloc[storage] == place
                        used = makes if is_made_here else reads
                        used[piece, storage] = True
        is_of_forward = (life.role == ACTIVATION) & (life.alloc < life.backward)
        is_in_block = np.zeros(life.nodes, dtype=bool)
        for block in life.blocks:
            is_in_block[block.first : block.last + 1] = True
        is_sent = np.zeros(len(is_of_forward), dtype=bool)
        for piece in range(self.pieces - 1):
            is_sent |= makes[piece] & reads[piece + 1] & is_of_forward & is_in_block[life.alloc]
        is_sent_away = is_sent & (makes & ~reads).any(axis=0)  # some piece makes it and does not read it itself
        return reads | (makes & ~is_sent_away), is_sent

    def restarts(self, graph: Graph) -> list[int]:
        """Return the indices of the ops with which a piece's forward or backward pass begins, except the very first one.

        Before such an op the GPU and its host wait for another stage's tensor. So the host has issued nothing ahead, and both
        start again together: hence the name. ``graph``: a rank's pass through all stages.
        """
        if self.pieces == 1:
            return []
        first_backward_place = self.lifetimes.backward
        traced = self.lifetimes.traced
        place_of = {node: place for place, node in enumerate(traced.program.nodes)}
        passes: list[tuple[int, tuple[int, bool]]] = []  # (op, (its piece, whether it is of the forward pass))
        for op, name in enumerate(graph.names):
            node = traced.nodes.get(name)
            if node is not None:  # a compute op; transfers have no node
                place = place_of[node]
                passes.append((op, (int(self.piece_at[place]), place < first_backward_place)))
        return [op for (_, pass_before), (op, own_pass) in pairwise(passes) if pass_before != own_pass]

    def by_stage(self, values: Floats) -> Floats:
        """Return (pipeline,) the sums of ``values`` (pieces,) over the pieces of each GPU."""
        sums: Floats = values.reshape(self.layout.virtual, self.layout.pipeline).sum(axis=0)
        return sums

    def parameter_bytes(self, size: Floats) -> Floats:
        """Return (pieces,) the bytes of each piece's parameters, in the type in which ops read them.

        ``size``: (s,) bytes of the storages.
        """
        return np.asarray(self.holds @ np.where(self.lifetimes.role == PARAMETER, size, 0.0))

    def trained_bytes(self, size: Floats) -> Floats:
        """Return (pieces,) the bytes of each piece's trained parameters, in the type in which they are updated.

        ``size``: (s,) bytes of the storages. Every piece is taken to have the same share of frozen parameters.
        """
        life = self.lifetimes
        kept_bytes = size[life.role == PARAMETER].sum() * life.kept_share
        share = float(life.trained_bytes.sum() / kept_bytes) if kept_bytes else 0.0
        return self.parameter_bytes(size) * life.kept_share * share

    def trained_share(self, size: Floats) -> Floats:
        """Return (pipeline,) the share of the model's trained parameters that each GPU updates, 0 to 1.

        ``size``: (s,) bytes of the storages.
        """
        trained = self.by_stage(self.trained_bytes(size))
        return trained / max(float(self.lifetimes.trained_bytes.sum()), 1.0)

    def shared_factor(self, size: Floats, shard: int) -> Floats:
        """Return (pipeline,) how many times as much a GPU has of what replicas share as a part of its own parameters.

        A part of the model is shared by ``shard`` replicas, and a part of the experts by the fewer that have the same experts;
        it is 1 without experts. ``size``: (s,) bytes of the storages.
        """
        all_bytes = self.by_stage(self.parameter_bytes(size))
        expert_bytes = self.by_stage(self.holds @ np.where(self.is_expert, size, 0.0))
        factor: Floats = 1.0 + (min(self.layout.expert, shard) - 1.0) * expert_bytes / np.maximum(all_bytes, 1.0)
        return factor

    def seconds(self, graph: Graph) -> tuple[Floats, Floats]:
        """Return (seconds of each piece's forward pass, seconds of its backward pass), each (pieces,).

        ``graph``: a rank's pass through all stages, with times.
        """
        seconds = self.lifetimes.seconds(graph)
        backward = self.lifetimes.backward

        def of_pieces(places: slice) -> Floats:
            """Return (pieces,) the sums of the seconds of these places."""
            sums = np.bincount(self.piece_at[places], weights=seconds[places], minlength=self.pieces)
            return sums.astype(np.float64)

        return of_pieces(slice(0, backward)), of_pieces(slice(backward, None))

    def transfer_s(self, size: Floats, fabric: Fabric, placement: Placement) -> float:
        """Return the seconds to send one micro-batch's activations from a stage to the next; 0 for a pipeline of one GPU.

        They are the mean over all places where the model is cut into pieces. The ranks of a tensor group hold the same
        activations: each sends a part of them, and gathers the others' parts on arrival. Under sequence parallelism a rank
        holds, sends and needs its own part only. On several nodes, the GPUs of a node share its network card. ``size``: (s,)
        bytes of the storages, as a rank holds them. ``placement``: how many replicas and nodes there are.
        """
        if self.layout.pipeline == 1:
            return 0.0
        layout, gpus_of_stage = self.layout, self.layout.tensor * placement.num_replicas
        cuts = max(self.pieces - 1, 1)
        held_bytes = float(size[self.sent].sum()) / cuts  # by a rank, of what one cut passes on
        part_bytes = held_bytes / (1 if layout.sequence else layout.tensor)
        crosses_nodes = placement.num_nodes > 1
        bytes_per_s_each = fabric.between.bytes_per_s / min(fabric.gpus_per_node, gpus_of_stage)
        shared_fabric = replace(fabric, between=replace(fabric.between, bytes_per_s=bytes_per_s_each))
        sender_and_receiver = shared_fabric.over(2, 2 if crosses_nodes else 1)
        send_s = sender_and_receiver.collective_s("broadcast", part_bytes)  # to one receiver it is a plain send
        gather_s = 0.0 if layout.sequence else fabric.over(layout.tensor).all_gather_s(held_bytes)
        return send_s + gather_s

    def units(self, stage: int, graph: Graph, size: Floats) -> tuple[Unit, list[Unit]]:
        """Return (root, blocks): the units that ``fully_shard`` gathers on a stage, with their bytes and seconds.

        The root is everything outside the blocks. ``graph``: a rank's pass through all stages, with times. ``size``: (s,) bytes
        of the storages.
        """
        life, seconds = self.lifetimes, self.lifetimes.seconds(graph)
        is_parameter = (life.role == PARAMETER) & self.holds[stage :: self.layout.pipeline].any(axis=0)
        runs_here = self.piece_at % self.layout.pipeline == stage  # (nodes,)
        units = []
        for number, block in enumerate(life.blocks):
            if self.piece_of_block[number] % self.layout.pipeline == stage:
                size_bytes = float(size[is_parameter & (life.owner == number)].sum())
                forward_s = float(seconds[block.first : block.last + 1].sum())
                backward_s = float(seconds[block.begins : block.ends + 1].sum())
                units.append(Unit(block.name, size_bytes, float(life.trained_bytes[number]), forward_s, backward_s))
        # The root has what is left of the stage's time.
        is_forward = np.arange(life.nodes) < life.backward
        forward_s = float(seconds[runs_here & is_forward].sum()) - sum(unit.forward_s for unit in units)
        backward_s = float(seconds[runs_here & ~is_forward].sum()) - sum(unit.backward_s for unit in units)
        root_bytes = float(size[is_parameter & (life.owner < 0)].sum())
        root = Unit(
            name="",
            size_bytes=root_bytes,
            gradient_bytes=root_bytes * life.kept_share,
            forward_s=max(forward_s, 0.0),
            backward_s=max(backward_s, 0.0),
        )
        return root, units

    def _copies_s(self, units: Sequence[Unit], graph: Graph, reshards: bool) -> list[tuple[float, float]]:
        """Return the seconds of FSDP2's copies of each unit in its forward and in its backward pass; see :func:`with_copies`.

        ``units``: the root, then the blocks. ``reshards``: whether blocks are gathered again for their backward pass.
        """
        bytes_per_s = copy_rate(graph)
        computed = (
            1.0 + 1.0 / self.lifetimes.kept_share
        )  # bytes of gradients as computed and as reduced, over the latter
        return [
            (
                2.0 * unit.size_bytes / bytes_per_s,
                (2.0 * unit.size_bytes * (reshards and number > 0) + computed * unit.gradient_bytes) / bytes_per_s,
            )
            for number, unit in enumerate(units)
        ]

    def copied_s(self, graph: Graph, size: Floats, sharding: Sharding) -> tuple[Floats, Floats]:
        """Return (pieces,) the seconds of FSDP2's copies in each piece's forward pass, and those in its backward pass.

        The pieces of a stage are taken to share them evenly. The arguments are those of :meth:`fsdp_factor`.
        """
        seconds = np.zeros((2, self.pieces))
        for stage in range(self.layout.pipeline):
            root, blocks = self.units(stage, graph, size)
            copies_s = np.array(self._copies_s([root, *blocks], graph, sharding.reshards)).sum(axis=0)
            seconds[:, stage :: self.layout.pipeline] = copies_s[:, None] / self.layout.virtual
        return seconds[0], seconds[1]

    def fsdp_factor(
        self,
        passes_s: Floats,
        graph: Graph,
        size: Floats,
        sharding: Sharding,
        group: Communicator,
        near: Communicator | None,
    ) -> Floats:
        """Return (pieces,) how many times as long each piece's passes take with the communication of ``fully_shard``.

        Args:
            passes_s: (pieces,) seconds of a piece's forward and backward pass together, without communication.
            graph: a rank's pass through all stages, with times.
            size: (s,) bytes of the storages.
            sharding: one that gathers parameters.
            group: the GPUs that gather and reduce the same part of the model.
            near: those that gather for the backward pass, if they are others; None: they are not.
        """
        factor = np.ones(self.pieces)
        for stage in range(self.layout.pipeline):
            root, blocks = self.units(stage, graph, size)
            copies_s = self._copies_s([root, *blocks], graph, sharding.reshards)
            root, *units = (
                replace(unit, forward_s=unit.forward_s + forward_s, backward_s=unit.backward_s + backward_s)
                for unit, (forward_s, backward_s) in zip([root, *blocks], copies_s, strict=True)
            )
            pass_s = simulate_fsdp(root, units, group, 1, 1, reshard=sharding.reshards, near=near).step_s
            pieces = slice(stage, None, self.layout.pipeline)  # of this stage's GPU
            factor[pieces] = pass_s / float(passes_s[pieces].sum())
        return factor

    def held(
        self, stage: int, recomputation: Recomputation, sharding: Sharding, optimizer: str, size: Floats, passes: int
    ) -> Held:
        """Return the bytes that a process of a stage holds at every place of a pass.

        They include the activations of other micro-batches in flight: those whose forward pass is done and whose backward pass
        is not.

        Args:
            stage: the index of the stage in the pipeline.
            recomputation: which blocks are computed again, and what they save.
            sharding: how the replicas share parameters, gradients and optimizer states.
            optimizer: a name of ``OPTIMIZERS``.
            size: (s,) bytes of the storages.
            passes: micro-batches of a step.
        """
        life, layout = self.lifetimes, self.layout
        pieces = self.holds[stage :: layout.pipeline]  # of this stage's GPU
        own_size = np.where(pieces.any(axis=0), size, 0.0)  # 0 for storages of other stages
        trained_bytes = float(self.by_stage(self.trained_bytes(size))[stage])
        activations = life.activations(recomputation, own_size)
        saved_bytes = float(activations[life.backward])
        in_flight_bytes = max(in_flight_passes(stage, layout, passes) - 1.0, 0.0) * saved_bytes  # beside this pass
        if sharding.gathers:
            of_stage = np.array([self.piece_of_block[n] % layout.pipeline == stage for n in range(len(life.blocks))])
            root_bytes = max(trained_bytes - float(life.trained_bytes[:-1][of_stage].sum()), 0.0)
            own_bytes = np.append(np.where(of_stage, life.trained_bytes[:-1], 0.0), root_bytes)
            held = replace(life, trained_bytes=own_bytes).held(recomputation, sharding, optimizer, own_size)
            # What experts add to the parts of parameters, of their states, and at the step's end of reduced gradients.
            more_bytes = (float(self.shared_factor(size, sharding.shard)[stage]) - 1.0) * trained_bytes / sharding.shard
            held.add("parameters", 0, held.places, more_bytes)
            held.add("optimizer", 0, held.places, state_share(self.rank.traced.graph, optimizer) * more_bytes)
            held.add("gradients", held.places - 1, held.places, more_bytes)
        else:
            held = Held(life.nodes + recomputation.extra)
            life.hold_activations(held, recomputation, own_size)
            shared_bytes = trained_bytes * float(self.shared_factor(size, sharding.shard)[stage])
            self._hold_state(held, recomputation, own_size, trained_bytes, shared_bytes / sharding.shard, optimizer)
        if in_flight_bytes:
            held.add("activations", 0, held.places, in_flight_bytes)
        return held

    def _hold_state(
        self,
        held: Held,
        recomputation: Recomputation,
        size: Floats,
        trained_bytes: float,
        own_bytes: float,
        optimizer: str,
    ) -> None:
        """Add to ``held`` the parameters, gradients and optimizer states of a stage that does not shard its parameters.

        A gradient is held until it has been added to the buffer of gradients, which stays. The optimizer's states, including
        float32 copies of parameters, are of the ``own_bytes`` of ``trained_bytes`` that it updates. ``size``: (s,) bytes of the
        stage's storages.
        """
        life = self.lifetimes
        is_gradient = life.role == GRADIENT
        made = recomputation.moved(life.alloc)[is_gradient]
        # States, and the float32 copy of a parameter, in copies of the trained parameters.
        copies = state_share(self.rank.traced.graph, optimizer) + (self.has_copies and optimizer != "none")
        held.add("parameters", 0, held.places, size[life.role == PARAMETER])
        # Held where it is made, and at the next place, where it is added to the buffer.
        held.add("gradients", made, made + 2, size[is_gradient])
        held.add("gradients", 0, held.places, self.summed_share * trained_bytes)
        held.add("optimizer", 0, held.places, copies * own_bytes)


def replica_group(fabric: Fabric, layout: ParallelDegrees, replicas: int, sharding: Sharding) -> Communicator:
    """Return the group of GPUs that hold the same part of every replica, and therefore exchange its gradients.

    ``fabric``: the links between all GPUs. ``replicas``: their number, which is that of the group.
    """
    spread = between_replicas(fabric, layout)
    return spread.sharded(replicas, sharding.shard) if sharding.gathers else spread.over(replicas)


def between_replicas(fabric: Fabric, layout: ParallelDegrees) -> Fabric:
    """Return the fabric of the GPUs that hold the same part of every replica, of which there is one in each tensor group.

    A node holds fewer of them than GPUs, and their links between nodes are slower, because the node's other GPUs use its
    network card at the same time.
    """
    per_node = max(1, fabric.gpus_per_node // layout.tensor)
    sharing = fabric.gpus_per_node // per_node
    between = replace(fabric.between, bytes_per_s=fabric.between.bytes_per_s / sharing)
    return replace(fabric, between=between, gpus_per_node=per_node)


def in_flight_passes(stage: int, layout: ParallelDegrees, passes: int) -> float:
    """Return the largest number of micro-batches whose activations a stage holds at one time.

    ``passes``: micro-batches of a step. It may be a fraction if a GPU has several pieces, each of which holds its own part.

    >>> [in_flight_passes(stage, ParallelDegrees(pipeline=4), 8) for stage in range(4)]
    [4.0, 3.0, 2.0, 1.0]
    """
    warm_up = _warm_up(stage, layout.pipeline, layout.virtual, passes)
    return min(warm_up + 1, passes * layout.virtual) / layout.virtual


def _warm_up(stage: int, pipeline: int, virtual: int, passes: int) -> int:
    """Return how many forward passes a stage runs at first, before one forward and one backward pass alternate.

    Under the schedule 1F1B it is the number of stages behind it; the interleaved form is Megatron-LM's. ``stage``: its index.
    ``pipeline``: the number of stages. ``virtual``: the pieces of each. ``passes``: the micro-batches of a step.
    """
    if virtual == 1:
        return min(pipeline - 1 - stage, passes)
    return min(2 * (pipeline - 1 - stage) + (virtual - 1) * pipeline, passes * virtual)


def play(forward_s: Floats, backward_s: Floats, pipeline: int, passes: int, transfer_s: float = 0.0) -> Floats:
    """Simulate a pipeline's schedule; return (pipeline,) when each GPU has done the last backward pass. O(passes x pieces).

    Args:
        forward_s, backward_s: (pieces,) seconds of a micro-batch in each piece (a run of neighbouring blocks); piece ``i`` is
            on GPU ``i % pipeline``.
        pipeline: the number of GPUs.
        passes: the micro-batches of a step.
        transfer_s: seconds to send one micro-batch from a piece to the next, for which the sending GPU waits.

    With uniform pieces the step takes (passes + (pipeline - 1) / virtual) times a micro-batch:

    >>> float(play(np.full(4, 1.0), np.full(4, 2.0), pipeline=4, passes=8).max())
    33.0
    """
    pieces = len(forward_s)
    virtual = pieces // pipeline
    orders = [_order(stage, pipeline, virtual, passes) for stage in range(pipeline)]
    # When the input of a pass arrives, by (whether it is a forward pass, its piece, its micro-batch).
    arrived_s: dict[tuple[bool, int, int], float] = {(True, 0, number): 0.0 for number in range(passes)}
    done = [0] * pipeline  # passes of each GPU
    clock_s = np.zeros(pipeline)
    # In each round every GPU runs as many passes as it has inputs for, which gives others their inputs.
    while any(done[stage] < len(orders[stage]) for stage in range(pipeline)):
        for stage, order in enumerate(orders):
            while done[stage] < len(order) and (arrival_s := arrived_s.get(order[done[stage]])) is not None:
                is_forward, piece, number = order[done[stage]]
                end_s = max(clock_s[stage], arrival_s) + float((forward_s if is_forward else backward_s)[piece])
                next_piece = piece + 1 if is_forward else piece - 1
                if is_forward and next_piece == pieces:  # after the last piece the backward pass begins
                    arrived_s[False, piece, number] = end_s
                elif next_piece >= 0:
                    end_s += transfer_s
                    arrived_s[is_forward, next_piece, number] = end_s
                clock_s[stage] = end_s
                done[stage] += 1
    return clock_s


def _order(stage: int, pipeline: int, virtual: int, passes: int) -> Sequence[tuple[bool, int, int]]:
    """Return the passes of a GPU (``stage``) in order, each as (whether it is a forward pass, its piece, its micro-batch).

    After the warm-up's forward passes, one forward and one backward pass alternate until no forward pass is left. With
    several pieces, ``pipeline`` micro-batches at a time go through all pieces of a GPU, backward from the last piece on.

    >>> _order(stage=0, pipeline=2, virtual=1, passes=2)
    [(True, 0, 0), (True, 0, 1), (False, 0, 0), (False, 0, 1)]
    """
    count, group_length = passes * virtual, pipeline * virtual

    def pass_at(step: int, is_forward: bool) -> tuple[bool, int, int]:
        """Return the GPU's forward or backward pass with the number ``step``, counted from 0 in each direction."""
        if virtual == 1:
            return is_forward, stage, step
        # A group is ``pipeline`` micro-batches, which go through all pieces together.
        group, within = divmod(step, group_length)
        own_piece = within // pipeline  # the number of the piece among those of the GPU
        if not is_forward:
            own_piece = virtual - 1 - own_piece
        return is_forward, own_piece * pipeline + stage, group * pipeline + within % pipeline

    warm_up = _warm_up(stage, pipeline, virtual, passes)
    order = [pass_at(step, True) for step in range(warm_up)]
    for step in range(count):
        if step + warm_up < count:
            order.append(pass_at(step + warm_up, True))
        order.append(pass_at(step, False))
    return order
